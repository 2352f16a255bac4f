"""A normal distribution whose draws have given moments once they are clamped."""

from unittest.mock import patch

import numpy as np
import pytest

from clients import images
from clients.images import before_clamping, warped
from clients.moments import Array


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


HEIGHT, WIDTH = 24, 40
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]


def blobs(number: int, down: float = (HEIGHT - 1) / 2, right: float = (WIDTH - 1) / 2) -> np.ndarray:
    """The same round spot on each of ``number`` images, whose weights add up to 1 there and are 0 elsewhere."""
    spot = np.exp(-((ROWS - down) ** 2 + (COLUMNS - right) ** 2) / (2 * 2.0**2))
    return np.repeat((spot / spot.sum())[None, None], number, axis=0).astype(np.float32)


def coins(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def centre_and_spread(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where an image's weight is, (down, right), and how it spreads about there."""
    places = np.stack([ROWS, COLUMNS]).reshape(2, -1)
    weights = image.ravel() / image.sum()
    return places @ weights, np.cov(places, aweights=weights, bias=True)


def test_no_strength_is_no_warp_and_draws_nothing() -> None:
    images, unused = blobs(3), coins()
    assert warped(images, 0, unused) is images
    assert unused.random() == coins().random()
    assert warped(images[:0], 1, unused).shape == (0, 1, HEIGHT, WIDTH)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_images_move_by_no_more_than_a_twentieth_of_a_side_and_in_all_directions(strength: float) -> None:
    middle = np.array([HEIGHT - 1, WIDTH - 1]) / 2
    shifts = np.array([centre_and_spread(image)[0] - middle for image in warped(blobs(300), strength, coins())])
    furthest = 0.05 * strength * np.array([HEIGHT, WIDTH])
    found = np.abs(shifts).max(axis=0)
    assert (found < 1.01 * furthest).all()
    assert (found > 0.9 * furthest).all()
    assert (np.abs(shifts.mean(axis=0)) < 0.15 * furthest).all()


def test_images_turn_by_no_more_than_ten_degrees() -> None:
    with patch.object(images, "_MOVE", 0.0), patch.object(images, "_STRETCH", 0.0):
        made = warped(blobs(200, right=WIDTH - 8), 1, coins())
    arm = WIDTH - 8 - (WIDTH - 1) / 2
    angles = np.degrees([np.arcsin((centre_and_spread(image)[0][0] - (HEIGHT - 1) / 2) / arm) for image in made])
    assert np.abs(angles).max() == pytest.approx(9.9, abs=0.5)
    assert min(angles) < -9 < 9 < max(angles)


def test_what_is_round_stays_round_on_an_oblong_image() -> None:
    with patch.object(images, "_STRETCH", 0.0):
        made = warped(blobs(50), 3, coins())
    for image in made:
        spread = np.sqrt(np.linalg.eigvalsh(centre_and_spread(image)[1]))
        assert spread[1] / spread[0] < 1.05


def test_flat_images_stay_as_they_are_and_none_leaves_the_range() -> None:
    flat = np.full((20, 3, 9, 8), -1, dtype=np.float32)
    np.testing.assert_allclose(warped(flat, 3, coins()), flat, atol=1e-6)
    rough = coins().choice(np.array([-1, 1], dtype=np.float32), (20, 3, 9, 8))
    assert np.abs(warped(rough, 1, coins())).max() <= 1


def test_each_image_has_a_warp_of_its_own_and_the_same_coins_the_same() -> None:
    made = warped(blobs(5), 1, coins())
    assert len({image.tobytes() for image in made}) == 5
    np.testing.assert_array_equal(made, warped(blobs(5), 1, coins()))
    assert (made != warped(blobs(5), 1, coins(1))).any()


def test_the_number_at_a_time_changes_nothing() -> None:
    whole = warped(blobs(7), 1, coins())
    with patch.object(images, "_AT_A_TIME", 2):
        np.testing.assert_array_equal(whole, warped(blobs(7), 1, coins()))
