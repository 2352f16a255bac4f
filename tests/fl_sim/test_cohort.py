"""Many clients at once end where one after another in PyTorch does, for every algorithm, on unequal shards."""

from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import nn

from fl_sim.cohort import Job, Trainer, train_cohort
from fl_sim.learning import LocalAlgorithm, train
from fl_sim.models import MODELS
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached, zeros_like
from fl_sim.seeding import rng, seed_torch, torch_kept
from fl_sim.types import LocalPlan, LocalSettings, LocalTask, Params
from strategies.fedavg import FedAvg
from strategies.fedmix import FedMix, NaiveMix
from strategies.fednova import FedNova
from strategies.fedprox import FedProx
from strategies.scaffold import Scaffold

SHAPE = (1, 16, 16)
SIZES = (1, 40, 0, 7, 64, 23)
SETTINGS = LocalSettings(0.02, 0.9, 1e-4, batch_size=16, epochs=2)
ALGORITHMS = [FedAvg(), FedProx(mu=0.1), Scaffold(), FedNova(), FedMix(), NaiveMix()]

needs_kernel = pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(6)
        return MODELS["niid-cnn"](SHAPE, 10)


def noise(params: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in params.items()}


def jobs(algorithm: LocalAlgorithm) -> list[Job]:
    params = detached(model().named_parameters())
    made = []
    for client, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(client)
        pool = {"inputs": torch.randn(3, *SHAPE, generator=generator), "labels": torch.full((3, 10), 0.1)}
        task = LocalTask(
            1, client, len(SIZES), size, SETTINGS, params, {"control": noise(params, 1)},
            {"control": noise(params, 2 + client)} if client % 2 else {}, pool,
        )  # fmt: skip
        inputs = torch.randn(size, *SHAPE, generator=generator)
        labels = torch.randint(0, 10, (size,), generator=generator)
        made.append(Job(task, algorithm.plan(task), inputs, labels, rng(0, "batches", client)))
    return made


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.double().reshape(-1) for value in params.values()])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_a_cohort_ends_where_the_one_by_one_loop_does(algorithm: LocalAlgorithm) -> None:
    found = train_cohort(model(), jobs(algorithm), threads=2)
    for job, trained in zip(jobs(algorithm), found, strict=True):
        expected = train(model(), job.task, job.plan, job.inputs, job.labels, job.generator)
        assert trained.num_steps == expected.num_steps
        assert list(trained.params) == list(expected.params)
        assert trained.momentum_buffers.keys() == expected.momentum_buffers.keys()
        assert trained.loss == (None if expected.loss is None else pytest.approx(expected.loss, rel=1e-5))
        apart = float((flat(trained.params) - flat(expected.params)).norm())
        assert apart <= 2e-5 * float((flat(expected.params) - flat(job.task.params)).norm())
        update = algorithm.finish(job.task, trained)  # what algorithms make of it is as near
        for name, params in algorithm.finish(job.task, expected).payloads.items():
            assert float((flat(update.payloads[name]) - flat(params)).norm()) <= 2e-5 * float(flat(params).norm())


@needs_kernel
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    results = [train_cohort(model(), jobs(Scaffold()), threads) for threads in (1, 2, 5)]
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert all(torch.equal(left.params[name], right.params[name]) for name in left.params)
            assert left.loss == right.loss


@needs_kernel
def test_the_compiled_trainer_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("fl_sim.cohort.train", lambda model, task, *_: asked.append(task.client))
    train_cohort(model(), jobs(Scaffold()), threads=1)
    assert asked == [2]  # an empty shard: nothing to train
    asked.clear()
    train_cohort(model(), jobs(FedMix()), threads=1)
    assert asked == list(range(len(SIZES)))  # its loss is not cross-entropy alone


def test_pytorch_trains_models_without_dropout_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Barrier(2)  # passed only if two clients train at the same time
    seen = []

    def meet(model: nn.Module, task: LocalTask, *_: object) -> None:
        meeting.wait(20)
        seen.append(id(model))

    monkeypatch.setattr("fl_sim.cohort.train", meet)
    resnet = MODELS["resnet"](SHAPE, 10)
    train_cohort(resnet, jobs(FedProx())[:2], threads=2)
    assert len(set(seen)) == 2  # each has its own
    assert id(resnet) not in seen


def test_the_bits_of_pytorch_do_not_depend_on_the_number_of_threads() -> None:
    resnet = MODELS["resnet"](SHAPE, 10)
    params = detached(resnet.named_parameters())

    def made() -> list[Job]:
        return [replace(job, task=replace(job.task, params=params), plan=LocalPlan()) for job in jobs(FedProx())[:4]]

    alone, together = (train_cohort(resnet, made(), threads) for threads in (1, 3))
    for left, right in zip(alone, together, strict=True):
        assert all(torch.equal(left.params[name], right.params[name]) for name in params)


def test_a_model_with_dropout_draws_from_its_own_seed_in_any_order() -> None:
    with torch_kept():
        torch.manual_seed(0)
        dropping = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.Dropout(0.5))
    params = detached(dropping.named_parameters())

    def made() -> list[Job]:
        return [
            Job(
                LocalTask(1, client, 4, 20, SETTINGS, params), LocalPlan(), torch.ones(20, *SHAPE),
                torch.arange(20) % 10, rng(0, "batches", client), lambda client=client: seed_torch(0, "local", client),
            )
            for client in range(4)
        ]  # fmt: skip

    with torch_kept():
        forth = train_cohort(dropping, made(), threads=1)
        back = train_cohort(dropping, made()[::-1], threads=3)[::-1]
    for left, right in zip(forth, back, strict=True):
        assert all(torch.equal(left.params[name], right.params[name]) for name in params)
    assert not torch.equal(forth[0].params["1.weight"], forth[1].params["1.weight"])


def test_without_a_kernel_pytorch_trains_the_very_same_bits() -> None:
    job, again = jobs(FedProx())[1], jobs(FedProx())[1]
    found = Trainer(model(), kernel=None).train(job)
    expected = train(model(), again.task, again.plan, again.inputs, again.labels, again.generator)
    assert all(torch.equal(found.params[name], expected.params[name]) for name in found.params)
    assert zeros_like(found.params).keys() == found.momentum_buffers.keys()
