"""A normal distribution whose draws have given moments once they are clamped."""

import numpy as np
import pytest

from clients.clamped import before_clamping
from clients.symmetric import Array


def clamp(draws: Array) -> Array:
    return np.clip(draws, -1, 1)


def moments(mean: Array, root: Array, seed: int = 1) -> tuple[Array, Array]:
    """Return mean and covariance of clamped draws, of other ones than those that the moments were matched on."""
    draws = clamp(mean + np.random.default_rng(seed).standard_normal((200_000, len(mean))) @ root.T)
    return draws.mean(0), np.cov(draws.T)


def test_draws_that_are_never_clamped_stay_as_they_are() -> None:
    mean, root = np.array([0.1, -0.2, 0.0]), 0.05 * np.array([[1.0, 0, 0], [0.5, 1, 0], [-0.3, 0.2, 0.4]])
    center, spread = before_clamping(mean, root, clamp)
    np.testing.assert_allclose(center, mean, atol=1e-12)
    np.testing.assert_allclose(spread @ spread.T, root @ root.T, rtol=0.01, atol=1e-5)


def test_clamped_draws_have_the_moments_that_were_asked_for() -> None:
    """A background that is nearly black, a stroke that is nearly white, and what lies between and goes with it."""
    generator = np.random.default_rng(0)
    truth = clamp(np.array([-1.1, 0.9, 0.1]) + generator.standard_normal((200_000, 3)) @ np.diag([0.3, 0.8, 0.6]))
    truth[:, 2] = clamp(truth[:, 2] + 0.5 * truth[:, 1])
    mean, covariance = truth.mean(0), np.cov(truth.T)
    root = np.linalg.cholesky(covariance)
    before, after = moments(mean, root), moments(*before_clamping(mean, root, clamp))
    assert np.abs(before[0] - mean).max() > 0.03
    assert np.linalg.norm(before[1] - covariance) > 0.2 * np.linalg.norm(covariance)
    np.testing.assert_allclose(after[0], mean, atol=0.02)
    assert np.linalg.norm(after[1] - covariance) < 0.06 * np.linalg.norm(covariance)


def test_moments_that_no_clamped_draws_have_end_in_finite_numbers() -> None:
    center, spread = before_clamping(np.array([0.99, 5.0]), np.diag([2.0, 1e-9]), clamp)
    assert np.isfinite(center).all()
    assert np.isfinite(spread).all()


@pytest.mark.parametrize("size", [3, 401])
def test_what_has_no_variance_or_is_too_large_stays_as_it_was_given(size: int) -> None:
    mean, root = np.full(size, 0.9), np.eye(size) * (size > 400)
    center, spread = before_clamping(mean, root, clamp)
    assert center is mean
    assert spread is root
