"""The client half of a layer: its changes to the tasks and updates of a client.

Server and client each build the same layer objects from the experiment. The client passes a task through all layers,
trains, and passes the update through all layers again. The server asks the layers for payload templates, and unpacks
updates with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_sim.errors import Malformed, RunError
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import error_context
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Reply, ServerState, Size, Trained


class ClientLayer:
    """A layer between a client's messages and the algorithm. By default each method changes nothing."""

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task that the algorithm and the trainer receive, given the task from the outer layers."""
        return task

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the local plan for the trainer. ``came`` (here and below): the task before this layer changed it."""
        del came
        return plan

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return the task and the trained parameters that the algorithm's ``finish`` receives."""
        del came
        return task, trained

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update with the payloads that the client sends and the client state that the client stores.

        ``task``: the argument of ``finish``; ``trained``: the trainer's complete result.
        """
        del came, task, trained
        return update

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the client's model: ``params`` from the message and the parameters that stay on the client."""
        del state
        return params

    def broadcast(self, server: ServerState) -> Payloads:
        """Return the payloads of this layer that clients receive, beside the model and the algorithm's payloads."""
        del server
        return {}

    def adds(self, server: ServerState) -> Payloads:
        """Return the payload template of this layer's part of updates, beside the algorithm's payloads."""
        del server
        return {}

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the size of each payload of ``template`` that this layer packs, by name.

        ``model``: the model that clients receive.
        """
        del template, model
        return {}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return an update with unpacked payloads. Raises Malformed if no correct client could have sent the update."""
        del template, server_round
        return reply

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return the template of the client state: ``state``, the algorithm's template, and the state of this layer."""
        del template, server
        return state


def _checked(name: str, wanted: Any) -> Any:
    """Return a method that calls the method ``name`` of ``half`` and checks the type ``wanted`` of its result.

    Errors name the method, with file and line.
    """

    def method(self: OwnClientLayer, *given: Any) -> Any:
        said = f"{name} of {type(self.half).__name__}"
        try:
            made = getattr(self.half, name)(*given)
        except Malformed:  # the fault of the client that sent the update
            raise
        except Exception:
            with error_context(said):
                raise
        if not isinstance(made, wanted):
            raise RunError(f"{said} gave {type(made).__name__}; wanted is {wanted.__name__}")
        return made

    return method


@dataclass(frozen=True)
class OwnClientLayer(ClientLayer):
    """A wrapper of a client half that a user wrote. The wrapper checks the types of the results."""

    half: ClientLayer

    received = _checked("received", LocalTask)
    planned = _checked("planned", LocalPlan)
    finishing = _checked("finishing", tuple)
    sent = _checked("sent", ClientUpdate)
    model = _checked("model", Mapping)
    broadcast = _checked("broadcast", dict)
    adds = _checked("adds", dict)
    packs = _checked("packs", Mapping)
    unpacked = _checked("unpacked", Reply)
    kept = _checked("kept", dict)
