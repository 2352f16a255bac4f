"""Compression in federated rounds: clients pack what their algorithm sends, and the server unpacks it as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import nn

from clients.client_layer import ClientLayer
from fl_sim.kinds import is_none
from fl_sim.packed import Held, Packing
from fl_sim.params import layout_of
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Reply, ServerState, Size, Trained
from strategies.layer import Layer

HELD: Final = "held-back/"
"""How the names of groups in client state begin that compression holds back."""


class Compression(Layer):
    """Nothing but its client half: what the server has of it is packed and unpacked there."""

    reserved: ClassVar[str] = HELD

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Say whether updates are compressed."""
        return not is_none(experiment.compress)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> None:
        """Return nothing: the server's rounds are those of any other run."""
        del experiment, out, progress

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return what packs and unpacks."""
        del algorithm, model
        return ClientCompression(Packing(experiment.compress, experiment.seed))


@dataclass(frozen=True)
class ClientCompression(ClientLayer):
    """Packs the groups of an update that have the model's names and shapes."""

    packing: Packing

    def received(self, task: LocalTask) -> LocalTask:
        """Hide from the algorithm what is held back."""
        return replace(task, state={name: group for name, group in task.state.items() if not name.startswith(HELD)})

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Pack, and keep what is held back for the client's next round."""
        payloads, packed, held = self.packing.pack(
            update.payloads, task.params, held_in(came.state), task.client, task.server_round
        )
        state = with_held(update.state, held) if update.state or trained.num_steps else update.state
        return replace(update, payloads=payloads, packed=packed, state=state)

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return what packed groups take."""
        return self.packing.sizes(template, model)

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the update that was packed."""
        opened = {
            name: self.packing.unpack(name, packed, layout_of(template[name]), reply.client, server_round)
            for name, packed in reply.packed.items()
        }
        payloads = {name: opened[name] if name in opened else reply.payloads[name] for name in template}
        return replace(reply, payloads=payloads, packed={})

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Add what is held back."""
        return with_held(state, self.packing.held_back(template, server.params))


def with_held(state: Payloads, held: Held) -> Payloads:
    """Return client state with what is held back, by the group of the update."""
    return {**state, **{f"{HELD}{group}/{part}": value for group, of in held.items() for part, value in of.items()}}


def held_in(state: Payloads) -> dict[str, Payloads]:
    """Return what client state holds back, by the group of the update."""
    held = dict[str, Payloads]()
    for name, value in state.items():
        if name.startswith(HELD):
            group, _, part = name.removeprefix(HELD).rpartition("/")
            held.setdefault(group, {})[part] = value
    return held
