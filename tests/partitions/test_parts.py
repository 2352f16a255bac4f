"""Parts are what a list of index arrays is, and cost nothing for each client but a number."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import Dirichlet, Iid, Natural, Parts, Quantity

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=4).map(lambda part: np.array(part, dtype=np.int64)), max_size=9)


@given(LISTS)
def test_parts_are_what_the_list_is(each):
    parts = Parts.of(each)
    assert len(parts) == len(each)
    assert [part.tolist() for part in parts] == [part.tolist() for part in each]
    assert [part.tolist() for part in parts[1::2]] == [part.tolist() for part in each[1::2]]
    assert parts.sizes.tolist() == [*map(len, each)]
    assert [(owner, record) for owner, record in zip(parts.owners, parts.records, strict=True)] == [
        (client, record) for client, part in enumerate(each) for record in part
    ]
    if each:
        assert parts[-1].tolist() == each[-1].tolist()
    with pytest.raises(IndexError):
        parts[len(each)]


@given(LISTS, st.integers(0, 99))
def test_what_is_kept_of_parts_stays_with_its_client(each, largest):
    parts = Parts.of(each)
    assert [part.tolist() for part in parts.where(parts.records <= largest)] == [
        [record for record in part if record <= largest] for part in each
    ]


@settings(max_examples=20, deadline=None)
@given(
    scheme=st.sampled_from([Iid(), Dirichlet(0.3), Quantity(0.3)]),
    num_clients=st.integers(2_000, 20_000),
    more=st.integers(0, 3_000),
    seed=st.integers(0, 2**32),
)
def test_populations_with_hardly_a_record_each_get_every_record_once(scheme, num_clients, more, seed):
    labels = np.random.default_rng(seed).integers(0, 3, num_clients + more)
    parts = scheme.split(labels, num_clients, np.random.default_rng(seed))
    assert len(parts) == num_clients
    assert np.array_equal(np.sort(parts.records), np.arange(len(labels)))
    inside = np.diff(parts.owners) == 0
    assert (np.diff(parts.records)[inside] > 0).all()


@pytest.mark.parametrize("scheme", [Iid(), Dirichlet(0.3), Quantity(0.3), Natural()], ids=str)
def test_a_split_makes_no_object_for_a_client(scheme):
    records = 20_000

    def objects(num_clients: int) -> int:
        rng, labels = np.random.default_rng(0), np.arange(records) % 3
        before = sys.getallocatedblocks()
        if isinstance(scheme, Natural):
            parts = scheme.split_groups(labels, np.arange(records), num_clients, rng)
        else:
            parts = scheme.split(labels, num_clients, rng)
        assert len(parts) == num_clients
        return sys.getallocatedblocks() - before

    objects(2)  # what is loaded at first use
    assert abs(objects(records) - objects(2)) < 100
