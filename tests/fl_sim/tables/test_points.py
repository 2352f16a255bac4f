"""Points of a grid: their order, what a bound's run and column are, and what lies over what."""

from typing import Any

import pytest

from fl_sim.tables.points import as_federation, as_run, experiment_at, is_bound, points

FEDERATION: dict[str, Any] = {
    "algorithm": {"kind": "centralized"}, "data": "digits", "partition": "label-2", "seed": 3, "clients": 7,
    "sampler": "fixed-size:3", "sampler.cohort_size": 2, "aggregator": "median", "preprocess": "da-fl",
    "preprocess.gamma": 0.1, "attack": "sign-flip", "calibrate": "ccvr", "compress": "rand-k:0.1",
    "partition_seed": 4, "sampling_seed": 5, "model": "logistic", "local.epochs": 2,
}  # fmt: skip
"""A bound's point with a setting of all that a federation has alone."""


def test_seeds_change_first_then_splits_data_other_settings_and_methods_and_the_bound_is_last() -> None:
    grid = {
        "seed": [0, 1], "partition": ["iid", "label-2"], "rounds": [5, 6], "data": ["digits", "mnist"],
        "algorithm": ["scaffold", "fedavg"],
    }  # fmt: skip
    assert [tuple(point.values()) for point in points({}, grid, centralized=True)] == [
        (algorithm, rounds, data, partition, seed)
        for algorithm in ("scaffold", "fedavg", "centralized")
        for rounds in (5, 6)
        for data in ("digits", "mnist")
        for partition in ("iid", "label-2")
        for seed in (0, 1)
    ]


def test_what_a_grid_does_not_span_has_the_value_of_the_base_or_its_default() -> None:
    (point,) = points({"seed": 7, "data": "mnist"}, {}, centralized=False)
    assert point == {"algorithm": "fedavg", "data": "mnist", "partition": "label-1", "seed": 7}
    (point,) = points({"algorithm": "scaffold"}, {"partition": ["iid"]}, centralized=False)
    assert point == {"algorithm": "scaffold", "data": "digits", "partition": "iid", "seed": 0}
    (point,) = points({}, {"algorithm": [{"local": {"epochs": 3}}]}, centralized=False)
    assert (point["algorithm"], point["local"]) == ("fedavg", {"epochs": 3})


def test_a_bounds_run_has_one_client_and_nothing_that_a_federation_has_alone() -> None:
    assert as_run(FEDERATION) == {
        "algorithm": "centralized", "data": "digits", "partition": "iid", "seed": 3, "clients": 1, "sampler": "full",
        "aggregator": "mean", "preprocess": "none", "attack": "none", "calibrate": "none", "compress": "none",
        "partition_seed": None, "sampling_seed": None, "model": "logistic", "local.epochs": 2,
    }  # fmt: skip


def test_a_bound_stands_in_the_column_that_fedavg_with_its_other_settings_would_have() -> None:
    assert as_federation(FEDERATION) == {
        **{key: value for key, value in FEDERATION.items() if not key.startswith("preprocess")},
        "algorithm": "fedavg", "preprocess": "none", "calibrate": "none",
    }  # fmt: skip


@pytest.mark.parametrize("algorithm", ["fedavg", {"kind": "fedprox", "mu": 0.1}])
def test_what_is_no_bound_runs_and_is_named_as_it_is(algorithm: Any) -> None:
    point = {**FEDERATION, "algorithm": algorithm}
    assert not is_bound(point)
    assert as_run(point) == as_federation(point) == point


def test_a_table_without_a_kind_goes_over_the_keys_it_names_and_one_with_a_kind_over_all() -> None:
    base = {
        "model": "logistic",
        "local": {"learning_rate": 0.5, "epochs": 4},
        "algorithm": {"kind": "fedprox", "mu": 1},
    }
    local = experiment_at(base, {"local": {"epochs": 3}, "local.batch_size": 8}).local
    assert (local.learning_rate, local.epochs, local.batch_size) == (0.5, 3, 8)
    alike, changed = (experiment_at(base, {"algorithm": each}).algorithm for each in ({"kind": "fedprox"}, {"mu": 2}))
    assert alike == experiment_at({}, {"algorithm": "fedprox"}).algorithm != changed
    assert changed == experiment_at({}, {"algorithm": {"kind": "fedprox", "mu": 2}}).algorithm
