"""A search inside a table: the same for every method, judged without the test records, resumed trial by trial."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fl_sim.cli import verbs
from fl_sim.data import Features, load
from fl_sim.errors import Diverged, RunError, UserError
from fl_sim.experiment import job as wiring
from fl_sim.experiment.experiment import Experiment
from fl_sim.report.runs import find
from fl_sim.simulation.run import run
from fl_sim.simulation.timing import Stopwatch, Timing
from fl_sim.tables import PRESETS, tuning, tuning_space
from fl_sim.tables.earlier_runs import TrialOutcome
from fl_sim.tables.filling import TableState, conclude, fill
from fl_sim.tables.plan import TableSettings, plan_table, read_settings, table_settings
from fl_sim.tables.tuning import (
    LOG,
    TRIALS,
    Runner,
    SearchResult,
    Trial,
    TrialResult,
    experiment_of,
    known_choices,
    proposed_trial,
    ranked,
    searches_of,
    tune,
)
from fl_sim.tables.tuning_space import Range, Tune, ValueList, drawn, proposed
from fl_sim.tables.workers import Event, Failed, Finished
from fl_sim.types import Dataset

ONE_WORKER = {"kind": "inprocess", "workers": 1}
RATES = {"low": 0.001, "high": 1.0, "log": True}
METHODS = ["fedavg", "fedprox", "scaffold"]
QUICK = {"model": "logistic", "rounds": 2, "partition": "label-2", "clients": 4, "engine": ONE_WORKER}


def settings(*, grid: dict[str, Any] | None = None, base: dict[str, Any] | None = None, **tuning: Any) -> TableSettings:
    table = {
        "base": {**QUICK, **(base or {})},
        "grid": {"algorithm": METHODS, **(grid or {})},
        "centralized": False,
        "tune": {"trials": 4, "space": {"local.learning_rate": RATES}, **tuning},
    }
    return table_settings(table, [], "the test")


def here(out: Path) -> Runner:
    """Run trials in this process."""

    def run_all(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterator[Event]:
        assert set(runs) == set(labels)
        yield from _run(runs, out / TRIALS)

    return run_all


def _run(runs: Mapping[str, Experiment], out: Path) -> Iterator[Event]:
    for name, experiment in runs.items():
        try:
            yield Finished(name, run(experiment, out / name))
        except Diverged as error:
            yield Failed(name, str(error))


def searched(chosen: TableSettings, out: Path) -> tuple[SearchResult, ...]:
    return tune(chosen, plan_table(chosen), out, here(out), None)


def log_of(out: Path) -> list[dict[str, str]]:
    with (out / LOG).open() as file:
        return list(csv.DictReader(file))


def test_every_method_gets_the_same_trials_and_rounds_and_the_best_of_its_last_rung_wins(tmp_path: Path) -> None:
    chosen = settings(spaces={"fedprox": {"algorithm.mu": [0.001, 0.01, 0.1, 1]}})
    choices = searched(chosen, tmp_path)
    log = log_of(tmp_path)
    assert Counter((line["row"], line["rung"], line["rounds"]) for line in log) == {
        (row, rung, rounds): trials
        for row in ("FedAvg", "FedProx", "SCAFFOLD")
        for rung, rounds, trials in (("1", "1", 4), ("2", "2", 2))
    }
    for choice in choices:
        own = [line for line in log if line["row"] == choice.search.cell.row]
        first, last = ([line for line in own if line["rung"] == rung] for rung in "12")
        by_accuracy = sorted(first, key=lambda line: -float(line["accuracy"]))
        assert {line["trial"] for line in last} == {line["trial"] for line in by_accuracy[:2]}
        best = max(last, key=lambda line: float(line["accuracy"]))
        assert json.loads(best["values"]) == choice.best.trial.values
    rates = [[json.loads(line["values"])["local.learning_rate"] for line in log[at : at + 4]] for at in (0, 4, 8)]
    assert rates[0] == rates[1] == rates[2]
    assert len(set(rates[0])) == 4


@pytest.mark.parametrize("order", [1, -1])
def test_a_search_with_more_rounds_than_another_of_the_table_climbs_all_of_its_rungs(
    tmp_path: Path, order: int
) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"], "rounds": [1, 4][::order]})
    short, long = searched(chosen, tmp_path)[::order]
    assert Counter((line["row"], line["rung"], line["rounds"]) for line in log_of(tmp_path)) == {
        ("FedAvg, rounds=1", "1", "1"): 4, ("FedAvg, rounds=4", "1", "2"): 4, ("FedAvg, rounds=4", "2", "4"): 2,
    }  # fmt: skip
    assert (short.best.rounds, long.best.rounds) == (1, 4)
    alone = searched(settings(grid={"algorithm": ["fedavg"], "rounds": [1]}), tmp_path / "alone")[0]
    assert [one.accuracy for one in short.tried] == [one.accuracy for one in alone.tried]


def test_trials_that_diverge_are_known_to_all_searches_that_have_their_settings(tmp_path: Path) -> None:
    rates = {"local.learning_rate": [0.1, 1e30]}
    chosen = settings(grid={"algorithm": ["fedavg"], "rounds": [1, 2, 4]}, trials=2, space=rates)
    choices = searched(chosen, tmp_path)
    assert [[one.status for one in choice.tried].count("diverged") for choice in choices] == [1, 1, 1]
    again = known_choices(chosen, searches_of(chosen, plan_table(chosen), None), tmp_path, None)
    assert again is not None
    assert [one.best.accuracy for one in again] == [one.best.accuracy for one in choices]


def test_no_trial_reads_a_test_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, trials=2)
    plan = plan_table(chosen)
    honest = tune(chosen, plan, tmp_path / "honest", here(tmp_path / "honest"), None)

    def without_test(name: str, root: Path | None, features: Features) -> Dataset:
        dataset = load(name, root, features)
        return replace(dataset, test=replace(dataset.test, labels=dataset.test.labels + 10**6))  # no class of the model

    monkeypatch.setattr(wiring, "load", without_test)
    other = tune(chosen, plan, tmp_path / "other", here(tmp_path / "other"), None)
    assert [one.accuracy for one in honest[0].tried] == [one.accuracy for one in other[0].tried]
    assert honest[0].best.trial.values == other[0].best.trial.values


def test_another_row_changes_no_trial_of_the_others(tmp_path: Path) -> None:
    alone = searched(settings(grid={"algorithm": ["fedavg"]}, trials=2), tmp_path / "alone")
    both = searched(settings(grid={"algorithm": ["fedprox", "fedavg"]}, trials=2), tmp_path / "both")
    assert [one.trial.values for one in alone[0].tried] == [one.trial.values for one in both[1].tried]
    assert [one.accuracy for one in alone[0].tried] == [one.accuracy for one in both[1].tried]


def test_what_diverges_counts_as_the_worst(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, trials=3, space={"local.learning_rate": [1e30, 0.1, 0.0001]})
    (choice,) = searched(chosen, tmp_path)
    assert choice.best.trial.values == {"local.learning_rate": 0.1}
    (diverged,) = [line for line in log_of(tmp_path) if line["status"] == "diverged"]
    assert json.loads(diverged["values"]) == {"local.learning_rate": 1e30}
    assert (diverged["accuracy"], diverged["trained"]) == ("", "0")  # in its first round
    assert "training diverged" in diverged["error"]


def test_a_search_of_which_all_diverges_is_refused_by_the_name_of_its_row(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg", "fedprox"]}, trials=2, space={"local.learning_rate": [1e30, 1e31]})
    with pytest.raises(RunError, match=r"FedAvg, digits 2-Label: all 2 trials .*smaller"):
        searched(chosen, tmp_path)
    assert len(log_of(tmp_path)) == 4


def test_a_trial_goes_on_from_rung_to_rung_and_each_round_is_trained_once(tmp_path: Path) -> None:
    (choice,) = searched(settings(grid={"algorithm": ["scaffold"]}, rounds=4), tmp_path)
    log = log_of(tmp_path)
    assert [(line["rounds"], line["trained"]) for line in log] == [("2", "2")] * 4 + [("4", "2")] * 2
    lines = {path.parent.name: len(path.read_text().splitlines()) for path in tmp_path.glob("tuning/*/rounds.jsonl")}
    assert sorted(lines.values()) == [2, 2, 4, 4]
    anew = run(experiment_of(settings(), choice.best.trial, 4), tmp_path / "anew")
    assert anew["validation"]["final_accuracy"] == choice.best.accuracy


def test_a_longer_search_goes_on_with_the_trials_of_a_shorter_one(tmp_path: Path) -> None:
    searched(settings(grid={"algorithm": ["fedavg"]}, trials=2, rounds=1), tmp_path)
    assert [line["trained"] for line in log_of(tmp_path)] == ["1", "1"]
    names = {line["dir"] for line in log_of(tmp_path)}
    searched(settings(grid={"algorithm": ["fedavg"]}, trials=2, rounds=3), tmp_path)
    assert {line["dir"] for line in log_of(tmp_path)} == names
    assert {len((tmp_path / TRIALS / name / "rounds.jsonl").read_text().splitlines()) for name in names} == {3}


@pytest.mark.parametrize(
    "base", [{"local": {"schedule": "cosine"}}, {"calibrate": "ccvr:5", "model": "mlp", "local": {"steps": 1}}]
)
def test_a_trial_that_depends_on_its_number_of_rounds_begins_anew_on_every_rung(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, base=base, trials=3, rounds=4)
    (choice,) = searched(chosen, tmp_path)
    assert [(one.rounds, one.trained) for one in choice.tried] == [(2, 2)] * 3 + [(4, 4)]
    anew = run(experiment_of(chosen, choice.best.trial, 4), tmp_path / "anew")
    assert anew["validation"]["final_accuracy"] == choice.best.accuracy


def test_a_trial_has_all_rounds_of_its_rung_where_the_tables_own_runs_stop_early(tmp_path: Path) -> None:
    early = {"evaluate": {"validation": 0.2, "patience": 1, "target_accuracy": 0.01}}
    (choice,) = searched(settings(grid={"algorithm": ["fedavg"]}, base=early, trials=2, rounds=3), tmp_path)
    assert [one.rounds for one in choice.tried] == [3, 3]
    logs = [(tmp_path / TRIALS / one.name / "rounds.jsonl").read_text().splitlines() for one in choice.tried]
    assert [len(lines) for lines in logs] == [3, 3]
    assert choice.search.cell.experiment.evaluate.patience == 1


def test_a_search_that_was_broken_off_goes_on_trial_by_trial_to_the_same_end(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, space={"local.learning_rate": [1e30, 0.1, 0.3, 0.001]})
    plan = plan_table(chosen)
    whole = tune(chosen, plan, tmp_path / "whole", here(tmp_path / "whole"), None)
    out = tmp_path / "out"
    asked: list[list[str]] = []

    def broken_off(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterator[Event]:
        asked.append(list(runs))
        events = _run(runs, out / TRIALS)
        yield next(events)
        next(events, None)
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(chosen, plan, out, broken_off, None)
    assert [len(names) for names in asked] == [4, 2, 2]  # two trials of the first rung, the other two, the second rung
    asked.clear()
    again = tune(chosen, plan, out, broken_off, None)
    assert not asked  # all is known, what diverged, too
    assert [(one.name, one.accuracy) for one in again[0].tried] == [(one.name, one.accuracy) for one in whole[0].tried]


def test_optuna_proposes_one_trial_after_another_and_the_same_again_after_a_break(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    chosen = settings(
        grid={"algorithm": ["fedavg"]}, trials=5, search="optuna", rounds=1,
        space={"local": {"learning_rate": RATES, "batch_size": {"low": 16, "high": 128}, "momentum": [0.0, 0.9]}},
    )  # fmt: skip
    plan, asked = plan_table(chosen), []

    def counted(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterator[Event]:
        asked.append(len(runs))
        yield from _run(runs, tmp_path / "out" / TRIALS)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(chosen, plan, tmp_path / "out", counted, None)
    (again,) = tune(chosen, plan, tmp_path / "out", counted, None)
    assert asked == [1] * 5
    (whole,) = searched(chosen, tmp_path / "whole")
    assert [one.trial.values for one in again.tried] == [one.trial.values for one in whole.tried]
    assert len({json.dumps(one.trial.values) for one in whole.tried}) == 5
    assert all(isinstance(one.trial.values["local.batch_size"], int) for one in whole.tried)


def test_optuna_goes_where_trials_were_good() -> None:
    pytest.importorskip("optuna")
    space = {"rate": Range(low=0.0, high=1.0), "kind": ValueList(("good", "bad"))}
    tried: list[tuple[dict[str, Any], float | None]] = []
    for number in range(30):
        values = drawn(space, 0, number) if number < 5 else proposed(space, tried, 0)
        tried.append((values, None if values["kind"] == "bad" else 1 - abs(values["rate"] - 0.3)))
    late = [values for values, _ in tried[20:]]
    assert sum(abs(values["rate"] - 0.3) < 0.2 for values in late) >= 8
    assert sum(values["kind"] == "good" for values in late) >= 8


def test_optuna_is_asked_for_in_words_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_space, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs .*Optuna.*pip install 'fl-sim\[tune\]', or take tune.search=random"):
        searched(settings(search="optuna"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def public_records(folder: Path, *, flat: bool = False) -> str:
    """Return the name of a data set that is not the table's own."""
    digits = load("digits", None)
    train, test = digits.train.take(np.arange(400)), digits.test.take(np.arange(100))
    images = {"x_train": train.inputs, "x_test": test.inputs}
    arrays = {name: inputs.transpose(0, 2, 3, 1) for name, inputs in images.items()}
    if flat:
        arrays = {name: inputs.reshape(len(inputs), -1).astype(np.float32) for name, inputs in images.items()}
    np.savez(folder / "public.npz", **arrays, y_train=train.labels, y_test=test.labels)
    return f"npz:{folder / 'public.npz'}"


