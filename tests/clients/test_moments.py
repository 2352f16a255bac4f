"""Moments of features by class: additive over clients, whatever each of them holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.moments import moments_of, num_moments, products, symmetric, triangle_of


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(1, 5))
def test_moments_of_parts_add_up_to_those_of_all(seed: int, size: int, num_features: int) -> None:
    draw = np.random.default_rng(seed)
    features, labels = draw.normal(size=(size, num_features)), draw.integers(0, 3, size)
    cut = draw.integers(0, size + 1)
    whole = moments_of(features, labels, 3)
    parts = moments_of(features[:cut], labels[:cut], 3) + moments_of(features[cut:], labels[cut:], 3)
    assert whole.shape == (3, num_moments(num_features))
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)


def test_moments_by_hand_and_zeros_for_a_class_that_is_not_there() -> None:
    moments = moments_of(np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([2, 2]), 3)
    assert moments[:2].tolist() == [[0.0] * 6] * 2
    assert moments[2, :3].tolist() == [2.0, 4.0, 1.0]
    assert symmetric(moments[2, 3:], 2) == pytest.approx(np.array([[10.0, -1.0], [-1.0, 5.0]]))


def test_a_triangle_is_as_long_as_its_matrix() -> None:
    matrix = np.array([[2.0, 1.0], [1.0, -3.0]])
    assert np.linalg.norm(triangle_of(matrix)) == pytest.approx(np.linalg.norm(matrix))
    assert symmetric(triangle_of(matrix), 2) == pytest.approx(matrix)
    row = np.array([[3.0, -2.0]])
    assert products(row)[0] == pytest.approx(triangle_of(row.T @ row))
    assert np.linalg.norm(products(row)) == pytest.approx(13.0)
