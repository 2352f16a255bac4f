"""Values through Flower's records and back, and the bytes themselves against Flower's own."""

from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from hypothesis import given
from hypothesis.extra import numpy as hnp

from fl_sim import wire

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))


def _bits(values):
    return values.shape, values.dtype, values.tobytes()


@given(FLOATS)
def test_float32_arrays_of_every_shape_come_back_bit_for_bit(values):
    back = wire.to_params(wire.to_arrays({"w": torch.from_numpy(values.copy())}))["w"]
    assert _bits(back.numpy()) == _bits(values)
    back += 1  # it is a copy that may be written to


@given(FLOATS)
def test_arrays_are_what_flowers_constructor_makes_byte_for_byte(values):
    ours, theirs = wire.to_arrays({"w": torch.from_numpy(values.copy())})["w"], Array(values)
    assert (ours.dtype, tuple(ours.shape), ours.stype, ours.data) == (
        theirs.dtype, tuple(theirs.shape), theirs.stype, theirs.data,
    )  # fmt: skip
    assert _bits(ours.numpy()) == _bits(values)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_other_types_come_back_too(dtype):
    values = torch.from_numpy(np.arange(6).reshape(2, 3).astype(dtype))
    back = wire.to_params(wire.to_arrays({"w": values}))["w"]
    assert back.dtype == values.dtype
    assert torch.equal(back, values)


def test_tensors_that_are_views_or_carry_gradients_can_be_sent():
    values = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert torch.equal(wire.to_params(wire.to_arrays({"w": values}))["w"], values.detach())


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2), (5,), (), (0, 3)])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_other_writers_are_read_right(shape, dtype, order):
    values = np.asarray(np.arange(np.prod(shape)).reshape(shape), dtype=dtype, order=order)
    back = wire.to_params(ArrayRecord({"w": Array(values)}))["w"]
    assert back.shape == shape
    assert back.is_contiguous()
    assert back.tolist() == values.tolist()


def test_another_version_of_the_format_is_read_right():
    values, buffer = np.arange(6, dtype=np.float32).reshape(2, 3), BytesIO()
    np.lib.format.write_array(buffer, values, version=(2, 0))
    array = Array("float32", (2, 3), "numpy.ndarray", buffer.getvalue())
    assert torch.equal(wire.to_params(ArrayRecord({"w": array}))["w"], torch.from_numpy(values))


def test_a_task_comes_back_whole():
    order = wire.Order('{"data": "digits"}', 7, 0.1 + 0.2, "/data root", "/state", "/pool")
    groups = {"control": {"w": torch.ones(2)}, "other": {"v": torch.zeros(1), "w": torch.ones(())}}
    content = wire.task_content(order, {"w": torch.tensor([1.0, 2.0])}, groups)
    assert wire.read_order(content) == order  # the learning rate to the last bit
    params, broadcast = wire.read_task(content)
    assert params["w"].tolist() == [1.0, 2.0]
    assert {name: {key: value.tolist() for key, value in group.items()} for name, group in broadcast.items()} == {
        "control": {"w": [1.0, 1.0]}, "other": {"v": [0.0], "w": 1.0},
    }  # fmt: skip
    assert wire.read_order(wire.share_content(order)) == order


@pytest.mark.parametrize("loss", [None, 0.1 + 0.2, float("inf")])
def test_an_update_comes_back_whole(loss):
    payloads = {"delta": {"a": torch.ones(2, 2)}, "control_delta": {"a": torch.zeros(2, 2)}}
    reply = wire.read_update(5, wire.update_content(payloads, 12, loss))
    assert (reply.client, reply.num_examples, reply.loss) == (5, 12, loss)
    assert reply.payloads.keys() == payloads.keys()
    assert all(torch.equal(reply.payloads[name]["a"], payloads[name]["a"]) for name in payloads)


def test_a_pool_and_a_partition_number_come_back():
    shared = {"inputs": torch.ones(0, 3), "labels": torch.ones(2, 4)}
    back = wire.read_pool(wire.pool_content(shared))
    assert {name: tuple(value.shape) for name, value in back.items()} == {"inputs": (0, 3), "labels": (2, 4)}
    assert wire.read_who(wire.who_content(41)) == 41


def test_errors_are_told_from_content(reply_of):
    good = reply_of(0, RecordDict())
    assert wire.error_of(good) is None
    sent = Message(RecordDict(), 1000, wire.TRAIN)
    sent.metadata.__dict__["_message_id"] = "sent"
    assert wire.error_of(Message(Error(1, "why"), reply_to=sent)) == "why"
    assert wire.error_of(Message(Error(1), reply_to=sent)) == "no reason given"
