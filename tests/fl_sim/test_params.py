"""Arithmetic on named tensors."""

import pytest
import torch

from fl_sim import params

LEFT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
RIGHT = {"b": torch.tensor(-1.0), "a": torch.tensor([10.0, 20.0])}


def _lists(values):
    return {name: value.tolist() for name, value in values.items()}


def test_sums_differences_and_multiples_go_by_name():
    assert _lists(params.add(LEFT, RIGHT)) == {"a": [11.0, 22.0], "b": 2.0}
    assert _lists(params.add(LEFT, RIGHT, 0.5)) == {"a": [6.0, 12.0], "b": 2.5}
    assert _lists(params.subtract(LEFT, RIGHT)) == {"a": [-9.0, -18.0], "b": 4.0}
    assert _lists(params.scale(LEFT, -2.0)) == {"a": [-2.0, -4.0], "b": -6.0}
    assert _lists(params.zeros_like(LEFT)) == {"a": [0.0, 0.0], "b": 0.0}
    assert params.num_parameters(LEFT) == 3
    assert _lists(LEFT) == {"a": [1.0, 2.0], "b": 3.0}


def test_one_bad_number_anywhere_is_not_finite_and_large_ones_are():
    large = torch.full((1000,), 3e38)
    assert params.is_finite({"a": {"w": large, "empty": torch.zeros(0)}, "b": {"v": -large}})
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = large.clone()
        spoiled[500] = bad
        assert not params.is_finite({"a": {"w": large}, "b": {"v": spoiled}})
    assert not params.is_finite({"a": {"w": torch.tensor([float("inf"), -float("inf")])}})


def test_the_shape_of_the_last_layer_comes_from_its_name_or_its_place():
    named = {"body.weight": torch.zeros(2, 5), "last.weight": torch.zeros(3, 2), "last.bias": torch.zeros(3)}
    assert params.head_shape(named) == (3, 2)
    assert params.head_shape({"head.weight": torch.zeros(7, 4), **named}) == (7, 4)


def test_detached_copies_leave_the_graph_and_the_original():
    weight = torch.ones(2, requires_grad=True)
    copy = params.detached([("w", weight)])["w"]
    copy += 1
    assert not copy.requires_grad
    assert weight.tolist() == [1.0, 1.0]


NAMED = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "none": torch.zeros(0, 2)}


def test_a_vector_has_the_names_shapes_and_numbers_of_its_tensors():
    flat = params.flattened(NAMED)
    assert flat.flat.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert list(flat) == list(NAMED) == [name for name, _ in flat.items()]
    assert len(flat) == len(flat.values()) == 3
    assert all(torch.equal(flat[name], value) for name, value in NAMED.items())
    assert flat["a.weight"].data_ptr() == flat.flat.data_ptr()  # a view
    assert params.flattened(flat) is flat
    assert params.layout_of(flat) == params.layout_of(NAMED)
    assert params.num_parameters(flat) == params.num_parameters(NAMED) == 7
    assert len(params.flattened({})) == 0


def test_flattening_leaves_the_graph_and_the_original():
    weight = torch.ones(2, requires_grad=True)
    flat = params.flattened({"w": weight})
    flat.flat.add_(1)
    assert not flat.flat.requires_grad
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("flat", [(True, True), (True, False), (False, True)])
def test_vectors_add_up_to_the_same_bits_as_tensors_do(flat):
    generator = torch.Generator().manual_seed(0)
    plain = [{"w": torch.randn(37, 3, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(2)]
    left, right = (params.flattened(item) if chosen else item for item, chosen in zip(plain, flat, strict=True))
    for operation in (params.add, params.subtract, lambda x, y: params.add(x, y, 0.3)):
        got, expected = operation(left, right), operation(*plain)
        assert isinstance(got, params.FlatParams)
        assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_other_orders_of_names_go_by_name():
    left, right = params.flattened(LEFT), params.flattened(RIGHT)
    assert (
        _lists(params.subtract(left, right)) == _lists(params.subtract(left, RIGHT)) == {"a": [-9.0, -18.0], "b": 4.0}
    )
    assert params.vector_in(right, params.layout_of(LEFT)).tolist() == [10.0, 20.0, -1.0]


def test_multiples_and_zeros_of_vectors_are_vectors():
    flat = params.flattened(LEFT)
    assert _lists(params.scale(flat, -2.0)) == {"a": [-2.0, -4.0], "b": -6.0}
    assert _lists(params.zeros_like(flat)) == {"a": [0.0, 0.0], "b": 0.0}
    assert not params.is_finite({"delta": params.flattened({"w": torch.tensor([1.0, float("nan")])})})
    assert params.is_finite({"delta": flat})
