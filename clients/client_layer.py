"""The client half of a layer, such as compression. It changes the tasks and the updates of a client.

These layers wrap every round, and are not layers of the network. Server and client each build the same layers from the
experiment. A client passes the task from the server through all layers, from the outermost to the innermost. Then it
trains, and passes its update back through all layers. On the server, the layers return payload templates (names and
shapes of the tensors in an update), and unpack updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fl_sim.errors import Malformed, RunError
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import error_context, load_object
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Reply, ServerState, Size, Trained

if TYPE_CHECKING:
    from clients.policy import Policy
    from fl_sim.engines.remote import Ticket
    from fl_sim.training.records import Records
    from fl_sim.training.trainer import LocalJob


class Payer(Protocol):
    """The data with which a layer writes a round's privacy cost into a client's privacy ledger.

    The class ``Client`` also has these attributes.
    """

    @property
    def number(self) -> int:
        """The client ID, from 0."""

    @property
    def run(self) -> str:
        """The random name of the run. A resumed run keeps its name; two runs never have the same name."""

    @property
    def policy(self) -> Policy | None:
        """The policy: the limits on privacy costs that the client's owner has set. None means no limits."""

    @property
    def ledger(self) -> Path:
        """The path of the client's privacy ledger. If there is a policy, the policy's own ledger is used instead."""

    @property
    def has_disk(self) -> bool:
        """True if this process can write the client's files, such as its privacy ledger."""

    @property
    def ticket(self) -> Ticket | None:
        """The proof that another process has written the cost of this round into the client's privacy ledger."""


@dataclass(frozen=True)
class PaidRound:
    """A private round of a client. Its privacy cost is already in the client's privacy ledger.

    ``jobs``: the inputs of the trainer, by model name. If the layer makes local steps private (DP-SGD), the local plans
    in these jobs contain private steps. ``ticket``: the proof that the cost is in the privacy ledger, for a worker
    without access to the client's files. ``release``: a function that changes the algorithm's update, for example by
    clipping and noise. Compression and similar layers get the changed update.
    """

    jobs: Mapping[str, LocalJob]
    ticket: Ticket
    release: Callable[[ClientUpdate], ClientUpdate] = lambda update: update