@pytest.mark.usefixtures("quick_accounting", "cells_in_threads")
def test_methods_under_privacy_are_searched_for_on_public_records_and_read_no_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"aggregator": {"kind": "global-dp", "noise_multiplier": 0.5, "delta": 0.01}}
    public = public_records(tmp_path)
    chosen = settings(grid={"algorithm": ["fedavg"]}, base=base, trials=3, data=public)
    plan = plan_table(chosen)
    seen: set[str] = set()

    def watched(name: str, root: Path | None, features: Features) -> Dataset:
        seen.add(name)
        return load(name, root, features)

    monkeypatch.setattr(wiring, "load", watched)
    (choice,) = tune(chosen, plan, tmp_path, here(tmp_path), None)
    assert seen == {public}
    assert all(one.trained == one.rounds for one in choice.tried)  # a private run gets no more rounds
    results = [json.loads((tmp_path / TRIALS / one.name / "result.json").read_text()) for one in choice.tried]
    assert [one.accuracy for one in choice.tried] == [result["final_accuracy"] for result in results]
    board = filled(chosen, tmp_path)
    assert {cell.experiment.data for cell in board.plan.cells} == {"digits"}
    told = (tmp_path / "table.md").read_text()
    assert "public.npz in place of the table's data" in told
    assert "trained and tested on the public data set" in told


