"""A mixture of a client's own model and the received model, and a training job for the gradient at the mixture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.seeding import seed_process
from fl_sim.types import LocalSettings, LocalTask, Params

if TYPE_CHECKING:
    from fl_sim.training.trainer import LocalJob


def mixture(own: Params, received: Params, weights: Params) -> Params:
    """Return v + (x - v) W for ``own`` v, ``received`` x and ``weights`` W: exactly x if W = 1, exactly v if W = 0."""
    return {name: torch.lerp(own[name], received[name], weight) for name, weight in weights.items()}


def gradient_step(
    task: LocalTask, mixed: Params, batch: tuple[torch.Tensor, torch.Tensor], generator: np.random.Generator
) -> LocalJob:
    """Return a training job that computes the gradient at the mixture by one step of SGD.

    ``mixed``: the parameters of the mixture; all other parameters are those of ``task``. After the step, the momentum
    buffers contain the gradient of ``mixed``.
    """
    from fl_sim.training.records import Records  # noqa: PLC0415 (it loads torch, which settings do not need)
    from fl_sim.training.trainer import LocalJob  # noqa: PLC0415 (as above)

    smoothing = task.settings.label_smoothing
    settings = LocalSettings(1.0, 0.5, 0.0, batch_size=len(batch[1]), epochs=1, label_smoothing=smoothing)
    start = replace(task, params={**task.params, **mixed}, settings=settings)
    seeded = partial(seed_process, int(generator.integers(2**63)), "step")
    return LocalJob(start, step_of(mixed), Records.of(*batch), generator, seeded)


def step_of(names: Collection[str]) -> LocalPlan:
    """Return the local plan of a gradient step: only the parameters ``names`` have gradients."""
    return LocalPlan(trained=frozenset(names))
