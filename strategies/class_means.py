"""Shared code of methods whose clients keep their models, and send other tensors, such as mean logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fl_sim.kinds import Choices, is_none, kind_of
from fl_sim.types import Params, Payloads, ServerState
from strategies.algorithm import Averaging


@dataclass(frozen=True)
class RoundPayloads:
    """The payloads of all clients with records in a round.

    ``clients``: the IDs of these clients, ascending. ``payloads``: the tensors of all these clients, stacked along the
    first dimension.
    """

    clients: Sequence[int]
    payloads: Payloads


class KeepsModels(Averaging):
    """Base class of methods whose clients keep their models, and send the server other tensors than parameters.

    ``payload``: the sent tensors in words, such as "mean logits".
    """

    kind: str = ""
    payload: ClassVar[str] = ""
    needs_head: ClassVar[bool] = True
    sends_nothing: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings with which the method cannot run; see ``check_in_the_clear``."""
        check_in_the_clear(self, experiment, self.payload)

    def sends(self, params: Params) -> Collection[str]:
        """Return the names of the sent parameters: none, because clients send other tensors."""
        del params
        return ()

    def init(self, params: Params) -> ServerState:
        """Return the server state before round 1. ``params``: the initial model."""
        return self.init_for(params, params)

    @abstractmethod
    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before round 1.

        ``params``: the initial values of the parameters that clients send. ``model``: the whole initial model.
        """


def check_in_the_clear(algorithm: object, experiment: Choices, what: str) -> None:
    """Raise ValueError for settings that hide or leave out single clients' payloads, and for local privacy.

    ``what``: the payload in words, such as "mean logits". Clients send this payload without noise, so local privacy
    would not cover it.
    """
    local, reads = experiment.local, f"its server reads the {what} of every client"
    refused = {
        "aggregator": (kind_of(experiment.aggregator), kind_of(experiment.aggregator) != "mean"),
        "local.privacy": (kind_of(local.privacy), not is_none(local.privacy)),
        "server": (kind_of(experiment.server), kind_of(experiment.server) != "synchronous"),
    }
    reasons = {
        "aggregator": f"{reads}, and this aggregator hides or leaves out some of them",
        "local.privacy": f"clients send {what}, which are computed from records without noise",
        "server": f"{reads} after a round in which all clients started from one state",
    }
    for name, (value, is_refused) in refused.items():
        if is_refused:
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with {name}={value}: {reasons[name]}; leave {name} out, or "
                "take fedavg"
            )
