"""A grid is planned: points, rows, columns and captions, and every cell is checked before one runs."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from clients.dafl.settings import DaFl
from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.tables import PRESETS
from fl_sim.tables.plan import (
    TableSettings,
    as_federation,
    as_run,
    experiment_at,
    is_bound,
    plan_table,
    points,
    read_settings,
    table_settings,
)
from strategies.fedavg import FedAvg
from strategies.pate.labelling import GNMax, LNMax
from strategies.pate.settings import Pate
from strategies.pate.student import ResidualStudent, Supervised

BASE = {"model": "logistic", "rounds": 1, "engine": "inprocess"}


def settings(*, centralized: bool = False, base: dict[str, Any] | None = None, **grid: list[Any]) -> TableSettings:
    return TableSettings(base={**BASE, **(base or {})}, grid=grid, centralized=centralized)


def test_rows_are_methods_columns_are_data_and_splits_and_seeds_share_a_cell() -> None:
    plan = plan_table(settings(algorithm=["fedavg", "scaffold"], partition=["label-1", "dirichlet:0.5"], seed=[0, 1]))
    assert plan.rows == ("FedAvg", "SCAFFOLD")
    assert plan.columns == ("digits 1-Label", "digits Dir(0.5)")
    assert [(cell.row, cell.column, cell.seed) for cell in plan.cells] == [
        (row, column, seed) for row in plan.rows for column in plan.columns for seed in (0, 1)
    ]
    assert len(plan.runs) == 8


def test_a_table_has_means_over_the_seed_that_has_several_values_and_rows_for_the_others() -> None:
    plan = plan_table(settings(centralized=True, partition_seed=[4, 5], seed=[3], partition=["iid"]))
    assert (plan.rows, plan.over) == (("FedAvg", "Centralized"), "partition_seed")
    assert [(cell.row, cell.seed, cell.experiment.partition_seed) for cell in plan.cells] == [
        ("FedAvg", 4, 4), ("FedAvg", 5, 5), ("Centralized", 3, None),
    ]  # fmt: skip
    assert "mean ± sample standard deviation over partition seeds 4, 5; seed 3." in plan.caption[3]
    both = plan_table(settings(model_seed=[4, 5], seed=[0, 1], partition=["iid"]))
    assert (both.rows, both.over) == (("FedAvg, model_seed=4", "FedAvg, model_seed=5"), "seed")
    assert [cell.seed for cell in both.cells] == [0, 1, 0, 1]
    assert "over seeds 0, 1; model_seed 4, 5." in both.caption[3]


def test_a_seed_apart_takes_a_list_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text('[base]\nmodel = "logistic"\n')
    plan = plan_table(read_settings(tmp_path / "grid.toml", ["model_seed=1,2", "centralized=false"]))
    assert [cell.seed for cell in plan.cells] == [1, 2]
    assert len(plan.rows) == 1


def test_upper_bound_runs_once_per_data_set_and_seed_and_stands_in_every_column() -> None:
    plan = plan_table(settings(centralized=True, partition=["label-1", "label-2"], seed=[0, 1]))
    bound = [cell for cell in plan.cells if cell.row == "Centralized"]
    assert plan.upper_bounds == {"Centralized"}
    assert plan.rows[-1] == "Centralized"
    assert {cell.column for cell in bound} == set(plan.columns)
    assert len(bound) == 4
    assert len({cell.name for cell in bound}) == 2


def test_upper_bound_ignores_what_only_federations_have() -> None:
    base = {"sampler": "fixed-size:3", "clients": 7}
    plan = plan_table(settings(centralized=True, base=base, **{"sampler.cohort_size": [2, 3], "rounds": [1, 2]}))
    assert [row for row in plan.rows if row in plan.upper_bounds] == ["Centralized, rounds=1", "Centralized, rounds=2"]
    assert plan.rows[:2] == ("FedAvg, sampler.cohort_size=2, rounds=1", "FedAvg, sampler.cohort_size=2, rounds=2")


def test_centralized_may_be_asked_for_as_a_method() -> None:
    listed = plan_table(settings(algorithm=["centralized", "fedavg"]))
    added = plan_table(settings(centralized=True, algorithm=["fedavg"]))
    assert (listed.rows, listed.upper_bounds) == (added.rows, added.upper_bounds)
    assert set(listed.runs) == set(added.runs)


def test_parameters_off_their_default_are_named_in_the_row() -> None:
    plan = plan_table(settings(algorithm=["fedprox", {"kind": "fedprox", "mu": 0.1}, {"kind": "fedprox", "mu": 0.01}]))
    assert plan.rows == ("FedProx", "FedProx (mu=0.1)")


def test_any_setting_may_span_the_grid(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('[base]\nmodel = "logistic"\n[grid]\nlocal.epochs = [1, 5]\n')
    plan = plan_table(read_settings(file, []))
    assert plan.rows[:2] == ("FedAvg, local.epochs=1", "FedAvg, local.epochs=5")
    assert [experiment.local.epochs for experiment in plan.runs.values()] == [1, 5, 1, 5]


def test_a_setting_within_a_group_may_span_the_grid_with_tables_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'centralized = false\n[base]\nclients = 3\nalgorithm = { kind = "pate", public_records = 100, queries = 20 }\n'
        '[grid]\n"algorithm.student" = ["supervised", { kind = "resnet", steps = 8, decay_at = [0.5] }]\n'
        '"algorithm.labelling.mechanism" = ["lnmax:2", { kind = "gnmax", sigma = 5 }]\n'
    )
    pates = [experiment.algorithm for experiment in plan_table(read_settings(file, [])).runs.values()]
    assert all(isinstance(pate, Pate) for pate in pates)
    assert [pate.student for pate in pates[:2]] == [Supervised()] * 2
    assert [pate.student for pate in pates[2:]] == [ResidualStudent(steps=8, decay_at=(0.5,))] * 2
    assert [pate.labelling.mechanism for pate in pates] == [LNMax(gamma=2), GNMax(sigma=5)] * 2


def test_several_grids_make_one_table_of_all_their_cells(tmp_path: Path) -> None:
    (tmp_path / "grids.toml").write_text(
        """centralized = false
        [base]
        model = "logistic"
        rounds = 1
        [[grid]]
        algorithm = ["fedavg", "scaffold"]
        partition = ["iid", "label-1"]
        seed = [0, 1]
        [[grid]]
        algorithm = ["fedavg"]
        clients = [5]
        partition = ["iid"]
        local.epochs = [1, 2]
        """
    )
    plan = plan_table(read_settings(tmp_path / "grids.toml", []))
    assert plan.rows == ("FedAvg", "SCAFFOLD", "FedAvg, clients=5, local.epochs=1", "FedAvg, clients=5, local.epochs=2")
    assert plan.columns == ("digits iid", "digits 1-Label")
    where = [(cell.row, cell.column, cell.seed) for cell in plan.cells]
    assert where == [
        *((row, column, seed) for row in plan.rows[:2] for column in plan.columns for seed in (0, 1)),
        *((row, "digits iid", 0) for row in plan.rows[2:]),
    ]
    assert [cell.experiment.num_clients for cell in plan.cells] == [10] * 8 + [5] * 2
    # A key=value takes the place of what spans any of the grids; a key that spans none of them is for all runs.
    changed = plan_table(read_settings(tmp_path / "grids.toml", ["seed=3", "clients=4,6", "rounds=2"]))
    assert [cell.experiment.num_clients for cell in changed.cells] == [10] * 4 + [4, 4, 6, 6]
    assert {(cell.seed, cell.experiment.rounds) for cell in changed.cells} == {(3, 2)}


def test_grids_may_share_runs() -> None:
    one = {"algorithm": ["fedavg"], "partition": ["iid"]}
    both = TableSettings(base=BASE, grid=(one, {**one, "algorithm": ["fedavg", "fednova"]}), centralized=False)
    assert [cell.row for cell in plan_table(both).cells] == ["FedAvg", "FedNova"]


@pytest.mark.parametrize("grid", ['grid = ["fedavg"]', "grid = 3", "grid = []"])
def test_a_grid_is_a_table_or_several(tmp_path: Path, grid: str) -> None:
    (tmp_path / "grid.toml").write_text(f"{grid}\n[base]\nrounds = 1\n")
    with pytest.raises(UserError, match=r"grid.*: give one table, \[grid\], or several tables, \[\[grid\]\]"):
        read_settings(tmp_path / "grid.toml", [])


def test_overrides_lie_over_base_and_lists_over_the_grid(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('[base]\nmodel = "logistic"\nrounds = 9\n[grid]\nalgorithm = ["fedavg"]\n')
    overrides = ["rounds=3", "local.epochs=2", "seed=4,5", "algorithm=fednova,fedprox", "centralized=false"]
    plan = plan_table(read_settings(file, overrides))
    assert plan.rows == ("FedNova", "FedProx")
    assert {cell.seed for cell in plan.cells} == {4, 5}
    assert {(cell.experiment.rounds, cell.experiment.local.epochs) for cell in plan.cells} == {(3, 2)}
    assert {cell.experiment.engine.kind for cell in plan.cells} == {"inprocess"}


def test_directories_depend_on_settings_but_not_on_the_engine() -> None:
    (one,) = plan_table(settings(algorithm=["fedavg"])).runs
    assert one.startswith("fedavg-digits-label-1-seed-0-")
    assert list(plan_table(settings(base={"engine": "auto"})).runs) == [one]
    assert list(plan_table(settings(base={"rounds": 2})).runs) != [one]


DA_FL = {"algorithm": "fedavg", "preprocess": {"kind": "da-fl"}}


def da_fl(**parameters: Any) -> dict[str, Any]:
    return {"algorithm": "fedavg", "preprocess": {"kind": "da-fl", **parameters}}


def test_an_entry_may_set_an_algorithm_and_what_clients_do_beforehand() -> None:
    plan = plan_table(
        settings(
            centralized=True, algorithm=["fedavg", da_fl(), {**da_fl(), "algorithm": {"kind": "fedprox", "mu": 1}}]
        )
    )
    assert plan.rows == ("FedAvg", "DA-FL + FedAvg", "DA-FL + FedProx (mu=1)", "Centralized")
    kinds = {cell.row: cell.experiment.preprocess.kind for cell in plan.cells}
    assert list(kinds.values()) == ["none", "da-fl", "da-fl", "none"]
    assert [name[:21] for name in plan.runs][1] == "da-fl-fedavg-digits-l"


def test_parameters_off_their_default_and_those_that_vary_are_named() -> None:
    plan = plan_table(settings(algorithm=[da_fl(gamma=0.01, labels="geometric:0.5")]))
    assert plan.rows == ("DA-FL (gamma=0.01, labels=geometric:0.5) + FedAvg",)
    nested = {"kind": "dp-cgan", "batch_size": 64}
    plan = plan_table(settings(algorithm=[da_fl(epsilon=math.inf), da_fl(generator=nested), da_fl()]))
    default = DaFl().generator.kind
    assert plan.rows == (
        f"DA-FL (epsilon=inf, generator={default}) + FedAvg",
        "DA-FL (epsilon=10, generator=dp-cgan (batch_size=64)) + FedAvg",
        f"DA-FL (epsilon=10, generator={default}) + FedAvg",
    )


def test_a_grid_over_a_parameter_of_the_preprocessing_leaves_the_upper_bound_alone(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        '[base]\nmodel = "logistic"\npreprocess = {kind = "da-fl", gamma = 0.1}\n'
        '[grid]\n"preprocess.epsilon" = [1, 10, inf]\n'
    )
    plan = plan_table(read_settings(file, []))
    assert plan.rows == tuple(
        [f"DA-FL (epsilon={epsilon}, gamma=0.1) + FedAvg" for epsilon in (1, 10, "inf")] + ["Centralized"]
    )
    assert len(plan.runs) == 4


def test_a_kind_with_settings_of_its_own_is_one_part_of_a_rows_name() -> None:
    corrected = {"kind": "rand-k", "share": 0.1, "correction": "error-feedback"}
    plan = plan_table(settings(algorithm=["fedavg"], compress=["rand-k:0.1", corrected]))
    assert plan.rows == (
        "FedAvg, compress=rand-k:0.1",
        "FedAvg, compress=rand-k (share=0.1, correction=error-feedback)",
    )


def test_further_settings_of_an_entry_are_named_and_change_single_keys_of_the_base() -> None:
    base = {"local": {"learning_rate": 0.5}}
    plan = plan_table(settings(base=base, algorithm=["fedavg", {"algorithm": "fedavg", "local": {"epochs": 3}}]))
    assert plan.rows == ("FedAvg", "FedAvg, local.epochs=3")
    local = plan.cells[-1].experiment.local
    assert (local.epochs, local.learning_rate) == (3, 0.5)


def test_an_entry_without_an_algorithm_has_that_of_the_base() -> None:
    entries = [{"label": "mean", "aggregator": "mean"}, {"aggregator": "median"}, "fedavg"]
    plan = plan_table(settings(base={"algorithm": {"kind": "worker-momentum", "beta": 0.5}}, algorithm=entries))
    found = [(cell.experiment.algorithm.kind, cell.experiment.aggregator.kind) for cell in plan.cells]
    assert found == [("worker-momentum", "mean"), ("worker-momentum", "median"), ("fedavg", "mean")]
    plan = plan_table(settings(algorithm=entries[:2]))
    assert [cell.experiment.algorithm.kind for cell in plan.cells] == ["fedavg", "fedavg"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"algorithm": [DA_FL], "preprocess": ["none"]}, "sets preprocess, which the table varies already"),
        ({"algorithm": [DA_FL], "preprocess.gamma": [0.1]}, "sets preprocess, which the table varies already"),
        ({"algorithm": [{**DA_FL, "seed": 1}]}, "sets seed, which the table varies"),
        ({"algorithm": [{**DA_FL, "preproces": "none"}]}, "unknown key 'preproces'.*did you mean 'preprocess'"),
        ({"algorithm": [{**DA_FL, "algorithm": "centralized"}], "x": [1]}, "unknown key 'x'"),
    ],
)
def test_entries_that_contradict_the_table_are_refused(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_table(settings(**grid))


def test_an_entry_for_the_upper_bound_loses_its_preprocessing() -> None:
    (cell,) = plan_table(settings(algorithm=[{**DA_FL, "algorithm": "centralized"}])).cells
    assert (cell.row, cell.experiment.preprocess.kind) == ("Centralized", "none")


def test_the_caption_says_what_the_preprocessing_is() -> None:
    told = " ".join(plan_table(settings(algorithm=["fedavg", da_fl(), da_fl(gamma=0.5, epsilon=math.inf)])).caption)
    for fact in (
        "gamma = 0.05, 0.5 times",
        DaFl().generator.kind,
        "epsilon = 10, inf at delta = 1e-05",
        "own-and-synthetic",
    ):
        assert fact in told
    assert "DA-FL" not in " ".join(plan_table(settings()).caption)


def test_the_caption_says_how_clients_train_where_that_is_not_the_default() -> None:
    told = " ".join(
        plan_table(
            settings(
                algorithm=["fedavg", {"algorithm": "fedprox", "local.clip_norm": 10, "local.label_smoothing": 0.1}],
                base={"local": {"augment": "flip"}},
            )
        ).caption
    )
    assert (
        "weight decay 1e-05, gradients clipped to norm 0 (10 for FedProx), label smoothing 0 (0.1 for FedProx), images "
        "moved by flip; "
    ) in told
    told = " ".join(
        plan_table(settings(algorithm=["fedavg", {"algorithm": "fedprox", "local.optimizer": "adam"}])).caption
    )
    assert ", SGD (Adam for FedProx) with constant learning rate 0.01, momentum 0.9 (0 for FedProx), " in told
    told = " ".join(plan_table(settings(algorithm=["fedavg", {"algorithm": "fedprox", "local.steps": 100}])).caption)
    assert " rounds of 1 local epoch (100 local steps for FedProx), batch size" in told
    assert "clipped" not in " ".join(plan_table(settings()).caption)


def test_rows_of_one_method_show_what_sets_them_apart_and_others_have_their_settings_in_one_line() -> None:
    plan = plan_table(settings(algorithm=["fedprox", {"kind": "fedprox", "mu": 0.1}, da_fl(gamma=0.5)]))
    assert plan.rows[:2] == ("FedProx", "FedProx (mu=0.1)")
    assert list(plan.labels.values()) == ["FedProx (mu=0.01)", "FedProx (mu=0.1)", "DA-FL + FedAvg"]
    (line,) = [line for line in plan.caption if line.startswith("Methods:")]
    assert line.startswith("Methods: DA-FL + FedAvg: gamma=0.5")
    epochs = plan_table(settings(algorithm=["fedavg", {"algorithm": "fedavg", "local.epochs": 2}]))
    assert list(epochs.labels.values()) == ["FedAvg, local.epochs=1", "FedAvg, local.epochs=2"]
    alone = plan_table(settings(algorithm=[{"algorithm": "fedavg", "local.epochs": 2}]))
    assert list(alone.labels.values()) == ["FedAvg"]
    assert "1 rounds of 2 local epochs" in alone.caption[2]
    assert not [line for line in alone.caption if line.startswith("Methods:")]


def test_a_label_names_a_row_of_the_users_own_with_what_the_grid_spans_besides() -> None:
    strong = {"kind": "fedprox", "mu": 1, "label": "Strong"}
    slow = {"algorithm": "fedavg", "local.epochs": 2, "label": "Slow"}
    plan = plan_table(settings(algorithm=["fedprox", strong, slow], clients=[3, 4]))
    assert plan.rows == (
        "FedProx, clients=3", "FedProx, clients=4", "Strong, clients=3", "Strong, clients=4", "Slow, clients=3",
        "Slow, clients=4",
    )  # fmt: skip
    assert plan.labels["Strong, clients=3"] == "Strong, clients=3"
    assert {cell.experiment.algorithm.mu for cell in plan.cells if cell.row.startswith("Strong")} == {1}
    (line,) = [line for line in plan.caption if line.startswith("Methods:")]
    assert "Strong, clients=3: FedProx, mu=1; " in line
    unnamed = plan_table(settings(algorithm=["fedprox", {"kind": "fedprox", "mu": 1}, slow], clients=[3, 4]))
    assert list(plan.runs) == list(unnamed.runs)  # a finished run stays finished under another name
    with pytest.raises(UserError, match=r"label = 3 in grid.algorithm: give the name of the row as text"):
        plan_table(settings(algorithm=[{"kind": "fedprox", "label": 3}]))


def test_the_reference_is_a_row_by_its_name_or_its_label() -> None:
    table = settings(algorithm=["fedavg", {"kind": "fedprox", "mu": 1}])
    for wanted in ("FedProx (mu=1)", "FedProx"):
        assert plan_table(table.model_copy(update={"reference": wanted})).reference == "FedProx (mu=1)"
    assert plan_table(table).reference == ""
    with pytest.raises(UserError, match=r"reference = 'FedAgv': no row has this name .*; rows are FedAvg, FedProx"):
        plan_table(table.model_copy(update={"reference": "FedAgv"}))


def test_the_caption_has_the_majority_class_baseline() -> None:
    labels = load("digits").test.labels
    share = 100 * max((labels == label).sum() for label in set(labels)) / len(labels)
    told = f"Baseline: the most frequent class of the test records, digits {share:.1f} %."
    assert plan_table(settings()).caption[1] == f"Data: digits. {told}"


def test_caption_states_the_setting() -> None:
    caption = " ".join(plan_table(settings(centralized=True, seed=[0, 1])).caption)
    for fact in ("digits", "10 clients", "logistic", "1 rounds of 1 local epoch", "seeds 0, 1", "last round", "best"):
        assert fact in caption
    assert "upper bound" in caption
    assert "upper bound" not in " ".join(plan_table(settings()).caption)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": ["fedavg", "fedporx"]}, "cell algorithm=fedporx.*did you mean 'fedprox'"),
        ({"base": {"round": 3}}, "unknown key 'round'.*did you mean 'rounds'"),
        ({"partition": ["label-1", "label-11"]}, "cell .*partition=label-11.*only 10 classes"),
        ({"data": ["digitz"]}, "cell .*data=digitz.*did you mean 'digits'"),
        ({"model": ["niid-cnn"]}, "cell .*model=niid-cnn.*16x16"),
        ({"base": {"device": "cpu", "local": {"precision": "tf32"}}}, "cell .*precision=tf32 has no effect on a CPU"),
        ({"rounds": [0]}, r"cell .*rounds = 0.*greater than or equal to 1"),
        ({"seed": []}, r"grid.seed = \[\]: give a list"),
        ({"seed": 3}, r"grid.seed = 3: give a list of one or more values, such as seed = \[3\]"),
    ],
)
def test_impossible_cells_are_refused_before_the_first_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_table(settings(**changes))


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text("[bas]\nrounds = 1\n")
    with pytest.raises(UserError, match=r"unknown key 'bas'.*did you mean 'base'"):
        read_settings(file, [])


def test_the_main_job_compares_all_methods_on_one_label_digits() -> None:
    plan = plan_table(read_settings(PRESETS / "digits.toml", []))
    assert tuple(plan.labels.values()) == (
        "FedAvg", "FedProx", "SCAFFOLD", "FedNova", "FedMix", "NaiveMix", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi",
        "DA-FL + FedAvg", "Centralized",
    )  # fmt: skip
    assert {cell.seed for cell in plan.cells} == {0, 1, 2}
    assert plan.columns[0] == "digits 1-Label"


def test_every_preset_is_a_valid_table_file() -> None:
    assert sorted(path.stem for path in PRESETS.glob("*.toml")) == [
        "dafl-paper", "dafl-paper-cifar10", "dafl-paper-fashion-mnist", "dafl-paper-mnist", "dafl-paper-svhn", "digits",
        "mnist",
    ]  # fmt: skip
    for name in sorted(path.stem for path in PRESETS.glob("*.toml")):
        assert read_settings(PRESETS / f"{name}.toml", []).grid


def test_the_joined_preset_of_da_fls_paper_has_the_runs_and_the_search_of_its_parts() -> None:
    def runs(table: TableSettings) -> set[str]:
        given = [one for grid in table.grids for one in points(table.base, grid, centralized=table.centralized)]
        return {experiment_at(table.base, as_run(one)).model_dump_json() for one in given}

    whole, *parts = (
        read_settings(PRESETS / f"dafl-paper{part}.toml", []) for part in ("", "-mnist", "-fashion-mnist", "-cifar10")
    )
    assert runs(whole) == set().union(*map(runs, parts))
    assert all(part.tune == whole.tune for part in parts)


def test_a_grid_that_nobody_could_read_is_refused_before_it_is_checked() -> None:
    with pytest.raises(UserError, match=r"the grid has 1,000,000 cells, and a table may have at most 10,000"):
        plan_table(settings(seed=list(range(1000)), rounds=list(range(1, 1001))))


class Explained(FedAvg):
    def note(self) -> str:
        return "Explained: clients are asked nicely."


def test_what_an_algorithm_says_of_itself_stands_below_the_table_once() -> None:
    plan = plan_table(settings(algorithm=["fedavg", f"{__name__}:Explained"], seed=[0, 1]))
    assert plan.caption.count("Explained: clients are asked nicely.") == 1
    assert not any("asked nicely" in line for line in plan_table(settings(algorithm=["fedavg"])).caption)


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
        "partition_seed": None, "sampling_seed": None, "forgotten": (), "model": "logistic", "local.epochs": 2,
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


def test_two_classes_with_one_title_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_twins.py").write_text(
        "from typing import ClassVar\nfrom strategies.algorithm import Averaging\n"
        'class A(Averaging):\n    title: ClassVar[str] = "Mine"\n'
        'class B(Averaging):\n    title: ClassVar[str] = "Mine"\n'
    )
    base = {"model": "logistic", "rounds": 1, "clients": 2, "partition": "iid"}
    grid = {"algorithm": ["own_twins:A", "own_twins:B"]}
    settings = table_settings({"base": base, "grid": grid, "centralized": False}, [], "the test")
    with pytest.raises(UserError, match=r"own_twins:A and own_twins:B have the same title.*give each class"):
        plan_table(settings)
    sys.modules.pop("own_twins")
