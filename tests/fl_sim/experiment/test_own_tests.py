"""Test records of each client: whose they are, how many, and with which classes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.errors import UserError
from fl_sim.experiment import own_tests
from fl_sim.types import Dataset, Examples
from partitions import Dirichlet, Domain, Iid, LabelK, Parts, label_counts


def dataset(train: int, test: int, classes: int = 5, *, groups: int = 0) -> Dataset:
    def examples(count: int) -> Examples:
        of = np.arange(count) % groups if groups else None
        return Examples(np.zeros((count, 2), np.float32), np.arange(count) % classes, of)

    return Dataset("made", examples(train), examples(test), classes, (0.0,), (1.0,))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(0, 3), st.sampled_from([Iid(), LabelK(2), Dirichlet(0.3)]), st.integers(0, 5))
def test_class_shares_are_the_clients_and_records_are_shared_only_where_they_lack(
    clients: int, size: int, scheme: object, seed: int
) -> None:
    made = dataset(1000, [60, 200, 500, 1000][size])
    shards = scheme.split(made.train.labels, clients, np.random.default_rng(seed))  # type: ignore[attr-defined]
    tests = own_tests.with_class_shares(made, shards, seed)
    held, tested = (label_counts(labels, parts, 5) for labels, parts in (
        (made.train.labels, shards), (made.test.labels, tests),
    ))  # fmt: skip
    assert (tested[held == 0] == 0).all()
    for client in range(clients):
        assert len(np.unique(tests[client])) == len(tests[client])
        size_of = tests.sizes[client]
        assert (size_of > 0) == (held[client].sum() > 0)
        exact = held[client] / max(held[client].sum(), 1) * size_of
        assert np.abs(tested[client] - exact).max() <= 2
    if tests.sizes.sum() <= len(made.test) and (tested.sum(axis=0) <= np.bincount(made.test.labels)).all():
        assert own_tests.num_shared(tests) == 0
    assert np.array_equal(own_tests.with_class_shares(made, shards, seed).records, tests.records)


def test_many_small_clients_share_records_and_that_is_counted() -> None:
    made = dataset(1000, 50)
    shards = Iid().split(made.train.labels, 100, np.random.default_rng(0))
    tests = own_tests.with_class_shares(made, shards, 0)
    assert (tests.sizes >= own_tests.FEWEST - 1).all()
    assert own_tests.num_shared(tests) == 50


def test_a_class_without_test_records_is_left_out() -> None:
    made = dataset(100, 50)
    made = replace(made, test=made.test.take(np.flatnonzero(made.test.labels != 3)))
    shards = LabelK(1).split(made.train.labels, 5, np.random.default_rng(0))
    tests = own_tests.with_class_shares(made, shards, 0)
    assert tests.sizes.min() == 0
    assert (tests.sizes == 0).sum() == 1


def test_records_of_a_source_belong_to_the_client_with_that_source() -> None:
    made = dataset(100, 40, groups=10)
    assert made.train.groups is not None
    assert made.test.groups is not None
    shards = Parts.of([np.flatnonzero(np.isin(made.train.groups, part)) for part in ([0, 1, 2], [3], [7, 8])])
    tests = own_tests.of_sources(made, shards)
    assert [set(made.test.groups[one].tolist()) for one in tests] == [{0, 1, 2}, {3}, {7, 8}]
    with pytest.raises(UserError, match=r"does not name them: set evaluate\.clients=class-shares"):
        own_tests.of_sources(dataset(100, 40), shards)
    everywhere = Iid().split(made.train.labels, 3, np.random.default_rng(0))
    with pytest.raises(UserError, match="several clients share a source and have other sources, too"):
        own_tests.of_sources(made, everywhere)


def test_clients_have_the_names_of_their_sources_if_each_has_one() -> None:
    made = dataset(100, 40, groups=4)
    assert made.train.groups is not None
    named = replace(made, sources=("north", "east", "south", "west"))
    one_each = Parts.of([np.flatnonzero(made.train.groups == number) for number in (2, 0, 1, 3)])
    assert own_tests.sources_of(named, one_each) == ("south", "north", "east", "west")
    two = Parts.of([np.flatnonzero(np.isin(made.train.groups, part)) for part in ([0, 1], [2], [3])])
    empty = Parts.of([one_each[0], one_each[0][:0], one_each[1]])
    twice = Parts.of([one_each[0][:5], one_each[0][5:], one_each[1]])
    assert own_tests.sources_of(named, empty) == ("south", "", "north")
    assert own_tests.sources_of(named, twice) == ("south", "south", "north")
    alone, more = Parts.of([one_each[0]]), dataset(100, 40, groups=21)
    assert more.train.groups is not None
    many = Parts.of([np.flatnonzero(more.train.groups == number) for number in range(21)])
    assert [own_tests.sources_of(named, one) for one in (two, alone)] == [()] * 2
    assert own_tests.sources_of(replace(more, sources=tuple("abcdefghijklmnopqrstu")), many) == ()
    assert own_tests.sources_of(made, one_each) == ()
    assert own_tests.sources_of(dataset(100, 40), one_each) == ()


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.9), st.integers(1, 9), st.integers(0, 3))
def test_a_pooled_share_cuts_every_client_and_loses_no_record(share: float, clients: int, seed: int) -> None:
    merged = own_tests.merged(dataset(70, 30))
    assert len(merged.train) == 100
    shards = Dirichlet(0.5).split(merged.train.labels, clients, np.random.default_rng(seed))
    cut, trained, tests = own_tests.cut(merged, shards, share, seed)
    assert (trained.sizes + tests.sizes == shards.sizes).all()
    assert ((tests.sizes > 0) == (shards.sizes > 1)).all()
    assert (trained.sizes[shards.sizes > 0] > 0).all()
    assert len(cut.test) == tests.sizes.sum()
    assert np.array_equal(np.sort(tests.records), np.arange(len(cut.test)))
    both = np.bincount(cut.test.labels, minlength=5) + np.bincount(merged.train.labels[trained.records], minlength=5)
    assert np.array_equal(both, np.bincount(merged.train.labels, minlength=5))


def test_members_are_all_but_the_held_out() -> None:
    assert np.array_equal(own_tests.members(7, 0, 0), np.arange(7))
    chosen = own_tests.members(20, 5, 3)
    assert len(set(chosen.tolist())) == 15
    assert np.array_equal(chosen, np.sort(chosen))
    assert not np.array_equal(chosen, own_tests.members(20, 5, 4))


def in_domains(train: int, test: int, domains: int, seed: int) -> Dataset:
    """Return records of five classes whose domains are drawn at random."""
    made, coins = dataset(train, test), np.random.default_rng(seed)
    train_of, test_of = (3 + coins.integers(0, domains, count) for count in (train, test))
    first, second = replace(made.train, groups=train_of), replace(made.test, groups=test_of)
    return replace(made, train=first, test=second)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(4, 12), st.sampled_from([Iid(), LabelK(2), Dirichlet(0.3)]), st.integers(0, 9))
def test_tests_of_a_client_are_of_its_own_domain(domains: int, clients: int, inner: object, seed: int) -> None:
    made = in_domains(2000, 600, domains, seed)
    assert made.train.groups is not None
    assert made.test.groups is not None
    shards = Domain(inner).split_groups(  # type: ignore[arg-type]
        made.train.labels, made.train.groups, clients, np.random.default_rng(seed)
    )
    assert isinstance(shards, Parts)
    own = own_tests.of_sources(made, shards)
    assert own_tests.num_shared(own) == 0
    assert np.array_equal(np.sort(own.records), np.arange(600))
    drawn = own_tests.with_class_shares(made, shards, seed, keeps_sources=True)
    for client, part in enumerate(shards):
        sources = set(made.train.groups[part].tolist())
        assert set(made.test.groups[own[client]].tolist()) <= sources
        assert set(made.test.groups[drawn[client]].tolist()) <= sources
        assert set(made.test.labels[drawn[client]].tolist()) <= set(made.train.labels[part].tolist())
        assert (len(drawn[client]) > 0) == (len(part) > 0)
    for source in np.unique(made.test.groups):
        sizes = [len(own[client]) for client, part in enumerate(shards) if source in made.train.groups[part]]
        assert max(sizes) - min(sizes) <= 1


def test_class_shares_in_domains_need_the_domains_of_test_records() -> None:
    made = in_domains(100, 50, 2, 0)
    assert made.train.groups is not None
    shards = Parts.of([np.flatnonzero(made.train.groups == one) for one in (3, 4)])
    unknown = replace(made, test=replace(made.test, groups=None))
    with pytest.raises(UserError, match=r"does not name the sources of its test records: .* or set .*pooled:0\.25"):
        own_tests.with_class_shares(unknown, shards, 0, keeps_sources=True)
    mixed = Parts.of([np.arange(50), np.arange(50, 100)])
    with pytest.raises(UserError, match="some clients have training records of several sources"):
        own_tests.with_class_shares(made, mixed, 0, keeps_sources=True)
    of_one = replace(made, test=made.test.take(np.flatnonzero(made.test.groups == 3)))  # no test records of domain 4
    assert own_tests.with_class_shares(of_one, shards, 0, keeps_sources=True).sizes[1] == 0
