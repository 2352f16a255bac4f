"""Sums of products of features: exact for every split and order, and private by one Gaussian mechanism."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from clients.gram import SENSITIVITY, STEP, num_products, packed, products_of, unpacked, vectors_of
from clients.moments import triangle_of
from clients.private_gram import longest_private, private_products
from clients.private_moments import Protection
from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise

PROTECTION = Protection(2.0, 1e-5, 0.0, "seeded", SENSITIVITY)
CLASSES = 3


def _records(count: int = 40, size: int = 5, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(count, size)), draw.integers(0, CLASSES, count)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.permutations(range(4)))
def test_the_sums_of_every_split_in_every_order_are_the_same_bits(owners: list[int], order: list[int]) -> None:
    features, labels = _records()
    whole = packed(*products_of(features, labels, CLASSES, 2.0))
    parts = [np.array(owners) == client for client in order]
    added = np.sum([packed(*products_of(features[one], labels[one], CLASSES, 2.0)) for one in parts], axis=0)
    assert whole.tobytes() == added.tobytes()


def test_sums_are_those_of_the_vectors_and_have_their_place() -> None:
    features, labels = _records()
    vectors = vectors_of(features, 2.0) * STEP
    gram, by_class = unpacked(packed(*products_of(features, labels, CLASSES, 2.0)), 5, CLASSES)
    assert np.allclose(gram, vectors.T @ vectors, rtol=0, atol=1e-12)
    assert np.allclose(by_class, vectors.T @ np.eye(CLASSES)[labels], rtol=0, atol=1e-12)
    expected = np.concatenate([features / np.maximum(np.linalg.norm(features, axis=1) / 2, 1)[:, None] / 2])
    assert np.allclose(vectors[:, :-1], math.sqrt(0.91) * expected, atol=2e-4)
    assert np.allclose(vectors[:, -1], 0.3, atol=2e-4)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, 6, elements=st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, 1e30])),
    st.integers(0, CLASSES - 1),
    st.sampled_from([None, PROTECTION]),
)
def test_one_record_moves_the_sums_by_at_most_their_sensitivity(
    feature: NDArray[np.float64], label: int, protection: Protection | None
) -> None:
    longest = 1.0 if protection is None else longest_private(6, CLASSES, protection)
    vector = vectors_of(feature[None], 1.0, longest)[0] * STEP
    assert float(np.linalg.norm(vector)) <= 1
    assert vector.any() == np.isfinite(feature).all()
    gram, by_class = products_of(feature[None], np.array([label]), CLASSES, 1.0, longest)
    moved = math.hypot(float(np.linalg.norm(triangle_of(gram))), float(np.linalg.norm(by_class)))
    assert moved <= SENSITIVITY
    if np.isfinite(feature).all() and np.linalg.norm(feature) >= 1:
        assert moved > 0.999 * SENSITIVITY


def test_noise_has_the_deviation_of_its_place_and_is_another_for_each_key() -> None:
    features, labels = _records(30, 12)
    exact = products_of(features, labels, CLASSES, 2.0)
    found: list[tuple[Any, Any]] = []
    for key in range(60):
        noisy = private_products(features, labels, CLASSES, 2.0, PROTECTION, Noise.seeded(key))
        gram, by_class = unpacked(noisy, 12, CLASSES)
        assert np.array_equal(gram, gram.T)
        found.append((gram - exact[0], by_class - exact[1]))
    grams, sums = (np.stack(one) / PROTECTION.std for one in zip(*found, strict=True))
    rows, columns = np.triu_indices(13, 1)
    diagonal, outside = grams[:, np.arange(13), np.arange(13)], grams[:, rows, columns] * math.sqrt(2)
    for part in (diagonal, outside, sums):
        assert (part**2).mean() == pytest.approx(1, abs=6 * math.sqrt(2 / part.size))


def test_a_client_without_records_sends_zeros_and_noise_that_hides_nothing_is_refused() -> None:
    none = packed(*products_of(np.zeros((0, 4)), np.zeros(0, np.int64), CLASSES, 1.0))
    assert none.shape == (1, num_products(4, CLASSES))
    assert not none.any()
    with pytest.raises(UserError, match="too coarse"):
        longest_private(5000, 10, Protection(0.01, 1e-5, 0.0, "seeded", SENSITIVITY))
