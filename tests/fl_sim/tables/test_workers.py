"""Cells side by side share the cores, and what ends a worker is said with the advice that helps."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fl_sim
from fl_sim.__main__ import main
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.groups import Auto, InProcess, Ray
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables import workers
from fl_sim.tables.workers import (
    Budget,
    Failed,
    Finished,
    Postponed,
    Stopped,
    _why_it_died,
    _why_none_starts,
    _Worker,
    run_all,
    with_share_of_cores,
)
from strategies.fedavg import FedAvg


@pytest.mark.parametrize(("jobs", "clients"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_a_cell_trains_as_many_clients_at_a_time_as_leave_the_others_their_cores(
    monkeypatch: pytest.MonkeyPatch, jobs: int, clients: int
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    asked = InProcess(threads=3, stack=5, graphs=False)
    shared = with_share_of_cores(Experiment(engine=asked, rounds=7), jobs)
    assert shared == Experiment(engine=InProcess(threads=3, workers=clients, stack=5, graphs=False), rounds=7)


@pytest.mark.parametrize("engine", [InProcess(workers=5), Ray(actors=3), Auto()])
def test_what_was_asked_for_stays(engine: InProcess | Ray | Auto) -> None:
    asked = Experiment(engine=engine)
    assert with_share_of_cores(asked, 4) is asked


@pytest.mark.parametrize(
    ("code", "said"),
    [(7, r"\(exit code 7\): code of the run"), (0, "exit code 0"), (-9, "memory runs out: take fewer --jobs"),
     (-15, "another process ended it"), (-11, "signal 11.* compiled code")],
)  # fmt: skip
def test_a_dead_worker_is_no_matter_of_memory_unless_the_system_killed_it(code: int, said: str) -> None:
    with pytest.raises(RunError, match=said):
        raise RunError(_why_it_died(code))
    assert ("--jobs" in _why_it_died(code)) == (code == -signal.SIGKILL)


def test_a_worker_that_was_killed_while_it_started_asks_for_fewer_others() -> None:
    assert "fewer --jobs" in _why_none_starts(-signal.SIGKILL)
    assert "--jobs" not in _why_none_starts(1)


RUNS = {name: Experiment(model="logistic", rounds=3, seed=seed) for seed, name in enumerate(("first", "second"))}


def test_a_worker_that_cannot_start_ends_the_table_and_blames_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libnothing.so is not there')")
    monkeypatch.syspath_prepend(tmp_path)  # workers have their parent's path
    with pytest.raises(RunError, match=r"exit code 1.* the same command continues"):
        list(run_all(RUNS, tmp_path / "out", 2, None))
    assert "libnothing.so is not there" in capfd.readouterr().err
    assert not list((tmp_path / "out").glob("*/result.json"))


def test_no_more_processes_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.subprocess, "Popen", none_left)
    with pytest.raises(RunError, match=r"could not be started: .*fewer --jobs"):
        list(run_all(RUNS, tmp_path / "out", 2, None))


def test_a_finished_run_is_none_of_another_number_of_rounds(tmp_path: Path) -> None:
    two, three = (Experiment(model="logistic", clients=2, rounds=rounds) for rounds in (2, 3))
    done = run(two, tmp_path / "run")
    assert workers.finished_result(tmp_path / "run", two, None) == done
    assert workers.finished_result(tmp_path / "run", three, None) is None
    assert workers.finished_result(tmp_path / "run", two.model_copy(update={"seed": 1}), None) is None
    (tmp_path / "run" / "config.toml").unlink()
    assert workers.finished_result(tmp_path / "run", two, None) is None  # nobody knows of what


def test_a_worker_killed_in_the_middle_of_a_word_costs_its_cell_alone() -> None:
    ours, theirs = workers.Pipe()
    os.write(theirs.fileno(), b"\0\0\1\0the first few of 256 bytes")
    theirs.close()
    worker = object.__new__(_Worker)
    vars(worker).update(name="first", _is_up=True, connection=ours)
    vars(worker).update(process=SimpleNamespace(wait=lambda _: None, returncode=-9, stdin=None))
    event = worker.next_event()
    assert isinstance(event, Failed)
    assert event.name == "first"
    assert "killed by signal 9" in event.error


def test_a_class_of_the_script_itself_is_named_before_any_worker_starts(tmp_path: Path) -> None:
    mine = type("Mine", (FedAvg,), {"__module__": "__main__", "__qualname__": "Mine"})
    with pytest.raises(UserError, match=r"Mine is defined in the script .* put Mine in a module"):
        list(run_all({"mine": Experiment(algorithm=mine())}, tmp_path / "out", 1, None))
    assert not (tmp_path / "out").exists()


TABLE = [
    "model=logistic",
    "rounds=4",
    "algorithm=fedavg,scaffold",
    "partition=label-1",
    "seed=0",
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
    assert "1 run, 0 finished; the remaining rounds take about" in capsys.readouterr().err
    assert typed(monkeypatch, *TABLE, "--budget", "1e-9", "--out", str(tmp_path), "--json") == 3
    shown, told = capsys.readouterr()
    assert "2 runs, 1 finished; the remaining rounds take about" in told
    assert "SCAFFOLD, digits 1-Label, seed 0: not started, because the remaining time is too short" in told
    assert "this table is PARTIAL, 1 of 2 cells are finished" in told
    assert [cell["row"] for cell in json.loads(shown)["cells"] if cell["values"] != [None]] == ["FedAvg"]
    assert typed(monkeypatch, *TABLE, "--budget", "24", "--out", str(tmp_path)) == 0
    assert "PARTIAL" not in capsys.readouterr().err
    assert typed(monkeypatch, *TABLE, "--out", str(tmp_path)) == 0
    assert "all 2 runs are finished already: no run is repeated" in capsys.readouterr().err


@pytest.mark.usefixtures("cells_in_threads")
def test_a_budget_from_python_returns_the_table_as_far_as_it_is_filled(tmp_path: Path) -> None:
    plan = {"base": {"rounds": 1}, "grid": {"algorithm": ["fedavg"]}, "centralized": False}
    with pytest.raises(UserError, match="budget -1: the time"):
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
    assert f"budget {hours}: the time for a table is a positive number of hours" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
