"""``fl-sim plan`` as typed: every run with what it takes, what is there already, and the bill of the whole."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fl_sim.__main__ import main
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import Silent, run
from fl_sim.simulation.timing import Stopwatch, Timing
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tables.plan import plan_table, read_settings, tuned
from fl_sim.tables.tuning import tune, values_of
from fl_sim.tables.workers import Finished

GRID = """
centralized = false
[base]
model = "logistic"
rounds = 4
[grid]
algorithm = ["fedavg", "scaffold", {algorithm = "fedavg", aggregator = "global-dp"}]
"""


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fl-sim", "plan", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path / "grid.toml"


def names_of(grid: Path, *overrides: str) -> list[str]:
    return list(plan_table(read_settings(grid, list(overrides))).runs)


@pytest.mark.usefixtures("quick_accounting")
def test_a_plan_tells_what_share_of_the_time_goes_into_synthetic_records(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid.write_text(GRID.replace('{algorithm = "fedavg", aggregator = "global-dp"}', '{preprocess = "da-fl"}'))
    assert typed(monkeypatch, "grid.toml", "partition=label-1,label-2", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    plain, private = runs[:4], runs[4:]
    assert [one["synthetic_seconds"] for one in plain] == [0] * 4
    assert all(0 < one["synthetic_seconds"] < one["seconds"] for one in private)  # both are timed: nothing more holds
    # Of one data set they take as long whatever the split, and so they are timed once.
    assert private[0]["synthetic_seconds"] == private[1]["synthetic_seconds"]
    assert typed(monkeypatch, "grid.toml", "partition=label-1,label-2") == 0
    told = re.search(
        r"Making synthetic records takes ([\d.]+)% of the time of the 2 runs with synthetic records \(of 6 runs\)\.",
        capsys.readouterr().out,
    )
    assert told is not None
    assert 0 < float(told[1]) <= 100


@pytest.mark.usefixtures("quick_accounting")
def test_a_plan_tells_what_is_finished_what_is_begun_and_what_the_rest_takes_and_writes_nothing(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    finished, begun, _ = names_of(grid)
    cells = grid.parent / "results" / "grid" / "cells"
    run(experiment_from({"model": "logistic", "rounds": 4}), cells / finished)
    with pytest.raises(KeyboardInterrupt):
        run(
            experiment_from({"model": "logistic", "rounds": 4, "algorithm": "scaffold"}),
            cells / begun,
            None,
            Impatient(),
        )
    before = sorted(grid.parent.rglob("*"))
    assert typed(monkeypatch, "grid.toml", "--jobs", "2", "--json") == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sorted(grid.parent.rglob("*")) == before
    assert [(one["status"], one["rounds_done"]) for one in told["runs"]] == [
        ("finished", 4), ("3 of 4 rounds done", 3), ("new", 0),
    ]  # fmt: skip
    done, half, new = told["runs"]
    assert done["seconds_left"] == 0
    assert half["seconds_left"] == pytest.approx(half["seconds"] / 4)
    assert told["seconds"] >= new["seconds_left"] == new["seconds"] > 0
    assert half["bytes"]["up"] == 2 * done["bytes"]["up"]  # control variates
    [bill] = told["bill"]
    assert (bill["unit"], bill["runs"], bill["runs_without_guarantee"]) == ("client", 3, 2)
    assert bill["private_releases"][0]["epsilon_sum"] > 1


def test_people_read_a_line_a_run_and_quick_times_nothing(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["algorithm=fedavg,scaffold", "seed=0,1", "rounds=2"]
    monkeypatch.setattr(Stopwatch, "time_all", pytest.fail)
    assert typed(monkeypatch, "grid.toml", *overrides, "--quick") == 0
    told = capsys.readouterr().out
    assert all(name in told for name in names_of(grid, *overrides))
    assert "4 runs, 0 finished\nPrivacy: no run has a privacy guarantee.\n" in told


def test_one_run_is_planned_by_its_settings_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('model = "logistic"\nrounds = 2\n')
    for arguments in ([str(tmp_path / "run.toml")], ["model=logistic", "rounds=2"]):
        assert typed(monkeypatch, *arguments, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["directory"] == "results"
        [one] = told["runs"]
        assert one["name"].startswith("fedavg-digits-label-1-seed-0-")
        assert one["bytes"] == {"down": 2 * 10 * (128 + 4 * 650), "up": 2 * 10 * (128 + 4 * 650)}


def test_what_travels_once_is_in_the_megabytes_of_the_line_and_told_apart_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of 1,437 records in averages of two: 239, of 64 + 10 numbers each; with 650 parameters a round."""
    settings = ["model=logistic", "rounds=2", "clients=3", "partition=iid", "algorithm=fedmix",
                "algorithm.records_per_average=2"]  # fmt: skip
    each, of_round = 4 * 239 * 74, 3 * (128 + 4 * 650)
    assert typed(monkeypatch, *settings, "--json") == 0
    [one] = json.loads(capsys.readouterr().out)["runs"]
    assert one["bytes"] == {"down": 2 * of_round, "up": 2 * of_round}
    once = {"down": 3 * (128 + 3 * each), "up": 3 * (128 + each)}
    assert one["bytes_once"] == {"shared_records": once}
    assert typed(monkeypatch, *settings, "--quick") == 0
    down, up = ((2 * of_round + once[way]) / 1e6 for way in ("down", "up"))
    assert f"{down:.1f}     {up:.1f}" in capsys.readouterr().out


