"""What is noted of an actor. Starts no Ray."""

import math
from collections import deque

import pytest

from fl_sim.engines.ray_crew import START_SECONDS, Crew, Node, Worker
from fl_sim.engines.ray_start import RayResources
from fl_sim.engines.work import Work
from tests.fl_sim.engines.test_work import messages


def worker() -> Worker:
    return Worker(actor=None, node=Node("a", "127.0.0.1", 1, room=1))


def test_a_workers_first_call_says_nothing_of_its_speed() -> None:
    late = worker()
    late.took(1.0, steps=1)  # it loaded the data, for one small client that was left
    assert math.isinf(late.step_seconds)
    work: Work[str] = Work(deque(messages(100)))
    assert work.take(late.step_seconds, others=[0.0005])
    late.took(0.001, steps=2)
    late.took(0.003, steps=2)
    assert late.step_seconds == pytest.approx(0.001)


def test_the_user_is_told_once_of_a_node_whose_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    crew = Crew(RayResources(), b"", (), 2, (), is_own=False, is_apart=True, say=told.append)
    monkeypatch.setattr("ray.nodes", list)
    crew.starting["question"] = slow = worker()
    crew.look(0)
    assert told == []
    slow.since -= START_SECONDS + 1
    for _ in range(2):
        crew._looked = -math.inf
        crew.look(0)
    assert len(told) == 1
    assert "node a at 127.0.0.1 of the Ray cluster does nothing: its worker has not started in 60 s" in told[0]
