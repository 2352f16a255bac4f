"""Orders, tasks and updates as Flower's records.

``releases`` has what else clients send, ``tensor_records`` how tensors travel. These three files spell every record key
and make every conversion between our values and records, and nobody else does. What a client sends is not trusted:
whoever reads an answer says what it must be, and anything else is Malformed. The reasons quote numbers at most, never a
client's text.
"""

import hashlib
import hmac
import json
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fl_sim.engines.tensor_records import exactly, pack, packed_record, read_group, read_packed, unpack, whole
from fl_sim.errors import Malformed, RunError
from fl_sim.params import layout_of
from fl_sim.types import ClientUpdate, Params, Payloads, Reply, Size

TRAIN, WHO = "train", "query"
"""The types of messages: a task for a client, and which partition a node holds. Which task it is says the order; one
round's local training is called as its message is."""

_ORDER, _PARAMS, _REPORT, _TICKET = "order", "params", "report", "ticket"
_BROADCAST, _PAYLOAD, _PACKED, _KEPT = "broadcast/", "payload/", "packed/", "kept/"
_NUM_EXAMPLES, _LOSS, _MOST_STEPS = "num-examples", "loss", "most-steps"

_LARGEST_LOSS: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TaskConfig:
    """The part of a message that is no tensor, and all the configuration a client has: nodes have no other.

    ``experiment``: the experiment as JSON; ``data_root``, ``state_dir``, ``pool`` (what clients shared for the
    algorithm) and ``synthetic`` (the pool of synthetic records): paths on a disk that the worker sees, empty where
    there is none. To workers that see none goes ``for_the_road``. ``most_steps``: {client: how many local steps it has
    time for}, of those who must stop early. ``task``: what the client is asked for. For nodes with records of their
    own: ``run`` names the run among others, and ``facts`` is what is public about the server's records, as JSON.
    """

    experiment: str
    server_round: int
    learning_rate: float
    data_root: str
    state_dir: str
    pool: str = ""
    synthetic: str = ""
    most_steps: Mapping[int, int] = field(default_factory=dict)
    run: str = ""
    facts: str = ""
    task: str = TRAIN

    @property
    def for_the_road(self) -> "TaskConfig":
        """Return what goes to a worker elsewhere: no path, but the names of the pools, which say what is in them.

        What a client keeps then comes with its message, and goes back with its answer.
        """
        return replace(
            self,
            data_root="",
            state_dir="",
            pool=Path(self.pool).name,
            synthetic=Path(self.synthetic).name,
        )


BLANK: Final = TaskConfig("", 0, 0.0, "", "")
"""The order of messages that are not sent, of which the size alone matters."""


@dataclass(frozen=True)
class Ticket:
    """What a client that is played elsewhere has paid for at home.

    ``key``: of its noise, a secret. ``counts``: of a share, how many records of each class to make. Only a ``Signer``
    reads one.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Signer:
    """Signs the tickets of one run, and reads them where the driver started the worker and gave it ``secret``.

    A signature holds for one message alone: its kind, its client and all of its content, of which the run and the round
    are a part. So no server, no other run and no message that was sent before can have a worker release what its client
    has not paid for.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "Signer":
        """Return the signer of a run, with a secret that nobody else has."""
        return cls(secrets.token_bytes(32))

    def records(self, ticket: Ticket, kind: str, client: int, content: RecordDict) -> Mapping[str, ConfigRecord]:
        """Pack a ticket, signed, to be added to the ``content`` of one client's message of this ``kind``."""
        record = ConfigRecord({"key": ticket.key, "simulation-only": ticket.simulation_only})
        record["counts"] = list(ticket.counts)
        record["signature"] = self._signature(ticket, kind, client, content)
        return {_TICKET: record}

    def read(self, kind: str, client: int, content: RecordDict) -> Ticket:
        """Unpack the ticket of a message. Raises RunError for one that this run's driver did not sign for it."""
        match dict(content[_TICKET]):
            case {"key": bytes(key), "simulation-only": bool(secret), "counts": list(counts), "signature": bytes(sign)}:
                ticket = Ticket(key, secret, tuple(int(count) for count in counts))
            case _:
                raise RunError(NO_TICKET)
        if not hmac.compare_digest(sign, self._signature(ticket, kind, client, content)):
            raise RunError(NO_TICKET)
        return ticket

    def _signature(self, ticket: Ticket, kind: str, client: int, content: RecordDict) -> bytes:
        said = [kind, client, ticket.key.hex(), ticket.simulation_only, ticket.counts, _digests(content)]
        return hmac.digest(self.secret, json.dumps(said).encode(), "sha256")


NO_TICKET: Final = (
    "the order brings a ticket, which says that its release was paid for elsewhere, and nothing was released: only a "
    "worker that the run's own driver started takes one, signed by that driver for this message; send the order without"
)


def task_content(order: TaskConfig, params: Params, broadcast: Payloads) -> RecordDict:
    """Pack a round's message; all clients of a round share one."""
    records = RecordDict({_ORDER: _config(order), _PARAMS: pack(params)})
    for name, group in broadcast.items():
        records[_BROADCAST + name] = pack(group)
    return records


def order_content(order: TaskConfig) -> RecordDict:
    """Pack a message that asks clients for something which needs no tensors."""
    return RecordDict({_ORDER: _config(order)})


