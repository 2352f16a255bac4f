"""Aggregators that look at single updates: by hand, against plain formulas, and against a few hostile clients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.types import Cohort, Reply
from strategies.aggregators import WeightedMean
from strategies.bulyan import Bulyan
from strategies.centred_clipping import CentredClipping
from strategies.coordinate_median import CoordinateMedian
from strategies.dnc import DnC
from strategies.flame import Flame
from strategies.geometric_median import GeometricMedian
from strategies.krum import Krum, MultiKrum, krum_scores
from strategies.mixing import Bucketing, NearestNeighbourMixing
from strategies.norm_bound import NormBound
from strategies.signguard import SignGuard
from strategies.trimmed_mean import TrimmedMean

ROBUST = [CoordinateMedian(), TrimmedMean(trim=0.3), Krum(hostile=2), MultiKrum(hostile=2), NormBound(norm_bound=1.0),
          GeometricMedian(), Bulyan(hostile=1), CentredClipping(), DnC(hostile=2), SignGuard(coordinate_share=1.0),
          Flame(noise=0), NearestNeighbourMixing(hostile=2, over=Krum(hostile=2)),
          Bucketing(size=2, over=GeometricMedian())]  # fmt: skip


def _cohort(rows, num_examples=None, num_clients=20):
    counts = num_examples or [1] * len(rows)
    replies = [
        Reply(
            client,
            {"delta": {"w": torch.tensor(row[:-1]).reshape(1, -1)}, "more": {"b": torch.tensor(row[-1:])}},
            count,
            1.0 if count else None,
        )
        for client, (row, count) in enumerate(zip(rows, counts, strict=True))
    ]
    return Cohort(3, tuple(replies), num_clients, expected_size=float(len(rows)))


def _mean(aggregator, cohort, weighting="examples"):
    payloads = aggregator.mean(cohort, weighting).payloads
    return torch.cat([payloads["delta"]["w"].flatten(), payloads["more"]["b"]]).numpy()


def test_medians_by_hand():
    odd, even = [[1.0, 5.0], [2.0, 9.0], [9.0, 7.0]], [[1.0, 5.0], [2.0, 9.0], [9.0, 7.0], [4.0, 0.0]]
    assert _mean(CoordinateMedian(), _cohort(odd)).tolist() == [2.0, 7.0]
    assert _mean(CoordinateMedian(), _cohort(even)).tolist() == [3.0, 6.0]


def test_trimmed_means_by_hand():
    rows = [[float(x), 1.0] for x in (0, 1, 2, 3, 100)]
    assert _mean(TrimmedMean(trim=0.2), _cohort(rows)).tolist() == [2.0, 1.0]
    assert _mean(TrimmedMean(trim=0.0), _cohort(rows))[0] == pytest.approx(106 / 5)
    assert _mean(TrimmedMean(trim=0.45), _cohort(rows)).tolist() == [2.0, 1.0]  # of five the median stays
    assert _mean(TrimmedMean(trim=0.21), _cohort(rows)).tolist() == [2.0, 1.0]  # rounded up: two at each end


@given(st.integers(0, 10_000), st.integers(5, 12))
def test_krum_scores_are_the_sums_of_the_nearest_squared_distances(seed, count):
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 7)).astype(np.float32))
    hostile = (count - 3) // 2
    plain = [
        sum(sorted(float(((a - b).double() ** 2).sum()) for j, b in enumerate(rows) if j != i)[: count - hostile - 2])
        for i, a in enumerate(rows)
    ]
    assert krum_scores(rows, hostile).tolist() == pytest.approx(plain, rel=1e-6)


def test_krum_takes_one_update_as_it_is_and_multi_krum_the_mean_of_the_closest():
    rows = [[0.0, 0.0], [0.1, 0.0], [0.0, 0.2], [0.1, 0.1], [5.0, 5.0]]
    assert _mean(Krum(hostile=1), _cohort(rows)).tolist() in [pytest.approx(row) for row in rows[:4]]
    expected = np.mean(rows[:4], axis=0)
    assert _mean(MultiKrum(hostile=1), _cohort(rows)) == pytest.approx(expected)


@pytest.mark.parametrize(("aggregator", "needed"), [(Krum(hostile=2), 7), (MultiKrum(hostile=0, selected=9), 9)])
def test_krum_among_too_few_clients_is_refused_with_the_number_it_needs(aggregator, needed):
    with pytest.raises(RunError, match=f"round 3 has 5 clients with records: (multi-)?krum needs at least {needed}"):
        aggregator.mean(_cohort([[0.0, 0.0]] * 5), "uniform")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"aggregator": "krum:4"}, "krum needs 11 clients in a round, and rounds have 10"),
     ({"aggregator": {"kind": "multi-krum", "hostile": 1, "selected": 11}}, "multi-krum needs 11 .* have 10"),
     ({"aggregator": "krum:2", "sampler": "fixed-size:6"}, "krum needs 7 .* have 6")],
)  # fmt: skip
def test_krum_in_rounds_of_too_few_clients_is_refused_before_anything_runs(settings, message):
    with pytest.raises(UserError, match=f"aggregator {message}: .*smaller aggregator.hostile, or more clients"):
        experiment_from({"clients": 10, **settings})


def test_updates_longer_than_the_bound_are_scaled_down_and_others_left():
    rows, counts = [[3.0, 4.0], [0.3, 0.4]], [1, 3]
    assert _mean(NormBound(norm_bound=1.0), _cohort(rows, counts)) == pytest.approx([0.45, 0.6])
    by_records = NormBound(norm_bound=1.0, weights="examples")
    assert _mean(by_records, _cohort(rows, counts)) == pytest.approx([0.375, 0.5])
    assert _mean(by_records, _cohort(rows, counts), "uniform") == pytest.approx([0.45, 0.6])
    free = NormBound(norm_bound=100.0, weights="examples")
    assert _mean(free, _cohort(rows, counts)) == pytest.approx(_mean(WeightedMean(), _cohort(rows, counts)))


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda one: one.kind)
def test_how_many_records_a_hostile_client_declares_moves_no_robust_result(aggregator):
    rows = [[0.1 * client, 0.0] for client in range(9)]
    honest, boasting = _cohort([*rows, [0.0, 50.0]], [100] * 10), _cohort([*rows, [0.0, 50.0]], [100] * 9 + [10_000])
    assert _mean(aggregator, boasting).tolist() == _mean(aggregator, honest).tolist()


def test_one_hostile_client_of_ten_moves_a_bounded_mean_by_a_tenth_of_the_bound_whatever_it_declares():
    quiet = [[0.0, 0.0]] * 9
    cohort = _cohort([*quiet, [30.0, 40.0]], [100] * 9 + [10_000])
    assert np.linalg.norm(_mean(NormBound(norm_bound=1.0), cohort)) == pytest.approx(0.1)
    by_records = NormBound(norm_bound=1.0, weights="examples")
    assert np.linalg.norm(_mean(by_records, cohort)) == pytest.approx(10_000 / 10_900)  # its own word


@given(st.integers(0, 10_000))
def test_at_the_geometric_median_unit_pulls_cancel(seed):
    rows = np.random.default_rng(seed).normal(size=(9, 4)).astype(np.float32)
    median = _mean(GeometricMedian(iterations=200), _cohort(rows.tolist())).astype(np.float64)
    pulls = rows - median
    lengths = np.linalg.norm(pulls, axis=1)
    if lengths.min() > 1e-3:
        assert np.linalg.norm((pulls / lengths[:, None]).sum(axis=0)) < 0.02


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda one: one.kind)
def test_two_of_ten_hostile_clients_move_the_result_no_further_than_honest_ones_differ(aggregator):
    generator = np.random.default_rng(0)
    honest = generator.normal(0.2, 0.1, size=(8, 6)).astype(np.float32)
    for far in (10.0, 1e8):
        attacked = np.concatenate([honest, np.full((2, 6), -far, dtype=np.float32)])
        moved = _mean(aggregator, _cohort(attacked.tolist()), "uniform") - honest.mean(axis=0)
        # a bounded norm lets two clients of ten move the mean by 0.2 of the bound, and shortens nobody else here
        assert np.abs(moved).max() < 0.35
        assert np.abs(_mean(WeightedMean(), _cohort(attacked.tolist())) - honest.mean(axis=0)).min() > 1.9


@pytest.mark.parametrize("aggregator", ROBUST[:-1], ids=lambda one: one.kind)  # buckets are drawn by order
def test_order_does_not_matter_empty_shards_do_not_count_and_nobody_has_no_mean(aggregator):
    rows = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32).tolist()
    one = _mean(aggregator, _cohort(rows))
    assert _mean(aggregator, _cohort(rows[::-1])) == pytest.approx(one, abs=1e-6)
    with_empty = _cohort([*rows, [0.0, 0.0, 0.0]], [1] * 9 + [0])
    assert _mean(aggregator, with_empty) == pytest.approx(one, abs=1e-6)
    assert aggregator.mean(with_empty, "uniform").participation == 9 / 20
    assert aggregator.mean(_cohort([[0.0, 0.0]], [0]), "uniform") is None
    with pytest.raises(RunError, match="client 2 in round 3 sent numbers that are not finite"):
        aggregator.mean(_cohort([*rows[:2], [float("nan"), 0.0, 0.0], *rows[3:]]), "uniform")


@pytest.mark.parametrize(
    ("trim", "kept"),
    [(0.0, [1, 2, 4, 8, 16, 32, 64]), (0.1, [2, 4, 8, 16, 32]), (0.2, [4, 8, 16]), (0.3, [8]), (0.49, [8])],
)  # a share of 7 is rounded up, and one stays
def test_a_trimmed_mean_cuts_as_many_from_either_end_and_no_others(trim, kept):
    """Powers of two: every other choice of neighbours has another mean."""
    rows = [[16.0], [2.0], [64.0], [1.0], [8.0], [32.0], [4.0]]
    assert _mean(TrimmedMean(trim=trim), _cohort(rows)).tolist() == pytest.approx([sum(kept) / len(kept)])
