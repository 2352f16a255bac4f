"""The client half of a layer: its changes to the tasks and updates of a client.

Server and client each make the same objects from the experiment. The client passes a task through all of them, trains,
and passes the update through all of them again; the server takes payload templates from them, and unpacks updates.
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
    """Stands between a client's messages and its algorithm. Each method by default changes nothing."""

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task for the algorithm and the trainer."""
        return task

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the plan to train by. ``came``: the task before this layer, here and below."""
        del came
        return plan

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return the task and the trained parameters for the algorithm's ``finish``."""
        del came
        return task, trained

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the payloads that leave the client, and its client state.

        ``task``: the argument of ``finish``; ``trained``: the trainer's whole result.
        """
        del came, task, trained
        return update

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the client's model: ``params``, as they travel, and the parameters that stay with the client."""
        del state
        return params

    def broadcast(self, server: ServerState) -> Payloads:
        """Return the groups that clients receive beside the model and the algorithm's own groups."""
        del server
        return {}

    def adds(self, server: ServerState) -> Payloads:
        """Return the payload template of the groups that clients send beside the algorithm's own groups."""
        del server
        return {}

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the sizes of the packed groups of ``template``; ``model``: the model that clients receive."""
        del template, model
        return {}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return an update with its groups unpacked. Raises Malformed if no client could have sent it."""
        del template, server_round
        return reply

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return the names and shapes of client state: ``state``, which is the algorithm's, and the layer's own."""
        del template, server
        return state


def _checked(name: str, wanted: Any) -> Any:
    """Return a method that calls method ``name`` of ``half``; errors name it, with file and line."""

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
    """Wraps a client half of the user's own and checks the types of its answers."""

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
