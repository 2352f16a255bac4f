"""The mean embedding: what a record can move, what is paid, and whether the images have the data's moments."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.dafl.generator import PrivateRecords
from clients.dafl.noisy_moments import ClassSums, MeanEmbedding
from clients.images import frequencies_of, lowest_frequencies, warped
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.mechanisms import Noise

SHAPE = (1, 6, 6)
SETTINGS = MeanEmbedding(frequencies=12)


def blobs(number: int = 400, num_classes: int = 3, seed: int = 0) -> PrivateRecords:
    """Records of class k about a mean of their own, well within [-1, 1]."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % num_classes
    means = generator.uniform(-0.4, 0.4, (num_classes, *SHAPE))
    inputs = means[labels] + 0.1 * generator.standard_normal((number, *SHAPE))
    return PrivateRecords(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels), num_classes)


def without(records: PrivateRecords, record: int) -> PrivateRecords:
    kept = torch.arange(len(records.labels)) != record
    return PrivateRecords(records.inputs[kept], records.labels[kept], records.num_classes)


def made(
    records: PrivateRecords, counts: list[int], target: float, seed: int = 0, settings: MeanEmbedding = SETTINGS
) -> torch.Tensor:
    bill = settings.bill(10_000, records.num_classes, target, 1e-5)
    assert not bill.refused
    return settings.generate(records, np.array(counts), bill, Noise.seeded(seed), np.random.default_rng(seed))


class Wiretap:
    """Both releases as they were: what was asked for, and the sums before and after the noise."""

    def __init__(self) -> None:
        self.releases: list[ClassSums] = []
        self.norms: list[float] = []
        self.exact: list[np.ndarray] = []
        self.noisy: list[np.ndarray] = []

    def sums(self, release: ClassSums, features, clipping_norm, labels, num_classes):  # type: ignore[no-untyped-def]
        self.exact.append(np.zeros((num_classes, features.shape[1])))
        clipped = release.clipped(features, clipping_norm, self.exact[-1].size)
        np.add.at(self.exact[-1], labels, clipped)
        self.releases.append(release)
        self.norms.append(clipping_norm)
        noisy, std = self.original(release, features, clipping_norm, labels, num_classes)
        self.noisy.append(noisy)
        return noisy, std

    original = staticmethod(ClassSums.sums)


@pytest.fixture
def wiretap() -> Iterator[Wiretap]:
    tap = Wiretap()

    def sums(release, *arguments):  # type: ignore[no-untyped-def]
        return tap.sums(release, *arguments)

    with patch.object(ClassSums, "sums", sums):
        yield tap


def test_the_bill_is_one_gaussian_release_within_the_budget() -> None:
    bill = MeanEmbedding().bill(6000, 10, 3.0, 1e-5)
    assert (bill.steps, bill.sampling_rate, bill.refused) == (1, 1.0, "")
    assert bill.event == dp_event.GaussianDpEvent(bill.noise_multiplier)
    assert epsilon([bill.event], 1e-5) == pytest.approx(3.0, rel=1e-3)
    assert epsilon([bill.event], 1e-5) <= 3.0


def test_the_two_releases_made_are_the_one_charged(wiretap: Wiretap) -> None:
    bill = SETTINGS.bill(10_000, 3, 2.0, 1e-5)
    made(blobs(), [1, 1, 1], 2.0)
    noises = [release.noise_multiplier for release in wiretap.releases]
    assert len(noises) == 2
    assert sum(noise**-2 for noise in noises) == pytest.approx(bill.noise_multiplier**-2)
    apart = [dp_event.GaussianDpEvent(noise) for noise in noises]
    assert epsilon(apart, 1e-5) == pytest.approx(epsilon([bill.event], 1e-5))


