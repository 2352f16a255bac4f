"""Is the compiled trainer slower than PyTorch anywhere? Layers of many channels and large images, one thread each.

    python benchmarks/large_layers.py [--json] [--pairs 7] [--only TEXT]

Every network is a layer or two between little ones, so that the way back to its inputs is needed. Both trainers take
the same SGD step on the same minibatch, in turn; a ratio is the median of those of neighbours, by processor time.
Above 1 the compiled trainer is slower; the last column says who trains such a model (fl_sim/native/layers.py). The exit
code is 1 where that is the slower one by a tenth or more.
"""

import argparse
import copy
import json
import statistics
import sys
import time

import torch
from torch import nn

from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import describe, slower_here
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng
from fl_sim.training.loop import train
from fl_sim.types import LocalSettings, LocalTask

CLASSES, MUCH = 10, 1.1


def ending(channels: int) -> list[nn.Module]:
    """Return the last layers of every network: the mean of each plane, and logits."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def wide(channels: int, kernel: int, stride: int = 1) -> nn.Module:
    """Return a convolution of many channels behind one of a single pixel."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 1), nn.ReLU(), nn.Conv2d(channels, channels, kernel, stride, kernel // 2), nn.ReLU(),
        *ending(channels),
    )  # fmt: skip


def small_network() -> nn.Module:
    """Return a network for large images: a wide first kernel, pooling, 3 x 3 convolutions and GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(32, 64, 3, 1, 1), nn.GroupNorm(8, 64),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), *ending(128),
    )  # fmt: skip


NETWORKS = {
    "512 channels, 3x3, 8x8": (lambda: wide(512, 3), (3, 8, 8), 16),
    "512 channels, 1x1, 14x14": (lambda: wide(512, 1), (3, 14, 14), 16),
    "512 channels, 3x3 of stride 2, 8x8": (lambda: wide(512, 3, 2), (3, 8, 8), 16),
    "256 channels, 5x5, 8x8": (lambda: wide(256, 5), (3, 8, 8), 16),
    "64 channels, 3x3, 56x56": (lambda: wide(64, 3), (3, 56, 56), 16),
    "16 channels, 3x3, 224x224": (lambda: wide(16, 3), (3, 224, 224), 16),
    "linear, 4096 to 4096": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)), (4096,), 64,
    ),
    "small network, 224x224": (small_network, (3, 224, 224), 16),
}  # fmt: skip
"""Networks, the records' shapes, and records a minibatch."""


def measure(kernel: Kernel, name: str, pairs: int) -> tuple[float, float, float, str]:
    """Return PyTorch's seconds a step, the compiled trainer's, the ratio, medians over ``pairs``, and who trains."""
    factory, shape, batch = NETWORKS[name]
    torch.manual_seed(0)
    model = factory()
    stack, params = describe(model, shape), flattened(detached(model.named_parameters()))
    assert stack is not None
    inputs, labels = torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))
    task = LocalTask(1, 0, 1, batch, LocalSettings(0.01, 0.9, 0.0, batch, 1), params)
    lesson = KernelJob(task, LocalPlan(), inputs, labels, Draws.of(task, LocalPlan(), batch, rng(0, "large")))
    seconds = []
    for _ in range(pairs + 1):
        start = time.process_time()
        train(copy.deepcopy(model), task, LocalPlan(), inputs, labels, rng(0, "large"))
        between = time.process_time()
        kernel.train(stack, [lesson])
        seconds.append((between - start, time.process_time() - between))
    return (
        *(statistics.median(pair[which] for pair in seconds[1:]) for which in (0, 1)),
        statistics.median(own / theirs for theirs, own in seconds[1:]),
        "PyTorch" if slower_here(stack) else "compiled",
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="", metavar="TEXT", help="the networks whose name holds TEXT")
    asked = parser.parse_args()
    kernel, why_not = load_kernel()
    if kernel is None:
        print(f"there is no native trainer here: {why_not}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    found = {name: measure(kernel, name, asked.pairs) for name in NETWORKS if asked.only in name}
    if asked.json:
        print(json.dumps(found))
    else:
        print(
            "| network, one step | PyTorch ms | compiled ms | compiled / PyTorch | trained by |\n|---|---|---|---|---|"
        )
        for name, (theirs, own, ratio, who) in found.items():
            print(f"| {name} | {1e3 * theirs:.0f} | {1e3 * own:.0f} | {ratio:.2f} | {who} |")
    return int(any((ratio if who == "compiled" else 1 / ratio) > MUCH for _, _, ratio, who in found.values()))


if __name__ == "__main__":
    sys.exit(main())
