"""Runs with aggregator=distributed-dp-sgd: gradient descent on all records, one bill per record, and refusals."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.nn import functional

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy import record_sums
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import signed
from fl_sim.privacy.record_sums import MOST_RECORDS, RecordGrid, opened
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.run import run
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.observed import Observed
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.types import ClientUpdate, LocalTask, Trained
from strategies import distributed_gradients
from strategies.algorithm import ONE_STEP
from strategies.distributed_dp_sgd import DistributedDPSGD
from strategies.distributed_gradients import ClientGradients, DistributedGradients
from strategies.distributed_sums import terms_of

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 4, "model": "logistic", "rounds": 2, "engine": "inprocess",
    "local": {"learning_rate": 0.5},
}  # fmt: skip
NOISY = {"kind": "distributed-dp-sgd", "noise_multiplier": 3.0, "noise": "seeded"}

pytestmark = pytest.mark.usefixtures("coarse_losses", "coarse")


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's noise of 2^12 grid steps, whose table is made at once."""
    monkeypatch.setattr(record_sums, "STEPS_OF_NOISE", 2**12)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(mechanism: str, variance: float, noise: Noise, count: int, **more: object) -> NDArray[np.int64]:
        return np.zeros(count, np.int64)

    monkeypatch.setattr(record_sums, "drawn", none)


def settings_of(noise: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**BASE, "aggregator": {**NOISY, **(noise or {})}, **changes}


def ran(out: Path, noise: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(noise, **changes)), out)


def model_of(out: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(out / "model.safetensors"))


def clipped_step(experiment: Any, norm: float) -> dict[str, torch.Tensor]:
    """Return the mean clipped gradient of all training records at the initial model, by PyTorch, record by record."""
    job = job_of(experiment)
    model, dataset = job.model(), job.dataset
    rows = np.concatenate([np.asarray(job.shards[client]) for client in range(len(job.shards))])
    sums = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in model.named_parameters()}
    model = model.double()
    inputs, labels = to_tensors(dataset.train, dataset)
    for one, label in zip(inputs[rows].double(), labels[rows], strict=True):
        loss = functional.cross_entropy(model(one[None]), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        length = torch.cat([each.flatten() for each in gradients]).norm()
        for name, each in zip(sums, gradients, strict=True):
            sums[name] += each * min(1.0, norm / float(length))
    return {name: total / len(rows) for name, total in sums.items()}


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("clipping_norm", [0.5, 100.0])
def test_a_round_is_a_clipped_gradient_step_on_all_records(clipping_norm: float, tmp_path: Path) -> None:
    noise = {"clipping_norm": clipping_norm}
    experiment = experiment_from(settings_of(noise, rounds=1, partition="dirichlet:0.3"))
    run(experiment, tmp_path / "run")
    first = dict(job_of(experiment).model().named_parameters())
    step = clipped_step(experiment, clipping_norm)
    for name, value in model_of(tmp_path / "run").items():
        assert value.numpy() == pytest.approx((first[name].detach() - 0.5 * step[name]).numpy(), abs=2e-4)


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedadam"])
def test_the_split_and_the_number_of_clients_do_not_matter(algorithm: str, tmp_path: Path) -> None:
    models = []
    for number, (partition, clients) in enumerate([("iid", 1), ("iid", 5), ("label-1", 10), ("dirichlet:0.1", 4)]):
        out = tmp_path / str(number)
        ran(out, partition=partition, clients=clients, algorithm=algorithm, rounds=3, local={"learning_rate": 0.1})
        models.append(model_of(out))
    for other in models[1:]:
        for name, value in models[0].items():
            assert other[name].numpy() == pytest.approx(value.numpy(), abs=2e-3)


def test_the_forecast_is_the_bill_and_the_ledger(tmp_path: Path) -> None:
    experiment = experiment_from(settings_of())
    bill = planned_bill(job_of(experiment))
    assert bill.payments is not None
    [payment] = bill.payments
    result = run(experiment, tmp_path / "run")
    [said] = result["privacy"]
    charges = Ledger(terms_of(experiment.aggregator), tmp_path / "run" / "ledger.jsonl").charges
    assert [one.release for one in charges] == ["round 1", "round 2"]
    assert (said["unit"], said["adjacency"], said["accountant"]) == ("record", "add-or-remove-one", "rdp")
    assert (said["steps"], said["steps_planned"]) == (2, 2)
    assert said["epsilon"] == said["epsilon_realised"] == payment.epsilon
    assert "replacing all data of one record by nothing while the numbers of clients and of" in said["guarantee"]
    for words in ("number of each client's records is treated as public", "plain sum", "trusted to add their noise"):
        assert words in said["does_not_cover"]
    assert result["distributed_sums"]["numbers"] == 650
    assert result["distributed_sums"]["bits"] == 40
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)["train_loss"] is None
    planned = procedure_of(job_of(experiment)).traffic()["rounds"]
    assert planned.up == result["bytes"]["rounds"]["up"]
    assert 650 * 5 <= result["bytes"]["each_client_in_a_round"]["up"] < 650 * 5 + 200


