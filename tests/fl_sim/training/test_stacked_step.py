"""A step over fixed buffers can be captured: it asks the device nothing and takes nothing from main memory."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fl_sim.local_plan import Ascent, Batch, Contrast, Distillation, LocalPlan, LossTerm, Mix, Pull, Suppression
from fl_sim.models import MODELS
from fl_sim.training.features import head_of
from fl_sim.training.records import Scale, Source
from fl_sim.training.stacked_step import Kind, StackedStep

META = torch.device("meta")
"""A device without memory, on which to ask for a number, or how many are not zero, is an error."""


class OnOneDevice(TorchDispatchMode):
    """Notes every operation that has to do with a tensor in main memory, even a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device != META for tensor in tensors):
            self.elsewhere.append(str(func))
        return out


def step_on_meta(name: str, *, linearise: bool | None) -> StackedStep:
    """Return a step with all that a plan can ask for; ``linearise`` None: without a mixing pool."""
    model = MODELS[name]((1, 16, 16), 10).to(META)
    inputs = torch.empty(50, 1, 16, 16, dtype=torch.uint8, device=META)
    scale = Scale(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)).to(META)
    source = Source(inputs, torch.empty(50, dtype=torch.int64, device=META), scale)
    pool = torch.empty(3, 1, 16, 16, device=META), torch.empty(3, 10, device=META)
    mix = None if linearise is None else Mix(*pool, 0.1, linearise)
    layout = tuple((part, tuple(weight.shape)) for part, weight in model.named_parameters())
    kind = Kind(
        layout,
        batch_size=16,
        momentum=0.9,
        weight_decay=1e-4,
        warm=True,
        offset=True,
        proximal=True,
        ascent=Ascent(0.1, share=0.5),
        gradient_scale=0.5,
    )
    numbers, chosen = torch.zeros(10, device=META), torch.zeros(10, dtype=torch.bool, device=META)
    plan = LocalPlan(
        mix=mix, loss_term=LossTerm(pull, {"target": numbers}),
        contrast=Contrast(1.0, 1.0, dict(model.named_parameters())),
        distillation=Distillation(1.0, classes=chosen, exclude_true=True), suppression=Suppression(numbers),
        pull=Pull(torch.zeros(10, head_of(model).in_features, device=META), chosen, 1.0),
        **({} if mix else {"logit_shift": numbers, "logit_scale": numbers}),
    )  # fmt: skip
    return StackedStep(model, kind, source, plan, 6, padded=True)


def pull(batch: Batch) -> torch.Tensor:
    """A loss term that looks at all there is."""
    received = batch.logits_of(batch.anchor, batch.inputs)
    apart = (batch.logits - received - batch.data["target"]).pow(2).sum(1)
    return apart + torch.stack([weight.pow(2).sum() for weight in batch.params.values()]).sum()


@pytest.mark.parametrize(
    ("name", "linearise"), [*((name, None) for name in MODELS), ("niid-cnn", True), ("niid-cnn", False)]
)
def test_a_step_asks_the_device_nothing_and_brings_nothing_to_it(name: str, *, linearise: bool | None) -> None:
    step = step_on_meta(name, linearise=linearise)
    with OnOneDevice() as noted:
        step(5)
    assert noted.elsewhere == []


def test_what_a_capture_would_not_survive_is_noted() -> None:
    numbers = torch.ones(3, device=META)
    with OnOneDevice() as noted:
        numbers + torch.tensor(1.0)  # a number in main memory
    assert noted.elsewhere
    with pytest.raises(RuntimeError):
        bool(numbers.any())