def test_a_public_data_set_that_would_train_another_model_is_refused(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, base={"model": ""}, data=public_records(tmp_path, flat=True))
    with pytest.raises(UserError, match=r"trains model=.* on digits, but the default model .* set model in"):
        searched(chosen, tmp_path / "out")


def filled(chosen: TableSettings, out: Path, *, progress: bool = False) -> TableState:
    board = TableState(chosen, plan_table(chosen))
    fill(board, out, 1, None, progress=progress)
    conclude(board, out)
    return board


@pytest.mark.usefixtures("cells_in_threads")
def test_the_tables_own_runs_have_the_chosen_values_all_records_and_one_test(tmp_path: Path) -> None:
    chosen = settings(
        grid={"algorithm": ["fedavg", "fedprox"], "seed": [0, 1]}, spaces={"fedprox": {"algorithm.mu": [0.5, 2.0]}}
    )
    board = filled(chosen, tmp_path)
    values = {choice.search.cell.row: choice.best.trial.values for choice in board.choices}
    assert [(cell.row, cell.seed) for cell in board.plan.cells] == [
        ("FedAvg", 0), ("FedAvg", 1), ("FedProx", 0), ("FedProx", 1)
    ]  # fmt: skip
    for cell in board.plan.cells:
        own = cell.experiment
        assert own.local.learning_rate == values[cell.row]["local.learning_rate"]
        assert (own.evaluate.validation, own.evaluate.test, own.rounds) == (0, "last", 2)
        assert cell.row == "FedAvg" or own.model_dump()["algorithm"]["mu"] == values["FedProx"]["algorithm.mu"]
        lines = (tmp_path / "cells" / cell.name / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["test_accuracy"] is None for line in lines] == [True, False]
    found = {entry["row"]: entry for entry in json.loads((tmp_path / "table.json").read_text())["tuning"]}
    assert {row: entry["values"] for row, entry in found.items()} == values
    assert {(entry["trials"], entry["runs"], entry["rounds"], entry["diverged"]) for entry in found.values()} == {
        (4, 4, 6, 0)
    }
    assert found["FedAvg"]["accuracy"] == 100 * board.choices[0].best.accuracy
    assert all(entry["rungs"] == [[4, 1], [2, 2]] and entry["seconds"] > 0 for entry in found.values())
    told = (tmp_path / "table.md").read_text()
    assert "4 trials of 1 rounds, the best 2 of them 2 rounds" in told
    assert "on 10 % of every client's training records" in told
    assert (
        f"FedProx, chosen: digits 2-Label local.learning_rate={values['FedProx']['local.learning_rate']:.10g}" in told
    )


