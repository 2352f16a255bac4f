"""Neurotoxin: attackers change only parameters that hardly changed in the last rounds (Zhang et al. 2022, alg. 1).

Honest clients hardly change these parameters in the next rounds either, so a backdoor in them lasts longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from fl_sim.importing import torch
from fl_sim.local_plan import LocalPlan
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.attacks import RESERVED, HostilePlans

RECEIVED: Final = f"{RESERVED}received"
"""Name of the last received model in the client state."""


@dataclass(frozen=True)
class HostileMemory(HostilePlans):
    """The attack's code on clients: the ``hostile`` clients store the received model, and mask their local steps.

    ``masked_share``: the share of the parameters that hostile steps do not change.
    """

    masked_share: float = 0.05

    def received(self, task: LocalTask) -> LocalTask:
        """Return the client's task, without the attack's own tensors in the client state."""
        return replace(task, state={name: group for name, group in task.state.items() if name != RECEIVED})

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the attack's local plan for a hostile client. Steps are masked from the client's second round on."""
        planned, before = super().planned(came, plan), came.state.get(RECEIVED)
        if before is None or not self.attacks(came):
            return planned
        moved = {name: value - before[name] for name, value in came.params.items() if name in before}
        return replace(planned, step_mask=mask_of(moved, self.masked_share))

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return an example of a hostile client's local plan, to check that trainers support its step mask."""
        return replace(super().typical(plan), step_mask={})

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update, with the received model added to the client state.

        All client states of a run must have the same names. So honest clients with a client state store the model, too.
        """
        del task
        keeps = bool(update.state) or (came.client in self.hostile and trained.num_steps > 0)
        return replace(update, state={**update.state, RECEIVED: came.params}) if keeps else update

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return names and shapes of client state, with the received model added."""
        del template
        return {**state, RECEIVED: server.params}


def mask_of(moved: Params, share: float) -> Params | None:
    """Return a mask of the parameters: False for those that changed most, True for all others.

    ``moved``: the change of every parameter. ``share``: the fraction of False entries in all tensors, rounded up.
    Returns None if no parameter changed.
    """
    flat = torch.cat([value.flatten().abs() for value in moved.values()])
    if not flat.any():
        return None
    mask = torch.ones_like(flat, dtype=torch.bool)
    mask[flat.argsort(descending=True, stable=True)[: math.ceil(share * len(flat) - 1e-9)]] = False
    parts = torch.split(mask, [value.numel() for value in moved.values()])
    return {name: part.view_as(value) for (name, value), part in zip(moved.items(), parts, strict=True)}
