"""How long a round of a model for tokens takes here, beside a plain PyTorch loop over the same clients.

    python benchmarks/token_models.py [--model lstm] [--clients 8] [--records 100] [--length 80] [--turns 5]

Both ways alternate in one process: after each round of FedAvg (engine inprocess) the plain loop trains the same clients
with the same batches, once with one thread of PyTorch and once with all. A client of the plain loop loads the weights,
takes steps of torch.optim.SGD and adds its weights to the mean. Printed are medians of the turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fl_sim
from fl_sim import models
from fl_sim.own_loss import OwnLoss

BATCH, VOCABULARY = 10, 81


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


def main() -> None:
    """Run both ways in turn, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="lstm")
    for name, value in (("clients", 8), ("records", 100), ("length", 80), ("turns", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
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