@pytest.mark.usefixtures("cells_in_threads")
def test_how_long_a_search_takes_is_told_before_it_begins_and_not_where_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stopwatch, "timing", lambda *_: Timing(piece=1.0))
    chosen = settings(grid={"algorithm": ["fedavg"]}, trials=2)
    for told in (True, False):
        filled(chosen, tmp_path, progress=True)
        first = capsys.readouterr().err.partition("\n")[0]
        assert ("1 search for settings, one per row and column: 2 trials with 4 rounds in total, 0" in first) is told
        assert ("0 of them done; the remaining rounds take about" in first) is told
        assert ("; after the search 1 run, 0 finished" in first) is told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"local.lerning_rate": [0.1]}}, r"unknown key 'local.lerning_rate' \(did you mean 'learning_rate'"),
        ({"space": {"local.learning_rate": [0.1, -0.1]}}, r"local.learning_rate = -0.1.*greater than 0"),
        ({"space": {"local.momentum": {"low": 0.5, "high": 1.0}}}, r"local.momentum = 1.0.*less than 1"),
        ({"spaces": {"fedprox": {"algorithm.mu": [-1]}}}, r"cell algorithm=fedprox.*algorithm.mu = -1"),
        ({"space": {"algorithm.mu": [1]}}, r"cell algorithm=fedavg.*unknown key 'algorithm.mu'"),
        ({"grid": {"local.epochs": [1, 2]}, "space": {"local.epochs": [1]}}, "sets local.epochs in the grid"),
        ({"grid": {"algorithm": [{"kind": "fedprox", "mu": 1.0}]}, "space": {"algorithm.mu": [1]}}, "sets algorithm"),
        ({"grid": {"algorithm": ["fedprox:2"]}, "space": {"algorithm.mu": [1]}}, "row FedProx.* sets algorithm.mu"),
        ({"validation": 0.999}, "holds out all .* of client 0, so none are left"),
        ({"base": {"aggregator": "global-dp"}}, r"row FedAvg promises privacy.*tune.data = \"NAME\""),
        ({"data": "digits"}, "tune.data=digits is also the data set of the table"),
        ({"data": "digts"}, "digts"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_told_before_the_first_trial(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    chosen = settings(**changes)
    plan = plan_table(chosen)
    with pytest.raises(UserError, match=said):
        tune(chosen, plan, tmp_path / "out", here(tmp_path), None)
    assert not (tmp_path / "out").exists()


def _npz(path: Path, trained: slice, tested: slice) -> str:
    images, classes = np.arange(4 * 40, dtype=np.uint8).reshape(40, 2, 2), np.arange(40) % 4
    arrays = {
        "x_train": images[trained],
        "y_train": classes[trained],
        "x_test": images[tested],
        "y_test": classes[tested],
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return f"npz:{path}"


def test_public_records_to_tune_on_are_other_records_and_not_another_name_of_them(tmp_path: Path) -> None:
    first, second = slice(0, 20), slice(20, 40)
    own = _npz(tmp_path / "own.npz", first, second)
    copy = _npz(tmp_path / "copy.npz", first, second)
    swapped = _npz(tmp_path / "swapped.npz", second, first)
    (tmp_path / "link.npz").symlink_to(tmp_path / "own.npz")
    for public in (copy, swapped, f"npz:{tmp_path}/../{tmp_path.name}/own.npz", f"npz:{tmp_path}/link.npz"):
        chosen = settings(base={"data": own, "partition": "iid"}, data=public)
        with pytest.raises(UserError, match=r"npz:.*own.npz, .*the data set of the table"):
            searches_of(chosen, plan_table(chosen), None)


@pytest.mark.parametrize(
    ("tuning", "said"),
    [
        ({"trials": 0}, r"tune.trials = 0: input should be greater than or equal to 1"),
        ({"halving": 1}, r"tune.halving = 1"),
        ({"validation": 0}, r"tune.validation = 0"),
        ({"trails": 3}, r"unknown key 'tune.trails' \(did you mean 'trials'\?\)"),
        ({"search": "grid"}, r"tune.search = 'grid'.*'random' or 'optuna'"),
    ],
)
def test_mistakes_in_tune_are_told_by_name(tuning: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings(**tuning)


def test_the_command_line_lays_settings_of_the_search_over_the_files() -> None:
    table = {"tune": {"trials": 4, "space": {"local.learning_rate": [0.1]}}}
    chosen = table_settings(table, ["tune.trials=2", "tune.search=optuna", "rounds=3"], "the test")
    assert chosen.tune is not None
    assert (chosen.tune.trials, chosen.tune.search, chosen.base["rounds"]) == (2, "optuna", "3")
    with pytest.raises(UserError, match=r"change \[tune.space\] in the file"):
        table_settings(table, ["tune.space.local.momentum=0.1"], "the test")


def test_a_table_whose_search_is_not_done_says_so(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]})
    table, _ = conclude(TableState(chosen, plan_table(chosen)), tmp_path)
    assert "The search for the settings of the methods is not finished" in table.caption[-1]
    assert {one.status for one in table.results} == {"missing"}
    assert "tuning" not in json.loads((tmp_path / "table.json").read_text())


def test_of_equally_good_trials_the_earlier_one_wins_and_what_diverged_never(tmp_path: Path) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]})
    (search,) = searches_of(chosen, plan_table(chosen), None)
    accuracies = [0.5, None, 0.75, 0.75, 0.0]
    tried = [TrialResult(Trial(search, at, {}), 1, 1, 1, "", one, 0.0) for at, one in enumerate(accuracies, 1)]
    assert [one.trial.number for one in ranked(tried)] == [3, 4, 1, 5]