def test_nothing_is_drawn_from_the_noise_but_the_two_releases() -> None:
    asked: list[tuple[str, int]] = []
    original = Noise.gaussian

    def listen(source: Noise, count: int, std: float, *, purpose: str, server_round: int) -> np.ndarray:
        asked.append((purpose, count))
        return original(source, count, std, purpose=purpose, server_round=server_round)

    with patch.object(Noise, "gaussian", listen):
        made(blobs(), [1, 1, 1], 2.0)
    assert len({purpose for purpose, _ in asked}) == len(asked) == 2
    assert [count for _, count in asked] == [3 * (1 + 12 + 1), 3 * (12 * 13 // 2)]


HOSTILE = [0.0, 1.0, -1.0, 50.0, 1e18, 3e38, math.nan, math.inf]


@pytest.mark.parametrize("value", HOSTILE)
def test_no_record_moves_a_release_by_more_than_its_norm(value: float) -> None:
    """Of all that precedes the noise; the second release is compared at the same outcome of the first."""
    records = blobs(90)
    records.inputs[7] = value
    records.inputs[8, 0, 0, 0] = value
    order, _ = lowest_frequencies(SHAPE, 12)
    for release, features, norm in _features(records, order):
        clipped = release.clipped(features, norm, 3 * features.shape[1])
        assert np.isfinite(clipped).all()
        # Adding over any neighbouring pair is adding one row: its length, with two spacings a number for rounding.
        assert np.linalg.norm(clipped, axis=1).max() <= norm
        whole, _ = release.sums(features, norm, records.labels.numpy(), 3)
        for record in (7, 8, 9):
            kept = np.arange(90) != record
            less, _ = release.sums(features[kept], norm, records.labels.numpy()[kept], 3)
            assert np.linalg.norm(whole - less) <= norm * (1 + 1e-12)
    assert torch.isfinite(made(records, [2, 2, 2], 5.0)).all()


def _features(records: PrivateRecords, order: np.ndarray) -> list[tuple[ClassSums, np.ndarray, float]]:
    """Return what ``generate`` hands to its two releases."""
    caught = []

    def catch(release, features, clipping_norm, labels, num_classes):  # type: ignore[no-untyped-def]
        caught.append((release, features, clipping_norm))
        return Wiretap.original(release, features, clipping_norm, labels, num_classes)

    with patch.object(ClassSums, "sums", catch):
        made(records, [1, 1, 1], 5.0)
    return caught


def test_a_legal_record_is_clipped_in_the_first_release_hardly_at_all(wiretap: Wiretap) -> None:
    records = blobs(90)
    records.inputs[0] = 1.0
    made(records, [1, 1, 1], 5.0)
    made(records, [1, 1, 1], math.inf)
    np.testing.assert_allclose(wiretap.exact[0], wiretap.exact[2], rtol=1e-4)


def test_the_noise_has_the_variance_that_was_stated(wiretap: Wiretap) -> None:
    for seed in range(40):
        made(blobs(), [1, 1, 1], 1.0, seed)
    for first in (0, 1):
        residuals = np.array([wiretap.noisy[i] - wiretap.exact[i] for i in range(first, 80, 2)])
        std = wiretap.releases[first].noise_multiplier * wiretap.norms[first]
        number = residuals.size
        assert (residuals**2).sum() / std**2 == pytest.approx(number, abs=4 * math.sqrt(2 * number))
        assert abs(residuals.sum()) / std < 4 * math.sqrt(number)


@pytest.mark.parametrize("settings", [SETTINGS, MeanEmbedding(frequencies=12, warp=1)])
def test_images_depend_on_the_records_through_the_releases_alone(settings: MeanEmbedding) -> None:
    """Releases replayed from the first client, all other data replaced: the same images."""
    outcomes: list[tuple[np.ndarray, float]] = []

    def record(*arguments):  # type: ignore[no-untyped-def]
        outcomes.append(Wiretap.original(*arguments))
        return outcomes[-1]

    with patch.object(ClassSums, "sums", record):
        expected = made(blobs(), [2, 0, 3], 3.0, settings=settings)
    other = blobs(300, seed=5)
    assert not torch.equal(made(other, [2, 0, 3], 3.0, settings=settings), expected)
    replayed = iter(outcomes)
    with patch.object(ClassSums, "sums", lambda *_: next(replayed)):
        assert torch.equal(made(other, [2, 0, 3], 3.0, settings=settings), expected)


def test_warping_is_of_the_images_that_would_come_without_it() -> None:
    plain, moved = (made(blobs(), [2, 0, 3], 3.0, settings=MeanEmbedding(frequencies=12, warp=warp)) for warp in (0, 1))
    coins = np.random.default_rng(0)
    coins.standard_normal((5, 12))
    np.testing.assert_array_equal(moved.numpy(), warped(plain.numpy(), 1, coins))
    assert not torch.equal(moved, plain)


def test_without_noise_the_moments_are_the_data_s() -> None:
    records = blobs()
    images = made(records, [0, 20_000, 0], math.inf)
    order, _ = lowest_frequencies(SHAPE, 12)
    of_data = frequencies_of(records.inputs[records.labels == 1], order)
    of_images = frequencies_of(images, order)
    np.testing.assert_allclose(of_images.mean(0), of_data.mean(0), atol=0.01)
    np.testing.assert_allclose(np.cov(of_images.T), np.cov(of_data.T, bias=True), atol=0.002)


def test_the_images_of_records_that_are_mostly_black_or_white_have_the_data_s_moments_too() -> None:
    records = blobs(900)
    dark = PrivateRecords((6 * records.inputs - 1).clamp(-1, 1), records.labels, records.num_classes)
    order, _ = lowest_frequencies(SHAPE, 12)
    of_data = frequencies_of(dark.inputs[dark.labels == 1], order)
    of_images = frequencies_of(made(dark, [0, 20_000, 0], math.inf), order)
    assert (dark.inputs.abs() == 1).double().mean() > 0.5
    assert np.linalg.norm(of_images.mean(0) - of_data.mean(0)) < 0.06 * np.linalg.norm(of_data.mean(0))
    truth, found = np.cov(of_data.T), np.cov(of_images.T)
    assert np.linalg.norm(found - truth) < 0.15 * np.linalg.norm(truth)


def test_much_data_is_as_good_as_no_noise() -> None:
    few, many = blobs(300), blobs(30_000)
    order, _ = lowest_frequencies(SHAPE, 12)
    truth = np.cov(frequencies_of(many.inputs[many.labels == 0], order).T)

    def gap(records: PrivateRecords) -> float:
        found = np.cov(frequencies_of(made(records, [5000, 0, 0], 1.0), order).T)
        return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))

    assert gap(many) < 0.25
    assert gap(few) > 2 * gap(many)


