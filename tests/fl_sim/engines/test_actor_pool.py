"""What is noted of an actor. Starts no Ray."""

import math
from collections import deque

import pytest

from fl_sim.engines.actor_pool import START_SECONDS, ActorPool, Node, Worker, _room
from fl_sim.engines.batching import Exchange
from fl_sim.engines.ray_start import RayResources
from tests.fl_sim.engines.test_batching import messages


def worker() -> Worker:
    return Worker(actor=None, node=Node("a", "127.0.0.1", 1, room=1))


def test_a_workers_first_call_says_nothing_of_its_speed() -> None:
    late = worker()
    late.took(1.0, steps=1)  # it loaded the data, for one small client that was left
    assert math.isinf(late.step_seconds)
    work: Exchange[str] = Exchange(deque(messages(100)))
    assert work.take(late.step_seconds, others=[0.0005])
    late.took(0.001, steps=2)
    late.took(0.003, steps=2)
    assert late.step_seconds == pytest.approx(0.001)


def test_the_user_is_told_once_of_a_node_whose_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    pool = ActorPool(RayResources(), b"", (), 2, (), is_own=False, is_remote=True, say=told.append)
    monkeypatch.setattr("ray.nodes", list)
    pool.starting["question"] = slow = worker()
    pool.update(0)
    assert told == []
    slow.since -= START_SECONDS + 1
    for _ in range(2):
        pool._looked = -math.inf
        pool.update(0)
    assert len(told) == 1
    assert "node a at 127.0.0.1 of the Ray cluster is not used yet: its worker has not started in 60 s" in told[0]


@pytest.mark.parametrize(
    ("there", "cpus", "gpus", "room"),
    [
        ({"CPU": 7.0}, 2.0, 0.0, 3), ({"CPU": 7.0}, 4.0, 0.0, 1), ({"CPU": 7.0}, 0.5, 0.0, 14),
        ({"CPU": 1.0}, 2.0, 0.0, 0),
        ({"CPU": 7.0}, 0.0, 0.0, 7), ({"CPU": 7.0, "GPU": 1.0}, 1.0, 0.6, 1),
        ({"CPU": 9.0, "GPU": 2.0}, 1.0, 0.35, 5),
        ({"CPU": 3.0, "GPU": 8.0}, 1.0, 1.0, 3), ({"CPU": 3.0}, 1.0, 0.5, 0), ({}, 1.0, 0.0, 0),
    ],
)  # fmt: skip
def test_a_node_has_room_for_whole_actors_alone(there: dict[str, float], cpus: float, gpus: float, room: int) -> None:
    """What is left over fits none: rounded to the nearest, 7 processors would have room for 4 actors of 2."""
    assert _room(there, RayResources(cpus=cpus, gpus=gpus)) == room