def test_epsilon_finds_the_noise_that_spends_it(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", {"epsilon": 8.0, "noise_multiplier": None})
    [said] = result["privacy"]
    assert 7.99 < said["epsilon_rdp"] <= 8.0
    assert any("All rounds cost each record at most epsilon 8 at delta 1e-05" in one for one in result["warnings"])
    stopped = ran(tmp_path / "other", {"epsilon": 2.0}, rounds=9)
    assert "privacy budget spent after" in stopped["stopped"]
    assert stopped["privacy"][0]["epsilon_realised"] <= 2.0


def test_it_learns_like_one_client_with_all_records(tmp_path: Path) -> None:
    changes = {"rounds": 20, "clients": 10, "partition": "label-1", "local": {"learning_rate": 2.0}}
    ours = ran(tmp_path / "ours", {"epsilon": 1.0, "noise_multiplier": None}, **changes)["final_accuracy"]
    private = {"kind": "dp-sgd", "epsilon": 1.0, "noise": "seeded"}
    local = {"steps": 1, "batch_size": 2000, "momentum": 0.0, "weight_decay": 0.0, "learning_rate": 2.0}
    alone, each = (
        run(experiment_from({**BASE, **changes, "clients": clients, "partition": partition,
                             "local": {**local, "privacy": private}}), tmp_path / str(clients))["final_accuracy"]
        for clients, partition in ((1, "iid"), (10, "label-1"))
    )  # fmt: skip
    assert ours == pytest.approx(alone, abs=0.04)
    assert ours > each + 0.02  # where each client adds all noise itself


@dataclass(frozen=True)
class OneRecord:
    """Four clients; the last record of the first client is there, or it is removed."""

    removed: bool = False

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        first, *others = np.split(np.arange(len(labels)), [50, 150, 700])
        return [first[:-1] if self.removed else first, *others]


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("clipping_norm", [1e-4, 0.01, 100.0])
@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_a_record_moves_the_sum_by_no_more_than_is_charged(
    model: str, clipping_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that differ in one record, with equal coins and equal released sums in all earlier rounds."""
    grids: list[RecordGrid] = []

    def played(out: Path, told: list[NDArray[np.float64]], *, removed: bool) -> tuple[list[Any], list[Any]]:
        sums: list[NDArray[np.int64]] = []
        released: list[NDArray[np.float64]] = []

        def spy(total: NDArray[np.int64], grid: RecordGrid) -> NDArray[np.float64]:
            sums.append(signed(total, grid.bits))
            grids.append(grid)
            released.append(told[len(sums) - 1] if told else opened(total, grid))
            return released[-1]

        def coins(self: ClientGradients, client: int, server_round: int) -> Noise:
            return Noise.seeded(100 * client + server_round)

        world = {"kind": f"{__name__}:OneRecord", "removed": removed}
        with monkeypatch.context() as patch:
            patch.setattr(distributed_gradients, "opened", spy)
            patch.setattr(ClientGradients, "_noise", coins)
            # the released sums are equal, and so is their divisor: the number of records does not change
            patch.setattr(DistributedGradients, "ready", counted)
            ran(out, {"clipping_norm": clipping_norm}, rounds=3, partition=world, model=model)
        return sums, released

    first, released = played(tmp_path / "there", [], removed=False)
    second, _ = played(tmp_path / "removed", released, removed=True)
    assert len(first) == 3
    for one, other in zip(first, second, strict=True):
        assert np.linalg.norm(one - other) <= grids[0].l2
        assert np.abs(one - other).sum() <= grids[0].l1
        if clipping_norm < 1:  # the record's gradient is longer, so the bound is reached
            assert np.linalg.norm(one - other) > 0.98 * grids[0].scale * clipping_norm


def counted(self: DistributedGradients, work: Any) -> None:
    """Store equal numbers of records in both runs of a test."""
    self.sizes = np.full(len(work.sizes), 100)
    self.inner.ready(work)


def test_a_resumed_run_has_the_bits_and_the_charges_of_an_uninterrupted_one(
    tmp_path: Path, resumed_like: Callable[[Any, Path], dict[str, Any]]
) -> None:
    experiment = experiment_from(settings_of(algorithm="fedavgm", rounds=3))
    whole = run(experiment, tmp_path / "whole")
    resumed = resumed_like(experiment, tmp_path / "whole")
    assert whole["privacy"][0]["steps"] == resumed["privacy"][0]["steps"] == 3


def test_with_drop_outs_the_mean_is_over_the_records_of_those_who_answered_and_costs_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ran(tmp_path / "all")["privacy"][0]["epsilon"]
    share, means = ClientGradients.share, []
    mean_of = DistributedGradients.mean_of

    def failing(self: Any, came: Any, trained: Any, update: Any) -> Any:
        if (came.client, came.server_round) == (1, 1):
            raise ValueError("these are my records")
        return share(self, came, trained, update)

    def spy(self: Any, total: Any, cohort: Any) -> Any:
        means.append((mean_of(self, total, cohort), opened(total, self.grid), self.sizes))
        return means[-1][0]

    monkeypatch.setattr(ClientGradients, "share", failing)
    monkeypatch.setattr(DistributedGradients, "mean_of", spy)
    halved = {"learning_rate": 0.5, "schedule": {"kind": "exponential", "decay": 0.5}}
    result = ran(tmp_path / "run", local=halved)
    [said] = result["privacy"]
    assert (said["steps"], said["steps_planned"]) == (2, 2)
    assert said["epsilon"] == said["epsilon_realised"] > without
    assert "my records" not in json.dumps(result)
    for rate, (mean, total, sizes), present in zip((0.5, 0.25), means, ([0, 2, 3], [0, 1, 2, 3]), strict=True):
        assert mean == pytest.approx(-rate / sizes[present].sum() * total)


def test_the_algorithms_code_sees_no_records() -> None:
    half = ClientGradients(RecordGrid(2, 1, 1.0, 1.0), {"delta": {"w": torch.zeros(2)}}, 0, "")
    task = LocalTask(1, 0, 1, 9, replace(ONE_STEP, batch_size=4, epochs=3), {}, {}, class_counts=(5, 4))
    found = half.received(task)
    with pytest.raises(UserError, match="without noise"):
        len(found.class_counts)
    with pytest.raises(UserError, match="without noise"):
        len(half.shown(Records.of(torch.zeros(9, 2), torch.zeros(9))))
    assert found.num_examples == 1
    untrained = Trained({}, {}, 1, None)
    with pytest.raises(RunError, match="did not add up the gradients"):
        half.share(task, untrained, ClientUpdate({}, 1, None))


def test_a_client_without_records_sends_its_noise(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", partition={"kind": f"{__name__}:OneIsEmpty"})
    assert result["privacy"][0]["steps"] == 2
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)["cohort"] == 4


class OneIsEmpty(OneRecord):
    """Four clients, of which the first has no record."""

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        first, *others = super().split(labels, num_partitions, rng)
        return [first[:0], *others]


def test_secret_noise_differs_from_run_to_run(tmp_path: Path) -> None:
    models = []
    for number in range(2):
        ran(tmp_path / str(number), {"noise": "secret"}, rounds=1)
        models.append(model_of(tmp_path / str(number)))
        assert not any(path.suffix == ".npy" for path in (tmp_path / str(number)).rglob("*"))
    assert any((value != models[1][name]).any() for name, value in models[0].items())


class Changed(DistributedDPSGD):
    """A user's change of the aggregator, about which nothing is proven."""


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "scaffold"}, "clients have no local training that the algorithm could change"),
        ({"algorithm": "fedprox"}, "take fedavg, fedavgm, fedadam"),
        ({"algorithm": "ditto"}, "clients have no local training that the algorithm could change"),
        ({"algorithm": "fedlc"}, "fedlc"),
        *[({"algorithm": one, "model": "mlp"}, "take fedavg, fedavgm") for one in ("fedper", "lg-fedavg", "knn-per")],
        ({"algorithm": "per-fedavg"}, "clients have no local training that the algorithm could change"),
        ({"algorithm": "fedmix"}, "averages of their records"),
        ({"algorithm": "local-only"}, "local-only"),
        ({"local": {"steps": 5}}, r"local.steps=5 cannot run .* leave local.steps out"),
        (
            {"local": {"batch_size": 64}},
            "local.batch_size=64 .*every record is in every step; leave local.batch_size out",
        ),
        ({"local": {"epochs": 2}}, r"local.epochs=2 and local.steps=1"),
        ({"local": {"momentum": 0.9}}, r"local.momentum=0.9 .*take algorithm=fedavgm"),
        ({"local": {"weight_decay": 0.1}}, "local.weight_decay=0.1"),
        ({"local": {"optimizer": "adam"}}, "take algorithm=fedadam"),
        ({"local": {"clip_norm": 1.0}}, "local.clip_norm=1.0 .*the gradient of every record is clipped"),
        ({"local": {"batch_norm": "average"}}, "running statistics"),
        ({"local": {"augment": "flip"}}, "secret source"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "cannot run with"),
        ({"sampler": "poisson:0.5"}, "sampler poisson cannot run under aggregator distributed-dp-sgd"),
        ({"preprocess": "da-fl"}, "preprocess da-fl cannot run under"),
        ({"calibrate": "ccvr"}, "calibrate ccvr cannot run under"),
        ({"compress": "qsgd"}, "qsgd"),
        ({"attack": "sign-flip"}, "sign-flip"),
        ({"engine": {"kind": "inprocess", "stack": 4}}, "engine.stack=4 cannot run under"),
        ({"evaluate": {"validation": 0.1}}, "validation"),
        ({"aggregator": "distributed-dp-sgd"}, "needs aggregator.epsilon"),
        ({"aggregator": {**NOISY, "epsilon": 0.01}}, "does not afford one round"),
        ({"aggregator": {**NOISY, "noise_multiplier": 1e-5}}, "may exceed the range of 40 bits"),
        ({"aggregator": Changed(noise_multiplier=1.0)}, "Changed changes distributed-dp-sgd"),
        ({"data": "digits", "partition": {"kind": "drift"}}, "drift"),
    ],
)
def test_what_the_sum_would_not_hide_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_every_record_is_in_the_batch() -> None:
    local = experiment_from(settings_of()).local
    assert (local.steps, local.batch_size, local.momentum, local.weight_decay) == (1, MOST_RECORDS, 0.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedyogi"}, {"model": "2nn"}, {"algorithm": "fedit", "model": "mlp"}, {"sampler": "cyclic:2"},
        {"local": {"label_smoothing": 0.1}},
        {"local": {"schedule": {"kind": "exponential", "decay": 0.5}}}, {"model": {"name": "mlp", "trainable": "head"}},
    ],
)  # fmt: skip
def test_it_works_with(changes: dict[str, Any], tmp_path: Path) -> None:
    [said] = ran(tmp_path / "run", **changes)["privacy"]
    assert said["steps_planned"] == (1 if "sampler" in changes else 2)


def test_attacks_on_a_finished_run_know_what_it_claims_for_a_record(tmp_path: Path) -> None:
    ran(tmp_path / "run")
    finished = FinishedRun.of(tmp_path / "run")
    [claim] = finished.covering
    assert claim.unit == "record"
    with pytest.raises(UserError, match="its server sees only sums over clients"):
        Observed.of(finished, 0, finished.procedure.beginning())
