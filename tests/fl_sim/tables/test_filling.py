"""A table while it fills: whoever looks on finds its file from the first run on."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fl_sim.experiment.experiment import Experiment
from fl_sim.report.watching import Watcher
from fl_sim.tables import filling
from fl_sim.tables.filling import Board, fill
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.workers import Event, Failed, Started


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
