"""Warping: how far images go, each by itself, and what stays as it was."""

from unittest.mock import patch

import numpy as np
import pytest

from clients import warping
from clients.warping import warped

HEIGHT, WIDTH = 24, 40
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]


def blobs(number: int, down: float = (HEIGHT - 1) / 2, right: float = (WIDTH - 1) / 2) -> np.ndarray:
    """The same round spot on each of ``number`` images, whose weights add up to 1 there and are 0 elsewhere."""
    spot = np.exp(-((ROWS - down) ** 2 + (COLUMNS - right) ** 2) / (2 * 2.0**2))
    return np.repeat((spot / spot.sum())[None, None], number, axis=0).astype(np.float32)


def coins(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def moments(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    shifts = np.array([moments(image)[0] - middle for image in warped(blobs(300), strength, coins())])
    furthest = 0.05 * strength * np.array([HEIGHT, WIDTH])
    found = np.abs(shifts).max(axis=0)
    assert (found < 1.01 * furthest).all()
    assert (found > 0.9 * furthest).all()
    assert (np.abs(shifts.mean(axis=0)) < 0.15 * furthest).all()


def test_images_turn_by_no_more_than_ten_degrees() -> None:
    with patch.object(warping, "_MOVE", 0.0), patch.object(warping, "_STRETCH", 0.0):
        made = warped(blobs(200, right=WIDTH - 8), 1, coins())
    arm = WIDTH - 8 - (WIDTH - 1) / 2
    angles = np.degrees([np.arcsin((moments(image)[0][0] - (HEIGHT - 1) / 2) / arm) for image in made])
    assert np.abs(angles).max() == pytest.approx(9.9, abs=0.5)
    assert min(angles) < -9 < 9 < max(angles)


def test_what_is_round_stays_round_on_an_oblong_image() -> None:
    with patch.object(warping, "_STRETCH", 0.0):
        made = warped(blobs(50), 3, coins())
    for image in made:
        spread = np.sqrt(np.linalg.eigvalsh(moments(image)[1]))
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
    with patch.object(warping, "_AT_A_TIME", 2):
        np.testing.assert_array_equal(whole, warped(blobs(7), 1, coins()))
