"""Messages between server and clients as Flower records.

This file and ``arrays`` define all record keys, and convert between values of this project and Flower records. Messages
from clients are not trusted: each reading function states the expected form of a message, and raises Malformed for any
other form. The error messages may quote numbers, but never a client's text.
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
"""The two message types.

``TRAIN``: a client task, whose name is in the message's configuration. ``WHO``: the request for the ID of a node's
client (Flower: its partition ID). The task of local training has the same name as its message type.
"""

_ORDER, _PARAMS, _REPORT = "order", "params", "report"
_BROADCAST, _PAYLOAD, _PACKED, _KEPT = "broadcast/", "payload/", "packed/", "kept/"
_NUM_EXAMPLES, _LOSS, _MOST_STEPS = "num-examples", "loss", "most-steps"

_LARGEST_LOSS: Final = float(np.finfo(np.float32).max)

_POOL, _SAID, _VOTES, _MOMENTS, _SUMS = "pool", "said", "votes", "moments", "sums"
_JSON, _PARTITION = "json", "partition-id"

_LONGEST_TEXT: Final = 1_000_000
_LARGEST_MOMENT: Final = 1e100  # larger moments are refused: no sum of products of two float32 features is so large


@dataclass(frozen=True)
class TaskConfig:
    """The configuration in a message to a client. A node gets no other configuration.

    ``experiment``: the experiment as JSON. ``data_root``, ``state_dir``, ``pool`` (the tensors that clients shared
    before the first round) and ``synthetic`` (the synthetic records): paths on a disk that the worker can read; empty
    if there is no such file. ``most_steps``: {client: largest number of local steps}, for clients that must stop early.
    ``task``: the name of the client task, such as training. For nodes with their own records: ``run`` identifies the
    run, and ``facts`` are the public facts about the server's records, as JSON.
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
        """Return the configuration for workers that do not share a disk with the driver (the server's process).

        The result has no paths. In the fields ``pool`` and ``synthetic`` it has file names, which are digests of the
        files. Such a worker receives the client state in each message, and returns the new client state in its answer.
        """
        pool, synthetic = Path(self.pool).name, Path(self.synthetic).name
        return replace(self, data_root="", state_dir="", pool=pool, synthetic=synthetic)


BLANK: Final = TaskConfig("", 0, 0.0, "", "")
"""An empty configuration. It is for messages that are never sent; only their size is computed."""


def task_content(config: TaskConfig, params: Params, broadcast: Payloads) -> RecordDict:
    """Return the content of a round's message, which all clients of the round share."""
    records = RecordDict({_ORDER: _config_record(config), _PARAMS: pack(params)})
    for name, group in broadcast.items():
        records[_BROADCAST + name] = pack(group)
    return records


def config_content(config: TaskConfig) -> RecordDict:
    """Return the content of a message for a client task that needs no tensors."""
    return RecordDict({_ORDER: _config_record(config)})


def read_task_config(content: RecordDict) -> TaskConfig:
    """Return the task configuration in the content of a message."""
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
    """Return the name of the client task in a message. If the message has no task, return its message type."""
    if message.metadata.message_type != TRAIN:
        return message.metadata.message_type
    config = message.content.get(_ORDER)
    return str(config.get("task", TRAIN)) if isinstance(config, ConfigRecord) else TRAIN


def with_config(content: RecordDict, config: TaskConfig) -> RecordDict:
    """Return a message's content with ``config`` in place of its present configuration. No tensor is copied."""
    return RecordDict({**content, _ORDER: _config_record(config)})


def state_records(state: Payloads) -> Mapping[str, ArrayRecord]:
    """Return a client state as Flower records, for a message.

    Only messages to and from workers that do not share a disk with the driver contain client states.
    """
    return {_KEPT + name: pack(group) for name, group in state.items()}


def take_state(content: RecordDict) -> Payloads:
    """Remove the client state from ``content``, and return the state. After that, no other reader can see the state."""
    names = [name for name in content if name.startswith(_KEPT)]
    return {name.removeprefix(_KEPT): unpack(content.pop(name)) for name in names}


def state_in(content: RecordDict) -> Payloads:
    """Return the client state in the content of a message; empty if there is none."""
    return {name.removeprefix(_KEPT): unpack(content[name]) for name in content if name.startswith(_KEPT)}


