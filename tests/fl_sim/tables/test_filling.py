"""A table while it fills: whoever looks on finds its file from the first run on."""

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from fl_sim.experiment.experiment import Experiment
from fl_sim.report.table import Table, notes
from fl_sim.report.watching import Watcher
from fl_sim.simulation.run import run
from fl_sim.tables import filling
from fl_sim.tables.filling import Board, fill
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.workers import Event, Failed, Finished, Started


def test_what_waits_is_known_from_the_first_event_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, str]]] = []

    def run_all(runs: Mapping[str, Experiment], *rest: object) -> Iterator[Event]:
        for name in runs:
            yield Started(name, 1)
            seen.append([(one.method, one.state) for one in Watcher(tmp_path).look()])
            yield Failed(name, "no")

    monkeypatch.setattr(filling, "run_all", run_all)
    settings = TableSettings.model_validate({"grid": {"algorithm": ["fedavg", "scaffold"]}, "centralized": False})
    fill(Board(settings, plan_table(settings)), tmp_path, 1, None, progress=False)
    assert seen[0] == [("FedAvg", "waiting"), ("SCAFFOLD", "waiting")]


@pytest.mark.parametrize("interrupted", [False, True])
def test_of_many_short_runs_the_table_is_written_now_and_then_and_whole_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, interrupted: bool
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
    monkeypatch.setattr(filling, "WRITE_SECONDS", 60.0)
    settings = TableSettings.model_validate({"grid": {"seed": [*range(20)]}, "centralized": False})
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        fill(Board(settings, plan_table(settings)), tmp_path, 1, None, progress=False)
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
    board = Board(settings, plan_table(settings))
    fill(board, tmp_path, 1, None, progress=False)
    [line, *_] = [line for line in notes(board.table()) if told in line]
    assert re.match(r".*FedAvg, digits iid, seed 0( and 1 other run)?: ", line)


def test_a_run_that_failed_is_not_finished(tmp_path: Path) -> None:
    settings = TableSettings.model_validate({"grid": {"seed": [0, 1, 2]}, "centralized": False})
    board = Board(settings, plan_table(settings))
    board.outcomes = {"a": Finished("a", {}), "b": Failed("b", "it broke"), "c": Finished("c", {})}
    assert board.num_finished() == 2
    assert board.failures() == ["b (it broke)"]
