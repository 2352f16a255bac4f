"""Scattering: the published wavelets, the transform by its definition, and features that look at one record alone.

The public whitening: made-up images that vary as photographs do, and features that vary alike in all directions.
"""

import math

import numpy as np
import pytest
import torch

from fl_sim.data import load, scattering, version_of
from fl_sim.data.scattering import dead_leaves, features_of, made_images, pink_noise, whitening_of
from fl_sim.errors import UserError

KYMATIO = {
    (0, 0, 3, 5): 0.834062, (0, 3, 1, 14): 0.057139, (0, 5, 2, 0): 0.135393, (1, 0, 3, 5): 0.123146,
    (1, 3, 2, 0): 0.744056, (1, 5, 1, 14): 0.531684, (1, 5, 3, 5): 0.0, (1, 0, 1, 14): -0.009587,
}  # fmt: skip
"""Of Kymatio 0.3.0, ``scattering2d.filter_bank(16, 16, 2, 8)``: {(scale, orientation, row, column): value}."""


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def test_wavelets_are_those_of_kymatio() -> None:
    banks = scattering.wavelets(16, 16)
    for (scale, orientation, row, column), value in KYMATIO.items():
        assert banks[scale][orientation, row, column] == pytest.approx(value, abs=5e-5)  # it takes 3.1415 for pi


def test_wavelets_have_no_mean() -> None:
    for bank in scattering.wavelets(12, 16):
        assert np.abs(bank[:, 0, 0]).max() < 1e-6


def test_maps_are_what_their_definition_says() -> None:
    image = pictures(1, (8, 12))[0] / 255
    padded = np.pad(image, 2, mode="reflect")
    heard = scattering.scattered(torch.from_numpy(image[None, None].astype(np.float32)))[0].numpy()
    first = [np.abs(convolved(padded, wavelet(padded.shape, 0, turn))) for turn in range(8)]
    second = [np.abs(convolved(padded, wavelet(padded.shape, 1, turn))) for turn in range(8)]
    deep = [np.abs(convolved(one, wavelet(padded.shape, 1, turn))) for one in first[:2] for turn in range(8)]
    expected = [smoothed(padded, 1), *(smoothed(one, 1) for one in first)]
    expected += [smoothed(one[::2, ::2], 2) for one in [*second, *deep]]
    np.testing.assert_allclose(heard[: len(expected)], expected, atol=2e-6)


