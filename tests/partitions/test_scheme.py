"""What every scheme promises: disjoint sorted parts, nothing lost, the same seed the same split."""

import time
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fl_sim.settings import OneOf
from partitions import (
    Dirichlet,
    Drift,
    FeatureNoise,
    Iid,
    ImpossibleSplit,
    LabelK,
    PermuteLabels,
    Quantity,
    Rotate,
    Shards,
    label_counts,
)

SCHEMES = [
    LabelK(k=1),
    LabelK(k=3),
    Dirichlet(beta=0.05),
    Dirichlet(beta=5.0, balanced=True),
    Dirichlet(beta=0.05, min_size=0, balanced=True),
    Iid(),
    Shards(),
    Quantity(beta=0.1),
    FeatureNoise(sigma=0.1),
    Rotate(k=4, over=Dirichlet(beta=0.5)),
    PermuteLabels(k=6),
    Drift(over=Dirichlet(beta=0.5), to=Iid()),
]
BY_NAME = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


@st.composite
def labels_of_every_class(draw):
    """3 to 6 classes, 50 to 90 records of each, shuffled."""
    num_classes = draw(st.integers(3, 6))
    sizes = draw(st.lists(st.integers(50, 90), min_size=num_classes, max_size=num_classes))
    labels = np.repeat(np.arange(num_classes), sizes)
    return np.random.default_rng(draw(st.integers(0, 2**32))).permutation(labels)


def split(scheme, labels, num_clients, seed=0):
    return scheme.split(np.asarray(labels), num_clients, np.random.default_rng(seed))


@BY_NAME
@settings(max_examples=25, deadline=None)
@given(labels=labels_of_every_class(), num_clients=st.integers(6, 40), seed=st.integers(0, 2**32))
def test_parts_are_disjoint_sorted_and_together_everything(scheme, labels, num_clients, seed):
    parts = split(scheme, labels, num_clients, seed)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@BY_NAME
def test_the_same_seed_gives_the_same_split_and_another_seed_another(scheme):
    labels = np.arange(400) % 4
    first, again, other = (split(scheme, labels, 8, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@BY_NAME
def test_one_client_gets_everything_it_may_hold(scheme):
    labels = np.arange(90) % 3
    (part,) = split(scheme, labels, 1)
    expected = np.flatnonzero(labels < scheme.k) if scheme == LabelK(k=1) else np.arange(90)
    np.testing.assert_array_equal(part, expected)


@BY_NAME
def test_more_clients_than_records_are_refused_with_both_numbers(scheme):
    with pytest.raises(ImpossibleSplit, match=r"31 clients.*30 records"):
        split(scheme, np.arange(30) % 3, 31)


@BY_NAME
def test_no_client_is_refused(scheme):
    with pytest.raises(ImpossibleSplit, match="0 clients"):
        split(scheme, np.arange(30) % 3, 0)


@BY_NAME
@pytest.mark.parametrize("num_clients", [10, 10_000])
def test_ten_thousand_clients_on_sixty_thousand_records_take_under_two_seconds(scheme, num_clients):
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    started = time.process_time()
    split(scheme, labels, num_clients)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelK(k=0), "k=0"),
        (lambda: Dirichlet(beta=0.0), "beta=0"),
        (lambda: Dirichlet(beta=float("nan")), "beta=nan"),
        (lambda: Dirichlet(beta=float("inf")), "beta=inf"),
        (lambda: Dirichlet(min_size=-1), "min_size=-1"),
        (lambda: Quantity(beta=-0.5), "beta=-0.5"),
        (lambda: Shards(shards_per_client=0), "shards_per_client=0"),
        (lambda: FeatureNoise(sigma=-0.1), "sigma=-0.1"),
        (lambda: FeatureNoise(sigma=float("nan")), "sigma=nan"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(make, message):
    with pytest.raises(ImpossibleSplit, match=message):
        make()


def test_pydantic_reads_every_scheme_from_plain_data_and_refuses_unknown_parameters():
    adapter = TypeAdapter(Annotated[Any, OneOf("partition", group="fl_sim.partition")])
    for scheme in SCHEMES:
        assert adapter.validate_python(TypeAdapter(type(scheme)).dump_python(scheme)) == scheme
    with pytest.raises(ValidationError, match="Unexpected keyword"):
        TypeAdapter(Dirichlet).validate_python({"kind": "dirichlet", "alpha": 0.5})
    with pytest.raises(ValidationError, match="k=0 must be at least 1"):
        TypeAdapter(LabelK).validate_python({"kind": "label-k", "k": 0})


def test_label_counts_by_hand():
    parts = [np.array([0, 3]), np.array([], dtype=np.int64), np.array([1, 2, 4])]
    counts = label_counts(np.array([0, 1, 1, 0, 2]), parts, 4)
    np.testing.assert_array_equal(counts, [[2, 0, 0, 0], [0, 0, 0, 0], [0, 2, 1, 0]])
