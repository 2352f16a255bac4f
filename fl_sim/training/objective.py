"""The loss of a batch of one client, as its plan has it."""

from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import LocalPlan, LossTerm
from fl_sim.params import placed_in
from fl_sim.training.features import Network
from fl_sim.training.losses import mixed_loss
from fl_sim.training.terms import added, adjusted, check_smoothing, outputs_for, terms_of
from fl_sim.types import Params

Partner: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""An averaged record of the mixing pool, (*input shape), and its class proportions, (classes,)."""


@dataclass(frozen=True)
class Objective:
    """What a model with its present weights loses on records: the plan's tensors lie on the device of the records."""

    network: Network
    plan: LocalPlan
    anchor: Params
    terms: tuple[LossTerm, ...]
    data: tuple[Params, ...]
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    smoothing: float

    @classmethod
    def of(
        cls, model: nn.Module, plan: LocalPlan, anchor: Params, device: torch.device, *, smoothing: float = 0.0
    ) -> Self:
        """Return the objective of ``plan``; ``anchor``: the model that the client received, on ``device``.

        ``smoothing``: that of labels. Raises UserError for what ``check_smoothing`` refuses.
        """
        check_smoothing(plan, smoothing)
        terms = terms_of(plan)
        data = tuple({name: value.to(device) for name, value in term.data.items()} for term in terms)
        scale, shift = (None if part is None else part.to(device) for part in (plan.logit_scale, plan.logit_shift))
        return cls(Network(model), plan, anchor, terms, data, scale, shift, smoothing)

    def partner(self, generator: np.random.Generator) -> Partner | None:
        """Draw the record that the next batch is mixed with, where the plan mixes."""
        if (mix := self.plan.mix) is None:
            return None
        chosen, device = int(generator.integers(len(mix.labels))), next(iter(self.anchor.values())).device
        return mix.inputs[chosen].to(device), mix.labels[chosen].to(device)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor, partner: Partner | None) -> torch.Tensor:
        """Return the loss, (), of records (n, *input shape) with labels (n,), to be differentiated."""
        if (mix := self.plan.mix) is None or partner is None:
            outputs = self._outputs(inputs)
            shifted = adjusted(outputs[0], self.scale, self.shift)
            loss = functional.cross_entropy(shifted, labels, label_smoothing=self.smoothing)
        else:
            loss = mixed_loss(
                self.network.model, inputs, labels, *partner, mix.weight,
                linearise=mix.linearise, smoothing=self.smoothing,
            )  # fmt: skip
            if self.terms:  # they are about the records as they are, not as they are mixed
                outputs = self._outputs(inputs)
        if not self.terms:
            return loss
        weights = torch.full((len(labels),), 1 / len(labels), dtype=outputs[0].dtype, device=inputs.device)
        params = placed_in(self.network.model, self.anchor)
        batch = self.network.batch((inputs, labels, weights), outputs, params, self.anchor)
        return added(loss, self.terms, self.data, batch)

    def _outputs(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return outputs_for(self.terms, self.network.model, lambda: self.network.model(inputs))