class ClientLayer:
    """The client half of a layer, such as compression. It changes the messages between the server and the algorithm.

    By default the layer changes nothing. ``protects``: True if an update is differentially private for each record of
    the client. These updates need no ``allow_raw_updates`` in the policy of the client's owner; the policy limits the
    privacy cost of these updates. ``only_sums``: True if the server sees only the sum of all clients' updates.
    """

    protects: ClassVar[bool] = False
    only_sums: ClassVar[bool] = False

    def received(self, task: LocalTask) -> LocalTask:
        """Return ``task`` with this layer's changes.

        ``task`` comes from the next outer layer. The result goes to the next inner layer, or to the algorithm.
        """
        return task

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return the local ``plan`` (the client's local objective) with this layer's changes.

        ``came``: the client's task before this layer changed it in ``received``.
        """
        del came
        return plan

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return a typical local plan of a client, for the choice of a trainer and for forecasts.

        ``plan``: the typical plan of the algorithm and of the inner layers.
        """
        return plan

    def shown(self, records: Records) -> Records:
        """Return ``records``, or a placeholder if this layer forbids the algorithm's code to read records."""
        return records

    def protected(self, client: Payer, jobs: Mapping[str, LocalJob]) -> PaidRound | None:
        """Write the privacy cost of a round into the client's privacy ledger, and return the private round.

        Return None if this layer adds no privacy. A layer may make the local steps private, or the update. ``jobs``:
        the inputs of the trainer, by model name. The name "" is the model that the client sends. Other names are models
        that stay on the client, such as a personal model.
        """
        del client, jobs
        return None

    def finishing(self, came: LocalTask, task: LocalTask, trained: Trained) -> tuple[LocalTask, Trained]:
        """Return the pair (task, result of training), the arguments of the algorithm's method ``finish``.

        ``came``: the task before this layer changed it in ``received``.
        """
        del came
        return task, trained

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update from the algorithm's ``finish``, after this layer has changed its payloads.

        The layer may also change the client state. ``came``: the task before this layer changed it in ``received``.
        ``task``: the task that ``finish`` received. ``trained``: the complete result of the trainer.
        """
        del came, task, trained
        return update

    def model(self, params: Params, state: Payloads) -> Params:
        """Return the client's model: ``params`` from the message, combined with parameters that stay on the client.

        Parameters that stay on the client, such as those of personal BatchNorm layers, are in the client ``state``.
        """
        del state
        return params

    def broadcast(self, server: ServerState) -> Payloads:
        """Return the payloads (groups of tensors) that this layer adds to the message to clients."""
        del server
        return {}

    def adds(self, server: ServerState) -> Payloads:
        """Return names and shapes of the payloads (groups of tensors) that this layer adds to each update."""
        del server
        return {}

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return {payload name: size after compression} for the payloads that this layer compresses.

        ``template``: names and shapes of the payloads. ``model``: the model that clients receive.
        """
        del template, model
        return {}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the client's update with decompressed payloads. The server calls this method.

        Raises Malformed for an update that an honest client cannot send.
        """
        del template, server_round
        return reply

    def beside(self, others: Sequence[ClientLayer]) -> ClientLayer:
        """Return the layer for a run whose clients have models of different architectures.

        ``others``: one copy of this layer for each architecture, including this object. In such a run, the client
        states of all clients must contain tensors of the same names and shapes.
        """
        del others
        return self

    def kept(self, state: Payloads, template: Payloads, server: ServerState) -> Payloads:
        """Return the names and shapes of the tensors in the client state, including those that this layer stores.

        ``state``: the names and shapes of the tensors of the algorithm and of the inner layers.
        """
        del template, server
        return state


def _checked(name: str, wanted: Any) -> Any:
    """Return a method that calls the user's method ``name`` and checks that its result has the type ``wanted``.

    ``wanted``: a type, or the import path of a type whose module loads slowly. Error messages name the user's method,
    with file and line.
    """

    def method(self: OwnClientLayer, *given: Any) -> Any:
        said = f"{name} of {type(self.half).__name__}"
        try:
            made = getattr(self.half, name)(*given)
        except Malformed:  # Malformed is raised for a client's wrong update, not for a mistake in the user's code
            raise
        except Exception:
            with error_context(said):
                raise
        kind = load_object(wanted, "type") if isinstance(wanted, str) else wanted
        if not isinstance(made, kind):
            raise RunError(f"{said} returned {type(made).__name__}: return {getattr(kind, '__name__', kind)}")
        return made

    return method


@dataclass(frozen=True)
class OwnClientLayer(ClientLayer):
    """A wrapper of the client half of a user-defined layer. It checks the type of every method's result."""

    half: ClientLayer

    received = _checked("received", LocalTask)
    planned = _checked("planned", LocalPlan)
    typical = _checked("typical", LocalPlan)
    shown = _checked("shown", "fl_sim.training.records:Records")
    # None is the only allowed result: fl-sim cannot verify that a user-defined layer protects records
    protected = _checked("protected", type(None))
    finishing = _checked("finishing", tuple)
    sent = _checked("sent", ClientUpdate)
    model = _checked("model", Mapping)
    broadcast = _checked("broadcast", dict)
    adds = _checked("adds", dict)
    packs = _checked("packs", Mapping)
    unpacked = _checked("unpacked", Reply)

    def beside(self, others: Sequence[ClientLayer]) -> ClientLayer:
        """Return a wrapper of the user's layer, for a run whose clients have models of different architectures."""
        halves = [one.half if isinstance(one, OwnClientLayer) else one for one in others]
        return OwnClientLayer(_checked("beside", ClientLayer)(self, halves))

    kept = _checked("kept", dict)
