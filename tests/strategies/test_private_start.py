"""A private start: what it costs, and what becomes of noisy answers; whole runs are in simulation/test_starting."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy.fft import idctn

from clients.frequency_sums import COMMON, STEPS, Frame, FrequencyQuestion, answer, black_frame, shapes_of
from clients.images import frequencies_of, lowest_frequencies
from clients.moments import triangle_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.accounting import epsilon
from strategies.global_dp import GlobalDP, releases_beforehand
from strategies.private_start import (
    Classes,
    PrivateStart,
    classes_of,
    covariances_of,
    drawn_images,
    frame_of,
)

SHAPE, CLASSES, SIZE = (1, 8, 8), 3, 10
ORDER, _ = lowest_frequencies(SHAPE, SIZE)


def _images(number: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return blurred images with a mean and a direction of their own in each class, well within [-1, 1]."""
    draw = np.random.default_rng(3)
    labels = np.arange(number) % CLASSES
    basis = np.eye(64)[ORDER]
    points = 0.6 * draw.normal(size=(CLASSES, SIZE))[labels]
    points += draw.normal(size=(number, SIZE)) * draw.uniform(0.05, 0.5, (CLASSES, SIZE))[labels]
    return torch.from_numpy(idctn((points @ basis).reshape(-1, *SHAPE), axes=(1, 2, 3), norm="ortho")).float(), labels


def _answers(inputs: torch.Tensor, labels: np.ndarray) -> tuple[Frame, Classes, np.ndarray]:
    """Return what the server makes of the answers of one client, without noise."""
    records = float(len(inputs))
    frame = frame_of(
        answer(FrequencyQuestion(1, records, black_frame(SHAPE, ORDER)), inputs, labels, CLASSES), 0.0, SHAPE, SIZE
    )
    classes = classes_of(answer(FrequencyQuestion(2, records, frame), inputs, labels, CLASSES), 0.0)
    return (
        frame,
        classes,
        covariances_of(
            answer(FrequencyQuestion(3, records, frame, classes.means), inputs, labels, CLASSES), 0.0, classes
        ),
    )


def test_without_noise_drawn_images_have_the_moments_of_their_class() -> None:
    inputs, labels = _images(3000)
    frame, classes, covariances = _answers(inputs, labels)
    assert classes.shares == pytest.approx([1 / 3] * 3, abs=1e-3)
    settings = PrivateStart(images=6000, warp=0)
    drawn, of = drawn_images(settings, SHAPE, frame, classes, covariances, np.random.default_rng(0))
    assert drawn.shape == (6000, *SHAPE)
    assert np.bincount(of).tolist() == [2000] * 3
    real, made = frequencies_of(inputs, ORDER), frequencies_of(torch.from_numpy(drawn), ORDER)
    for label in range(CLASSES):
        one, other = real[labels == label], made[of == label]
        np.testing.assert_allclose(other.mean(axis=0), one.mean(axis=0), atol=0.06)
        np.testing.assert_allclose(other.std(axis=0), one.std(axis=0), atol=0.06)


def test_classes_that_differ_in_number_are_drawn_as_often_as_they_are_there() -> None:
    inputs, labels = _images(3000)
    some = (labels != 2) | (np.arange(3000) % 6 == 2)  # half as many of class 2
    frame, classes, covariances = _answers(inputs[some], labels[some])
    _, of = drawn_images(PrivateStart(images=500), SHAPE, frame, classes, covariances, np.random.default_rng(0))
    assert np.bincount(of).tolist() == [200, 200, 100]


@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
def test_of_nothing_but_noise_finite_images_are_drawn(size: float) -> None:
    draw = np.random.default_rng(1)

    def noise(step: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.from_numpy(size * draw.normal(size=like)) for name, like in shapes_of(step, 3, SIZE).items()
        }  # type: ignore[arg-type]

    frame = frame_of(noise(1), size, SHAPE, SIZE)
    classes = classes_of(noise(2), size)
    covariances = covariances_of(noise(3), size, classes)
    assert (frame.width > 0).all()
    assert (classes.shares > 0).all()
    assert all(np.linalg.eigvalsh(one)[0] > 0 for one in covariances)
    drawn, of = drawn_images(PrivateStart(images=30), SHAPE, frame, classes, covariances, draw)
    assert np.isfinite(drawn).all()
    assert np.abs(drawn).max() <= 1
    assert set(of) == {0, 1, 2}


