"""Every record key and every conversion between our values and Flower's records: nobody else spells one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.params import FlatParams, Layout, flattened
from fl_sim.types import Params, Payloads, Reply, RunError

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
    return _unpack(content[_PARAMS]), _groups(content, _BROADCAST)


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
    report = content[_REPORT]
    loss = report.get("loss")
    count = int(str(report["num-examples"]))
    return Reply(client, _groups(content, _PAYLOAD), count, None if loss is None else float(str(loss)))


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


def read_votes(content: RecordDict, num_records: int, num_classes: int) -> NDArray[np.int64]:
    """Unpack a teacher's votes, shape (records,). Raises RunError for anything but one class for each record."""
    records = content.array_records
    if set(content) != {_VOTES} or set(records) != {_VOTES} or set(records[_VOTES]) != {_VOTES}:
        raise RunError(f"the reply to {VOTE} holds no votes, or more than them")
    data, header = records[_VOTES][_VOTES].data, _npy_header((num_records,), "<i8")
    if not data.startswith(header) or len(data) != len(header) + 8 * num_records:
        raise RunError(f"the votes are not {num_records} whole numbers of 64 bits, one for each public record")
    votes = np.frombuffer(data, "<i8", offset=len(header)).astype(np.int64)
    if ((votes < 0) | (votes >= num_classes)).any():
        raise RunError(f"a vote is for a class that does not exist: classes are 0 to {num_classes - 1}")
    return votes


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({"partition-id": partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds."""
    return int(str(content.metric_records[_REPORT]["partition-id"]))


def to_arrays(params: Params) -> ArrayRecord:
    """Return named tensors as the record that Flower's own strategies exchange: one array a tensor."""
    return _record({name: value.detach() for name, value in params.items()})


class TensorArray(Array):
    """Flower's Array of a float32 tensor by reference: its bytes are made whenever somebody asks for them.

    Inside one process nobody does. What leaves it, pickled for Ray or through Flower's own runtime, is a plain Array.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32, "only float32 tensors travel"
        values = {"dtype": "float32", "shape": tuple(tensor.shape), "stype": "numpy.ndarray", "tensor": tensor}
        self.__dict__.update(values)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # a plain attribute in Flower's class
        """Return the tensor as numpy.save writes it."""
        tensor: torch.Tensor = self.__dict__["tensor"]
        return b"".join((_npy_header(self.shape), tensor.contiguous().numpy(force=True).data))

    def deflate(self) -> bytes:
        """Name the type that the other side knows: Flower's own runtime sends what this returns."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the Array that it stands for."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


def _pack(params: Params) -> ArrayRecord:
    # One array for a whole group, named by its layout.
    group = flattened(params)
    return _record({_write_layout(group.layout): group.flat})


def _record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    record = ArrayRecord()  # ArrayRecord({...}) would ask every array for its bytes
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def _groups(content: RecordDict, prefix: str) -> Payloads:
    # Not by content.array_records, which sorts all records into three new dictionaries.
    return {name.removeprefix(prefix): _unpack(record) for name, record in content.items() if name.startswith(prefix)}


def _unpack(record: Any) -> Params:
    ((layout, array),) = record.items()
    if isinstance(array, TensorArray):
        return FlatParams(array.__dict__["tensor"], _read_layout(layout))
    header = _npy_header(tuple(array.shape))
    values = (
        np.frombuffer(array.data, np.float32, offset=len(header)) if array.data.startswith(header) else array.numpy()
    )
    return FlatParams(torch.from_numpy(values.astype(np.float32)), _read_layout(layout))  # a copy: bytes are read-only


@lru_cache(maxsize=64)
def _npy_header(shape: tuple[int, ...], kind: str = "<f4") -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


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
        }
    )
