"""Cells side by side share the cores: an engine that would take them all gets its part."""

import pytest

from fl_sim import table_workers
from fl_sim.experiment import Auto, Experiment, InProcess, Ray
from fl_sim.table_workers import _with_share_of_cores


@pytest.mark.parametrize(("jobs", "workers"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_a_cell_trains_as_many_clients_at_a_time_as_leave_the_others_their_cores(
    monkeypatch: pytest.MonkeyPatch, jobs: int, workers: int
) -> None:
    monkeypatch.setattr(table_workers, "cores", lambda: 8)
    asked = InProcess(threads=3, stack=5, graphs=False)
    shared = _with_share_of_cores(Experiment(engine=asked, rounds=7), jobs)
    assert shared == Experiment(engine=InProcess(threads=3, workers=workers, stack=5, graphs=False), rounds=7)


@pytest.mark.parametrize("engine", [InProcess(workers=5), Ray(actors=3), Auto()])
def test_what_was_asked_for_stays(engine: InProcess | Ray | Auto) -> None:
    asked = Experiment(engine=engine)
    assert _with_share_of_cores(asked, 4) is asked
