"""The public whitening: made-up images that vary as photographs do, and features that vary alike in all directions."""

import numpy as np
import pytest
import torch

from fl_sim.data import load, version_of
from fl_sim.data.made_images import dead_leaves, made_images, pink_noise
from fl_sim.data.scattering import features_of
from fl_sim.data.whitening import whitening_of

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