@pytest.mark.usefixtures("cells_in_threads")
def test_a_report_shows_no_trials(tmp_path: Path) -> None:
    filled(settings(grid={"algorithm": ["fedavg"]}, trials=2), tmp_path)
    found = find([tmp_path])
    assert [run.path.parent.name for run in found.runs] == ["cells"]
    assert not found.problems


def test_every_setting_of_a_search_is_in_the_help() -> None:
    words = set(re.findall(r"\w+", verbs.table.__doc__ or ""))
    assert set(Tune.model_fields) - words == set()


def foretold(
    monkeypatch: pytest.MonkeyPatch, chosen: TableSettings, accuracies: Mapping[int, Mapping[float, float | None]]
) -> list[tuple[int, int]]:
    """Let trials come to ``accuracies`` of {rounds: {rate: accuracy}}; return what (rounds, after) was asked for."""
    asked: list[tuple[int, int]] = []

    def outcome(directory: Path, experiment: Experiment, after: int, data_root: Path | None) -> TrialOutcome:
        del directory, data_root
        asked.append((experiment.rounds, after))
        accuracy = accuracies[experiment.rounds][experiment.local.learning_rate]
        return TrialOutcome(
            accuracy, experiment.rounds - after, 1.0, "" if accuracy else f"{experiment.local.learning_rate}"
        )

    monkeypatch.setattr(tuning, "trial_outcome", outcome)
    return asked


