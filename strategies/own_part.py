"""Personal parameters: parameters that a client never sends. An algorithm's ``sends`` names all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from clients.client_layer import ClientLayer
from clients.evaluate import OwnModel
from fl_sim.errors import UserError
from fl_sim.kinds import hides_clients, kind_of
from fl_sim.local_plan import LocalPlan, Sending, sends_a_part, sent_by
from fl_sim.params import FlatParams, detached, layout_of, num_in, num_parameters, trainable
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.layer import Beginning, Layer

OWN: Final = "own"
"""Name of the personal parameters in client state."""


OWN_PART: Final = (
    "a part of the model stays with each client, and no trained client uses the evaluated model: it combines the "
    "server's part with the initial values of the other part"
)


UNCOVERED: Final = (
    "Each client's own model, or own part of the model, never leaves the client and is trained on its "
    "records without noise: the guarantee is about what others see, and a client that shows its own model to "
    "others shows facts about its records."
)


class OwnPart(Layer):
    """The layer of personal parameters. On the server it only checks settings and warns users.

    The class ``ClientOwnPart`` is the layer's code on clients.
    """

    reserved: ClassVar[str] = OWN

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if each client has its own model, or personal parameters."""
        has_model = isinstance(experiment.algorithm, OwnModel)
        return has_model or sends_a_part(experiment.algorithm, experiment.local.personal)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer | None:
        """Return None: personal parameters need no layer on the server, only code on clients."""
        del experiment, out, progress
        return None

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer | None:
        """Return the layer's code on clients, which keeps the personal parameters in client state."""
        if not sends_a_part(algorithm, experiment.local.personal):
            return None
        params = detached(trainable(model()).items())
        travel = sent_by(algorithm, params, experiment.local.personal)
        own = {name: value for name, value in params.items() if name not in travel}
        return ClientOwnPart(own, tuple(params))

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return a warning about personal parameters: the evaluated model is not the model of any client."""
        del rounds_done, idle
        has_part = sends_a_part(experiment.algorithm, experiment.local.personal)
        return [OWN_PART] if has_part and not experiment.evaluate.measures_clients else []

    @classmethod
    def uncovered(cls, experiment: Any) -> Sequence[str]:
        """Return a sentence for privacy statements: no noise protects the own models that clients train and keep."""
        return [] if experiment.local.privacy.covers_own_models else [UNCOVERED]

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for settings that conflict with personal parameters, such as a stage that trains them."""
        if not sends_a_part(experiment.algorithm, experiment.local.personal):
            return
        what = f"algorithm {kind_of(experiment.algorithm)}"
        if not isinstance(experiment.algorithm, Sending):
            what = f"local.personal={experiment.local.personal}"
        if not beginning.server.params and hides_clients(experiment.aggregator):
            raise UserError(
                f"{what} leaves the whole model with each client, so aggregator {kind_of(experiment.aggregator)} clips "
                "nothing, and its epsilon would protect nothing: leave aggregator out"
            )
        if beginning.whole:
            raise UserError(
                f"{what} leaves a part of the model with each client, and {beginning.whole[0]} trains the "
                "whole model at the server: leave out one of the two"
            )
        if experiment.local.batch_norm == "personal":
            raise UserError(
                f"{what} decides which part of the model stays with each client: take local.batch_norm=average, "
                "and let that part contain the BatchNorm layers"
            )


@dataclass(frozen=True)
class ClientOwnPart(ClientLayer):
    """Keeps each client's personal parameters in its client state.

    ``own``: the initial personal parameters of every client. ``names``: all parameter names of the model, in order.
    ``room``: if clients have different architectures, a client state stores its personal parameters as a vector of this
    length, padded with zeros. If ``room`` is 0, they are stored by name.
    """

    own: Params = field(repr=False)
    names: tuple[str, ...]
    room: int = 0

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task with the client's personal parameters added to the received model."""
        state = {name: group for name, group in task.state.items() if name != OWN}
        return replace(task, params=self.model(task.params, task.state), state=state)

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the plan for the whole model: personal parameters are trained without the method's corrections.

        The method's gradient offsets and momentum buffers cover only the sent parameters, so zeros are added for the
        personal ones. MOON's loss uses the client's last model; the personal parameters are added to this model, too.
        """
        missing = self._kept_in(came.state)
        zeros = {name: torch.zeros_like(value) for name, value in missing.items()}

        def filled(params: Params | None, rest: Params) -> Params | None:
            return {**rest, **params} if params and rest.keys() - params.keys() else params

        contrast = plan.contrast
        if contrast is not None:
            contrast = replace(contrast, previous=filled(contrast.previous, missing) or contrast.previous)
        return replace(
            plan,
            gradient_offset=filled(plan.gradient_offset, zeros),
            step_offset=filled(plan.step_offset, zeros),
            momentum_buffers=filled(plan.momentum_buffers, zeros),
            contrast=contrast,
        )

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Remove personal parameters from the task and the trained parameters: the update must not contain them."""
        del came
        params, after = self._without(task.params), self._without(trained.params)
        personal = {name: trained.params[name] for name in self.own}
        return replace(task, params=params), replace(trained, params=after, personal=personal)

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update with the trained personal parameters added to the client state for the next round."""
        del came, task
        if not (update.state or trained.num_steps):
            return update
        own: Params = {name: trained.params[name] for name in self.own}
        if self.room:
            numbers = torch.cat([value.flatten() for value in own.values()])
            own = {"vector": torch.nn.functional.pad(numbers, (0, self.room - len(numbers)))}
        return replace(update, state={**update.state, OWN: own})

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the client's whole model in its usual order: ``params`` and the personal parameters in ``state``."""
        if not self.own:
            return params
        both = {**params, **self._kept_in(state)}
        return {name: both[name] for name in self.names if name in both}

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return names and shapes of client state, with the personal parameters added."""
        del template, server
        return {**state, OWN: {"vector": torch.zeros(self.room)} if self.room else self.own} if self.own else state

    def beside(self, others: Sequence[ClientLayer]) -> ClientLayer:
        """Return this layer with ``room`` set to the number of personal parameters of the largest architecture.

        Client states of all architectures then have the same shape. If the personal parameters of all architectures
        have the same names and shapes anyway, the layer is returned unchanged.
        """
        halves = [one for one in others if isinstance(one, ClientOwnPart)]
        if all(layout_of(one.own) == layout_of(self.own) for one in halves):
            return self
        return replace(self, room=max(num_parameters(one.own) for one in halves))

    def _kept_in(self, state: Payloads) -> Params:
        """Return the personal parameters in a client state, or the initial ones before the client's first round."""
        kept = state.get(OWN, self.own)
        if not self.room or OWN not in state:
            return kept
        layout = layout_of(self.own)
        return FlatParams(kept["vector"][: num_in(layout)], layout)

    def _without(self, params: Params) -> Params:
        return {name: value for name, value in params.items() if name not in self.own}