def is_same_round(one: RecordDict, other: RecordDict) -> bool:
    """Return True if two message contents belong to one exchange, and so differ at most in their client states."""
    return one[_ORDER] is other[_ORDER]


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Return the pair (global model, further groups of tensors for all clients as {name: group}) in a message."""
    # The attribute content.array_records would be slower, because it sorts all records into three new dictionaries.
    groups = {
        name.removeprefix(_BROADCAST): unpack(record) for name, record in content.items() if name.startswith(_BROADCAST)
    }
    return unpack(content[_PARAMS]), groups


def update_content(update: ClientUpdate) -> RecordDict:
    """Return the content of a client's answer after training: its update, without its client state."""
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
    """Return a client's update, whose tensors must have the names and shapes of ``template``.

    The stated number of records must be at most ``most_examples``. ``packed``: {name of a group of tensors: its
    compressed size}, for the groups that clients compress. The loss may be infinite or NaN, since training can diverge.
    Raises Malformed for any other content.
    """
    check_names(content, {_REPORT, *((_PACKED if name in packed else _PAYLOAD) + name for name in template)})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or not {_NUM_EXAMPLES} <= set(report) <= {_NUM_EXAMPLES, _LOSS}:
        raise Malformed("sent a report with other fields than a number of records and a loss")
    count, loss = whole_number(report[_NUM_EXAMPLES], most_examples, "a number of records"), report.get(_LOSS)
    if not isinstance(loss, float | int | None) or (loss is not None and _LARGEST_LOSS < abs(loss) < math.inf):
        raise Malformed("sent a finite loss that is larger than any float32 number")
    payloads, groups = dict[str, Params](), dict[str, Packed]()
    for name, params in template.items():
        if name in packed:
            groups[name] = read_packed(content[_PACKED + name], packed[name])
        else:
            payloads[name] = read_group(content[_PAYLOAD + name], layout_of(params))
    return Reply(client, payloads, count, None if loss is None else float(loss), groups)


def error_of(message: Message) -> str | None:
    """Return the reason for a client's failure, or None if the client did not fail."""
    return message.error.reason or "no reason given" if message.has_error() else None


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Return the content of a client's answer before the first round: the tensors that the client shares."""
    return RecordDict({_POOL: pack(dict(shared))})


def read_pool(content: RecordDict, template: Params, most_rows: int) -> Params:
    """Return the tensors that a client shares before the first round.

    Names and shapes must be equal to those of ``template``, except for the number of rows, which must be the same for
    all tensors. Raises Malformed for any other content, for more than ``most_rows`` rows, and for numbers that are not
    finite.
    """
    check_names(content, {_POOL})
    return read_rows(content[_POOL], {name: tuple(value.shape[1:]) for name, value in template.items()}, most_rows)


def made_content(inputs: torch.Tensor) -> RecordDict:
    """Return a message content with the synthetic records that a worker sends to the driver (the server's process)."""
    return RecordDict({_POOL: pack({"inputs": inputs})})


