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
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.engines.arrays import (
    check_names,
    numbers_in,
    pack,
    packed_record,
    read_group,
    read_packed,
    read_rows,
    unpack,
    whole_number,
)
from fl_sim.errors import Malformed
from fl_sim.params import layout_of
from fl_sim.types import ClientUpdate, Packed, Params, Payloads, Reply, Size

TRAIN, WHO = "train", "query"
"""The types of messages: a task for a client, named in the message's configuration, and a question for the partition of
a node. The task of local training has the name of its message type."""

_ORDER, _PARAMS, _REPORT = "order", "params", "report"
_BROADCAST, _PAYLOAD, _PACKED, _KEPT = "broadcast/", "payload/", "packed/", "kept/"
_NUM_EXAMPLES, _LOSS, _MOST_STEPS = "num-examples", "loss", "most-steps"

_LARGEST_LOSS: Final = float(np.finfo(np.float32).max)

_POOL, _SAID, _VOTES, _MOMENTS, _SUMS = "pool", "said", "votes", "moments", "sums"
_JSON, _PARTITION = "json", "partition-id"

_LONGEST_TEXT: Final = 1_000_000
_LARGEST_MOMENT: Final = 1e100  # products of float32 numbers, added up


@dataclass(frozen=True)
class TaskConfig:
    """The configuration in a message, and all that a client has: nodes have no other.

    ``experiment``: the experiment as JSON; ``data_root``, ``state_dir``, ``pool`` (the clients' shares for the
    algorithm) and ``synthetic`` (the pool of synthetic records): paths on a disk that the worker sees, empty where
    there is none. ``most_steps``: {client: largest number of local steps}, of those who must stop early. ``task``: the
    name of the client task. For nodes with records of their own: ``run`` names the run among others, and ``facts`` are
    the public facts about the server's records, as JSON.
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
    def without_paths(self) -> "TaskConfig":
        """Return the configuration for workers that see no disk of the driver: no path, but the names of the pools.

        The names are digests of the content. Client states then come with the message, and go back with the answer.
        """
        pool, synthetic = Path(self.pool).name, Path(self.synthetic).name
        return replace(self, data_root="", state_dir="", pool=pool, synthetic=synthetic)


BLANK: Final = TaskConfig("", 0, 0.0, "", "")
"""The configuration of messages that are not sent, of which the size alone matters."""


def task_content(config: TaskConfig, params: Params, broadcast: Payloads) -> RecordDict:
    """Pack a round's message; all clients of a round share one."""
    records = RecordDict({_ORDER: _config_record(config), _PARAMS: pack(params)})
    for name, group in broadcast.items():
        records[_BROADCAST + name] = pack(group)
    return records


def config_content(config: TaskConfig) -> RecordDict:
    """Pack the message of a task that needs no tensors."""
    return RecordDict({_ORDER: _config_record(config)})


def read_task_config(content: RecordDict) -> TaskConfig:
    """Unpack the configuration of a message."""
    record = content.config_records[_ORDER]
    most_steps = json.loads(str(record[_MOST_STEPS])) if _MOST_STEPS in record else {}
    return TaskConfig(
        str(record["experiment"]),
        int(str(record["server-round"])),
        float(str(record["learning-rate"])),
        str(record["data-root"]),
        str(record["state-dir"]),
        str(record["pool"]),
        str(record["synthetic"]),
        {int(client): int(steps) for client, steps in most_steps.items()} if most_steps else {},
        str(record["run"]),
        str(record["facts"]),
        str(record["task"]),
    )


def task_of(message: Message) -> str:
    """Return the name of the task in a message; of a message without a task, its type."""
    if message.metadata.message_type != TRAIN:
        return message.metadata.message_type
    config = message.content.get(_ORDER)
    return str(config.get("task", TRAIN)) if isinstance(config, ConfigRecord) else TRAIN


def with_config(content: RecordDict, config: TaskConfig) -> RecordDict:
    """Return a message's content with another configuration; its tensors are the same ones."""
    return RecordDict({**content, _ORDER: _config_record(config)})


def state_records(state: Payloads) -> Mapping[str, ArrayRecord]:
    """Pack a client state, to be added to a content on its way to or from a worker that sees no disk of the driver."""
    return {_KEPT + name: pack(group) for name, group in state.items()}


def take_state(content: RecordDict) -> Payloads:
    """Return the client state in ``content``, and remove it: nobody else is to see it."""
    names = [name for name in content if name.startswith(_KEPT)]
    return {name.removeprefix(_KEPT): unpack(content.pop(name)) for name in names}


def state_in(content: RecordDict) -> Payloads:
    """Return the client state that came with a message, if any."""
    return {name.removeprefix(_KEPT): unpack(content[name]) for name in content if name.startswith(_KEPT)}


