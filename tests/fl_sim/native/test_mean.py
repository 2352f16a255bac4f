"""The mean of clients' updates."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.native.kernel import Kernel
from fl_sim.native.mean import by_torch, weighted_mean
from fl_sim.params import flattened

LEFT = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
RIGHT = {"b": torch.tensor(-1.0), "a": torch.tensor([10.0, 20.0])}


def _lists(values):
    return {name: value.tolist() for name, value in values.items()}


def test_weighted_mean_matches_numbers_by_hand():
    mean = weighted_mean([LEFT, RIGHT], [3, 1])
    assert _lists(mean) == {"a": [3.25, 6.5], "b": 2.0}
    assert all(value.dtype == torch.float32 for value in mean.values())


def test_weighted_mean_adds_in_float64():
    # In float32 1e8 + 1 is 1e8: the 1 would be lost, and the sum 0.
    items = [{"w": torch.tensor([value])} for value in (1e8, 1.0, -1e8)]
    assert weighted_mean(items, [1.0, 1.0, 1.0])["w"].item() == pytest.approx(1 / 3, rel=1e-6)


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.floats(0.125, 100)), min_size=1, max_size=6))
def test_weighted_mean_lies_between_its_items_and_ignores_the_scale_of_weights(pairs):
    items = [{"w": torch.tensor([value])} for value, _ in pairs]
    weights = [weight for _, weight in pairs]
    mean = weighted_mean(items, weights)["w"].item()
    values = [value for value, _ in pairs]
    assert min(values) - 1e-5 <= mean <= max(values) + 1e-5
    assert mean == pytest.approx(weighted_mean(items, [4 * weight for weight in weights])["w"].item(), abs=1e-6)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0]])
def test_a_mean_of_no_weight_is_refused(weights):
    with pytest.raises(ValueError, match="positive total weight, got 0"):
        weighted_mean([LEFT, RIGHT], weights)


@pytest.mark.parametrize("make", [dict, flattened])
def test_weighted_mean_is_one_fused_multiply_add_a_client_in_float64(make):
    generator = torch.Generator().manual_seed(1)
    items = [{"w": torch.randn(50, 3, generator=generator)} for _ in range(40)]
    weights = [float(torch.randint(1, 600, (), generator=generator)) for _ in items]
    sums = [Fraction(0)] * 150
    for item, weight in zip(items, weights, strict=True):
        factor = Fraction(weight / math.fsum(weights))
        sums = [
            Fraction(float(Fraction(total) + factor * Fraction(value)))  # exact, then rounded once
            for total, value in zip(sums, item["w"].flatten().tolist(), strict=True)
        ]
    expected = torch.tensor([float(total) for total in sums], dtype=torch.float64).float().reshape(50, 3)
    assert torch.equal(weighted_mean([make(item) for item in items], weights)["w"], expected)


def test_vectors_of_other_orders_go_by_name():
    assert _lists(weighted_mean([flattened(LEFT), flattened(RIGHT)], [3, 1])) == {"a": [3.25, 6.5], "b": 2.0}


@pytest.mark.parametrize("size", [1, 15, 1024, 1025, 5000])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_compiled_sum_has_the_bits_of_pytorchs(kernel: Kernel, size: int, count: int):
    generator = torch.Generator().manual_seed(size + count)
    vectors = [torch.randn(size, generator=generator) * 10.0 ** (index % 5) for index in range(count)]
    factors = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    assert torch.equal(kernel.weighted_sum(vectors, factors), by_torch(vectors, factors))


def test_the_compiled_sum_keeps_what_is_not_finite_and_overflows_as_float32_does(kernel: Kernel):
    vectors = [torch.tensor([1.0, math.nan, math.inf, 3e38]), torch.tensor([2.0, 1.0, -1.0, 3e38])]
    assert kernel.weighted_sum(vectors, [1.0, 1.0]).tolist() == pytest.approx(
        [3.0, math.nan, math.inf, math.inf], nan_ok=True
    )


def test_the_compiled_sum_reads_vectors_with_gaps_and_refuses_others(kernel: Kernel):
    gaps = torch.arange(10.0)[::2]
    assert kernel.weighted_sum([gaps], [2.0]).tolist() == [0.0, 4.0, 8.0, 12.0, 16.0]
    for other in (torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(1, 5)):
        with pytest.raises(ValueError, match="a vector of the sum"):
            kernel.weighted_sum([gaps, other], [1.0, 1.0])


def test_vectors_that_are_not_float32_are_added_by_pytorch():
    doubles = [flattened({"w": torch.tensor([value, 1.0], dtype=torch.float64)}) for value in (1.0, 2.0)]
    mean = weighted_mean(doubles, [1, 1])["w"]
    assert mean.dtype == torch.float64
    assert mean.tolist() == [1.5, 1.0]
