"""Values through Flower's records and back, and the bytes themselves against Flower's own."""

import pickle

import numpy as np
import pytest
import torch
from flwr.app import Array, Error, Message, RecordDict
from hypothesis import given
from hypothesis.extra import numpy as hnp

from fl_sim.engines import arrays, wire
from fl_sim.params import flattened
from fl_sim.types import ClientUpdate

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))


def _round_trip(params):
    return wire.read_update(0, wire.update_content(ClientUpdate({"delta": params}, 1)), {"delta": params}).payloads[
        "delta"
    ]


@given(FLOATS, FLOATS)
def test_float32_tensors_of_every_shape_come_back_bit_for_bit(first, second):
    sent = {"0.weight": torch.from_numpy(first.copy()), 'odd "name" é': torch.from_numpy(second.copy())}
    back = _round_trip(sent)
    assert list(back) == list(sent)
    for name, value in sent.items():
        assert back[name].shape == value.shape
        assert back[name].numpy().tobytes() == value.numpy().tobytes()


def test_inside_one_process_a_vector_travels_by_reference():
    sent = flattened({"w": torch.ones(3), "b": torch.zeros(2)})
    content = wire.update_content(ClientUpdate({"delta": sent}, 1))
    first, second = (wire.read_update(0, content, {"delta": sent}).payloads["delta"] for _ in range(2))
    assert first.flat.data_ptr() == second.flat.data_ptr() == sent.flat.data_ptr()
    assert first["b"].data_ptr() == sent["b"].data_ptr()
    assert not any("data" in vars(array) for array in content["payload/delta"].values())  # no bytes were made


def test_separate_tensors_are_copied_when_they_are_sent():
    sent = {"w": torch.ones(3)}
    content = wire.update_content(ClientUpdate({"delta": sent}, 1))
    sent["w"] += 1
    assert wire.read_update(0, content, {"delta": sent}).payloads["delta"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_what_leaves_the_process_is_a_plain_array_of_flowers_own_bytes():
    sent = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(())}
    content = wire.update_content(ClientUpdate({"delta": sent}, 1))
    arrived = pickle.loads(pickle.dumps(content))
    for left, right in zip(content["payload/delta"].values(), arrived["payload/delta"].values(), strict=True):
        assert type(right) is Array
        assert right.data == left.data == Array(np.array([0, 1, 2, 3, 4, 5, 1], np.float32)).data
        assert left.object_id == right.object_id  # what Flower's own runtime sends
    first, second = (wire.read_update(0, arrived, {"delta": sent}).payloads["delta"] for _ in range(2))
    assert {name: value.tolist() for name, value in first.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "b": 1.0}
    first["w"].add_(5)  # no memory is shared with the bytes
    assert second["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_group_without_tensors_comes_back_empty():
    assert _round_trip({}) == {}


def test_tensors_that_are_views_or_carry_gradients_can_be_sent():
    values = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert torch.equal(_round_trip({"w": values})["w"], values.detach())


def test_other_types_are_refused_and_not_rounded():
    with pytest.raises(AssertionError, match="float32"):
        _round_trip({"w": torch.ones(2, dtype=torch.float64)})


@given(FLOATS)
def test_the_model_flower_sees_is_what_its_own_constructor_makes(values):
    ours, theirs = arrays.array_record({"w": torch.from_numpy(values.copy())})["w"], Array(values)
    assert (ours.dtype, tuple(ours.shape), ours.stype, ours.data) == (
        theirs.dtype, tuple(theirs.shape), theirs.stype, theirs.data,
    )  # fmt: skip


def test_a_task_comes_back_whole():
    order = wire.TaskConfig('{"data": "digits"}', 7, 0.1 + 0.2, "/data root", "/state", "/pool")
    groups = {"control": {"w": torch.ones(2)}, "other": {"v": torch.zeros(1), "w": torch.ones(())}}
    content = wire.task_content(order, {"w": torch.tensor([1.0, 2.0])}, groups)
    assert wire.read_task_config(content) == order  # the learning rate to the last bit
    params, broadcast = wire.read_task(content)
    assert params["w"].tolist() == [1.0, 2.0]
    assert {name: {key: value.tolist() for key, value in group.items()} for name, group in broadcast.items()} == {
        "control": {"w": [1.0, 1.0]}, "other": {"v": [0.0], "w": 1.0},
    }  # fmt: skip
    assert wire.read_task_config(wire.config_content(order)) == order


@pytest.mark.parametrize("loss", [None, 0.1 + 0.2, float("inf")])
def test_an_update_comes_back_whole(loss):
    payloads = {"delta": {"a": torch.ones(2, 2)}, "control_delta": {"a": torch.zeros(2, 2)}}
    reply = wire.read_update(5, wire.update_content(ClientUpdate(payloads, 12, loss)), payloads)
    assert (reply.client, reply.num_examples, reply.loss) == (5, 12, loss)
    assert reply.payloads.keys() == payloads.keys()
    assert all(torch.equal(reply.payloads[name]["a"], payloads[name]["a"]) for name in payloads)


def test_a_pool_and_a_partition_number_come_back():
    shared = {"inputs": torch.ones(2, 3), "labels": torch.ones(2, 4)}
    back = wire.read_pool(wire.pool_content(shared), {name: value[:0] for name, value in shared.items()}, 2)
    assert {name: tuple(value.shape) for name, value in back.items()} == {"inputs": (2, 3), "labels": (2, 4)}
    assert wire.read_who(wire.who_content(41)) == 41


def test_errors_are_told_from_content(reply_of):
    good = reply_of(0, RecordDict())
    assert wire.error_of(good) is None
    sent = Message(RecordDict(), 1000, wire.TRAIN)
    sent.metadata.__dict__["_message_id"] = "sent"
    assert wire.error_of(Message(Error(1, "why"), reply_to=sent)) == "why"
    assert wire.error_of(Message(Error(1), reply_to=sent)) == "no reason given"
