"""What the parts of a plan cost a step of the compiled trainer, as multiples of plain SGD: processor time, medians.

    PYTHONPATH=. python benchmarks/plan_cost.py [--json] [--repeats 9] [--models niid-cnn mlp dafl-cnn] [--epochs 1 5]
        [--records 600] [--batch-size 64]

One client trains on random 28x28 records, in one thread. Plain SGD goes before every plan, so that a busy machine
disturbs both: a ratio is the median of those of neighbours. What a plan needs once a round (the logits of the received
model for distillation, two models' features for a contrast) is counted, and weighs most with one epoch.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from fl_sim.local_plan import Ascent, Contrast, Distillation, LocalPlan, Pull, Suppression
from fl_sim.models import MODELS
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import describe
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng
from fl_sim.types import LocalSettings, LocalTask, Params

SHAPE, CLASSES = (1, 28, 28), 10
PlanOf = Callable[[nn.Module, Params], LocalPlan]


def adjusted(_: nn.Module, __: Params) -> LocalPlan:
    """P1: every class has its scale and its shift (FedLC, FedRS, balanced softmax)."""
    return LocalPlan(logit_scale=torch.linspace(0.5, 1, CLASSES), logit_shift=torch.linspace(-1, 0, CLASSES))


def distilled(_: nn.Module, __: Params) -> LocalPlan:
    """P2 (FedNTD)."""
    return LocalPlan(distillation=Distillation(1.0, exclude_true=True))


def vls(model: nn.Module, params: Params) -> LocalPlan:
    """P1 and P2 together (FedVLS)."""
    absent, shares = torch.arange(CLASSES) > 4, torch.where(torch.arange(CLASSES) > 4, 0.0, 0.2)
    shift = adjusted(model, params).logit_shift
    return LocalPlan(logit_shift=shift, distillation=Distillation(0.1, classes=absent), suppression=Suppression(shares))


def sam(_: nn.Module, __: Params) -> LocalPlan:
    """P3 (FedSAM)."""
    return LocalPlan(ascent=Ascent(0.05))


def asam(_: nn.Module, __: Params) -> LocalPlan:
    """P3, the adaptive step uphill (FedASAM)."""
    return LocalPlan(ascent=Ascent(0.5, adaptive=True))


def mofedsam(_: nn.Module, params: Params) -> LocalPlan:
    """P3 beside the last round's mean update (MoFedSAM)."""
    return LocalPlan(gradient_scale=0.1, gradient_offset=params, ascent=Ascent(0.1))


def speed(_: nn.Module, params: Params) -> LocalPlan:
    """P3 beside a client's correction and a pull towards the received model (FedSpeed)."""
    return LocalPlan(gradient_offset=params, proximal_mu=0.1, ascent=Ascent(0.1))


def both(_: nn.Module, __: Params) -> LocalPlan:
    """P3 with all that an ascent can be: no method asks for both."""
    return LocalPlan(ascent=Ascent(0.1, adaptive=True, share=0.5))


def moon(_: nn.Module, params: Params) -> LocalPlan:
    """P4 (MOON)."""
    return LocalPlan(contrast=Contrast(5.0, 0.5, {name: 1.1 * value for name, value in params.items()}))


def proto(model: nn.Module, _: Params) -> LocalPlan:
    """P5 (FedProto)."""
    width = [part for part in model.modules() if isinstance(part, nn.Linear)][-1].in_features
    return LocalPlan(pull=Pull(torch.zeros(CLASSES, width), torch.ones(CLASSES, dtype=torch.bool), 0.01))


PLANS: dict[str, PlanOf] = {
    "P1 logits scaled and shifted": adjusted, "P2 distillation": distilled, "P1 + P2 FedVLS": vls, "P3 FedSAM": sam,
    "P3 FedASAM": asam, "P3 MoFedSAM": mofedsam, "P3 FedSpeed": speed, "P3 adaptive, half": both, "P4 contrast": moon,
    "P5 pull": proto,
}  # fmt: skip


def measure(kernel: Kernel, name: str, settings: LocalSettings, records: int, repeats: int) -> dict[str, list[float]]:
    """Return {plan: [its processor seconds / those of plain SGD just before]}; "plain" is in seconds a step."""
    torch.manual_seed(0)
    model = MODELS[name](SHAPE, CLASSES)
    stack, params = describe(model, SHAPE), flattened(detached(model.named_parameters()))
    assert stack is not None
    inputs, labels = torch.randn(records, *SHAPE), torch.randint(0, CLASSES, (records,))
    task = LocalTask(1, 0, 1, records, settings, params)

    def seconds(plan: LocalPlan) -> float:
        lesson = KernelJob(task, plan, inputs, labels, Draws.of(task, plan, records, rng(0, "cost")))
        start = time.process_time()
        kernel.train(stack, [lesson])
        return time.process_time() - start

    taken: dict[str, list[float]] = {"plain": [], **{plan: [] for plan in PLANS}}
    plans = {plan: plan_of(model, params) for plan, plan_of in PLANS.items()}
    for repeat in range(repeats + 1):
        for plan, asked in plans.items():
            plain, own = seconds(LocalPlan()), seconds(asked)
            if repeat:  # the first warms up
                taken["plain"].append(plain / settings.num_steps(records))
                taken[plan].append(own / plain)
    return taken


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["niid-cnn", "mlp", "dafl-cnn"])
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    asked = parser.parse_args()
    kernel, why_not = load_kernel()
    if kernel is None:
        print(f"there is no native trainer here: {why_not}")
        return 2
    torch.set_num_threads(1)
    found = {
        f"{name}, {epochs} epochs": {
            plan: statistics.median(taken)
            for plan, taken in measure(
                kernel, name, LocalSettings(0.01, 0.9, 1e-5, asked.batch_size, epochs), asked.records, asked.repeats
            ).items()
        }
        for name in asked.models
        for epochs in asked.epochs
    }
    if asked.json:
        print(json.dumps(found))
        return 0
    print(f"{asked.records} records in batches of {asked.batch_size}, one thread; multiples of plain SGD's step")
    print("| |" + "|".join(f" {case} " for case in found) + "|\n|---|" + "---|" * len(found))
    for plan in ("plain", *PLANS):
        values = [medians[plan] for medians in found.values()]
        print(
            f"| {plan} |" + "|".join(f" {1e3 * x:.2f} ms " if plan == "plain" else f" {x:.2f} " for x in values) + "|"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
