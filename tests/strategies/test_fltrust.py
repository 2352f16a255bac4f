"""FLTrust: values by hand, the server's own training, and records that are neither clients' nor for testing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from clients.train import Train
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.types import Cohort, Reply
from strategies.aggregators import as_named, row_like
from strategies.fltrust import FLTrust

DIRECTIONS = [[6.0, 8.0], [-1.0, 0.0], [0.0, 0.1], [0.0, 0.0]]


def _aggregate(own: Any, rows: Any) -> list[float]:
    replies = [Reply(client, {"delta": {"w": torch.tensor(row)}}, 5, 1.0) for client, row in enumerate(rows)]
    aggregate = FLTrust().mean(Cohort(1, tuple(replies), 9, 9.0, own={"delta": {"w": torch.tensor(own)}}), "uniform")
    assert aggregate is not None
    value: list[float] = aggregate.payloads["delta"]["w"].tolist()
    return value


def test_updates_have_the_servers_norm_and_their_cosines_as_weights() -> None:
    """Cosines to (3, 4): 1, -0.6, 0.8, and none for a client that sends zeros."""
    assert _aggregate([3.0, 4.0], DIRECTIONS) == pytest.approx([5 * 0.6 / 1.8, 5 * (0.8 + 0.8) / 1.8])
    scaled = (np.array(DIRECTIONS, dtype=np.float32) * np.array([[1e6], [1e-3], [7.0], [1.0]], np.float32)).tolist()
    assert _aggregate([3.0, 4.0], scaled) == pytest.approx(_aggregate([3.0, 4.0], DIRECTIONS))


@pytest.mark.parametrize(("own", "rows"), [([0.0, 0.0], DIRECTIONS), ([3.0, 4.0], [[-3.0, -4.0], [4.0, -3.0]])])
def test_a_server_without_direction_and_clients_against_it_leave_the_model_as_it_is(own: Any, rows: Any) -> None:
    assert _aggregate(own, rows) == pytest.approx([0.0, 0.0], abs=1e-7)


SETTINGS = {"model": "logistic", "clients": 4, "partition": "dirichlet:1", "aggregator": "fltrust:30"}


def test_no_client_holds_the_servers_records() -> None:
    job, usual = job_of(experiment_from(SETTINGS)), job_of(experiment_from({**SETTINGS, "aggregator": "median"}))
    assert job.set_aside is not None
    left = set(usual.shards.records.tolist()) - set(job.shards.records.tolist())
    assert (job.dataset.train.take(np.array(sorted(left))).inputs == job.set_aside.inputs).all()
    assert len(left) == len(job.set_aside) == 30
    assert all({*own.tolist()} <= {*before.tolist()} for own, before in zip(job.shards, usual.shards, strict=True))


def _own_row(rule: FLTrust, rows: torch.Tensor, cohort: Cohort, weighting: str) -> torch.Tensor:
    del rule, rows, weighting
    return row_like(as_named(cohort.own), cohort.replies[0].payloads)


def test_the_server_trains_on_its_records_as_a_client_does(tmp_path: Path, monkeypatch: Any) -> None:
    """Three whole-batch steps, after which an aggregator that trusts the server alone moves the model to its model."""
    monkeypatch.setattr(FLTrust, "of_rows", _own_row)
    local = {"steps": 3, "batch_size": 30, "learning_rate": 0.1, "momentum": 0.0}
    settings = {**SETTINGS, "local": local, "rounds": 2}
    fl_sim.run(settings, out=tmp_path, progress=False)
    job = job_of(experiment_from(settings))
    assert job.set_aside is not None
    model, (inputs, labels) = job.model(), job.source(job.set_aside).whole().tensors()[:2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    made = load_file(tmp_path / "model.safetensors")
    for name, value in model.state_dict().items():
        assert torch.allclose(made[name], value, atol=1e-5)


def test_an_attacker_tries_the_rule_out_with_the_update_for_which_the_server_trains_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    trained: list[int] = []
    train = Train.run
    monkeypatch.setattr(Train, "run", lambda task, client: (trained.append(client.number), train(task, client))[1])
    fl_sim.run({**SETTINGS, "rounds": 2, "attack": "opt-ipm:1"}, out=tmp_path, progress=False)
    assert trained.count(4) == 2  # the server's number comes after those of the four clients


def test_another_data_set_may_be_the_servers(tmp_path: Path) -> None:
    job = job_of(experiment_from({**SETTINGS, "aggregator": "mean"}))
    train, test = job.dataset.train.take(np.arange(50)), job.dataset.test.take(np.arange(2))
    images = {f"x_{name}": part.inputs[:, 0] for name, part in (("train", train), ("test", test))}
    np.savez(tmp_path / "own.npz", **images, y_train=train.labels, y_test=test.labels)
    given = {**SETTINGS, "rounds": 1, "aggregator": {"kind": "fltrust", "records": f"npz:{tmp_path}/own.npz"}}
    assert fl_sim.run(given, out=tmp_path / "run", progress=False).facts["server_records"]["count"] == 50
    vectors = {"x_train": np.zeros((9, 4), np.float32), "x_test": np.zeros((3, 4), np.float32)}
    np.savez(tmp_path / "vectors.npz", **vectors, y_train=np.arange(9) % 3, y_test=np.arange(3))
    other = {**given, "aggregator": {"kind": "fltrust", "records": f"npz:{tmp_path}/vectors.npz"}}
    with pytest.raises(UserError, match=r"aggregator.records=npz:.* has float32 records of shape .*the same shape"):
        fl_sim.run(other, out=tmp_path / "other", progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"aggregator": "fltrust:0"}, "the server needs its own records: give the number"),
     ({"aggregator": "fltrust:none"}, "the server needs its own records"),
     ({"aggregator": "fltrust:digits"}, "digits is what clients hold"),
     ({"aggregator": "fltrust:5000"}, "sets 5,000 training records aside, and digits has 1,437"),
     ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8.0}}}, "promises privacy.*take another aggregator"),
     ({"local": {"personal": "head"}}, "no personal part"),
     ({"aggregator": {"kind": "bucketing", "over": "fltrust"}}, "bucketing cannot run over fltrust"),
     ({"algorithm": "moon"}, "moon cannot run with aggregator fltrust: each client keeps tensors")],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_words(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        fl_sim.run({**SETTINGS, "rounds": 1, **settings}, out=tmp_path, progress=False)
