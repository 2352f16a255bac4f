"""How far gradients lie from float64's: the compiled trainer's and PyTorch's, on the same minibatches.

    python benchmarks/rounding.py [--json] [--batches 40] [--models mlp niid-cnn dafl-cnn resnet]

Every minibatch is 64 random 3x32x32 records for a model with new weights. Its error is that of the worst of the
model's tensors, relative to the tensor's norm. Where a ReLU or a maximum hangs on the last bit, it may fall the other
way than in float64: then the error is some 1e-4 to 1e-2, whoever computes it. Such minibatches (error above 2e-5) are
counted apart, beside those in which PyTorch itself decides otherwise in float32 than in float64; the median is that of
the others. Where the processor has products of bfloat16 numbers, errors of both with these come last, medians of all
minibatches: in most of them something falls the other way.
"""

import argparse
import copy
import json
import statistics
import sys

import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import LocalPlan
from fl_sim.models import MODELS, ResidualBlock
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.types import LocalSettings, LocalTask, Params, Precision

SHAPE, CLASSES, RECORDS = (3, 32, 32), 10, 64
RATE = 1e4
"""A learning rate so large that the rounding of weights does not hide the rounding of gradients."""

FLIPPED = 2e-5


def by_kernel(
    kernel: Kernel, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, precision: Precision = "float32"
) -> Params:
    """Return the gradient that the compiled trainer's first step takes."""
    params, stack = detached(model.named_parameters()), describe(model, SHAPE)
    assert stack is not None
    task = LocalTask(1, 0, 1, RECORDS, LocalSettings(RATE, 0.0, 0.0, RECORDS, 1), params)
    draws = Draws.of(task, LocalPlan(), RECORDS, rng(0, "rounding"))
    [trained] = kernel.train(stack, [KernelJob(task, LocalPlan(), inputs, labels, draws)], precision)
    return {name: (value.double() - trained.params[name].double()) / RATE for name, value in params.items()}


def by_pytorch(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Params, list[torch.Tensor]]:
    """Return the gradient, and what every ReLU lets through and every maximum takes."""
    decided: list[torch.Tensor] = []

    def note(module: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if isinstance(module, nn.MaxPool2d):
            decided.append(functional.max_pool2d(given[0], module.kernel_size, return_indices=True)[1])
        elif isinstance(module, nn.ReLU | ResidualBlock):
            decided.append(out > 0)

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    loss = functional.cross_entropy(model(inputs), labels)
    for hook in hooks:
        hook.remove()
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {name: value.double() for (name, _), value in zip(model.named_parameters(), found, strict=True)}, decided


def error(found: Params, truth: Params) -> float:
    """Return the largest of the tensors' relative errors."""
    return max(float((found[name] - value).norm() / value.norm()) for name, value in truth.items())


def measure(kernel: Kernel, name: str, batches: int) -> dict[str, float]:
    """Return medians of errors, and in how many minibatches something fell the other way."""
    errors: dict[str, list[float]] = {"compiled": [], "PyTorch": []}
    halves: dict[str, list[float]] = {"compiled": [], "PyTorch": []}
    decided_otherwise = 0
    for number in range(batches):
        torch.manual_seed(number)
        model, inputs = MODELS[name](SHAPE, CLASSES), torch.randn(RECORDS, *SHAPE)
        labels = torch.randint(0, CLASSES, (RECORDS,))
        truth, exact = by_pytorch(copy.deepcopy(model).double(), inputs.double(), labels)
        found, rounded = by_pytorch(model, inputs, labels)
        errors["compiled"].append(error(by_kernel(kernel, model, inputs, labels), truth))
        errors["PyTorch"].append(error(found, truth))
        if kernel.has_bfloat16:
            halves["compiled"].append(error(by_kernel(kernel, model, inputs, labels, "bfloat16"), truth))
            with torch.autocast("cpu", torch.bfloat16):
                halves["PyTorch"].append(error(by_pytorch(model, inputs, labels)[0], truth))
        decided_otherwise += not all(torch.equal(*pair) for pair in zip(exact, rounded, strict=True))
    return {
        **{f"{who}, median": statistics.median([e for e in own if e <= FLIPPED]) for who, own in errors.items()},
        **{f"{who}, flipped": sum(e > FLIPPED for e in own) for who, own in errors.items()},
        "PyTorch decides otherwise": decided_otherwise,
        **{f"{who}, bfloat16": statistics.median(own) for who, own in halves.items() if own},
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument(
        "--models", nargs="+", choices=sorted(MODELS), default=["mlp", "niid-cnn", "dafl-cnn", "resnet"]
    )
    asked = parser.parse_args()
    kernel, why_not = load_kernel()
    if kernel is None:
        print(f"there is no native trainer here: {why_not}")
        return 2
    torch.set_num_threads(1)
    found = {name: measure(kernel, name, asked.batches) for name in asked.models}
    if asked.json:
        print(json.dumps(found))
        return 0
    for name, figures in found.items():
        print(f"{name}: " + "; ".join(f"{what} {figure:.2g}" for what, figure in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
