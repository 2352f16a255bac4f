"""How long a round of a model for tokens takes here, beside a plain PyTorch loop over the same clients.

    python benchmarks/token_models.py [--model lstm] [--clients 8] [--records 100] [--length 80] [--turns 5]
    python benchmarks/token_models.py --stack [--clients 10]

Both ways alternate in one process: after each round of FedAvg (engine inprocess) the plain loop trains the same clients
with the same batches, once with one thread of PyTorch and once with all. A client of the plain loop loads the weights,
takes steps of torch.optim.SGD and adds its weights to the mean. Printed are medians of the turns.

With ``--stack``, the clients of a transformer train with Adam in one thread, in turn one by one and as one stack.
Printed are milliseconds of the processor for a step of one client, and how long the multiplications of its layers would
take at the speed of one large matrix product. Texts are random tokens of the full length.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import fl_sim
from fl_sim import models, token_models
from fl_sim.engines.arrays import reuse_freed_memory
from fl_sim.local_plan import LocalPlan
from fl_sim.own_loss import OwnLoss
from fl_sim.params import detached
from fl_sim.params import trainable as trainable_in
from fl_sim.trained_part import TrainedPart
from fl_sim.training.records import Records
from fl_sim.training.stacked import StackedTrainer
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask, Params

BATCH, VOCABULARY = 10, 81

CASES = [
    (trainable, vocabulary, length, width, batch)
    for trainable in ("all", "lora")
    for vocabulary, length in ((257, 64), (30_522, 32))
    for width in (32, 128)
    for batch in (1, 4, 16)
]
"""(trained part, vocabulary, length of a text, width, records in a batch): bytes, and word pieces of MiniLM."""


def plain_round(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, clients: int) -> tuple[float, float]:
    """Train ``clients`` one after another for an epoch each; return the seconds of the clock and of the processor."""
    begin = time.perf_counter(), time.process_time()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    for x, y in zip(inputs.chunk(clients), labels.chunk(clients), strict=True):
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(start[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order = torch.randperm(len(x))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            if isinstance(model, OwnLoss):
                loss = model.loss_of(x[batch], y[batch]).losses.mean()
            else:
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        for name, value in model.named_parameters():
            mean[name] += value.detach() / clients
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(mean[name])
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


class Beside:
    """An observer that runs a round of the plain loop after each of our rounds."""

    def __init__(self, name: str, inputs: torch.Tensor, labels: torch.Tensor, clients: int) -> None:
        self.model = models.build(name, (inputs.shape[1],), VOCABULARY - 1, 0, vocabulary=VOCABULARY)
        self.records = inputs, labels, clients
        self.seconds: dict[str, list[tuple[float, float]]] = {
            "ours": [],
            "plain, one thread": [],
            "plain, all threads": [],
        }
        self.before = time.process_time()

    def finished_round(self, record: object) -> None:
        """Run a round of the plain loop, with one thread and with all."""
        self.seconds["ours"].append((record.seconds, time.process_time() - self.before))  # type: ignore[attr-defined]
        before = torch.get_num_threads()
        for what, threads in (("plain, one thread", 1), ("plain, all threads", os.cpu_count() or 1)):
            torch.set_num_threads(threads)
            self.seconds[what].append(plain_round(self.model, *self.records))
        torch.set_num_threads(before)
        self.before = time.process_time()


def stacked(clients: int, turns: int) -> None:
    """Print the time of a step of one client in a stack and alone, for some sizes of a transformer."""
    torch.set_num_threads(1)
    reuse_freed_memory()
    square = torch.randn(1024, 1024)
    per_second = 2 * 1024**3 / statistics.median(_seconds(lambda: square @ square) for _ in range(9))
    for trainable, vocabulary, length, width, batch in CASES:
        with mock.patch.multiple(token_models, _WIDTH=width, _HIDDEN=4 * width):
            model = models.build("transformer", (length,), 2, 0, vocabulary=vocabulary)
        TrainedPart(trainable)(model)
        steps = max(2, min(8, 64 // batch))
        params = detached(trainable_in(model).items())
        settings = LocalSettings(0.001, 0.0, 1e-5, batch_size=batch, epochs=1, optimizer="adam")

        ways = {"alone": Trainer(model, None).train_all, "stack": StackedTrainer(model).train}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(turns + 1):
            for name, train in ways.items():
                jobs = [
                    _job(client, params, settings, (steps * batch, length), vocabulary) for client in range(clients)
                ]
                seconds = _seconds(partial(train, jobs))
                if turn:  # the first turn loads libraries
                    found[name].append(1000 * seconds / clients / steps)
        alone, stack = (statistics.median(found[name]) for name in ways)
        ratio = statistics.median(two / one for one, two in zip(*found.values(), strict=True))
        linear = sum(part.weight.numel() for part in model.blocks.modules() if isinstance(part, nn.Linear))
        products = (2 if trainable == "lora" else 3) * 2 * linear * batch * length
        print(f"{trainable:4} vocabulary {vocabulary:5} length {length:3} width {width:3} batch {batch:2}  alone "
              f"{alone:6.2f} ms  stack {stack:6.2f} ms  {ratio:.2f}  products {1000 * products / per_second:6.2f} ms",
              flush=True)  # fmt: skip


def _job(client: int, params: Params, settings: LocalSettings, shape: tuple[int, int], vocabulary: int) -> LocalJob:
    draw = np.random.default_rng(client)
    inputs = torch.from_numpy(draw.integers(1, vocabulary, shape)).float()
    records = Records.of(inputs, torch.from_numpy(draw.integers(0, 2, len(inputs))))
    return LocalJob(LocalTask(1, client, 1, len(inputs), settings, params), LocalPlan(), records, draw)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    """Run both ways in turn, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="lstm")
    for name, value in (("clients", 8), ("records", 100), ("length", 80), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--stack", action="store_true")
    given = parser.parse_args()
    if given.stack:
        stacked(given.clients, given.turns)
        return
    rng, count = np.random.default_rng(0), given.clients * given.records
    inputs = rng.integers(1, VOCABULARY, (count, given.length))
    labels = np.concatenate([np.arange(VOCABULARY - 1), rng.integers(0, VOCABULARY - 1, count - VOCABULARY + 1)])
    beside = Beside(given.model, torch.from_numpy(inputs).float(), torch.from_numpy(labels), given.clients)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/t.npz", x_train=inputs, y_train=labels, x_test=inputs[:80], y_test=labels[:80],
                 vocabulary=VOCABULARY)  # fmt: skip
        local = {"batch_size": BATCH, "epochs": 1, "learning_rate": 0.1, "momentum": 0.0}
        settings = {"data": f"npz:{folder}/t.npz", "model": given.model, "clients": given.clients, "partition": "iid",
                    "rounds": given.turns + 1, "engine": "inprocess", "evaluate": {"test": "last"},
                    "local": local}  # fmt: skip
        fl_sim.run(settings, out=Path(folder) / "run", progress=False, observer=beside)
    ours = beside.seconds["ours"][1:]
    for place, clock in enumerate(("wall", "processor")):
        for what, all_turns in beside.seconds.items():
            turns = all_turns[1:]  # the first turn loads libraries
            seconds = statistics.median(turn[place] for turn in turns)
            ratio = statistics.median(turn[place] / own[place] for turn, own in zip(turns, ours, strict=True))
            print(f"{clock:9} {what:18} {seconds:8.2f} s  {ratio:5.2f} times ours")


if __name__ == "__main__":
    main()
