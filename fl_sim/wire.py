"""Every record key and every conversion between our values and Flower's records: nobody else spells one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.types import Params, Payloads, Reply

TRAIN, SHARE, WHO = "train", "train.share", "query"
"""Message types: one round's local training; sharing before the first round; which partition a node holds."""

_ORDER, _PARAMS, _REPORT, _POOL = "order", "params", "report", "pool"
_BROADCAST, _PAYLOAD = "broadcast/", "payload/"


@dataclass(frozen=True)
class Order:
    """The part of a message that is no tensor, and all the configuration a client has: nodes have no other.

    ``experiment``: the experiment as JSON; ``data_root``, ``state_dir`` and ``pool``: paths on a disk that all workers
    see, empty where there is none.
    """

    experiment: str
    server_round: int
    learning_rate: float
    data_root: str
    state_dir: str
    pool: str


def task_content(order: Order, params: Params, broadcast: Payloads) -> RecordDict:
    """Pack a round's message; all clients of a round share one."""
    records = RecordDict({_ORDER: _config(order), _PARAMS: to_arrays(params)})
    for name, group in broadcast.items():
        records[_BROADCAST + name] = to_arrays(group)
    return records


def share_content(order: Order) -> RecordDict:
    """Pack the message that asks clients to share before the first round."""
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
    )


def read_task(content: RecordDict) -> tuple[Params, Payloads]:
    """Unpack (global model, broadcast groups)."""
    groups = {
        name.removeprefix(_BROADCAST): to_params(record)
        for name, record in content.array_records.items()
        if name.startswith(_BROADCAST)
    }
    return to_params(content.array_records[_PARAMS]), groups


def update_content(payloads: Payloads, num_examples: int, loss: float | None) -> RecordDict:
    """Pack a client's update."""
    report = MetricRecord({"num-examples": num_examples})
    if loss is not None:
        report["loss"] = loss
    content = RecordDict({_REPORT: report})
    for name, params in payloads.items():
        content[_PAYLOAD + name] = to_arrays(params)
    return content


def read_update(client: int, content: RecordDict) -> Reply:
    """Unpack a client's update."""
    payloads = {
        name.removeprefix(_PAYLOAD): to_params(record)
        for name, record in content.array_records.items()
        if name.startswith(_PAYLOAD)
    }
    report = content.metric_records[_REPORT]
    loss = report.get("loss")
    return Reply(client, payloads, int(str(report["num-examples"])), None if loss is None else float(str(loss)))


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack what a client shares before the first round."""
    return RecordDict({_POOL: to_arrays(dict(shared))})


def read_pool(content: RecordDict) -> Params:
    """Unpack what a client shared."""
    return to_params(content.array_records[_POOL])


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({"partition-id": partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds."""
    return int(str(content.metric_records[_REPORT]["partition-id"]))


def to_arrays(params: Params) -> ArrayRecord:
    """Return named tensors as a Flower record."""
    return ArrayRecord({name: _to_array(value.numpy(force=True)) for name, value in params.items()})


def to_params(record: ArrayRecord) -> Params:
    """Return a Flower record as named tensors."""
    return {name: torch.from_numpy(_from_array(array)) for name, array in record.items()}


def _to_array(values: NDArray[np.generic]) -> Array:
    # What Array(values) makes, at a tenth of its cost: numpy writes and parses the same few headers thousands of times.
    data = b"".join((_npy_header(values.dtype.str, values.shape), np.ascontiguousarray(values).data))
    return Array(str(values.dtype), values.shape, "numpy.ndarray", data)


def _from_array(array: Array) -> NDArray[np.generic]:
    dtype = np.dtype(array.dtype)
    header = _npy_header(dtype.str, tuple(array.shape))
    if not (dtype.isnative and array.data.startswith(header)):
        # Not written by us: another byte order (torch takes only the native one), memory order or format version.
        return np.array(array.numpy(), dtype=dtype.newbyteorder("="), order="C")
    return np.frombuffer(array.data, array.dtype, offset=len(header)).reshape(array.shape).copy()


@lru_cache(maxsize=1024)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def error_of(message: Message) -> str | None:
    """Return why a client failed, its last line first, or None where it did not."""
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
        }
    )
