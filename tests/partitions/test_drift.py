"""Drift: records move once, at the stated pace, and each belongs to at most one client in a round."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import Dirichlet, Domain, Drift, Iid, ImpossibleSplit, LabelK, Natural, Parts, Quantity, Rotate, Scheme
from partitions.moving import owner_of

INNER: list[Scheme] = [Iid(), LabelK(1), LabelK(2), Dirichlet(0.1, min_size=0), Quantity(0.3, min_size=0)]


def same(left: Parts, right: Parts) -> bool:
    return np.array_equal(left.records, right.records) and np.array_equal(left.bounds, right.bounds)


@settings(max_examples=60, deadline=None)
@given(
    over=st.sampled_from(INNER), to=st.sampled_from(INNER), first=st.integers(1, 6), length=st.integers(1, 9),
    num_clients=st.integers(2, 9), num_records=st.integers(60, 150), seed=st.integers(0, 2**32), draw=st.integers(0, 2),
)  # fmt: skip
def test_the_law_of_drift(
    over: Scheme, to: Scheme, first: int, length: int, num_clients: int, num_records: int, seed: int, draw: int
) -> None:
    labels, coins = np.random.default_rng(seed).integers(0, 4, num_records), lambda: np.random.default_rng(seed)
    drift = Drift(over, to, first, first + length, draw)
    moving = drift.moving(labels, None, num_clients, coins())
    again = drift.moving(labels, None, num_clients, coins())
    assert same(moving.first, Parts.of(over.split(labels, num_clients, coins())))
    assert same(moving.first, Parts.of(drift.split(labels, num_clients, coins())))
    if not draw:
        assert same(moving.last, Parts.of(to.split(labels, num_clients, coins())))
    before, after = (owner_of(parts, num_records) for parts in (moving.first, moving.last))
    earlier = before
    for server_round in range(1, first + length + 3):
        parts, share = moving.in_round(server_round), np.clip((server_round - first) / length, 0, 1)
        assert drift.share_in(server_round) == share
        assert same(parts, again.in_round(server_round))
        assert len(np.unique(parts.records)) == len(parts.records)  # at most one client for each record
        assert all((np.diff(part) > 0).all() for part in parts)
        owner = owner_of(parts, num_records)
        assert ((owner == before) | (owner == after)).all()
        assert (owner == after)[(earlier == after)].all()  # no record moves back
        for old, new in {*zip(before.tolist(), after.tolist(), strict=True)} - {(one, one) for one in range(99)}:
            pair = (before == old) & (after == new)
            moved, expected = np.count_nonzero(owner[pair] == new), share * np.count_nonzero(pair)
            assert np.floor(expected + 1e-9) <= moved <= np.ceil(expected - 1e-9)
        assert parts is moving.first or server_round > first
        assert same(parts, moving.last) or server_round < first + length
        earlier = owner


def test_the_records_of_a_pair_move_in_a_random_order_and_small_pairs_at_random_times() -> None:
    moving = Drift(Iid(), Iid(), 1, 101, to_seed=1).moving(np.zeros(4000, np.int64), None, 50, np.random.default_rng(0))
    before, after = (owner_of(parts, 4000) for parts in (moving.first, moving.last))
    assert abs(np.corrcoef(np.arange(4000), moving.rounds)[0, 1]) < 0.06
    assert 49 < moving.rounds[before != after].mean() < 54  # 4000 records, 2500 pairs: no wave of moves
    assert np.bincount(moving.rounds, minlength=102)[2:].max() < 80
    assert moving.moves_in[0] > 1
    assert moving.moves_in[-1] <= 101


def test_sources_are_kept_where_a_partition_of_the_drift_keeps_them() -> None:
    groups, labels = np.repeat([0, 1, 2], 20), np.zeros(60, np.int64)
    moving = Drift(Natural(), Iid(), 1, 5).moving(labels, groups, 3, np.random.default_rng(0))
    assert [np.unique(groups[part]).tolist() for part in moving.first] == [[0], [1], [2]]
    parts = Drift(Natural(), Iid()).split_groups(labels, groups, 3, np.random.default_rng(0))
    assert same(Parts.of(parts), moving.first)
    with pytest.raises(ImpossibleSplit, match="does not say where its records come from"):
        Drift(Natural()).split(labels, 3, np.random.default_rng(0))
    assert (Drift().uses_labels, Drift(Iid(), Quantity()).uses_labels) == (True, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Drift(first_round=5, last_round=5), "first_round=5 and last_round=5: take rounds from 1"),
        (lambda: Drift(first_round=0), "first_round=0"),
        (lambda: Drift(to_seed=-1), "to_seed=-1 must be at least 0"),
        (lambda: Drift(to=Rotate()), "drift: to=rotate changes the records of clients by itself"),
        (lambda: Drift(over=Drift()), "drift: over=drift moves records between rounds"),
        (lambda: Rotate(2, Drift()), "rotate: over=drift moves records between rounds"),
        (lambda: Domain(Drift()), "domain: over=drift moves records between rounds"),
        (lambda: Drift(to="iid"), "drift: to='iid' is no partition"),
    ],
)
def test_impossible_drifts_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ImpossibleSplit, match=message):
        make()


def test_a_drift_without_effect_or_beyond_the_run_is_told() -> None:
    experiment = SimpleNamespace(rounds=10, algorithm=None)
    assert Drift(first_round=2, last_round=10).remarks(experiment) == []
    [none] = Drift(Iid(), Iid(), 2, 10).remarks(experiment)
    assert "no record moves" in none
    [short] = Drift(first_round=5, last_round=15).remarks(experiment)
    assert "is after the last round, 10: the run ends with 50 % of the drift" in short
    assert Drift().remarks(SimpleNamespace(rounds=1, algorithm=SimpleNamespace(is_central=True))) == []
