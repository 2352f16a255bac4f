"""Clients trained as one stack end where one after another does, for every algorithm and model, on unequal shards."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_sim.cohort import Job
from fl_sim.learning import LocalAlgorithm, train
from fl_sim.models import MODELS
from fl_sim.params import detached
from fl_sim.seeding import rng, torch_kept
from fl_sim.stacked import train_stacked
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
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def model(name: str, device: str = "cpu") -> nn.Module:
    with torch_kept():
        torch.manual_seed(6)
        return MODELS[name](SHAPE, 10).to(device)


def noise(params: Params, seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in params.items()}


def jobs(algorithm: LocalAlgorithm, name: str, settings: LocalSettings = SETTINGS, device: str = "cpu") -> list[Job]:
    params = detached(model(name).named_parameters())
    generator = torch.Generator().manual_seed(0)
    pool = {"inputs": torch.randn(3, *SHAPE, generator=generator), "labels": torch.full((3, 10), 0.1)}
    made = []
    for client, size in enumerate(SIZES):
        rate = settings.learning_rate * (1 + client / 10)
        task = LocalTask(
            1, client, len(SIZES), size, replace(settings, learning_rate=rate), params, {"control": noise(params, 1)},
            {"control": noise(params, 2 + client)} if client % 2 else {}, pool,
        )  # fmt: skip
        inputs = torch.randn(size, *SHAPE, generator=generator).to(device)
        labels = torch.randint(0, 10, (size,), generator=generator).to(device)
        made.append(Job(task, algorithm.plan(task), inputs, labels, rng(0, "batches", client)))
    return made


def flat(params: Params) -> torch.Tensor:
    return torch.cat([value.double().cpu().reshape(-1) for value in params.values()])


def assert_agree(made: Callable[[], list[Job]], name: str, device: str = "cpu", within: float = 5e-5) -> None:
    found, expected = made(), made()
    for job, twin, trained in zip(found, expected, train_stacked(model(name, device), found), strict=True):
        alone = train(model(name, device), twin.task, twin.plan, twin.inputs, twin.labels, twin.generator)
        assert trained.num_steps == alone.num_steps
        assert trained.params.keys() == alone.params.keys()
        assert trained.momentum_buffers.keys() == alone.momentum_buffers.keys()
        assert trained.loss == (None if alone.loss is None else pytest.approx(alone.loss, rel=1e-4))
        moved = float((flat(alone.params) - flat(job.task.params)).norm())
        assert float((flat(trained.params) - flat(alone.params)).norm()) <= within * moved
        if alone.momentum_buffers:
            buffers = flat(alone.momentum_buffers)
            assert float((flat(trained.momentum_buffers) - buffers).norm()) <= 10 * within * float(buffers.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.kind)
def test_a_stack_ends_where_the_one_by_one_loop_does(algorithm: LocalAlgorithm, device: str) -> None:
    assert_agree(lambda: jobs(algorithm, "niid-cnn", device=device), "niid-cnn", device)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "niid-cnn"])
def test_every_model_of_ours_can_be_stacked(name: str) -> None:
    settings = replace(SETTINGS, epochs=1, learning_rate=0.005)
    assert_agree(lambda: jobs(Scaffold(), name, settings), name)


def test_without_momentum_or_decay_it_is_plain_sgd() -> None:
    settings = LocalSettings(0.05, 0.0, 0.0, batch_size=16, epochs=1)
    assert_agree(lambda: jobs(FedAvg(), "mlp", settings), "mlp")


def test_warm_momentum_goes_on_where_it_was() -> None:
    def warm() -> list[Job]:
        return [
            replace(job, plan=LocalPlan(momentum_buffers=noise(job.task.params, job.task.client)))
            for job in jobs(FedAvg(), "mlp")
        ]

    assert_agree(warm, "mlp")


def test_frozen_and_unused_parameters_stay_as_they_were() -> None:
    def partly() -> nn.Module:
        made = model("mlp")
        made.register_parameter("unused", nn.Parameter(torch.ones(2)))
        made.get_parameter("1.weight").requires_grad = False
        return made

    def made() -> list[Job]:
        params = detached(partly().named_parameters())
        return [replace(job, task=replace(job.task, params=params)) for job in jobs(FedAvg(), "mlp")]

    for job, twin, trained in zip(made(), made(), train_stacked(partly(), made()), strict=True):
        alone = train(partly(), twin.task, twin.plan, twin.inputs, twin.labels, twin.generator)
        for name in ("unused", "1.weight"):
            assert torch.equal(trained.params[name], job.task.params[name])
        assert float((flat(trained.params) - flat(alone.params)).norm()) <= 1e-4 * float(flat(alone.params).norm())


def test_the_same_stack_gives_the_same_bits() -> None:
    forward = train_stacked(model("niid-cnn"), jobs(Scaffold(), "niid-cnn"))
    again = train_stacked(model("niid-cnn"), jobs(Scaffold(), "niid-cnn"))
    assert all(torch.equal(flat(one.params), flat(two.params)) for one, two in zip(forward, again, strict=True))


def test_bfloat16_stays_near_and_keeps_float32_weights() -> None:
    settings = replace(SETTINGS, epochs=1)
    whole = train_stacked(model("mlp"), jobs(FedAvg(), "mlp", settings))
    half = train_stacked(model("mlp"), jobs(FedAvg(), "mlp", settings), "bfloat16")
    for job, one, two in zip(jobs(FedAvg(), "mlp", settings), whole, half, strict=True):
        moved = float((flat(one.params) - flat(job.task.params)).norm())
        assert float((flat(one.params) - flat(two.params)).norm()) <= 0.1 * moved
        assert all(value.dtype == torch.float32 for value in two.params.values())
        assert moved == 0 or not torch.equal(flat(one.params), flat(two.params))


def test_no_clients_are_no_results() -> None:
    assert train_stacked(model("mlp"), []) == []
