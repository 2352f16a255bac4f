"""What a client may send is said exactly; anything else is Malformed, in our words, and nothing else is raised."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_sim.engines import wire
from fl_sim.engines.arrays import numbers_in
from fl_sim.errors import Malformed

TEMPLATE = {"delta": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}}
LAYOUT = '[["w", [2, 3]], ["b", [2]]]'
GOOD = Array(np.arange(8, dtype=np.float32))


def update(**changes: object) -> RecordDict:
    report = MetricRecord({"num-examples": 5, "loss": 0.5})
    return RecordDict({"report": report, "payload/delta": ArrayRecord({LAYOUT: GOOD}), **changes})


def report(**entries: object) -> RecordDict:
    return update(report=MetricRecord({key.replace("_", "-"): value for key, value in entries.items()}))


def payload(**arrays: Array) -> RecordDict:
    return update(**{"payload/delta": ArrayRecord(arrays)})


def forged(dtype: str = "float32", shape: tuple[int, ...] = (8,), stype: str = "numpy.ndarray", data: bytes = b""):
    return Array(dtype, shape, stype, data or GOOD.data)


UPDATES = {
    "nothing": RecordDict(),
    "no report": RecordDict({"payload/delta": ArrayRecord({LAYOUT: GOOD})}),
    "no tensors": RecordDict({"report": MetricRecord({"num-examples": 5})}),
    "a foreign group": update(**{"payload/more": ArrayRecord({LAYOUT: GOOD})}),
    "a foreign record": update(more=ConfigRecord({"a": "b"})),
    "a report of another kind": update(report=ConfigRecord({"num-examples": 5})),
    "tensors of another kind": update(**{"payload/delta": ConfigRecord({LAYOUT: "x"})}),
    "no number of records": report(loss=0.5),
    "a foreign entry": report(num_examples=5, more=1),
    "records: a fraction": report(num_examples=2.5),
    "records: negative": report(num_examples=-1),
    "records: beyond the data": report(num_examples=101),
    "records: several": report(num_examples=[5, 5]),
    "loss: several": report(num_examples=5, loss=[0.5]),
    "loss: beyond float32": report(num_examples=5, loss=1e308),
    "loss: an integer beyond all": report(num_examples=5, loss=10**400),
    "two arrays": payload(**{LAYOUT: GOOD, "more": GOOD}),
    "no array": payload(),
    "another order": payload(**{'[["b", [2]], ["w", [2, 3]]]': GOOD}),
    "other names": payload(**{'[["v", [2, 3]], ["b", [2]]]': GOOD}),
    "other shapes": payload(**{'[["w", [3, 2]], ["b", [2]]]': GOOD}),
    "names that are not JSON": payload(**{LAYOUT[:-1]: GOOD}),
    "names that are nested": payload(**{"[" * 100_000: GOOD}),
    "fewer numbers": payload(**{LAYOUT: Array(np.zeros(7, np.float32))}),
    "more numbers": payload(**{LAYOUT: Array(np.zeros(9, np.float32))}),
    "a matrix": payload(**{LAYOUT: Array(np.zeros((2, 4), np.float32))}),
    "64 bits": payload(**{LAYOUT: Array(np.zeros(8))}),
    "integers": payload(**{LAYOUT: Array(np.zeros(8, np.int32))}),
    "the other byte order": payload(**{LAYOUT: Array(np.zeros(8, ">f4"))}),
    "objects": payload(**{LAYOUT: forged(data=GOOD.data.replace(b"<f4", b"|O "))}),
    "cut off": payload(**{LAYOUT: forged(data=GOOD.data[:-1])}),
    "terabytes": payload(**{LAYOUT: forged(data=GOOD.data.replace(b"(8,), }   ", b"(8000000,)"))}),
    "no bytes of numpy's": payload(**{LAYOUT: forged(data=b"\0" * len(GOOD.data))}),
}  # fmt: skip


@pytest.mark.parametrize("content", UPDATES.values(), ids=UPDATES)
def test_an_update_that_is_none_is_malformed(content: RecordDict) -> None:
    with pytest.raises(Malformed) as caught:
        wire.read_update(3, content, TEMPLATE, 100)
    assert caught.value.said == ""


def test_an_update_as_it_should_be_is_read_whatever_the_array_says_of_itself() -> None:
    for array in (GOOD, forged(dtype="object", shape=(10**15,), stype="pickle")):
        reply = wire.read_update(3, payload(**{LAYOUT: array}), TEMPLATE, 100)
        assert reply.payloads["delta"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (reply.client, reply.num_examples, reply.loss) == (3, 5, 0.5)


SHARED = {"inputs": torch.zeros(0, 2, 2), "labels": torch.zeros(0, 3)}


def pool(inputs: np.ndarray, labels: np.ndarray) -> RecordDict:
    return wire.pool_content({"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)})


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


POOLS = {
    "more labels than inputs": pool(ones(2, 2, 2), ones(3, 3)),
    "more labels than inputs, as many numbers": pool(ones(1, 2, 2), ones(1, 10)),
    "another shape": pool(ones(2, 4), ones(2, 3)),
    "another number of classes": pool(ones(2, 2, 2), ones(2, 4)),
    "too many rows": pool(ones(9, 2, 2), ones(9, 3)),
    "NaN": pool(ones(2, 2, 2) * np.float32(np.nan), ones(2, 3)),
    "infinity": pool(ones(2, 2, 2), ones(2, 3) * np.float32(np.inf)),
    "nothing": RecordDict(),
    "another record": RecordDict({"pool": ConfigRecord({"inputs": 1})}),
    "no array": RecordDict({"pool": ArrayRecord()}),
    "a number without an axis": RecordDict({"pool": ArrayRecord({"x": Array(ones())})}),
    "one array a tensor": RecordDict(
        {"pool": ArrayRecord({"inputs": Array(ones(2, 2, 2)), "labels": Array(ones(2, 3))})}
    ),
    "rows below zero": RecordDict({"pool": ArrayRecord({"x": forged(shape=(-7,))})}),
}


@pytest.mark.parametrize("content", POOLS.values(), ids=POOLS)
def test_what_is_shared_has_as_many_labels_as_inputs_all_finite(content: RecordDict) -> None:
    with pytest.raises(Malformed):
        wire.read_pool(content, SHARED, most_rows=8)


def synthetic(inputs: np.ndarray | None = None, **changes: object) -> RecordDict:
    said = {"counts": [1, 0, 2], "refused": "", "facts": {}, "receipt": None, **changes}
    return wire.synthetic_content(torch.from_numpy(ones(3, 2, 2) if inputs is None else inputs), json.dumps(said))


def with_text(text: object) -> RecordDict:
    content = synthetic()
    content["said"] = ConfigRecord({"json": text})
    return content


SYNTHETIC = {
    "counts that do not add up": synthetic(counts=[1, 1, 2]),
    "a class too many": synthetic(counts=[1, 0, 2, 0]),
    "a class too few": synthetic(counts=[3, 0]),
    "a negative count": synthetic(counts=[4, 1, -2]),
    "half a record": synthetic(counts=[1.5, 0, 1.5]),
    "true": synthetic(counts=[True, 0, 2]),
    "counts beyond all": synthetic(counts=[10**30, 0, 0]),
    "no counts": with_text('{"refused": "", "facts": {}, "receipt": null}'),
    "a foreign entry": synthetic(more=1),
    "facts of another kind": synthetic(facts=[]),
    "a reason of another kind": synthetic(refused=None),
    "not JSON": with_text("{"),
    "nested JSON": with_text("[" * 100_000),
    "a number of a million digits": with_text("9" * 999_999),
    "a longer text": with_text(" " * 1_000_001),
    "a list": with_text("[]"),
    "no text": with_text(5),
    "another shape": synthetic(ones(3, 4)),
    "NaN": synthetic(ones(3, 2, 2) * np.float32(np.nan)),
    "too many": synthetic(ones(9, 2, 2), counts=[9, 0, 0]),
    "nothing": RecordDict(),
}


@pytest.mark.parametrize("content", SYNTHETIC.values(), ids=SYNTHETIC)
def test_synthetic_records_are_as_many_as_the_counts_of_classes_that_exist(content: RecordDict) -> None:
    with pytest.raises(Malformed):
        wire.read_synthetic(content, (2, 2), 3, most_rows=8)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"report": MetricRecord({})}),
        RecordDict({"report": MetricRecord({"partition-id": 1.0})}),
        RecordDict({"report": MetricRecord({"partition-id": -1})}),
        RecordDict({"report": MetricRecord({"partition-id": [1]})}),
        RecordDict({"report": MetricRecord({"partition-id": 1, "more": 1})}),
        RecordDict({"report": ConfigRecord({"partition-id": 1})}),
        RecordDict({"report": MetricRecord({"partition-id": 1}), "more": MetricRecord({})}),
    ],
)
def test_a_partition_is_a_number_from_0_on(content: RecordDict) -> None:
    with pytest.raises(Malformed):
        wire.read_who(content)


def test_what_is_no_array_holds_no_numbers() -> None:
    for odd in (None, 5, b"bytes", np.zeros(8)):
        with pytest.raises(Malformed):
            numbers_in(odd, (8,), "<f4")
