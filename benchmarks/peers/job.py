"""The job that every peer framework is given, and the turns in which it does it. Needs PyTorch and numpy alone.

A peer's script hands its global network to ``Turns`` and calls ``end_of_round`` from the framework's own loop. Spoken
is what ``benchmarks/contestants.py`` speaks: ``ready`` after the first round, then a round for every line on standard
input, and its seconds. Whatever else the framework prints goes to standard error.

No round counts that was not the job: in each, ``Turns`` counts the optimizer steps with the job's learning rate and
momentum, and how many of them were the first of a fresh optimizer (one a client: momentum does not outlive a round).
In the first round it also counts the records, and the loss over (the first thousands of) records must have fallen by
its end. Where a part of the clients takes part, counts must be those of some such part.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from networks import NETWORKS
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

MOST_RECORDS = 20_000
"""After so many records the loss is known well enough."""


class Network(nn.Sequential):
    """A network of ``networks.NETWORKS``: NIID-Bench's CNN for 28x28x1 unless another is named."""

    def __init__(
        self, name: str = "niid_cnn", input_shape: tuple[int, ...] = (1, 28, 28), num_classes: int = 10
    ) -> None:
        super().__init__(*NETWORKS[name](input_shape, num_classes))


@dataclass(frozen=True)
class Way:
    """How clients train: SGD for ``epochs`` on ``network``. ``cohort``: how many a round, 0 for all of them."""

    network: str = "niid_cnn"
    classes: int = 10
    cohort: int = 0
    epochs: int = 1
    learning_rate: float = 0.01
    momentum: float = 0.9
    batch_size: int = 64


@dataclass(frozen=True)
class Job:
    """One round: some clients train the network on their shards, with momentum SGD from the global weights.

    ``shards``: each client's (n, *shape) float32 inputs and (n,) int64 labels; ``weights``: by name, where to start.
    """

    shards: list[tuple[torch.Tensor, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    way: Way = field(default_factory=Way)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.shards)

    @property
    def cohort(self) -> int:
        """How many of them take part in a round."""
        return self.way.cohort or self.clients

    @property
    def records(self) -> range:
        """How many records a round's clients have together, each as often as it is trained on: from ... to."""
        return self._of_a_cohort([self.way.epochs * len(labels) for _, labels in self.shards])

    @property
    def steps(self) -> range:
        """How many minibatch steps a round is; the last batch of a shard may be small, none is dropped."""
        return self._of_a_cohort([self.way.epochs * -(-len(ls) // self.way.batch_size) for _, ls in self.shards])

    def _of_a_cohort(self, numbers: list[int]) -> range:
        ordered = sorted(numbers)
        return range(sum(ordered[: self.cohort]), sum(ordered[-self.cohort :]) + 1)

    def network(self, kind: type[Network] = Network) -> Network:
        """Return a network with the weights to start from."""
        network = kind(self.way.network, tuple(self.shards[0][0].shape[1:]), self.way.classes)
        network.load_state_dict(self.weights)
        return network


def write(
    path: Path,
    shards: list[tuple[torch.Tensor, torch.Tensor]],
    weights: dict[str, torch.Tensor],
    way: Way = Way(),
) -> None:
    """Write a job's shards, first weights and way for ``read``."""
    arrays = {f"weight {name}": value.numpy() for name, value in weights.items()}
    arrays["inputs"], arrays["labels"] = (torch.cat(parts).numpy() for parts in zip(*shards, strict=True))
    arrays["sizes"] = np.array([len(labels) for _, labels in shards])
    arrays["way"] = np.array(json.dumps(asdict(way)))
    np.savez(path, allow_pickle=False, **arrays)


def read(path: Path) -> Job:
    """Return the job that ``write`` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        sizes = arrays["sizes"].tolist()
        inputs, labels = (torch.split(torch.from_numpy(arrays[name]), sizes) for name in ("inputs", "labels"))
        weights = {
            name.removeprefix("weight "): torch.from_numpy(arrays[name])
            for name in arrays.files
            if name.startswith("weight ")
        }
        way = Way(**json.loads(str(arrays["way"])))
    return Job(list(zip(inputs, labels, strict=True)), weights, way)


def mean_loss(network: nn.Module, job: Job) -> float:
    """Return the cross-entropy over the records, of which the first clients' are enough."""
    was_training, total, count = network.training, 0.0, 0
    network.eval()
    with torch.inference_mode():
        for inputs, labels in job.shards:
            total += functional.cross_entropy(network(inputs), labels, reduction="sum").item()
            count += len(labels)
            if count > MOST_RECORDS:
                break
    network.train(was_training)
    return total / count


class Turns:
    """What a framework's loop calls at the end of every round: checks it, says so, and waits to be told the next."""

    def __init__(self, job: Job, network: Callable[[], nn.Module], requests: TextIO, answers: TextIO) -> None:
        self._job = job
        self._network = network
        self._requests = requests
        self._answers = answers
        self._steps = self._fresh = self._records = 0
        self._loss = mean_loss(network(), job)
        self._start: float | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._count_step),
            register_module_forward_pre_hook(self._count_records),
        ]

    def end_of_round(self) -> None:
        """Take note that a round is over; return when the next one is wanted.

        Raises SystemExit when none is, and RuntimeError when the round was not the job.
        """
        seconds = None if self._start is None else time.perf_counter() - self._start
        self._check("minibatch steps", self._steps, self._job.steps)
        if self._job.way.momentum:  # without it an optimizer keeps nothing, and all are fresh
            self._check("fresh optimizers", self._fresh, range(self._job.cohort, self._job.cohort + 1))
        if seconds is None:
            self._end_of_first_round()
        self._say("ready" if seconds is None else str(seconds))
        if not self._requests.readline():
            raise SystemExit(0)
        self._steps = self._fresh = 0
        self._start = time.perf_counter()

    def counted(self, steps: int, records: int, fresh: int) -> None:
        """Add what clients counted who train in other processes, where no hook of this one hears of it."""
        self._steps, self._records, self._fresh = self._steps + steps, self._records + records, self._fresh + fresh

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()

    def _end_of_first_round(self) -> None:
        self._hooks.pop().remove()  # it would cost time in the rounds that are measured
        self._check("records", self._records, self._job.records)
        after = mean_loss(self._network(), self._job)
        if not after < self._loss:
            raise RuntimeError(f"the loss went from {self._loss:.5f} to {after:.5f} in the first round")
        print(
            f"first round: {self._steps} steps, {self._records} records, loss {self._loss:.5f} -> {after:.5f}",
            file=sys.stderr,
        )

    def _say(self, line: str) -> None:
        print(line, file=self._answers, flush=True)

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        group = optimizer.param_groups[0]
        # Whoever steps otherwise is the server, whose rate is 1, or does not do the job.
        way = self._job.way
        if group["lr"] == way.learning_rate and group.get("momentum") == way.momentum:
            self._steps += 1
            self._fresh += not optimizer.state

    def _count_records(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Network) and torch.is_grad_enabled():
            self._records += len(inputs[0])

    @staticmethod
    def _check(what: str, done: int, wanted: range) -> None:
        if done not in wanted:
            said = f"{wanted.start}" if len(wanted) == 1 else f"{wanted.start} to {wanted.stop - 1}"
            raise RuntimeError(f"a round of the job has {said} {what}, and this one had {done}")


def pipes() -> tuple[TextIO, TextIO]:
    """Return (requests, answers); from now on everything printed to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return sys.stdin, answers


def given() -> Job:
    """Return the job whose file the command line names, on one thread and with fixed seeds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (what the frameworks draw from)
    return read(Path(sys.argv[1]))
