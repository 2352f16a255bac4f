"""FedMD: local-only as its limit, the digest of the mean of all clients' logits, its bytes, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clients.public_logits import logits_in
from fl_sim import models
from fl_sim.engines import wire
from fl_sim.errors import Malformed, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.store.tensors import load_state
from fl_sim.training.courses import follow
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalTask, Params, ServerState, Traffic
from strategies.fedmd import FedMD
from strategies.public_logits import PublicLogits

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "label-3", "clients": 4, "model": "logistic,niid-mlp", "rounds": 3,
    "sampler": "fixed-size:3", "local": {"learning_rate": 0.05, "batch_size": 32},
    "evaluate": {"clients": "class-shares"},
}  # fmt: skip


@pytest.fixture
def proxy(tmp_path: Path) -> str:
    """Return the name of a data set of 80 public records."""
    images, labels = np.random.default_rng(0).integers(0, 255, (80, 8, 8)).astype(np.uint8), np.arange(80) % 10
    np.savez(tmp_path / "proxy.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    return f"npz:{tmp_path / 'proxy.npz'}"


def ran(out: Path, observer: Any = None, **settings: Any) -> list[Params]:
    """Return the client states."""
    run(experiment_from({**SETTINGS, **settings}), out, observer=observer)
    return [load_state(out / "clients", client, 4).get("own", {}) for client in range(4)]


def same(some: list[Params], others: list[Params]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(value, other[name]) for one, other in pairs for name, value in one.items())


def test_without_public_records_it_is_local_only_to_the_bit(tmp_path: Path) -> None:
    assert same(ran(tmp_path / "md", algorithm="fedmd"), ran(tmp_path / "alone", algorithm="local-only"))


def test_runs_of_two_architectures_have_the_planned_bytes_and_resume(
    tmp_path: Path, proxy: str, stop_after: Callable[[int], Any]
) -> None:
    algorithm = {"kind": "fedmd", "proxy": proxy, "public_records": 60, "digest_batch": 60}
    whole = ran(tmp_path / "whole", algorithm=algorithm)
    assert not same(whole, ran(tmp_path / "alone", algorithm="local-only"))
    rounds = read_rounds(tmp_path / "whole")
    planned = procedure_of(job_of(experiment_from({**SETTINGS, "algorithm": algorithm}))).traffic()["rounds"]
    # the plan rounds the mean bytes of a round
    assert planned.up == pytest.approx(sum(one.bytes_up or 0 for one in rounds), abs=3)
    assert planned.down == pytest.approx(sum(one.bytes_down or 0 for one in rounds), abs=3)
    numbers = 4 * 60 * 10  # float32 logits
    assert 4 * numbers <= (rounds[1].bytes_up or 0) - (rounds[0].bytes_up or 0) < 4 * numbers + 4 * 1000
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path / "broken", stop_after(2), algorithm=algorithm)
    assert same(ran(tmp_path / "broken", algorithm=algorithm), whole)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["personal"]["own_accuracy"] > 0.5


def test_the_digest_is_gradient_descent_on_the_distance_to_the_mean_logits(settings: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    model = models.build("logistic", (5,), 3, seed=0)
    params = detached(model.named_parameters())
    public, targets = torch.randn(7, 5, generator=draw), torch.randn(7, 3, generator=draw)
    records = Records.of(torch.randn(9, 5, generator=draw), torch.arange(9) % 3)
    algorithm = FedMD(proxy="x", digest_epochs=4, digest_rate=0.2, digest_batch=7)
    task = LocalTask(
        2, 0, 1, 9, settings(momentum=0.9), params, {"consensus": {"logits": targets}}, pool={"inputs": public}
    )
    job = LocalJob(task, algorithm.plan(task), records, np.random.default_rng(0))
    trainer = Trainer(models.build("logistic", (5,), 3, seed=0), None)
    (found,) = follow(algorithm, [job], trainer.train_all)
    weight, bias = (value.clone().requires_grad_() for value in params.values())
    for _ in range(4):
        loss = (public @ weight.T + bias - targets).abs().mean()
        for value, slope in zip((weight, bias), torch.autograd.grad(loss, [weight, bias]), strict=True):
            value.data -= 0.2 * slope
    digested = dict(zip(params, (weight.detach(), bias.detach()), strict=True))
    own = LocalTask(2, 0, 1, 9, settings(momentum=0.9), digested)
    wanted = trainer.train(LocalJob(own, algorithm.plan(own), records, np.random.default_rng(0)))
    assert all(torch.allclose(found.params[name], value, atol=1e-5) for name, value in wanted.params.items())
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)


def test_clients_receive_the_mean_of_all_logits_from_the_second_round_on() -> None:
    logits = [torch.full((2, 3), float(one)) for one in (1, 2, 6)]
    layer = PublicLogits(experiment_from({"algorithm": "fedmd", "clients": 3}))
    server = ServerState({}, {"consensus": {"logits": torch.zeros(0, 3)}})

    inner: Any = SimpleNamespace(consult=lambda *_: Traffic(0, 0), sent_to=lambda client, state: state)
    layer.inner = inner
    layer.shape = (2, 3)
    asked = list[str]()

    def ask(task: str, clients: Any, read: Any) -> Any:
        asked.append(task)
        return [read(wire.pool_content({"logits": logits[client]})) for client in clients], Traffic(5, 0)

    layer.consult(1, ask)
    assert not asked
    assert layer.sent_to(0, server) is server
    traffic = layer.consult(2, ask)
    assert torch.equal(layer.sent_to(0, server).broadcast["consensus"]["logits"], torch.full((2, 3), 3.0))
    assert traffic.down == 5
    assert traffic.up >= 3 * 4 * 6
    with pytest.raises(Malformed, match="1 records instead of 2"):
        logits_in(wire.pool_content({"logits": torch.zeros(1, 3)}), (2, 3))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": "global-dp", "sampler": "poisson:0.5"}, "aggregator=global-dp: .*leave"),
        ({"aggregator": "secure-sum"}, "aggregator=secure-sum: .*leave"),
        ({"local": {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0}}}, "local.privacy=dp-sgd: .*without noise"),
        ({"devices": "log-normal"}, "devices=log-normal: .*leave"),
        ({"algorithm": {"kind": "fedmd", "proxy": "digits"}}, "must be another data set"),
        ({"evaluate": {"clients": "class-shares", "held_out_clients": 0.25}}, "held_out_clients=0.25: .*leave"),
        ({"algorithm": {"kind": "fedmd", "proxy": "PROXY", "public_records": 81}}, "has 80 training records: set"),
    ],
)
def test_what_does_not_fit_is_refused(settings: Any, why: str, tmp_path: Path, proxy: str) -> None:
    given = {**SETTINGS, "algorithm": {"kind": "fedmd", "proxy": proxy}, **settings}
    if given["algorithm"]["proxy"] == "PROXY":
        given["algorithm"] = {**given["algorithm"], "proxy": proxy}
    with pytest.raises(UserError, match=why):
        run(experiment_from(given), tmp_path / "run")
