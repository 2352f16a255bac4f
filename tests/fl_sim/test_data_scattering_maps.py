"""All scattering maps, whitened across the maps: each record by itself, nothing projected, and the formula by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_sim.data import load
from fl_sim.data.scattering import NUM_MAPS, in_groups, normalised, public_images, root_maps, scattered
from fl_sim.data.scattering_maps import maps_of, mixing_of, num_numbers
from fl_sim.errors import UserError
from fl_sim.testing_fixtures import FewerImages

SHAPE = (1, 8, 8)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewer_images: FewerImages) -> None:
    """Fewer made-up images, whose features go neither from nor to other tests."""
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path))
    fewer_images(whitened=150)


def flat(images: np.ndarray) -> np.ndarray:
    """Return the normalised maps as rows of (image, position), with one column for each map."""
    maps = normalised(torch.from_numpy(images.astype(np.float32)) / 255).numpy().astype(float)
    return maps.transpose(0, 2, 3, 1).reshape(-1, maps.shape[1])


@pytest.mark.parametrize(("shape", "numbers"), [((1, 8, 8), 324), ((1, 28, 28), 3969), ((3, 32, 32), 3888)])
def test_no_number_of_the_transform_is_left_out(shape: tuple[int, ...], numbers: int) -> None:
    assert num_numbers(shape) == numbers


@pytest.mark.parametrize(("shape", "numbers"), [((1, 8, 8), 162), ((1, 28, 28), 2268), ((3, 32, 32), 1944)])
def test_half_of_the_numbers_of_both_images_are_left_out(shape: tuple[int, ...], numbers: int) -> None:
    assert num_numbers(shape, mirrored=True) == numbers


def test_the_half_that_is_left_out_has_nearly_the_same_numbers() -> None:
    images = torch.from_numpy(load("digits").train.inputs[:20].astype(np.float32)) / 255
    one, both = scattered(images), (scattered(images) + scattered(images.flip(-1))) / 2
    assert torch.equal(in_groups(both)[..., :1], normalised(images, mirrored=True))
    apart = [float((left.flatten(1).sort(dim=1).values - right.flatten(1).sort(dim=1).values).norm())
             for left, right in ((maps[..., :1], maps[..., 1:]) for maps in (one, both))]  # fmt: skip
    assert apart[1] < apart[0] / 10


@pytest.mark.usefixtures("few")
def test_an_image_and_its_mirror_image_have_the_same_features_of_norm_one() -> None:
    images = load("digits").train.inputs[:30]
    found = maps_of(images, mirrored=True)
    assert np.array_equal(maps_of(np.ascontiguousarray(images[..., ::-1]), mirrored=True), found)
    assert np.linalg.norm(found.astype(float), axis=1) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(found.astype(float), axis=1).max() <= 1
    assert np.abs(maps_of(images, mirrored=True)[3] - maps_of(images[3:4], mirrored=True)[0]).max() < 1e-6
    made = normalised(torch.from_numpy(public_images(SHAPE).astype(np.float32)) / 255, mirrored=True).double()
    centre, matrix = mixing_of(SHAPE, mirrored=True)
    white = (made.permute(0, 2, 3, 1).flatten(0, 2) - centre) @ matrix
    assert float(white.mean(dim=0).abs().max()) < 1e-6


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("mirrored", [False, True])
def test_roots_are_whitened_roots_of_the_maps_and_have_norm_one(*, mirrored: bool) -> None:
    def roots(images: np.ndarray) -> np.ndarray:
        """Return the roots as rows of (image, position), with one column for each map."""
        given = torch.from_numpy(images.astype(np.float32)) / 255
        maps = ((scattered(given) + scattered(given.flip(-1))) / 2)[..., :1] if mirrored else scattered(given)
        return np.sqrt(np.maximum(maps.numpy().astype(float), 0)).transpose(0, 2, 3, 1).reshape(-1, NUM_MAPS)

    images = load("digits").train.inputs[:30]
    found = maps_of(images, mirrored=mirrored, root=True)
    centre, matrix = (one.numpy() for one in mixing_of(SHAPE, mirrored=mirrored, root=True))
    assert np.abs(((roots(public_images(SHAPE)) - centre) @ matrix).mean(axis=0)).max() < 1e-6
    expected = ((roots(images) - centre) @ matrix).reshape(30, -1, NUM_MAPS).transpose(0, 2, 1).reshape(30, -1)
    assert np.abs(found - expected / np.linalg.norm(expected, axis=1, keepdims=True)).max() < 1e-4
    assert np.linalg.norm(found.astype(float), axis=1) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(found.astype(float), axis=1).max() <= 1
    assert np.abs(maps_of(images[7:8], mirrored=mirrored, root=True) - found[7:8]).max() < 1e-6


def test_roots_of_a_quarter_of_the_contrast_are_half_as_large() -> None:
    images = torch.from_numpy(load("digits").train.inputs[:5].astype(np.float32)) / 255
    assert torch.allclose(root_maps(images / 4), root_maps(images) / 2, atol=1e-3)
    assert not torch.allclose(normalised(images / 4), normalised(images) / 2, atol=0.1)


def test_what_cannot_be_scattered_is_refused() -> None:
    with pytest.raises(UserError, match="images from 8x8 to 128x128 pixels"):
        maps_of(np.zeros((2, 1, 8, 5), dtype=np.uint8))


@pytest.mark.usefixtures("few")
def test_the_maps_of_artificial_images_are_white() -> None:
    rows = flat(public_images(SHAPE))
    centre, matrix = (one.numpy() for one in mixing_of(SHAPE))
    before, after = (np.linalg.eigvalsh(np.cov(one.T)) for one in (rows, (rows - centre) @ matrix))
    assert np.abs(((rows - centre) @ matrix).mean(axis=0)).max() < 1e-9
    assert before[-1] / np.median(before) > 20 * after[-1] / np.median(after)
    lengths = np.linalg.norm(((rows - centre) @ matrix).reshape(len(rows) // 4, -1), axis=1)
    assert (lengths <= 1).mean() == pytest.approx(0.9, abs=0.01)


@pytest.mark.usefixtures("few")
def test_each_record_is_whitened_by_itself_and_no_longer_than_one() -> None:
    images = load("digits").train.inputs[:30]
    found = maps_of(images)
    centre, matrix = (one.numpy() for one in mixing_of(SHAPE))
    expected = ((flat(images) - centre) @ matrix).reshape(30, 4, NUM_MAPS).transpose(0, 2, 1).reshape(30, -1)
    expected /= np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    assert np.abs(found - expected).max() < 1e-5
    assert np.linalg.norm(found.astype(float), axis=1).max() <= 1
    assert np.abs(maps_of(images[7:8]) - found[7:8]).max() < 1e-6
    assert math.sqrt(found.shape[1]) == 18


@pytest.mark.usefixtures("few")
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    images, found = load("digits").train.inputs[:60], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        mixing_of.cache_clear()
        found.append(maps_of(images))
    torch.set_num_threads(1)
    assert np.array_equal(*found)