def test_images_are_sorted_by_class_clamped_and_repeatable() -> None:
    records = blobs(3000)
    images = made(records, [3, 0, 2], 10.0)
    assert images.dtype == torch.float32
    assert images.shape == (5, *SHAPE)
    assert images.abs().max() <= 1
    assert torch.equal(images, made(records, [3, 0, 2], 10.0))
    assert not torch.equal(images, made(records, [3, 0, 2], 10.0, seed=1))
    assert made(records, [0, 0, 0], 10.0).shape == (0, *SHAPE)
    means = torch.stack([records.inputs[records.labels == label].mean(0) for label in range(3)])
    nearest = ((images[:, None] - means) ** 2).sum((2, 3, 4)).argmin(1)
    assert nearest.tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("target", [1.0, 10.0, math.inf])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_handful_of_records_is_no_crash(number: int, target: float) -> None:
    few = PrivateRecords(torch.zeros(number, *SHAPE), torch.zeros(number, dtype=torch.int64), 3)
    images = made(few, [2, 0, 1], target)
    assert images.shape == (3, *SHAPE)
    assert torch.isfinite(images).all()


def test_a_bill_is_refused_where_the_mean_image_would_be_noise() -> None:
    settings = MeanEmbedding()
    assert settings.bill(1, 10, 1.0, 1e-5).refused.startswith("1 records are too few for epsilon 1")
    assert settings.bill(0, 10, math.inf, 1e-5).refused
    assert isinstance(settings.bill(1, 10, math.inf, 1e-5).event, dp_event.NonPrivateDpEvent)
    least = next(number for number in range(1, 1000) if not settings.bill(number, 10, 1.0, 1e-5).refused)
    assert 20 < least < 200
    assert settings.bill(least - 1, 10, 10.0, 1e-5).refused == ""


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 28, 28), (5,)])
def test_any_shape_of_records(shape: tuple[int, ...]) -> None:
    inputs = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (200, *shape)).astype(np.float32))
    records = PrivateRecords(inputs, torch.arange(200) % 2, 2)
    assert made(records, [3, 1], 10.0, settings=MeanEmbedding(frequencies=30)).shape == (4, *shape)
    order, spectrum = lowest_frequencies(shape, 30)
    assert len(order) == len(spectrum) == len(set(order)) == min(30, math.prod(shape))
    assert spectrum.sum() == pytest.approx(1)
    assert order[0] == 0


def test_colours_are_among_the_first_frequencies_and_grey_images_have_none() -> None:
    order, _ = lowest_frequencies((3, 32, 32), 80)
    channel, down, right = np.unravel_index(order, (3, 32, 32))
    assert {(1, 0, 0), (2, 0, 0)} <= set(zip(channel.tolist(), down.tolist(), right.tolist(), strict=True))
    assert np.bincount(channel).tolist() == [41, 31, 8]
    grey, spectrum = lowest_frequencies((1, 28, 28), 80)
    flat, same = lowest_frequencies((28, 28), 80)
    np.testing.assert_array_equal(grey, flat)
    np.testing.assert_array_equal(spectrum, same)


def test_images_have_the_colours_of_their_class() -> None:
    colours = torch.tensor([[0.8, -0.6, -0.6], [-0.5, -0.5, 0.7]])
    labels = torch.arange(4000) % 2
    inputs = colours[labels][:, :, None, None] + 0.1 * torch.from_numpy(
        np.random.default_rng(0).standard_normal((4000, 3, 8, 8)).astype(np.float32)
    )
    images = made(PrivateRecords(inputs, labels, 2), [300, 300], 10.0, settings=MeanEmbedding(frequencies=80))
    found = torch.stack([part.mean((0, 2, 3)) for part in images.split(300)])
    assert (found - colours).abs().max() < 0.1
