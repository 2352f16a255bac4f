"""A table that is given too little time: what begins, what stops, and what is told."""

import json
import sys
from pathlib import Path

import pytest

import fl_sim
from fl_sim.__main__ import main
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.budget import Budget
from fl_sim.tables.workers import Finished, Postponed, Stopped, run_all

TABLE = [
    "model=logistic",
    "rounds=4",
    "algorithm=fedavg,scaffold",
    "partition=label-1",
    "centralized=false",
    "--jobs=1",
]


class Moment(Budget):
    """A moment is left, however long ago that was said."""

    @property
    def left(self) -> float:
        return 1e-9


def quick(**changes: object) -> Experiment:
    return experiment_from({"model": "logistic", "rounds": 4, "engine": "inprocess", **changes})


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fl-sim", "table", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.usefixtures("cells_in_threads")
def test_what_has_begun_stops_after_a_round_and_nothing_begins_that_cannot_be_finished(tmp_path: Path) -> None:
    runs = {"long": quick(), "begun": quick(seed=1), "short": quick(seed=2, rounds=1)}
    budget = Moment(0.0, {"long": 9.0, "begun": 9.0, "short": 0.0}, frozenset({"begun"}))
    events = list(run_all(runs, tmp_path, 1, None, budget))
    ends = [event for event in events if isinstance(event, Stopped | Postponed | Finished)]
    assert [(type(event), event.name) for event in ends] == [
        (Stopped, "begun"), (Finished, "short"), (Postponed, "long"),
    ]  # fmt: skip
    assert Stopped("begun", 1) in ends
    assert len(read_rounds(tmp_path / "begun")) == 1
    assert not (tmp_path / "long").exists()
    run(quick(seed=1), tmp_path / "begun")
    run(quick(seed=1), tmp_path / "whole")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("begun", "whole")]
    assert models[0] == models[1]


@pytest.mark.usefixtures("cells_in_threads")
def test_a_table_without_time_says_that_it_is_partial_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *TABLE, "algorithm=fedavg", "--out", str(tmp_path)) == 0
    assert "1 run, 0 finished; the rest takes about" in capsys.readouterr().err
    assert typed(monkeypatch, *TABLE, "--budget", "1e-9", "--out", str(tmp_path), "--json") == 3
    shown, told = capsys.readouterr()
    assert "2 runs, 1 finished; the rest takes about" in told
    assert "SCAFFOLD, digits 1-Label, seed 0: not begun, as the time that is left is too short" in told
    assert "this table is PARTIAL, 1 of 2 cells are finished" in told
    assert [cell["row"] for cell in json.loads(shown)["cells"] if cell["values"] != [None]] == ["FedAvg"]
    assert typed(monkeypatch, *TABLE, "--budget", "24", "--out", str(tmp_path)) == 0
    assert "PARTIAL" not in capsys.readouterr().err
    assert typed(monkeypatch, *TABLE, "--out", str(tmp_path)) == 0
    assert "all 2 finished already: nothing of it is run again" in capsys.readouterr().err


@pytest.mark.usefixtures("cells_in_threads")
def test_a_budget_from_python_returns_the_table_as_far_as_it_is_filled(tmp_path: Path) -> None:
    plan = {"base": {"rounds": 1}, "grid": {"algorithm": ["fedavg"]}, "centralized": False}
    with pytest.raises(UserError, match="budget -1 is no time"):
        fl_sim.table(plan, out=tmp_path, budget=-1)
    partly = fl_sim.table(plan, out=tmp_path, jobs=1, budget=1e-9, progress=False)
    assert [cell.status for cell in partly.cells] == ["missing"]
    whole = fl_sim.table(plan, out=tmp_path, jobs=1, budget=24, progress=False)
    assert [cell.status for cell in whole.cells] == ["finished"]


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_no_time_is_refused(
    hours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *TABLE, "--budget", hours, "--out", str(tmp_path / "out")) == 2
    assert f"budget {hours} is no time to fill a table in: give hours, such as 2.5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