def convolved(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Circular convolution, pixel by pixel."""
    made = np.zeros(image.shape, dtype=complex)
    for row, column in np.ndindex(image.shape):
        made += image[row, column] * np.roll(kernel, (row, column), (0, 1))
    return made


def wavelet(shape: tuple[int, int], scale: int, turn: int) -> np.ndarray:
    """A Morlet wavelet in space, wrapped round a torus, written from its formula."""
    angle, sigma = (3 - turn) * math.pi / 8, 0.8 * 2**scale
    kernel, bell = np.zeros(shape, dtype=complex), np.zeros(shape)
    y, x = np.mgrid[-2 * shape[0] : 3 * shape[0], -2 * shape[1] : 3 * shape[1]]
    u, v = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)
    height = np.exp(-(u**2 + v**2 / 4) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
    np.add.at(bell, (y % shape[0], x % shape[1]), height)
    np.add.at(kernel, (y % shape[0], x % shape[1]), height * np.exp(3j * math.pi / 4 / 2**scale * u))
    return kernel - kernel.sum() / bell.sum() * bell


def smoothed(image: np.ndarray, spacing: int) -> np.ndarray:
    """The mean under a Gaussian of 1.6 pixels around the middle of each 4x4 block of the image inside its padding."""
    weights = []
    for side in image.shape:
        middles = [2 + 4 * block + 1.5 for block in range((side * spacing - 4) // 4)]
        across = np.abs(np.arange(side) * spacing - np.array(middles)[:, None])
        bell = np.exp(-(np.minimum(across, side * spacing - across) ** 2) / (2 * 1.6**2))
        weights.append(bell / bell.sum(axis=1, keepdims=True))
    return weights[0] @ image @ weights[1].T


@pytest.mark.parametrize(("shape", "size"), [((1, 8, 8), 324), ((1, 28, 28), 1000), ((3, 32, 32), 1000)])
def test_features_are_as_many_as_stated_and_of_norm_one_at_most(shape: tuple[int, ...], size: int) -> None:
    images = pictures(3, shape)
    images[1] = 0  # without any contrast
    features = scattering.features_of(images)
    assert features.shape == (3, size) == (3, scattering.dimension_of(shape))
    norms = np.linalg.norm(features.astype(np.float64), axis=1)
    assert norms.max() <= 1 + 1e-6
    assert norms[0] > 0.5


def test_features_of_a_record_depend_on_no_other() -> None:
    images = pictures(70, (1, 8, 8))
    others = images.copy()
    others[np.arange(70) != 5] = pictures(69, (1, 8, 8), seed=1)
    assert np.array_equal(scattering.features_of(images)[5], scattering.features_of(others)[5])


def test_features_are_the_same_by_any_number_of_threads() -> None:
    images, before = pictures(150, (1, 8, 8)), torch.get_num_threads()
    made = scattering.features_of(images)
    try:
        torch.set_num_threads(3)
        assert np.array_equal(made, scattering.features_of(images))
    finally:
        torch.set_num_threads(before)


def test_the_projection_is_orthonormal_and_always_the_same() -> None:
    columns = scattering._projected(np.eye(60, dtype=np.float32), 20)
    np.testing.assert_allclose(columns.T @ columns, np.eye(20), atol=1e-6)
    scattering._directions.cache_clear()
    assert np.array_equal(scattering._projected(np.eye(60, dtype=np.float32), 20), columns)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((61,), "for images, but these records are vectors of 61 numbers"),
        ((1, 5, 28), "images from 8x8 to 128x128 pixels, but these have 5x28"),
        ((3, 200, 200), "but these have 200x200"),
    ],
)
def test_what_cannot_be_scattered_is_refused(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        scattering.dimension_of(shape)


SHAPE = (1, 8, 8)


@pytest.fixture
def few(tmp_path, monkeypatch, fewer_images):
    """Fewer made-up images: another whitening than the one of its name, so no features go from or to other tests.

    Neither by a file nor by what this process remembers.
    """
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path))
    fewer_images(whitened=700)
    return whitening_of(SHAPE)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9)])
def test_made_images_are_the_same_each_time(shape):
    made = made_images(shape, 5, seed=0)
    assert (made.shape, made.dtype) == ((15, *shape), np.uint8)
    assert np.array_equal(made, made_images(shape, 5, seed=0))
    assert not np.array_equal(made, made_images(shape, 5, seed=1))


@pytest.mark.parametrize("exponent", [1.0, 1.5])
def test_the_amplitude_of_pink_noise_falls_with_the_frequency(exponent):
    images = pink_noise((1, 64, 64), 60, exponent, np.random.default_rng(0))[:, 0].astype(float)
    amplitude = np.abs(np.fft.fft2(images - images.mean(axis=(1, 2), keepdims=True))).mean(axis=0)
    frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.fftfreq(64))
    middle = (frequency > 0.03) & (frequency < 0.3)
    slope = np.polyfit(np.log(frequency[middle]), np.log(amplitude[middle]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.15)


def test_dead_leaves_have_edges_and_flat_places():
    """Differences of neighbours have heavy tails, as in photographs; those of noise are nearly normal (kurtosis 3)."""

    def kurtosis(images):
        steps = np.diff(images[:, 0].astype(float), axis=2)
        return (steps**4).mean() / (steps**2).mean() ** 2

    coins = np.random.default_rng(0)
    assert kurtosis(dead_leaves((1, 32, 32), 40, coins)) > 1.5 * kurtosis(pink_noise((1, 32, 32), 40, 1.0, coins))


def test_made_up_images_vary_alike_in_all_directions(few):
    made = features_of(made_images(SHAPE, 700, seed=0))
    before, after = (np.linalg.eigvalsh(np.cov(one.T.astype(float))) for one in (made, few.of(made)))
    largest, median = after[-1] / np.median(after), np.median(before)
    assert before[-1] / median > 50 * largest


def test_no_record_is_longer_than_one_and_each_depends_on_itself_alone(few):
    features = features_of(load("digits", None).train.inputs[:50])
    whitened = few.of(features)
    assert np.linalg.norm(whitened.astype(float), axis=1).max() <= 1
    assert np.abs(few.of(features[7:8]) - whitened[7:8]).max() < 1e-6
    expected = (features.astype(float) - few.centre.numpy()) @ few.matrix.numpy()
    expected /= np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    assert np.abs(whitened - expected).max() < 1e-6


def test_the_bits_do_not_depend_on_the_number_of_threads(few):
    features = features_of(load("digits", None).train.inputs[:200])
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whitening_of.cache_clear()
        found.append(whitening_of(SHAPE).of(features))
    torch.set_num_threads(1)
    assert np.array_equal(*found)


def test_a_data_set_is_whitened_by_its_name(few):
    plain, whitened = (load("digits", None, name) for name in ("scattering", "whitened-scattering"))
    assert np.array_equal(whitened.train.inputs, few.of(plain.train.inputs))
    assert whitened.note.startswith("whitened-scattering features of the images")
    assert version_of("whitened-scattering") != version_of("scattering")
