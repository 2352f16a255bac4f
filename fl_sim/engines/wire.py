"""Every record key and every conversion between our values and Flower's records: nobody else spells one.

What a client sends is not trusted: whoever reads an answer says what it must be, and anything else is Malformed. The
reasons quote numbers at most, never a client's text.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.engines.arrays import TensorArray, numbers_in, tensor_in
from fl_sim.engines.arrays import num_bytes as array_bytes
from fl_sim.errors import Malformed
from fl_sim.packed import Held, Packed, Size
from fl_sim.params import FlatParams, Layout, flattened, is_finite, layout_of, num_in
from fl_sim.types import Params, Payloads, Reply

TRAIN, SHARE, SYNTHESIZE, VOTE, WHO = "train", "train.share", "train.synthesize", "train.vote", "query"
SUMMARISE = "train.summarise"
"""Message types: one round's local training; sharing before the first round; releasing synthetic records before that;
training a teacher and voting on the public pool; which partition a node holds; moments of features after training."""

LAYERS = "batch-norm"
"""The group in which BatchNorm layers travel, both ways, and stay with clients. No algorithm has one of that name: a
run with such a one is refused."""

_ORDER, _PARAMS, _REPORT, _POOL, _SAID, _VOTES = "order", "params", "report", "pool", "said", "votes"
_MOMENTS, _TICKET = "moments", "ticket"
_BROADCAST, _PAYLOAD, _PACKED, _KEPT, _HELD = "broadcast/", "payload/", "packed/", "kept/", "held-back/"
_NUMBERS, _BITS = "numbers", "bits"
_NUM_EXAMPLES, _LOSS, _PARTITION, _JSON, _MOST_STEPS = "num-examples", "loss", "partition-id", "json", "most-steps"

_LARGEST_LOSS: Final = float(np.finfo(np.float32).max)
_LONGEST_TEXT: Final = 1_000_000
_LARGEST_MOMENT: Final = 1e100  # products of float32 numbers, added up


@dataclass(frozen=True)
class Order:
    """The part of a message that is no tensor, and all the configuration a client has: nodes have no other.

    ``experiment``: the experiment as JSON; ``data_root``, ``state_dir``, ``pool`` (what clients shared for the
    algorithm) and ``synthetic`` (the pool of synthetic records): paths on a disk that the worker sees, empty where
    there is none. To workers that see none goes ``for_the_road``. ``most_steps``: {client: how many local steps it has
    time for}, of those who must stop early. For nodes with records of their own: ``run`` names the run among others,
    and ``facts`` is what is public about the server's records, as JSON.
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

    @property
    def for_the_road(self) -> "Order":
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


@dataclass(frozen=True)
class Ticket:
    """What a client that is played elsewhere has paid for at home.

    ``key``: of its noise, a secret. ``counts``: of a share, how many records of each class to make.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unpacking:
    """How a group that travels compressed is read: how much it takes, and what it stands for."""

    size: Size
    unpack: Callable[[Packed], Params]


def task_content(order: Order, params: Params, broadcast: Payloads) -> RecordDict:
    """Pack a round's message; all clients of a round share one."""
    records = RecordDict({_ORDER: _config(order), _PARAMS: _pack(params)})
    for name, group in broadcast.items():
        records[_BROADCAST + name] = _pack(group)
    return records


def share_content(order: Order) -> RecordDict:
    """Pack the message that asks clients to share, to release synthetic records, or to vote, before the first round."""
    return RecordDict({_ORDER: _config(order)})


def read_order(content: RecordDict) -> Order:
    """Unpack the configuration of a message."""
    record = content.config_records[_ORDER]
    return Order(
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
    )


def reordered(content: RecordDict, order: Order) -> RecordDict:
    """Return a message's content with another configuration; its tensors are the same ones."""
    return RecordDict({**content, _ORDER: _config(order)})


def kept_records(kept: Payloads) -> Mapping[str, ArrayRecord]:
    """Pack what a client keeps, to be added to a content on its way to or from a worker that sees no disk of ours."""
    return {_KEPT + name: _pack(group) for name, group in kept.items()}


def ticket_records(ticket: Ticket) -> Mapping[str, ConfigRecord]:
    """Pack a ticket, to be added to the content of one client's message."""
    counts = list(ticket.counts)
    return {_TICKET: ConfigRecord({"key": ticket.key, "simulation-only": ticket.simulation_only, "counts": counts})}


def read_ticket(content: RecordDict) -> Ticket | None:
    """Unpack the ticket that came with a message, if any."""
    if _TICKET not in content:
        return None
    match dict(content.config_records[_TICKET]):
        case {"key": bytes(key), "simulation-only": bool(simulation_only), "counts": list(counts)}:
            return Ticket(key, simulation_only, tuple(int(count) for count in counts))
        case _:
            raise AssertionError("a ticket is what ticket_records made")


def take_kept(content: RecordDict) -> Payloads:
    """Return what a client keeps, and remove it from ``content``. Nobody else is to see it."""
    names = [name for name in content if name.startswith(_KEPT)]
    return {name.removeprefix(_KEPT): _unpack(content.pop(name)) for name in names}


