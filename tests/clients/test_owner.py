"""A SuperNode whose owner has records of its own: they are trained on, states stay there, and no place is told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from fl_sim.data import load
from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.experiment.node_job import public_facts
from fl_sim.params import detached
from fl_sim.simulation.engine_choice import client_app
from fl_sim.stages.pate.procedure import VOTE
from strategies.scaffold import Scaffold

Ask = Callable[..., Message]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with 90 of the records of digits."""
    train = load("digits", None).train
    path = tmp_path / "owners" / "hospital.npz"
    path.parent.mkdir()
    arrays = {"x": train.inputs[:90, 0], "y": train.labels[:90]}
    np.savez(path, x_train=arrays["x"], y_train=arrays["y"], x_test=arrays["x"][:9], y_test=arrays["y"][:9])
    return path


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Ask client 1 of 3 for a task, of a run ``name`` at a server."""
    app = client_app()
    LocalGrid(3)  # sets the identity that Flower wants before a message can be made

    def send(
        node: dict[str, str], task: str = wire.TRAIN, name: str = "a", server_round: int = 1, **settings: Any
    ) -> Message:
        experiment = experiment_from({"model": "logistic", "clients": 3, "algorithm": "scaffold", **settings})
        job = job_of(experiment)
        facts = json.dumps(public_facts(job.dataset))
        order = wire.TaskConfig(
            job.experiment.model_dump_json(), server_round, 0.1, "", str(tmp_path / "server"),
            run=name, facts=facts, task=task,
        )  # fmt: skip
        params = detached(job.model().named_parameters())
        broadcast = Scaffold().init(params).broadcast
        config: dict[str, bool | float | int | str] = {"partition-id": 1, "num-partitions": 3, **node}
        message = Message(wire.task_content(order, params, broadcast), 1001, wire.TRAIN)
        message.metadata.__dict__["_message_id"] = "one"
        return app(message, Context(1, 1001, config, RecordDict(), {}))

    return send


def test_a_node_trains_on_all_of_its_own_records_and_keeps_its_state_at_its_place(
    ask: Ask, own: Path, tmp_path: Path
) -> None:
    node = {"data": f"npz:{own}", "state": str(tmp_path / "owners/state")}
    answer = ask(node)
    assert answer.content.metric_records["report"]["num-examples"] == 90
    assert (tmp_path / "owners/state/client-1/a/states.bin").exists()
    assert not (tmp_path / "server").exists()
    assert str(tmp_path) not in repr(answer)
    again, other_run = ask(node, server_round=2), ask(node, name="b", server_round=2)
    assert _sent(again) != _sent(other_run)  # which never met this client, and finds nothing of the first


def test_without_an_owner_a_node_takes_its_part_of_the_servers_records(ask: Ask, tmp_path: Path) -> None:
    part = len(job_of(experiment_from({"clients": 3})).shards[1])
    assert ask({}).content.metric_records["report"]["num-examples"] == part
    assert (tmp_path / "server/states.bin").exists()


@pytest.mark.parametrize("missing", ["data", "state"])
def test_errors_of_a_node_with_an_owner_name_no_place(ask: Ask, own: Path, tmp_path: Path, missing: str) -> None:
    node = {"data": f"npz:{own}", "state": str(tmp_path / "owners/state")}
    if missing == "data":
        own.unlink()
    else:
        Path(node["state"]).write_text("a file stands where a folder is needed")
    said = wire.error_of(ask(node))
    assert said
    assert not any(part in said for part in ("hospital", "owners", str(tmp_path), "/"))
    assert "there is no file" in said or "folder is needed" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": "mnist"}, "the node's own records have shape [1, 8, 8], but the experiment's have shape [1, 9, 9]"),
        ({"algorithm": {"kind": "pate", "public_records": 100}}, "needs public records of the server's data set"),
    ],
)
def test_records_that_do_not_fit_are_refused(
    ask: Ask, own: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    if settings.get("data") == "mnist":
        digits = load("digits", None)
        wide = replace(digits.train, inputs=np.zeros((len(digits.train), 1, 9, 9), np.uint8))
        servers = replace(digits, train=wide, test=wide)
        monkeypatch.setattr(
            "fl_sim.experiment.job.load", lambda name, *rest: servers if name == "digits" else load(name, *rest)
        )
    task = VOTE if "algorithm" in settings else wire.TRAIN
    answer = wire.error_of(ask({"data": f"npz:{own}"}, task, **({} if "data" in settings else settings)))
    assert answer is not None
    assert said in answer


def _sent(answer: Message) -> list[bytes]:
    return [array.data for record in answer.content.array_records.values() for array in record.values()]


def test_validation_records_of_a_node_which_measures_nothing_are_refused(ask: Ask, own: Path) -> None:
    with np.load(own) as file:
        arrays = dict(file)
    np.savez(own, **arrays, x_val=arrays["x_test"], y_val=arrays["y_test"])
    answer = wire.error_of(ask({"data": f"npz:{own}"}))
    assert answer is not None
    assert "validation records, and a node evaluates no models: leave them out" in answer
