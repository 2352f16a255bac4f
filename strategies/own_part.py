"""A part of the model that stays with each client: what an algorithm's ``sends`` leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.local_plan import Sending, sent_by
from fl_sim.params import detached, trainable
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.layer import Beginning, Layer

OWN: Final = "own"
"""The group of parameters that do not travel, in client state."""


OWN_PART: Final = (
    "a part of the model stays with each client: the accuracy is that of a model which no client has, the server's "
    "part with the other as it was at first"
)


class OwnPart(Layer):
    """The server's half of personal parameters: statements for users alone."""

    reserved: ClassVar[str] = OWN

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the algorithm leaves a part of the model with clients."""
        return isinstance(experiment.algorithm, Sending)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> None:
        """Return nothing: the server's rounds are those of any other run."""
        del experiment, out, progress

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return the client half, which keeps the parameters that do not travel."""
        del experiment
        params = detached(trainable(model()).items())
        travel = sent_by(algorithm, params)
        own = {name: value for name, value in params.items() if name not in travel}
        return ClientOwnPart(own, tuple(params))

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Say whose accuracy is measured."""
        del experiment, rounds_done, idle
        return [OWN_PART]

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError where the whole model is needed at the server, or BatchNorm layers stay with clients, too."""
        kind = kind_of(experiment.algorithm)
        if beginning.whole:
            raise UserError(
                f"algorithm {kind} leaves a part of the model with each client, and {beginning.whole[0]} trains the "
                "whole model at the server: leave out preprocess or calibrate, or take another algorithm"
            )
        if experiment.local.batch_norm == "personal":
            raise UserError(
                f"algorithm {kind} says itself which part of the model stays with each client: take "
                "local.batch_norm=average, and let its sends leave out BatchNorm layers"
            )


@dataclass(frozen=True)
class ClientOwnPart(ClientLayer):
    """Keeps parameters with their client. ``own``: as each client first has them; ``names``: of the whole model."""

    own: Params = field(repr=False)
    names: tuple[str, ...]

    def received(self, task: LocalTask) -> LocalTask:
        """Put the client's own part into the model."""
        state = {name: group for name, group in task.state.items() if name != OWN}
        return replace(task, params=self.model(task.params, task.state), state=state)

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Leave the own part out: nothing of it travels."""
        del came
        params, after = self._without(task.params), self._without(trained.params)
        return replace(task, params=params), replace(trained, params=after)

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Keep the own part for the client's next round."""
        del came, task
        if not (update.state or trained.num_steps):
            return update
        own = {name: trained.params[name] for name in self.own}
        return replace(update, state={**update.state, OWN: own})

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the whole model, in its own order."""
        if not self.own:
            return params
        both = {**params, **state.get(OWN, self.own)}
        return {name: both[name] for name in self.names if name in both}

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Add the own part."""
        del template, server
        return {**state, OWN: self.own} if self.own else state

    def _without(self, params: Params) -> Params:
        return {name: value for name, value in params.items() if name not in self.own}