def test_a_search_is_planned_as_far_as_it_is_not_done_and_then_the_runs_that_it_chose(
    grid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search = '[tune]\ntrials = 2\nrounds = 3\nhalving = 2\n[tune.space]\n"local.learning_rate" = [0.1, 0.001]\n'
    grid.write_text(GRID + search)
    settings, out = read_settings(grid, ["algorithm=fedavg"]), grid.parent / "results" / "grid"

    def in_process(runs: Mapping[str, Experiment], labels: Mapping[str, str]) -> Iterator[Finished]:
        yield from (Finished(name, run(one, out / "tuning" / name)) for name, one in list(runs.items())[:until])

    planned, told = ("grid.toml", "algorithm=fedavg", "--quick"), []
    for until in (1, 2):  # noqa: B007 (in_process reads it)
        with suppress(RunError):  # one of the two trials has not run
            choices = tune(settings, plan_table(settings), out, in_process, None)
        assert typed(monkeypatch, *planned, "--json") == 0
        told.append(json.loads(capsys.readouterr().out))
    [before] = told[0]["searches"]
    assert (before["row"], before["trials"], before["rounds"], before["rounds_done"]) == ("FedAvg", 2, 6, 3)
    assert told[0]["runs"][0]["name"] in names_of(grid, "algorithm=fedavg")
    assert told[1]["searches"] == []
    chosen = tuned(settings, plan_table(settings), values_of(choices), None)
    assert [one["name"] for one in told[1]["runs"]] == list(chosen.runs) != [told[0]["runs"][0]["name"]]
    grid.write_text(GRID + search.replace("0.001", "0.01"))
    assert typed(monkeypatch, *planned) == 0
    assert "2 trials with 6 rounds in total, 3 of them done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.toml"], "no file or preset 'nothing.toml'"),
        (["a.toml", "b.toml"], "give at most one FILE or PRESET"),
        (["rouds=3"], "did you mean 'rounds'"),
        (["rounds=3", "--jobs", "2"], "--jobs 2 is for the parallel runs of a table"),
        (["digits", "algorithm=fedporx"], "did you mean 'fedprox'"),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_was_timed_is_listed_and_json_is_one_object_whatever_a_model_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty.py").write_text(
        "from torch import nn\n\ndef factory(input_shape, num_classes):\n    print('hello')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert typed(monkeypatch, "model=chatty:factory", "rounds=2", "--json") == 0
    shown, told = capsys.readouterr()
    found = json.loads(shown)
    assert "hello" in told
    assert [(one["what"], one["at_least"], one["why_not"]) for one in found["timed"]] == [
        ("a step of chatty:factory on digits (plain, 64 records)", False, None),
        ("measuring chatty:factory on a record of digits", False, None),
    ]
    assert all(one["seconds"] > 0 for one in found["timed"])
    assert (found["seconds_at_least"], found["bill_by_rdp_alone"]) == (False, False)
    assert typed(monkeypatch, "model=logistic", "rounds=2") == 0
    said = capsys.readouterr().out
    assert re.search(
        r"Timed just now: a step of logistic on digits \(plain, 64 records\): [\d.]+ [mu]?s; measuring", said
    )


def test_what_found_no_time_is_a_lower_bound_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_part(self: Stopwatch, works: Any, _: object) -> None:
        self.timings = {work.kind: Timing(piece=3.0, at_least=True) for work in works}
        self._what = dict.fromkeys(self.timings, "a step of a huge network")

    monkeypatch.setattr(Stopwatch, "time_all", only_part)
    assert typed(monkeypatch, "model=logistic", "rounds=2") == 0
    said = capsys.readouterr().out
    assert "the remaining rounds take at least" in said
    assert "a lower bound: a step of a huge network: over 3 s" in said
    assert "not counted: most of a step of logistic on digits" in said


def test_ctrl_c_ends_a_plan_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stopwatch, "time_all", interrupted)
    assert typed(monkeypatch, "model=logistic", "--json") == 130
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("quick_accounting")
def test_where_the_time_is_up_epsilons_are_by_rdp_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ("model=logistic", "rounds=7", "aggregator=global-dp", "sampler=poisson:0.3", "--quick", "--json")
    monkeypatch.setattr("fl_sim.cli.run.ANSWER_SECONDS", 0.0)
    assert typed(monkeypatch, *private) == 0
    rough = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("fl_sim.cli.run.ANSWER_SECONDS", 1e6)
    assert typed(monkeypatch, *private) == 0
    exact = json.loads(capsys.readouterr().out)
    assert (rough["bill_by_rdp_alone"], exact["bill_by_rdp_alone"]) == (True, False)
    assert rough["bill"][0]["epsilon"] > exact["bill"][0]["epsilon"]