def kept_in(content: RecordDict) -> Payloads:
    """Return what a client kept of its last round, where that came with its message."""
    return {name.removeprefix(_KEPT): _unpack(content[name]) for name in content if name.startswith(_KEPT)}


def is_same_round(one: RecordDict, other: RecordDict) -> bool:
    """Say whether the contents differ in nothing but what their clients keep: they were made of one."""
    return one[_ORDER] is other[_ORDER]


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Unpack (global model, broadcast groups)."""
    # Not by content.array_records, which sorts all records into three new dictionaries.
    groups = {
        name.removeprefix(_BROADCAST): _unpack(record)
        for name, record in content.items()
        if name.startswith(_BROADCAST)
    }
    return _unpack(content[_PARAMS]), groups


def update_content(
    payloads: Payloads, num_examples: int, loss: float | None, packed: Mapping[str, Packed] | None = None
) -> RecordDict:
    """Pack a client's update; ``packed``: those of its groups that travel compressed."""
    report = MetricRecord({_NUM_EXAMPLES: num_examples})
    if loss is not None:
        report[_LOSS] = loss
    content = RecordDict({_REPORT: report})
    for name, params in payloads.items():
        content[_PAYLOAD + name] = _pack(params)
    for name, group in (packed or {}).items():
        content[_PACKED + name] = _packed_record(group)
    return content


def read_update(
    client: int,
    content: RecordDict,
    template: Payloads,
    most_examples: int = sys.maxsize,
    packed: Mapping[str, Unpacking] | None = None,
) -> Reply:
    """Unpack a client's update, which has the names and shapes of ``template``, from at most that many records.

    ``packed``: how to read those of its groups that travel compressed. A loss may be infinite or NaN, as training that
    diverges makes it. Raises Malformed for anything else.
    """
    packed = packed or {}
    _exactly(content, {_REPORT, *((_PACKED if name in packed else _PAYLOAD) + name for name in template)})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or not {_NUM_EXAMPLES} <= set(report) <= {_NUM_EXAMPLES, _LOSS}:
        raise Malformed("reported something else than a number of records and a loss")
    count, loss = _whole(report[_NUM_EXAMPLES], most_examples, "a number of records"), report.get(_LOSS)
    if not isinstance(loss, float | int | None) or (loss is not None and _LARGEST_LOSS < abs(loss) < math.inf):
        raise Malformed("sent a loss that training in float32 cannot have")
    payloads = {
        name: packed[name].unpack(_read_packed(content[_PACKED + name], packed[name].size))
        if name in packed
        else _read_group(content[_PAYLOAD + name], layout_of(params))
        for name, params in template.items()
    }
    return Reply(client, payloads, count, None if loss is None else float(loss))


def with_held(state: Payloads, held: Held) -> Payloads:
    """Return what a client keeps for its next round: what its algorithm does, and what compression holds back."""
    return {**state, **{f"{_HELD}{group}/{part}": value for group, of in held.items() for part, value in of.items()}}


def without_held(state: Payloads) -> tuple[Payloads, dict[str, Payloads]]:
    """Return (what the algorithm kept, what compression held back by the group of the update)."""
    own, held = {}, dict[str, Payloads]()
    for name, value in state.items():
        if is_held(name):
            group, _, part = name.removeprefix(_HELD).rpartition("/")
            held.setdefault(group, {})[part] = value
        else:
            own[name] = value
    return own, held


def is_held(name: str) -> bool:
    """Say whether a client keeps under this name what compression holds back."""
    return name.startswith(_HELD)


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack what a client shares before the first round."""
    return RecordDict({_POOL: _pack(dict(shared))})


def read_pool(content: RecordDict, template: Params, most_rows: int) -> Params:
    """Unpack what a client shared: tensors like ``template``'s, but all of the same number of rows.

    Raises Malformed for anything else, more than ``most_rows``, and for numbers that are not finite.
    """
    _exactly(content, {_POOL})
    return _read_rows(content[_POOL], {name: tuple(value.shape[1:]) for name, value in template.items()}, most_rows)


def made_content(inputs: torch.Tensor) -> RecordDict:
    """Pack synthetic records on their way home, where what is to be said of them is added."""
    return RecordDict({_POOL: _pack({"inputs": inputs})})


def read_made(content: RecordDict) -> torch.Tensor:
    """Unpack what ``made_content`` packed, on a worker of ours."""
    return _unpack(content[_POOL])["inputs"]


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Pack a client's synthetic records and, as JSON, what it says of them."""
    return RecordDict({_POOL: _pack({"inputs": inputs}), _SAID: ConfigRecord({_JSON: said})})


