"""A table while it fills: whoever looks on finds its file from the first run on."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from fl_sim.experiment.experiment import Experiment
from fl_sim.report.captions import notes
from fl_sim.report.table import Table
from fl_sim.report.watching import Watcher
from fl_sim.simulation.forecast import Estimate
from fl_sim.simulation.run import run
from fl_sim.simulation.timing import Stopwatch, Timing
from fl_sim.tables import filling
from fl_sim.tables.filling import TableState, TimeIsUp, fill
from fl_sim.tables.forecast import Forecast
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.workers import Budget, Event, Failed, Finished, Postponed, Started, Stopped


def test_what_waits_is_known_from_the_first_event_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, str]]] = []

    def run_all(runs: Mapping[str, Experiment], *rest: object) -> Iterator[Event]:
        for name in runs:
            yield Started(name, 1)
            seen.append([(one.method, one.state) for one in Watcher(tmp_path).look()])
            yield Failed(name, "no")

    monkeypatch.setattr(filling, "run_all", run_all)
    settings = TableSettings.model_validate({"grid": {"algorithm": ["fedavg", "scaffold"]}, "centralized": False})
    fill(TableState(settings, plan_table(settings)), tmp_path, 1, None, progress=False)
    assert seen[0] == [("FedAvg", "waiting"), ("SCAFFOLD", "waiting")]


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(("limit", "value"), [("WRITE_SECONDS", 60.0), ("WRITE_SHARE", 1e-9)])
def test_of_many_short_runs_the_table_is_written_now_and_then_and_whole_at_the_end(
    limit: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, interrupted: bool
) -> None:
    def run_all(runs: Mapping[str, Experiment], *_: object) -> Iterator[Event]:
        for name in runs:
            yield Started(name, 1)
            yield Failed(name, "no")
        if interrupted:
            raise KeyboardInterrupt

    written: list[int] = []

    def write(_: Path, table: Table) -> None:
        written.append(sum(result.status == "failed" for result in table.results))

    monkeypatch.setattr(filling, "run_all", run_all)
    monkeypatch.setattr(filling, "write_table", write)
    monkeypatch.setattr(filling, "WRITE_SECONDS", 0.0)
    monkeypatch.setattr(filling, limit, value)
    settings = TableSettings.model_validate({"grid": {"seed": [*range(20)]}, "centralized": False})
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        fill(TableState(settings, plan_table(settings)), tmp_path, 1, None, progress=False)
    assert written == [0, 20]


@pytest.mark.parametrize(
    ("told", "base"),
    [
        ("after round 1 reaches the target of 1 %", {"evaluate": {"validation": 0.1, "target_accuracy": 0.01}}),
        (
            "75 of 80 clients released no synthetic records; client 0: ",
            {"preprocess": {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded"}},
        ),
    ],
)
def test_a_table_says_which_runs_stopped_early_or_warned_of_something(
    told: str, base: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_all(runs: Mapping[str, Experiment], folder: Path, *_: object) -> Iterator[Event]:
        for name, experiment in runs.items():
            yield Finished(name, run(experiment, folder / name))

    monkeypatch.setattr(filling, "run_all", run_all)
    small = {"clients": 80, "rounds": 2, "partition": "iid", "model": "logistic", **base}
    grid = {"algorithm": ["fedavg", "scaffold"]}
    settings = TableSettings.model_validate({"base": small, "grid": grid, "centralized": False})
    board = TableState(settings, plan_table(settings))
    fill(board, tmp_path, 1, None, progress=False)
    [line, *_] = [line for line in notes(board.table()) if told in line]
    assert re.match(r".*FedAvg, digits iid, seed 0( and 1 other run)?: ", line)


def test_a_run_that_failed_is_not_finished(tmp_path: Path) -> None:
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False})
    board = TableState(settings, plan_table(settings))
    board.outcomes = {"a": Finished("a", {}), "b": Failed("b", "it broke"), "c": Finished("c", {})}
    assert board.num_finished() == 2
    assert board.failures() == ["b (it broke)"]


@pytest.mark.parametrize("kind", ["stopped", "postponed"])
def test_the_time_is_up_whichever_run_it_was_too_short_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def run_all(runs: Mapping[str, Experiment], *_: object) -> Iterator[Event]:
        first, second, third = runs
        yield Failed(first, "no")
        yield Stopped(second, 1) if kind == "stopped" else Postponed(second)
        yield Failed(third, "no")

    monkeypatch.setattr(filling, "run_all", run_all)
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False})
    with pytest.raises(TimeIsUp):
        fill(TableState(settings, plan_table(settings)), tmp_path, 1, None, progress=False)


@pytest.mark.parametrize(("cores", "jobs"), [(2, 2), (8, 3)])
def test_as_many_runs_go_side_by_side_as_there_are_cores_and_no_more_than_there_are_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, jobs: int
) -> None:
    asked: list[int] = []

    def run_all(runs: Mapping[str, Experiment], _: Path, side_by_side: int, *__: object) -> Iterator[Event]:
        asked.append(side_by_side)
        yield from (Failed(name, "no") for name in runs)

    monkeypatch.setattr(filling, "run_all", run_all)
    monkeypatch.setattr(filling, "cores", lambda: cores)
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False})
    fill(TableState(settings, plan_table(settings)), tmp_path, None, None, progress=False)
    assert asked == [jobs]


@pytest.mark.parametrize(("cores", "jobs"), [(2, 2), (8, 3)])
def test_a_search_is_foretold_for_as_many_runs_side_by_side_as_there_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cores: int, jobs: int
) -> None:
    monkeypatch.setattr(filling, "cores", lambda: cores)
    monkeypatch.setattr(Stopwatch, "timing", lambda *_: Timing(piece=1.0))
    tuned = {"trials": 2, "space": {"local.learning_rate": [0.1, 0.2]}}
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False, "tune": tuned})
    filling._Runner(tmp_path, None, None, math.inf).announce_search(settings, plan_table(settings))
    told = capsys.readouterr().err
    assert told.count(f"with {jobs} runs in parallel") == told.count("in parallel") == 2


def test_what_has_begun_may_go_on_and_what_is_left_of_each_run_is_held_against_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[Budget] = []

    def run_all(runs: Mapping[str, Experiment], *rest: object) -> Iterator[Event]:
        budgets.extend(one for one in rest if isinstance(one, Budget))
        yield from (Failed(name, "no") for name in runs)

    def forecasts(runs: Mapping[str, Experiment], *_: object, **__: object) -> list[Forecast]:
        facts = zip(runs, (0, 2, 0), (None, 80.0, 40.0), strict=True)
        return [
            Forecast(name, 8, done, is_finished=False, estimate=Estimate(seconds, None), has_pool=False)
            for name, done, seconds in facts
        ]

    monkeypatch.setattr(filling, "run_all", run_all)
    monkeypatch.setattr(filling, "forecast", forecasts)
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False})
    board = TableState(settings, plan_table(settings))
    fill(board, tmp_path, 1, None, progress=False, deadline=time.monotonic() + 1000)
    [budget] = budgets
    assert list(budget.seconds.values()) == [0.0, 60.0, 40.0]
    assert budget.begun == {list(board.plan.runs)[1]}


def test_the_last_accuracy_and_the_best_one_are_told_apart() -> None:
    settings = TableSettings.model_validate({"grid": {"seed": [0]}, "centralized": False})
    board = TableState(settings, plan_table(settings))
    result = {"final_accuracy": 0.5, "best_accuracy": 0.75, "privacy": [], "stopped": "", "warnings": []}
    (name,) = board.plan.runs
    board.outcomes = {name: Finished(name, result)}
    (one,) = board.table().results
    assert (one.last, one.best) == (0.5, 0.75)
    assert filling._reached(result) == "last 50.0 %, best 75.0 % (picked on the test set)"
    assert filling._reached({**result, "best_chosen_on": "validation"}).endswith("best 75.0 % (picked on validation)")
    assert filling._reached({**result, "best_chosen_on": "last"}) == "50.0 %"
    untested = {"final_accuracy": None, "best_accuracy": None}
    assert filling._reached(untested) == "nothing was measured"
    judged = {"final_accuracy": 0.25, "best_accuracy": 0.375}
    assert filling._reached({**untested, "validation": judged}) == "25.0 % on validation"