def read_task_config(content: RecordDict) -> TaskConfig:
    """Unpack the configuration of a message."""
    record = content.config_records[_ORDER]
    return TaskConfig(
        str(record["experiment"]),
        int(str(record["server-round"])),
        float(str(record["learning-rate"])),
        str(record["data-root"]),
        str(record["state-dir"]),
        str(record["pool"]),
        str(record["synthetic"]),
        {int(client): int(steps) for client, steps in json.loads(str(record.get(_MOST_STEPS, "{}"))).items()},
        str(record["run"]),
        str(record["facts"]),
        str(record["task"]),
    )


def task_of(message: Message) -> str:
    """Return which task a message asks a client for; of one that asks for no task, its type."""
    if message.metadata.message_type != TRAIN:
        return message.metadata.message_type
    order = message.content.get(_ORDER)
    return str(order.get("task", TRAIN)) if isinstance(order, ConfigRecord) else TRAIN


def reordered(content: RecordDict, order: TaskConfig) -> RecordDict:
    """Return a message's content with another configuration; its tensors are the same ones."""
    return RecordDict({**content, _ORDER: _config(order)})


def kept_records(kept: Payloads) -> Mapping[str, ArrayRecord]:
    """Pack what a client keeps, to be added to a content on its way to or from a worker that sees no disk of ours."""
    return {_KEPT + name: pack(group) for name, group in kept.items()}


def has_ticket(content: RecordDict) -> bool:
    """Say whether a message brings something that is called a ticket."""
    return _TICKET in content


def take_kept(content: RecordDict) -> Payloads:
    """Return what a client keeps, and remove it from ``content``. Nobody else is to see it."""
    names = [name for name in content if name.startswith(_KEPT)]
    return {name.removeprefix(_KEPT): unpack(content.pop(name)) for name in names}


def kept_in(content: RecordDict) -> Payloads:
    """Return what a client kept of its last round, where that came with its message."""
    return {name.removeprefix(_KEPT): unpack(content[name]) for name in content if name.startswith(_KEPT)}


def is_same_round(one: RecordDict, other: RecordDict) -> bool:
    """Say whether the contents differ in nothing but what their clients keep: they were made of one."""
    return one[_ORDER] is other[_ORDER]


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Unpack (global model, broadcast groups)."""
    # Not by content.array_records, which sorts all records into three new dictionaries.
    groups = {
        name.removeprefix(_BROADCAST): unpack(record) for name, record in content.items() if name.startswith(_BROADCAST)
    }
    return unpack(content[_PARAMS]), groups


def update_content(update: ClientUpdate) -> RecordDict:
    """Pack a client's update, without what stays with it."""
    report = MetricRecord({_NUM_EXAMPLES: update.num_examples})
    if update.loss is not None:
        report[_LOSS] = update.loss
    content = RecordDict({_REPORT: report})
    for name, params in update.payloads.items():
        content[_PAYLOAD + name] = pack(params)
    for name, group in update.packed.items():
        content[_PACKED + name] = packed_record(group)
    return content


def read_update(
    client: int,
    content: RecordDict,
    template: Payloads,
    most_examples: int = sys.maxsize,
    packed: Mapping[str, Size] = MappingProxyType({}),
) -> Reply:
    """Unpack a client's update, which has the names and shapes of ``template``, from at most that many records.

    ``packed``: how much those of its groups take that travel packed. A loss may be infinite or NaN, as training that
    diverges makes it. Raises Malformed for anything else.
    """
    exactly(content, {_REPORT, *((_PACKED if name in packed else _PAYLOAD) + name for name in template)})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or not {_NUM_EXAMPLES} <= set(report) <= {_NUM_EXAMPLES, _LOSS}:
        raise Malformed("reported something else than a number of records and a loss")
    count, loss = whole(report[_NUM_EXAMPLES], most_examples, "a number of records"), report.get(_LOSS)
    if not isinstance(loss, float | int | None) or (loss is not None and _LARGEST_LOSS < abs(loss) < math.inf):
        raise Malformed("sent a loss that training in float32 cannot have")
    payloads = {
        name: read_group(content[_PAYLOAD + name], layout_of(params))
        for name, params in template.items()
        if name not in packed
    }
    groups = {name: read_packed(content[_PACKED + name], size) for name, size in packed.items()}
    return Reply(client, payloads, count, None if loss is None else float(loss), groups)


def error_of(message: Message) -> str | None:
    """Return why a client failed, or None where it did not."""
    return message.error.reason or "no reason given" if message.has_error() else None


def _digests(content: RecordDict) -> list[list[str]]:
    """Return the names of all records but the ticket, and digests of what is in them."""
    return [[name, _digest(content[name])] for name in sorted(content) if name != _TICKET]


def _digest(record: object) -> str:
    digest = hashlib.sha256()
    if isinstance(record, ArrayRecord):
        for name, array in record.items():
            digest.update(json.dumps([name, list(array.shape)]).encode())
            digest.update(array.data)
    else:
        assert isinstance(record, ConfigRecord), "messages to clients hold settings and tensors"
        digest.update(json.dumps(sorted(record.items())).encode())
    return digest.hexdigest()


def _config(order: TaskConfig) -> ConfigRecord:
    return ConfigRecord(
        {
            "experiment": order.experiment,
            "server-round": order.server_round,
            "learning-rate": order.learning_rate,
            "data-root": order.data_root,
            "state-dir": order.state_dir,
            "pool": order.pool,
            "synthetic": order.synthetic,
            "run": order.run,
            "facts": order.facts,
            "task": order.task,
            **({_MOST_STEPS: json.dumps(dict(order.most_steps))} if order.most_steps else {}),
        }
    )