def read_synthetic(
    content: RecordDict, input_shape: tuple[int, ...], num_classes: int, most_rows: int
) -> tuple[torch.Tensor, str]:
    """Unpack (synthetic records, what the client says of them as JSON: counts, refused, facts, receipt).

    Raises Malformed where the records are not ``most_rows`` or fewer of that shape, finite, and as many as the counts
    add up to; what the facts and the receipt say is not looked at.
    """
    _exactly(content, {_POOL, _SAID})
    inputs = _read_rows(content[_POOL], {"inputs": input_shape}, most_rows)["inputs"]
    text = content[_SAID].get(_JSON)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise Malformed("says of its records what is no text, or too long")
    match _read_json(text):
        case {"counts": list(counts), "refused": str(), "facts": dict(), "receipt": dict() | None, **others} if (
            not others
        ):
            if len(counts) != num_classes or sum(_whole(one, most_rows, "a count") for one in counts) != len(inputs):
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
    _exactly(content, {_VOTES})
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
    _exactly(content, {_MOMENTS})
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


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({_PARTITION: partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds. Raises Malformed for anything but a number from 0 on."""
    _exactly(content, {_REPORT})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or set(report) != {_PARTITION}:
        raise Malformed("reported something else than the number of a partition")
    return _whole(report[_PARTITION], sys.maxsize, "a partition's number")


def num_bytes(content: RecordDict) -> int:
    """Return how many bytes the arrays of a message have on their way, each as numpy.save writes it.

    That is 4 a number and 128 before each group of tensors; names, settings and Flower's own frame are not counted.
    """
    groups = (record for record in content.values() if isinstance(record, ArrayRecord))
    return sum(array_bytes(array) for group in groups for array in group.values())


def to_arrays(params: Params) -> ArrayRecord:
    """Return named tensors as the record that Flower's own strategies exchange: one array a tensor."""
    return _record({name: value.detach() for name, value in params.items()})


def _pack(params: Params) -> ArrayRecord:
    # One array for a whole group, named by its layout.
    group = flattened(params)
    return _record({_write_layout(group.layout): group.flat})


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    record = ArrayRecord()  # ArrayRecord({...}) would ask every array for its bytes
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def _unpack(record: Any) -> Params:
    """Unpack what a server sent, which clients trust."""
    ((text, array),) = record.items()
    layout = _read_layout(text)
    return FlatParams(tensor_in(array, (num_in(layout),)), layout)


def _read_group(record: object, layout: Layout) -> Params:
    if not isinstance(record, ArrayRecord) or set(record) != {_write_layout(layout)}:
        raise Malformed("sent tensors of other names, shapes or order than are exchanged")
    return FlatParams(tensor_in(record[_write_layout(layout)], (num_in(layout),)), layout)


def _packed_record(packed: Packed) -> ArrayRecord:
    record = ArrayRecord()
    if len(packed.numbers):
        record[_NUMBERS] = TensorArray(packed.numbers)
    if len(packed.bits):
        record[_BITS] = Array(packed.bits)
    return record


def _read_packed(record: object, size: Size) -> Packed:
    names = {name for name, count in ((_NUMBERS, size.numbers), (_BITS, size.bits)) if count}
    if not isinstance(record, ArrayRecord) or set(record) != names:
        raise Malformed("sent a compressed update of other parts than the others have")
    numbers = tensor_in(record[_NUMBERS], (size.numbers,)) if size.numbers else torch.zeros(0)
    bits = numbers_in(record[_BITS], (size.bits,), "|u1") if size.bits else np.zeros(0, np.uint8)
    return Packed(numbers, bits)


def _read_rows(record: object, shapes: Mapping[str, tuple[int, ...]], most_rows: int) -> Params:
    """Unpack tensors of these names and shapes, each with as many rows before it as the array has numbers for."""
    array = next(iter(record.values()), None) if isinstance(record, ArrayRecord) else None
    size = array.shape[0] if isinstance(array, Array) and len(array.shape) == 1 else -1
    rows, left = divmod(size, sum(map(math.prod, shapes.values())))
    if left or not 0 <= rows <= most_rows:
        raise Malformed(f"sent tensors that do not all have the same number of rows, from 0 to {most_rows}")
    params = _read_group(record, tuple((name, (rows, *shape)) for name, shape in shapes.items()))
    if not is_finite({"rows": params}):
        raise Malformed("sent numbers that are not finite")
    return params


def _read_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("says of its records what is not JSON") from error


def _exactly(content: RecordDict, names: set[str]) -> None:
    if set(content) != names:
        raise Malformed(f"sent other records than {', '.join(sorted(names))}")


def _whole(value: object, largest: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise Malformed(
            f"sent {what} that is not a whole number from 0" + (f" to {largest}" if largest < sys.maxsize else " on")
        )
    return value


@lru_cache(maxsize=64)
def _write_layout(layout: Layout) -> str:
    return json.dumps(layout)


@lru_cache(maxsize=64)
def _read_layout(text: str) -> Layout:
    return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in json.loads(text))


def error_of(message: Message) -> str | None:
    """Return why a client failed, or None where it did not."""
    return message.error.reason or "no reason given" if message.has_error() else None


def _config(order: Order) -> ConfigRecord:
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
            **({_MOST_STEPS: json.dumps(dict(order.most_steps))} if order.most_steps else {}),
        }
    )
