"""Every record key and every conversion between our values and Flower's records: nobody else spells one."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.types import Params, Payloads, Reply

TRAIN, SHARE, SYNTHESIZE, VOTE, WHO = "train", "train.share", "train.synthesize", "train.vote", "query"
"""Message types: one round's local training; sharing before the first round; releasing synthetic records before that;
training a teacher and voting on the public pool; which partition a node holds."""

_ORDER, _PARAMS, _REPORT, _POOL, _SAID, _VOTES = "order", "params", "report", "pool", "said", "votes"
_BROADCAST, _PAYLOAD = "broadcast/", "payload/"


@dataclass(frozen=True)
class Order:
    """The part of a message that is no tensor, and all the configuration a client has: nodes have no other.

    ``experiment``: the experiment as JSON; ``data_root``, ``state_dir``, ``pool`` (what clients shared for the
    algorithm) and ``synthetic`` (the pool of synthetic records): paths on a disk that all workers see, empty where
    there is none.
    """

    experiment: str
    server_round: int
    learning_rate: float
    data_root: str
    state_dir: str
    pool: str = ""
    synthetic: str = ""


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
    )


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Unpack (global model, broadcast groups)."""
    groups = {
        name.removeprefix(_BROADCAST): _unpack(record)
        for name, record in content.array_records.items()
        if name.startswith(_BROADCAST)
    }
    return _unpack(content.array_records[_PARAMS]), groups


def update_content(payloads: Payloads, num_examples: int, loss: float | None) -> RecordDict:
    """Pack a client's update."""
    report = MetricRecord({"num-examples": num_examples})
    if loss is not None:
        report["loss"] = loss
    content = RecordDict({_REPORT: report})
    for name, params in payloads.items():
        content[_PAYLOAD + name] = _pack(params)
    return content


def read_update(client: int, content: RecordDict) -> Reply:
    """Unpack a client's update."""
    payloads = {
        name.removeprefix(_PAYLOAD): _unpack(record)
        for name, record in content.array_records.items()
        if name.startswith(_PAYLOAD)
    }
    report = content.metric_records[_REPORT]
    loss = report.get("loss")
    return Reply(client, payloads, int(str(report["num-examples"])), None if loss is None else float(str(loss)))


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack what a client shares before the first round."""
    return RecordDict({_POOL: _pack(dict(shared))})


def read_pool(content: RecordDict) -> Params:
    """Unpack what a client shared."""
    return _unpack(content.array_records[_POOL])


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Pack a client's synthetic records and, as JSON, what it says of them."""
    return RecordDict({_POOL: _pack({"inputs": inputs}), _SAID: ConfigRecord({"json": said})})


def read_synthetic(content: RecordDict) -> tuple[torch.Tensor, str]:
    """Unpack (synthetic records, what the client says of them as JSON)."""
    return _unpack(content.array_records[_POOL])["inputs"], str(content.config_records[_SAID]["json"])


def votes_content(votes: NDArray[np.int64]) -> RecordDict:
    """Pack a teacher's votes, one class a public record."""
    return RecordDict({_VOTES: ArrayRecord({_VOTES: Array(votes)})})


def read_votes(content: RecordDict) -> NDArray[np.int64]:
    """Unpack a teacher's votes, shape (public records,)."""
    return np.asarray(content.array_records[_VOTES][_VOTES].numpy(), dtype=np.int64)


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({"partition-id": partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds."""
    return int(str(content.metric_records[_REPORT]["partition-id"]))


def to_arrays(params: Params) -> ArrayRecord:
    """Return named tensors as the record that Flower's own strategies exchange: one array a tensor."""
    return ArrayRecord({name: Array(value.numpy(force=True)) for name, value in params.items()})


def _pack(params: Params) -> ArrayRecord:
    # One array for a whole group, named by its layout, its few header bytes remembered: Array(values) for each tensor
    # has numpy format and parse the same headers again for every client.
    shapes = tuple((name, tuple(value.shape)) for name, value in params.items())
    assert all(value.dtype == torch.float32 for value in params.values()), "only float32 tensors travel"
    flat = torch.cat([value.detach().reshape(-1) for value in params.values()]) if params else torch.empty(0)
    data = b"".join((_npy_header(len(flat)), flat.numpy(force=True).data))
    return ArrayRecord({_write_layout(shapes): Array("float32", (len(flat),), "numpy.ndarray", data)})


def _unpack(record: ArrayRecord) -> Params:
    ((layout, array),) = record.items()
    shapes = _read_layout(layout)
    header = _npy_header(array.shape[0])
    values = (
        np.frombuffer(array.data, np.float32, offset=len(header)) if array.data.startswith(header) else array.numpy()
    )
    flat = torch.from_numpy(values.astype(np.float32))  # a copy: what arrived is read-only
    parts = torch.split(flat, [math.prod(shape) for _, shape in shapes])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


@lru_cache(maxsize=64)
def _npy_header(size: int) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (size,)})
    return buffer.getvalue()


@lru_cache(maxsize=64)
def _write_layout(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    return json.dumps(shapes)


@lru_cache(maxsize=64)
def _read_layout(layout: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((str(name), tuple(int(side) for side in shape)) for name, shape in json.loads(layout))


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
        }
    )