def test_the_best_half_of_each_rung_climbs_and_the_best_of_the_last_is_taken_whatever_rungs_before_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight trials one diverges at once and one later; what is best changes from rung to rung."""
    chosen = settings(grid={"algorithm": ["fedavg"]}, trials=8, rounds=9)
    (search,) = searches_of(chosen, plan_table(chosen), None)
    assert chosen.tune is not None
    rates = [drawn(search.space, chosen.tune.seed, number)["local.learning_rate"] for number in range(8)]
    accuracies = {
        2: dict(zip(rates, [0.91, None, 0.97, 0.2, 0.95, 0.93, 0.3, 0.99], strict=True)),
        4: {rates[7]: 0.1, rates[2]: 0.8, rates[4]: None, rates[5]: 0.85},
        9: {rates[2]: 0.5, rates[5]: 0.5},
    }
    asked = foretold(monkeypatch, chosen, accuracies)
    (choice,) = searched(chosen, tmp_path)
    assert [(one.trial.number, one.rung, one.rounds, one.trained) for one in choice.tried] == [
        *((number, 1, 2, 2) for number in range(1, 9)), (8, 2, 4, 2), (3, 2, 4, 2), (5, 2, 4, 2), (6, 2, 4, 2),
        (6, 3, 9, 5), (3, 3, 9, 5),
    ]  # fmt: skip
    assert (choice.best.trial.number, choice.best.rung, choice.best.accuracy) == (3, 3, 0.5)
    assert {*asked} == {(2, 0), (4, 2), (9, 4)}
    asked.clear()
    anew = settings(grid={"algorithm": ["fedavg"]}, base={"local": {"schedule": "cosine"}}, trials=8, rounds=9)
    searched(anew, tmp_path)
    assert {*asked} == {(2, 0), (4, 0), (9, 0)}


def test_a_rung_of_which_all_diverges_is_told_with_its_own_rounds_and_its_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"]}, trials=8, rounds=9)
    (search,) = searches_of(chosen, plan_table(chosen), None)
    assert chosen.tune is not None
    rates = [drawn(search.space, chosen.tune.seed, number)["local.learning_rate"] for number in range(8)]
    first = dict(zip(rates, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], strict=True))
    foretold(monkeypatch, chosen, {2: first, 4: dict.fromkeys(rates, None)})
    with pytest.raises(RunError, match=rf"all 4 trials of 4 rounds diverged; the error of the first .*{rates[7]};"):
        searched(chosen, tmp_path)


@pytest.mark.parametrize("grid", [[1, 8, 4], [8, 1, 4], [4, 1, 8]])
def test_trials_with_the_same_settings_run_once_for_the_most_rounds_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: list[int]
) -> None:
    chosen = settings(grid={"algorithm": ["fedavg"], "rounds": grid}, trials=2)
    known: dict[str, int] = {}

    def outcome(directory: Path, experiment: Experiment, after: int, data_root: Path | None) -> TrialOutcome | None:
        del after, data_root
        rounds = experiment.rounds
        return TrialOutcome(rounds / 10, rounds, 1.0) if known.get(directory.name, 0) >= rounds else None

    def runner(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterator[Event]:
        assert {label.rpartition(", ")[2] for label in labels.values()} == {"8 rounds"}
        known.update({name: experiment.rounds for name, experiment in runs.items()})
        yield from ()

    monkeypatch.setattr(tuning, "trial_outcome", outcome)
    choices = tune(chosen, plan_table(chosen), tmp_path, runner, None)
    assert [*known.values()] == [8, 8]
    assert [one.best.accuracy for one in choices] == [rounds / 10 for rounds in grid]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "svhn"])
def test_the_papers_presets_search_the_papers_grids_on_validation_records_alone(tmp_path: Path, name: str) -> None:
    inputs, labels = np.zeros((100, 16, 16), dtype=np.uint8), np.arange(100) % 10
    np.savez(tmp_path / "d.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    settings = read_settings(
        PRESETS / f"dafl-paper-{name}.toml",
        [f"data=npz:{tmp_path / 'd.npz'}", "seed=0", "partition=label-1", "evaluate.test_is_public=true"],
    )
    plan = plan_table(settings)
    assert len(plan.runs) == 6 + 2 * 2 + 2 * 2 + (2 * 5 if name == "mnist" else 0) + 1
    assert {cell.experiment.evaluate.test for cell in plan.cells} == {"rounds"}
    searches = searches_of(settings, plan, None)
    values = {key: one.extremes() for search in searches for key, one in search.space.items()}
    assert values == {"algorithm.mu": (0.001, 0.01, 0.1, 1), "algorithm.mixing_weight": (0.05, 0.1, 0.2)}
    assert {search.cell.row.split(",")[0] for search in searches} == {"FedProx", "NaiveMix", "FedMix"}
    for search in searches:
        trials = [proposed_trial(search, cast("Tune", settings.tune), number, ()) for number in range(4)]
        assert {str(trial.values) for trial in trials} == {
            str({key: value}) for key, one in search.space.items() for value in one.extremes()
        }
        run = experiment_of(settings, trials[0], 50)
        assert (run.evaluate.validation, run.evaluate.test) == (0.1, "never")