def test_means_are_shrunk_to_nothing_where_they_may_be_noise() -> None:
    counts = torch.full((3,), 1 / 6)
    draw = torch.from_numpy(np.random.default_rng(0).normal(size=(3, SIZE)))
    classes = classes_of({"counts": counts, "means": draw}, 2.0)
    assert not classes.means.any()
    assert classes.shares == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0])
def test_the_three_releases_cost_as_much_as_one_of_their_noise_together(noise_multiplier: float) -> None:
    settings, aggregator = PrivateStart(noise_multiplier=noise_multiplier), GlobalDP(delta=1e-3, noise="seeded")
    releases = releases_beforehand(settings, aggregator)
    assert [one.clipping_norm for one in releases] == [0.9, 0.4, 0.1]
    assert {(one.noise, one.delta) for one in releases} == {("seeded", 1e-3)}
    together = epsilon([one.event() for one in releases], 1e-3)
    assert together == pytest.approx(epsilon([dp_event.GaussianDpEvent(noise_multiplier)], 1e-3), rel=1e-6)
    assert len(releases) == len(STEPS)
    assert math.fsum(one.noise_multiplier**-2 for one in releases) == pytest.approx(noise_multiplier**-2)


PRIVATE = {"preprocess": "private-start", "aggregator": "global-dp", "model": "logistic"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregator": "mean"}, "needs aggregator global-dp, .* the aggregator is mean"),
        ({"sampler": "cyclic"}, "take sampler full, poisson or fixed-size"),
        ({"attack": "sign-flip"}, "cannot run with attack sign-flip"),
        ({"preprocess": {"kind": "private-start", "noise_multiplier": 0}}, "greater than 0"),
        ({"preprocess": {"kind": "private-start", "clipping_norms": [1, 1]}}, "clipping_norms"),
    ],
)
def test_what_it_cannot_go_with_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        experiment_from({**PRIVATE, **changes})


@pytest.mark.parametrize(
    ("shape", "features", "frequencies", "words"),
    [
        ((14,), "none", 60, "draws images, and these records have shape"),
        ((1000,), "scattering", 60, "take data and features that are images"),
        ((3, 224, 224), "none", 8000, "take fewer frequencies"),
    ],
)
def test_records_that_are_no_images_and_answers_that_are_too_long_are_refused(
    shape: tuple[int, ...], features: str, frequencies: int, words: str
) -> None:
    data = SimpleNamespace(input_shape=shape, num_classes=10)
    with pytest.raises(UserError, match=words):
        PrivateStart(frequencies=frequencies).check_data(data, features)


def test_small_images_have_fewer_frequencies() -> None:
    assert PrivateStart().num_frequencies((1, 4, 4)) == 16


def test_products_are_shrunk_by_the_noise_in_their_own_unit() -> None:
    # Noise as long as it is expected to be: of products of all classes it is std / COMMON, of each class's std / share.
    size, num_classes, std = 6, 2, 0.01
    dimension = size * (size + 1) // 2
    classes = Classes(np.array([0.25, 0.75]), np.zeros((num_classes, size)))
    independent = triangle_of(np.eye(size) / size)
    off = np.zeros(dimension)
    off[1] = math.sqrt(dimension)  # between two frequencies

    def found(common: float, own: float) -> np.ndarray:
        sums = {
            "common": torch.from_numpy(COMMON * independent + common * std * off),
            "own": torch.from_numpy(np.stack([share * independent + own * std * off for share in classes.shares])),
        }
        return covariances_of(sums, std, classes)

    alone = np.eye(size) / size
    np.testing.assert_allclose(found(0.999, 0.0), [alone, alone], atol=1e-12)
    np.testing.assert_allclose(found(0.0, 0.999), [alone, alone], atol=1e-12)
    kept = found(1.2, 0.0)[1] - alone  # one class's own shrink towards what all have in common
    assert abs(kept).max() > 1e-3
    # What is beyond the noise stays, as James and Stein's factor says.
    left = 1.2 * std / COMMON * (1 - 1 / 1.2**2) * math.sqrt(dimension) / math.sqrt(2)
    weak = Classes(np.array([1e-3, 1e-3]), classes.means)
    sums = {"common": torch.from_numpy(COMMON * independent + 1.2 * std * off), "own": torch.zeros(2, dimension)}
    np.testing.assert_allclose(covariances_of(sums, std, weak)[0][0, 1], left, rtol=1e-6)
