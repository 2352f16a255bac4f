"""What a user's own code draws, from whichever global generator, is the same in every process, and after a resume."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_sim.data import reading
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.seeding import process_state
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds

CODE = """
import math
import random
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from fl_sim.local_plan import LocalPlan, LossTerm
from fl_sim.settings import Settings
from fl_sim.types import Dataset, Examples, ServerState
from fl_sim.params import add, scale
from dataclasses import replace
from strategies.algorithm import Averaging
from strategies.samplers import Everyone


def plain(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def numpys_start(shape, classes):
    model = plain(shape, classes)
    with torch.no_grad():
        model[1].weight.copy_(torch.from_numpy(np.random.randn(classes, math.prod(shape))).float() * 0.3)
    return model


def pythons_start(shape, classes):
    model = plain(shape, classes)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-random.random(), random.random())
    return model


class Noisy(nn.Module):
    def __init__(self, shape, classes, draw):
        super().__init__()
        self.head, self.draw = nn.Linear(math.prod(shape), classes), draw

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x + self.draw(x.shape) * 0.5 if self.training else x)


def numpys_noise(shape, classes):
    return Noisy(shape, classes, lambda size: torch.from_numpy(np.random.randn(*size)).float())


def pythons_noise(shape, classes):
    return Noisy(shape, classes, lambda size: random.random())


def own_start(shape, classes):
    model, coins = plain(shape, classes), np.random.default_rng()
    with torch.no_grad():
        model[1].bias.copy_(torch.from_numpy(coins.random(classes)).float())
    return model


def own_noise(shape, classes):
    coins = np.random.default_rng(0)
    return Noisy(shape, classes, lambda size: torch.from_numpy(coins.standard_normal(size)).float())


class Shuffled(Settings):
    def split(self, labels, num_partitions, rng):
        order = np.random.permutation(len(labels))
        random.shuffle(cuts := sorted(random.sample(range(1, len(labels)), num_partitions - 1)))
        return np.split(order, sorted(cuts))


class SelfSeeded(Settings):
    def split(self, labels, num_partitions, rng):
        return np.array_split(np.random.default_rng().permutation(len(labels)), num_partitions)


class Planned(Averaging):
    title: ClassVar[str] = "Planned"

    def plan(self, task):
        shift = np.random.randn() + random.random() + float(torch.rand(()))
        return LocalPlan(logit_scale=torch.full((10,), 1 + shift**2))

    def finish(self, task, trained):
        update = super().finish(task, trained)
        return replace(update, payloads={"delta": scale(update.payloads["delta"], 0.5 + np.random.rand())})

    def merge(self, server, aggregate):
        return ServerState(add(server.params, aggregate.payloads["delta"], np.random.rand() + random.random()))


def shaken(batch):
    return batch.logits.square().mean(1) * float(np.random.rand())


class Loss(Averaging):
    title: ClassVar[str] = "Loss"

    def plan(self, task):
        return LocalPlan(loss_term=LossTerm(shaken))


def records(root):
    coins = np.random
    def part(size):
        labels = coins.randint(0, 3, size).astype(np.int64)
        inputs = (labels[:, None] + coins.rand(size, 4)).astype(np.float32)
        return Examples(inputs, labels)
    return Dataset("own", part(60), part(30), 3, (0.0,), (1.0,))
"""

QUICK = {
    "model": "logistic",
    "rounds": 3,
    "engine": {"kind": "inprocess", "workers": 1},
    "clients": 3,
    "partition": "iid",
}

OWN = [
    {"model": "own_draws:numpys_start"},
    {"model": "own_draws:pythons_start"},
    {"model": "own_draws:numpys_noise"},
    {"model": "own_draws:pythons_noise"},
    {"partition": "own_draws:Shuffled"},
    {"algorithm": "own_draws:Planned"},
    {"algorithm": "own_draws:Loss"},
    {"algorithm": "own_draws:Loss", "model": "own_draws:plain"},
    {"data": "own_draws:records"},
]


@pytest.fixture(autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "own_draws.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("own_draws", None)


def made(**changes: Any) -> Any:
    return experiment_from({**QUICK, **changes})


def disturb(number: int) -> None:
    """Leave the process's generators where no run expects them."""
    np.random.seed(number)  # noqa: NPY002
    random.seed(number)
    torch.manual_seed(number)


def outcome(folder: Path) -> tuple[list[tuple[float | None, float | None]], bytes]:
    rounds = [(one.test_accuracy, one.train_loss) for one in read_rounds(folder)]
    return rounds, (folder / "model.safetensors").read_bytes()


def forget_records() -> None:
    reading._read_once.cache_clear()
    reading._fingerprint_once.cache_clear()


@pytest.mark.parametrize("own", OWN, ids=lambda own: "-".join(own.values()))
def test_the_same_command_ends_in_the_same_bits(
    own: dict[str, str], tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    for number, name in enumerate(("first", "second")):
        forget_records()
        disturb(number)
        before = process_state()
        run(made(**own), tmp_path / name)
        assert process_state() == before  # whoever draws afterwards finds nothing of the run
    assert outcome(tmp_path / "first") == outcome(tmp_path / "second")
    run(made(**own, engine={"kind": "inprocess", "workers": 3}), tmp_path / "three")
    assert outcome(tmp_path / "first") == outcome(tmp_path / "three")
    with pytest.raises(KeyboardInterrupt):
        run(made(**own), tmp_path / "resumed", observer=stop_after(1))
    disturb(7)
    forget_records()
    run(made(**own), tmp_path / "resumed")
    assert outcome(tmp_path / "first") == outcome(tmp_path / "resumed")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"model": "own_draws:own_start"},
            r"differs between two calls of its factory with the same seed \(in 1.bias\)",
        ),
        (
            {"model": "own_draws:own_noise"},
            "returned different logits for the same records.*: draw random",
        ),
        (
            {"partition": "own_draws:SelfSeeded"},
            "SelfSeeded gave different shards in two calls with the same seed: take",
        ),
    ],
)
def test_what_no_seed_decides_is_refused(own: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_of(made(**own)).model()


def test_other_seeds_clients_and_rounds_draw_otherwise(tmp_path: Path) -> None:
    models = [outcome_of(tmp_path / str(seed), seed) for seed in (0, 1)]
    assert models[0] != models[1]


def outcome_of(folder: Path, seed: int) -> bytes:
    run(made(model="own_draws:numpys_start", seed=seed), folder)
    return outcome(folder)[1]
