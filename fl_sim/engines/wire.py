"""Messages between server and clients as records of Flower.

This file and ``arrays`` spell every record key and convert between our values and records. What a client sends is not
trusted: the reader of an answer states its form, and any other is Malformed. The reasons quote numbers at most, never a
client's text.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.engines.arrays import (
    exactly,
    numbers_in,
    pack,
    packed_record,
    read_group,
    read_json,
    read_packed,
    read_rows,
    unpack,
    whole,
)
from fl_sim.errors import Malformed
from fl_sim.params import layout_of
from fl_sim.types import ClientUpdate, Params, Payloads, Reply, Size

TRAIN, WHO = "train", "query"
"""The types of messages: a task for a client, and which partition a node holds. Which task it is says the order; one
round's local training is called as its message is."""

_ORDER, _PARAMS, _REPORT, _TICKET = "order", "params", "report", "ticket"
_BROADCAST, _PAYLOAD, _PACKED, _KEPT = "broadcast/", "payload/", "packed/", "kept/"
_NUM_EXAMPLES, _LOSS, _MOST_STEPS = "num-examples", "loss", "most-steps"

_LARGEST_LOSS: Final = float(np.finfo(np.float32).max)

_POOL, _SAID, _VOTES, _MOMENTS, _SUMS, _REPORT = "pool", "said", "votes", "moments", "sums", "report"
_JSON, _PARTITION = "json", "partition-id"

_LONGEST_TEXT: Final = 1_000_000
_LARGEST_MOMENT: Final = 1e100  # products of float32 numbers, added up


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


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack what a client shares before the first round."""
    return RecordDict({_POOL: pack(dict(shared))})


def read_pool(content: RecordDict, template: Params, most_rows: int) -> Params:
    """Unpack what a client shared: tensors like ``template``'s, but all of the same number of rows.

    Raises Malformed for anything else, more than ``most_rows``, and for numbers that are not finite.
    """
    exactly(content, {_POOL})
    return read_rows(content[_POOL], {name: tuple(value.shape[1:]) for name, value in template.items()}, most_rows)


def made_content(inputs: torch.Tensor) -> RecordDict:
    """Pack synthetic records on their way home, where what is to be said of them is added."""
    return RecordDict({_POOL: pack({"inputs": inputs})})


def read_made(content: RecordDict) -> torch.Tensor:
    """Unpack what ``made_content`` packed, on a worker of ours."""
    return unpack(content[_POOL])["inputs"]


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Pack a client's synthetic records and, as JSON, what it says of them."""
    return RecordDict({_POOL: pack({"inputs": inputs}), _SAID: ConfigRecord({_JSON: said})})


def read_synthetic(
    content: RecordDict, input_shape: tuple[int, ...], num_classes: int, most_rows: int
) -> tuple[torch.Tensor, str]:
    """Unpack (synthetic records, what the client says of them as JSON: counts, refused, facts, receipt).

    Raises Malformed where the records are not ``most_rows`` or fewer of that shape, finite, and as many as the counts
    add up to; what the facts and the receipt say is not looked at.
    """
    exactly(content, {_POOL, _SAID})
    inputs = read_rows(content[_POOL], {"inputs": input_shape}, most_rows)["inputs"]
    text = content[_SAID].get(_JSON)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise Malformed("says of its records what is no text, or too long")
    match read_json(text):
        case {"counts": list(counts), "refused": str(), "facts": dict(), "receipt": dict() | None, **others} if (
            not others
        ):
            if len(counts) != num_classes or sum(whole(one, most_rows, "a count") for one in counts) != len(inputs):
                raise Malformed(
                    f"sent counts that are not one for each of {num_classes} classes, adding up to its records"
                )
        case _:
            raise Malformed("says something else of its records than their counts, why there are none, and facts")
    return inputs, text


def votes_content(votes: NDArray[np.int64]) -> RecordDict:
    """Pack a teacher's votes, one class a public record."""
    return RecordDict({_VOTES: ArrayRecord({_VOTES: Array(votes)})})


def read_votes(content: RecordDict, num_records: int, num_classes: int) -> NDArray[np.int64]:
    """Unpack a teacher's votes, shape (records,). Raises Malformed for anything but one class for each record."""
    exactly(content, {_VOTES})
    record = content[_VOTES]
    if not isinstance(record, ArrayRecord) or set(record) != {_VOTES}:
        raise Malformed("sent no votes, or more than them")
    votes = numbers_in(record[_VOTES], (num_records,), "<i8").astype(np.int64)
    if ((votes < 0) | (votes >= num_classes)).any():
        raise Malformed(f"votes for a class that does not exist: classes are 0 to {num_classes - 1}")
    return votes


def moments_content(moments: NDArray[np.float64]) -> RecordDict:
    """Pack the moments of a client's features, a row for each class."""
    return RecordDict({_MOMENTS: ArrayRecord({_MOMENTS: Array(moments)})})


def read_moments(content: RecordDict, shape: tuple[int, int], most_records: int | None = None) -> NDArray[np.float64]:
    """Unpack the moments of a client's features, of at most that many records; None where there is noise on them.

    Raises Malformed for another shape, for absurd numbers, and without noise for counts that are none.
    """
    exactly(content, {_MOMENTS})
    record = content[_MOMENTS]
    if not isinstance(record, ArrayRecord) or set(record) != {_MOMENTS}:
        raise Malformed("sent no moments, or more than them")
    moments = numbers_in(record[_MOMENTS], shape, "<f8").astype(np.float64)
    if not (np.abs(moments) <= _LARGEST_MOMENT).all():
        raise Malformed("sent moments of features that are not finite, or far too large")
    counts = moments[:, 0]
    if most_records is not None and ((counts < 0) | (counts % 1 != 0) | (counts.sum() > most_records)).any():
        raise Malformed(f"sent numbers of records that are not whole, or add up to more than {most_records}")
    return moments


def sums_content(sums: Params) -> RecordDict:
    """Pack a client's answer to a question before the first round: sums over its records."""
    return RecordDict({_SUMS: pack(sums)})


def read_sums(content: RecordDict, template: Params) -> Params:
    """Unpack such an answer: float32 tensors like ``template``'s. Raises Malformed for anything else."""
    exactly(content, {_SUMS})
    return read_group(content[_SUMS], layout_of(template))


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({_PARTITION: partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds. Raises Malformed for anything but a number from 0 on."""
    exactly(content, {_REPORT})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or set(report) != {_PARTITION}:
        raise Malformed("reported something else than the number of a partition")
    return whole(report[_PARTITION], sys.maxsize, "a partition's number")


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
