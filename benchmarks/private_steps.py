"""How long a private step of DP-SGD takes: ours beside the plain step of the compiled trainer, and beside Opacus.

    python benchmarks/private_steps.py

Steps of 64 random records of MNIST's shape, on one thread. The three ways alternate, and the medians of seven turns of
20 steps are printed. Opacus clips by its hooks (GradSampleModule) and adds float32 noise of torch's own generator.
"""

import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from fl_sim import models
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.native.kernel import CompiledNormals, load_kernel
from fl_sim.params import detached, trainable
from fl_sim.privacy.mechanisms import Noise
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, LocalTask

SHAPE, BATCH, STEPS, TURNS = (1, 28, 28), 64, 20, 7


def ours(model: nn.Module, records: Records, plan: LocalPlan) -> Callable[[], object]:
    """Return a function that trains ``STEPS`` steps with our trainers."""
    settings = LocalSettings(0.1, 0.0, 0.0, batch_size=BATCH, epochs=1)
    task = LocalTask(1, 0, 1, len(records), settings, detached(trainable(model).items()))
    trainer = Trainer(model, load_kernel()[0])
    return lambda: trainer.train(LocalJob(task, plan, records, np.random.default_rng(0)))


def opacus(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return a function that trains ``STEPS`` steps with Opacus."""
    module = GradSampleModule(copy.deepcopy(model))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )

    def train() -> None:
        for records, targets in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(records), targets).backward()
            optimizer.step()

    return train


def main() -> None:
    """Time the three ways on four models, and print a table."""
    torch.set_num_threads(1)
    kernel = load_kernel()[0]
    assert kernel is not None, "compile the trainer first: python -m fl_sim.native"
    noise = Noise(bytes(32), simulation_only=True, normals=CompiledNormals(kernel))
    private = LocalPlan(private=PrivateSteps(1.0, 1.0, noise, "model"))
    print("| model | parameters | plain, ms | private, ms | Opacus, ms | private / plain | Opacus / private |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in ("logistic", "2nn", "mlp", "niid-cnn"):
        torch.manual_seed(0)
        model = models.MODELS[name](SHAPE, 10)
        inputs, labels = torch.randn(BATCH * STEPS, *SHAPE), torch.randint(0, 10, (BATCH * STEPS,))
        records = Records.of(inputs, labels)
        ways = [ours(model, records, LocalPlan()), ours(model, records, private), opacus(model, inputs, labels)]
        times: list[list[float]] = [[], [], []]
        for turn in range(TURNS + 1):  # the first one warms up
            for way, spent in zip(ways, times, strict=True):
                begin = time.perf_counter()
                way()
                if turn:
                    spent.append(1e3 * (time.perf_counter() - begin) / STEPS)
        plain, own, theirs = map(statistics.median, times)
        size = sum(value.numel() for value in trainable(model).values())
        print(
            f"| {name} | {size:,} | {plain:.3f} | {own:.2f} | {theirs:.2f} | {own / plain:.1f} | {theirs / own:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