def is_same_round(one: RecordDict, other: RecordDict) -> bool:
    """Return True if the contents differ in nothing but their client states: they were made of one."""
    return one[_ORDER] is other[_ORDER]


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Unpack (global model, broadcast groups)."""
    # Not by content.array_records, which sorts all records into three new dictionaries.
    groups = {
        name.removeprefix(_BROADCAST): unpack(record) for name, record in content.items() if name.startswith(_BROADCAST)
    }
    return unpack(content[_PARAMS]), groups


def update_content(update: ClientUpdate) -> RecordDict:
    """Pack a client's update, without its client state."""
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
    """Unpack a client's update: the names and shapes of ``template``, from at most ``most_examples`` records.

    ``packed``: the sizes of the groups that travel compressed. A loss may be infinite or NaN, as training that diverges
    makes it. Raises Malformed for anything else.
    """
    check_names(content, {_REPORT, *((_PACKED if name in packed else _PAYLOAD) + name for name in template)})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or not {_NUM_EXAMPLES} <= set(report) <= {_NUM_EXAMPLES, _LOSS}:
        raise Malformed("reported something else than a number of records and a loss")
    count, loss = whole_number(report[_NUM_EXAMPLES], most_examples, "a number of records"), report.get(_LOSS)
    if not isinstance(loss, float | int | None) or (loss is not None and _LARGEST_LOSS < abs(loss) < math.inf):
        raise Malformed("sent a loss that training in float32 cannot have")
    payloads, groups = dict[str, Params](), dict[str, Packed]()
    for name, params in template.items():
        if name in packed:
            groups[name] = read_packed(content[_PACKED + name], packed[name])
        else:
            payloads[name] = read_group(content[_PAYLOAD + name], layout_of(params))
    return Reply(client, payloads, count, None if loss is None else float(loss), groups)


def error_of(message: Message) -> str | None:
    """Return the reason for which a client failed, or None where it did not."""
    return message.error.reason or "no reason given" if message.has_error() else None


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack a client's share before the first round."""
    return RecordDict({_POOL: pack(dict(shared))})


def read_pool(content: RecordDict, template: Params, most_rows: int) -> Params:
    """Unpack a client's share: tensors like ``template``'s, but all of the same number of rows.

    Raises Malformed for anything else, more than ``most_rows``, and for numbers that are not finite.
    """
    check_names(content, {_POOL})
    return read_rows(content[_POOL], {name: tuple(value.shape[1:]) for name, value in template.items()}, most_rows)


def made_content(inputs: torch.Tensor) -> RecordDict:
    """Pack synthetic records on their way to the driver, which adds the facts about them."""
    return RecordDict({_POOL: pack({"inputs": inputs})})


def read_made(content: RecordDict) -> torch.Tensor:
    """Unpack the content of ``made_content``, from a worker of ours."""
    return unpack(content[_POOL])["inputs"]


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Pack a client's synthetic records and, as JSON, its facts about them."""
    return RecordDict({_POOL: pack({"inputs": inputs}), _SAID: ConfigRecord({_JSON: said})})


def read_synthetic(
    content: RecordDict, input_shape: tuple[int, ...], num_classes: int, most_rows: int
) -> tuple[torch.Tensor, str]:
    """Unpack (synthetic records, the client's facts about them as JSON: counts, refused, facts, receipt).

    Raises Malformed where the records are not ``most_rows`` or fewer of that shape, finite, and as many as the counts
    add up to. The content of ``facts`` and ``receipt`` is not checked.
    """
    check_names(content, {_POOL, _SAID})
    inputs = read_rows(content[_POOL], {"inputs": input_shape}, most_rows)["inputs"]
    text = content[_SAID].get(_JSON)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise Malformed("says of its records what is no text, or too long")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("says of its records what is not JSON") from error
    match facts:
        case {"counts": list(counts), "refused": str(), "facts": dict(), "receipt": dict() | None, **others} if (
            not others
        ):
            if len(counts) != num_classes or sum(whole_number(one, most_rows, "a count") for one in counts) != len(
                inputs
            ):
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
    votes = _single_array(content, _VOTES, (num_records,), "<i8").astype(np.int64)
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
    moments = _single_array(content, _MOMENTS, shape, "<f8").astype(np.float64)
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
    check_names(content, {_SUMS})
    return read_group(content[_SUMS], layout_of(template))


def who_content(partition: int) -> RecordDict:
    """Pack the number of a node's partition."""
    return RecordDict({_REPORT: MetricRecord({_PARTITION: partition})})


def read_who(content: RecordDict) -> int:
    """Unpack the number of a node's partition. Raises Malformed for anything but a number from 0 on."""
    check_names(content, {_REPORT})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or set(report) != {_PARTITION}:
        raise Malformed("reported something else than the number of a partition")
    return whole_number(report[_PARTITION], sys.maxsize, "a partition's number")


def _single_array(content: RecordDict, name: str, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return the numbers of a content that is one array, which has the name of its record."""
    check_names(content, {name})
    record = content[name]
    if not isinstance(record, ArrayRecord) or set(record) != {name}:
        raise Malformed(f"sent no {name}, or more than them")
    return numbers_in(record[name], shape, kind)


def _config_record(config: TaskConfig) -> ConfigRecord:
    return ConfigRecord(
        {
            "experiment": config.experiment,
            "server-round": config.server_round,
            "learning-rate": config.learning_rate,
            "data-root": config.data_root,
            "state-dir": config.state_dir,
            "pool": config.pool,
            "synthetic": config.synthetic,
            "run": config.run,
            "facts": config.facts,
            "task": config.task,
            **({_MOST_STEPS: json.dumps(dict(config.most_steps))} if config.most_steps else {}),
        }
    )