def read_made(content: RecordDict) -> torch.Tensor:
    """Return the synthetic records in a worker's message. Nothing is checked, because the driver trusts workers."""
    return unpack(content[_POOL])["inputs"]


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Return a message content with a client's synthetic records.

    ``said``: the client's facts about these records as JSON, such as the number of records of each class.
    """
    return RecordDict({_POOL: pack({"inputs": inputs}), _SAID: ConfigRecord({_JSON: said})})


def read_synthetic(
    content: RecordDict, input_shape: tuple[int, ...], num_classes: int, most_rows: int
) -> tuple[torch.Tensor, str]:
    """Return the pair (synthetic records, the client's facts about these records as JSON).

    The JSON object has four keys: ``counts`` (records of each class), ``refused`` (the reason if the client made no
    records), ``facts`` (the privacy costs) and ``receipt`` (a digest of the client's privacy ledger). The content of
    ``facts`` and ``receipt`` is not checked. Raises Malformed for more than ``most_rows`` records, for records of
    another shape than ``input_shape``, and for numbers that are not finite. Also raises Malformed if the counts of the
    classes do not add up to the number of records.
    """
    check_names(content, {_POOL, _SAID})
    inputs = read_rows(content[_POOL], {"inputs": input_shape}, most_rows)["inputs"]
    text = content[_SAID].get(_JSON)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise Malformed("sent facts about its records that are no text, or too long")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("sent facts about its records that are not JSON") from error
    match facts:
        case {"counts": list(counts), "refused": str(), "facts": dict(), "receipt": dict() | None, **others} if (
            not others
        ):
            if len(counts) != num_classes or sum(whole_number(one, most_rows, "a count") for one in counts) != len(
                inputs
            ):
                raise Malformed(
                    f"sent counts that are not one for each of {num_classes} classes, or do not add up to its records"
                )
        case _:
            raise Malformed("sent facts about its records with other keys than counts, refused, facts and receipt")
    return inputs, text


def votes_content(votes: NDArray[np.int64]) -> RecordDict:
    """Return a message content with the votes of one teacher (a client of PATE).

    The teacher votes for one class for each public record. The shape of the votes is (records,).
    """
    return RecordDict({_VOTES: ArrayRecord({_VOTES: Array(votes)})})


def read_votes(content: RecordDict, num_records: int, num_classes: int) -> NDArray[np.int64]:
    """Return the votes of one teacher (a client of PATE), one class for each public record, shape (records,).

    Raises Malformed for another number of votes, and for a class that does not exist.
    """
    votes = _single_array(content, _VOTES, (num_records,), "<i8").astype(np.int64)
    if ((votes < 0) | (votes >= num_classes)).any():
        raise Malformed(f"votes for a class that does not exist: classes are 0 to {num_classes - 1}")
    return votes


def moments_content(moments: NDArray[np.float64]) -> RecordDict:
    """Return a message content with the moments (sums) of a client's features, one row for each class.

    A row has the number of the client's records of the class, the sums of their features, and the sums of products of
    features.
    """
    return RecordDict({_MOMENTS: ArrayRecord({_MOMENTS: Array(moments)})})


def read_moments(content: RecordDict, shape: tuple[int, int], most_records: int | None = None) -> NDArray[np.float64]:
    """Return the moments of a client's features in a message content.

    The moments have one row for each class; the first column is the number of records of the class. ``most_records``:
    the largest total number of records; None if the moments have noise. Raises Malformed for another shape, and for
    numbers that are not finite or far too large. Without noise, raises Malformed for invalid numbers of records, too.
    """
    moments = _single_array(content, _MOMENTS, shape, "<f8").astype(np.float64)
    if not (np.abs(moments) <= _LARGEST_MOMENT).all():
        raise Malformed("sent moments of features that are not finite, or far too large")
    counts = moments[:, 0]
    if most_records is not None and ((counts < 0) | (counts % 1 != 0) | (counts.sum() > most_records)).any():
        raise Malformed(f"sent numbers of records that are not whole, or add up to more than {most_records}")
    return moments


def sums_content(sums: Params) -> RecordDict:
    """Return a message content with tensors that a client sends outside of rounds, such as sums over its records."""
    return RecordDict({_SUMS: pack(sums)})


def read_sums(content: RecordDict, template: Params) -> Params:
    """Return the tensors in a message that ``sums_content`` made: float32, names and shapes as in ``template``.

    Raises Malformed for any other content.
    """
    check_names(content, {_SUMS})
    return read_group(content[_SUMS], layout_of(template))


def who_content(partition: int) -> RecordDict:
    """Return a message content with the ID of a node's client (Flower: its partition ID)."""
    return RecordDict({_REPORT: MetricRecord({_PARTITION: partition})})


def read_who(content: RecordDict) -> int:
    """Return the ID of a node's client (Flower: its partition ID). Raises Malformed for any other content."""
    check_names(content, {_REPORT})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or set(report) != {_PARTITION}:
        raise Malformed("reported something else than the ID of its client (Flower: its partition ID)")
    return whole_number(report[_PARTITION], sys.maxsize, "a partition's number")


def _single_array(content: RecordDict, name: str, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
    """Return the numbers of the only array in a message content.

    The content must have one Flower record, called ``name``, with one array, also called ``name``. Raises Malformed for
    any other content.
    """
    check_names(content, {name})
    record = content[name]
    if not isinstance(record, ArrayRecord) or set(record) != {name}:
        raise Malformed(f"sent no {name}, or other arrays in addition to the {name}")
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
