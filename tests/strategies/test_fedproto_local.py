"""FedProto with clients' own models: local-only without the pull, prototypes as the only payload, and predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from clients.client_task import OnClient
from fl_sim import models
from fl_sim.params import detached
from fl_sim.store.tensors import load_state
from fl_sim.training.features import features_of
from fl_sim.training.records import Records
from fl_sim.training.trainer import Trainer
from fl_sim.types import LocalTask, Params
from strategies.algorithm import first_state, payload_template
from strategies.fedproto import FedProto
from strategies.fedproto_local import FedProtoLocal

SMALL: dict[str, Any] = {
    "data": "digits", "partition": "label-2", "clients": 5, "model": "mlp", "rounds": 4,
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares"},
}  # fmt: skip


def ran(out: Path, **algorithm: Any) -> tuple[Any, dict[str, Any]]:
    """Return the table of clients and the server's last model."""
    fl_sim.run({**SMALL, "algorithm": algorithm}, out=out, progress=False)
    table = np.genfromtxt(out / "clients.csv", delimiter=",", names=True)
    return table, load_file(out / "model.safetensors")


def states(out: Path) -> list[Params]:
    """Return the own model of every client after the last round."""
    return [load_state(out / "clients", client, SMALL["rounds"] + 1)["own"] for client in range(SMALL["clients"])]


def test_without_strength_the_clients_are_alone(tmp_path: Path) -> None:
    """The clients' own models have the bits of local-only, although prototypes travel."""
    left, model = ran(tmp_path / "proto", kind="fedproto-local", strength=0)
    right, same = ran(tmp_path / "alone", kind="local-only")
    assert all(torch.equal(value, same[name]) for name, value in model.items())
    assert np.array_equal(left["own_accuracy"], right["own_accuracy"])
    ours, theirs = states(tmp_path / "proto"), states(tmp_path / "alone")
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_pull_changes_the_clients_models_and_no_parameter_travels(tmp_path: Path) -> None:
    ran(tmp_path / "proto", kind="fedproto-local")
    ran(tmp_path / "alone", kind="local-only")
    ours, theirs = states(tmp_path / "proto"), states(tmp_path / "alone")
    assert any(
        not torch.equal(value, other[name])
        for one, other in zip(ours, theirs, strict=True)
        for name, value in one.items()
    )
    rounds = [json.loads(line) for line in (tmp_path / "proto" / "rounds.jsonl").read_text().splitlines()]
    params = detached(models.build("mlp", (1, 8, 8), 10, seed=0).named_parameters())
    numbers = sum(
        value.numel()
        for value in payload_template(FedProtoLocal(), first_state(FedProtoLocal(), params))["features"].values()
    )
    assert rounds[-1]["bytes_up"] < 5 * (4 * numbers + 2000)


def test_only_prototypes_are_sent_and_kept_at_the_server() -> None:
    params = detached(models.build("mlp", (1, 8, 8), 10, seed=0).named_parameters())
    server = first_state(FedProtoLocal(), params)
    classes, features = params["5.weight"].shape
    assert dict(server.params) == {}
    assert server.broadcast["prototypes"]["z"].shape == (classes, features)
    sent = payload_template(FedProtoLocal(), server)
    assert {name: {key: tuple(one.shape) for key, one in group.items()} for name, group in sent.items()} == {
        "delta": {},
        "features": {"sums": (classes, features), "counts": (classes,)},
    }


def test_prototypes_have_the_right_shape_beside_a_personal_head() -> None:
    params = detached(models.build("mlp", (1, 8, 8), 10, seed=0).named_parameters())
    server = first_state(FedProto(), params, "head")
    assert server.broadcast["prototypes"]["z"].shape == params["5.weight"].shape
    assert set(server.params) == {name for name in params if not name.startswith("5.")}


@pytest.mark.parametrize("predict", ["head", "prototype"])
def test_predictions_are_those_of_the_head_or_of_the_nearest_known_prototype(settings: Any, predict: Any) -> None:
    network = models.build("mlp", (1, 8, 8), 10, seed=0).requires_grad_(requires_grad=False)
    params, generator = detached(network.named_parameters()), torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 1, 8, 8, generator=generator)
    z = features_of(network, params, inputs)
    client = OnClient(Records.of(inputs, torch.zeros(20, dtype=torch.int64)), Trainer(network, None))
    known = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 1, 1])
    prototypes = z[:10] + 0.01
    for there in (known, known * 0):
        task = LocalTask(1, 0, 1, 20, settings(), params, {"prototypes": {"z": prototypes, "known": there}})
        found = FedProtoLocal(predict=predict).own_scores(task, client)(inputs).argmax(1)
        far = (z[:, None] - prototypes[None]).square().sum(2)
        far[:, there == 0] = torch.inf
        use_head = predict == "head" or not there.any()
        assert torch.equal(found, network(inputs).argmax(1) if use_head else far.argmin(1))
