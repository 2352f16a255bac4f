"""The client half of a layer: what it changes in what comes to a client and in what leaves it.

Server and client each make the same objects from the experiment. The client hands a task through all of them, trains,
and hands the update through all of them again; the server knows from them what travels, and undoes what was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from fl_sim.errors import Malformed, RunError
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import error_context
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Reply, ServerState, Size, Trained

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class ClientLayer:
    """Stands between a client's messages and its algorithm. A method that a layer does not need stays as it is here."""

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task as the algorithm and the trainer see it."""
        return task

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the plan to train by. ``came``: the task as it came to this layer, here and below."""
        del came
        return plan

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return what the algorithm's ``finish`` sees of a task and of its training."""
        del came
        return task, trained

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return what leaves the client, and what stays with it.

        ``task``: what ``finish`` saw; ``trained``: what the trainer made, all of it.
        """
        del came, task, trained
        return update

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the client's model: ``params``, as they travel, and what of it stays with the client."""
        del state
        return params

    def broadcast(self, server: ServerState) -> Payloads:
        """Return what goes to clients beside the model and the algorithm's own groups."""
        del server
        return {}

    def adds(self, server: ServerState) -> Payloads:
        """Return the names and shapes of what comes back beside the algorithm's own groups."""
        del server
        return {}

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the sizes of the groups of ``template`` that travel packed; ``model``: what clients are sent."""
        del template, model
        return {}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return an update with its packed groups as they were. Raises Malformed where no client could have sent it."""
        del template, server_round
        return reply

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return the names and shapes of client state: ``state``, which is the algorithm's, and the layer's own."""
        del template, server
        return state


@dataclass(frozen=True)
class OwnClientLayer(ClientLayer):
    """Stands around a client half of the user's own: what it raises is told with its name, file and line."""

    half: ClientLayer

    def received(self, task: LocalTask) -> LocalTask:
        """Return what it makes of a task."""
        return self._told(LocalTask, self.half.received, task)

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return what it makes of a plan."""
        return self._told(LocalPlan, self.half.planned, came, plan)

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return what it lets ``finish`` see."""
        return self._told(tuple, self.half.finishing, came, task, trained)

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return what it lets leave the client."""
        return self._told(ClientUpdate, self.half.sent, came, task, trained, update)

    def model(self, params: Params, state: Payloads) -> Params:
        """Return what it takes for the client's model."""
        return self._told(Mapping, self.half.model, params, state)

    def broadcast(self, server: ServerState) -> Payloads:
        """Return what it sends along."""
        return self._told(dict, self.half.broadcast, server)

    def adds(self, server: ServerState) -> Payloads:
        """Return what it adds to an update."""
        return self._told(dict, self.half.adds, server)

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return what it packs."""
        return self._told(Mapping, self.half.packs, template, model)

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return what it unpacks."""
        return self._told(Reply, self.half.unpacked, reply, template, server_round)

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return what it keeps."""
        return self._told(dict, self.half.kept, state, template, server)

    def _told(self, wanted: Any, method: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs) -> _Made:
        name = f"{method.__name__} of {type(self.half).__name__}"
        try:
            made = method(*given, **named)
        except Malformed:  # which is said of the client that sent it
            raise
        except Exception:
            with error_context(name):
                raise
        if not isinstance(made, wanted):
            raise RunError(f"{name} gave {type(made).__name__}; wanted is {wanted.__name__}")
        return made
