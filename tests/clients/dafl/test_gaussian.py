"""Class Gaussians: what a record can move, what is paid and released, and whether draws have the data's moments."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.dafl.generator import PrivateRecords
from clients.dafl.noisy_moments import LONGEST, Gaussian, GaussianRelease, drawn_as_one, without_noise
from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.mechanisms import Noise

SIZE = 6
SETTINGS = Gaussian()


def ball(number: int, seed: int = 0, *, longest: float = 1.0, size: int = SIZE) -> np.ndarray:
    """Vectors of all lengths up to ``longest``."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((number, size))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) * generator.uniform(0, longest, (number, 1))


def records_of(rows: np.ndarray, labels: np.ndarray, num_classes: int = 2) -> PrivateRecords:
    return PrivateRecords(torch.from_numpy(rows.astype(np.float32)), torch.from_numpy(labels), num_classes)


def made(
    records: PrivateRecords, counts: list[int], target: float = 10, key: int = 0, settings: Gaussian = SETTINGS
) -> torch.Tensor:
    bill = settings.bill(10_000, records.num_classes, target, 1e-5)
    assert not bill.refused
    return settings.generate(records, np.array(counts), bill, Noise.seeded(key), np.random.default_rng(1))


@pytest.fixture
def without_any_noise() -> Iterator[None]:
    """Let sums out as they are: clipped and summed as under noise, for what they can move."""
    with patch.object(GaussianRelease, "_noisy", lambda _self, sums, _std, _purpose: sums):
        yield


RELEASE = GaussianRelease(3.0, Noise.seeded(0), 100)


@pytest.mark.usefixtures("without_any_noise")
@pytest.mark.parametrize("longest", [0.5, 1.0, 30.0])
def test_a_record_moves_the_sums_by_their_sensitivities_at_most(longest: float) -> None:
    rows = ball(40, longest=longest)
    centre, (moments, std) = RELEASE.sum_of(rows, 2, 0), RELEASE.moments_of(rows, 2, 0)
    assert std == 3.0 * LONGEST == 3.0 * math.sqrt(2)
    for record in range(40):
        others = np.delete(rows, record, axis=0)
        assert np.linalg.norm(RELEASE.sum_of(others, 2, 0) - centre) <= 1
        assert np.linalg.norm(RELEASE.moments_of(others, 2, 0)[0] - moments) <= math.sqrt(2)


@pytest.mark.usefixtures("without_any_noise")
def test_the_sensitivities_are_attained() -> None:
    [row] = ball(1, longest=1.0) * 100
    rows, none = row[None], np.zeros((0, SIZE))
    assert np.linalg.norm(RELEASE.sum_of(rows, 2, 0) - RELEASE.sum_of(none, 2, 0)) > 0.9999
    moved = np.linalg.norm(RELEASE.moments_of(rows, 2, 0)[0] - RELEASE.moments_of(none, 2, 0)[0])
    assert moved > 0.9999 * math.sqrt(2)


@pytest.mark.usefixtures("without_any_noise")
def test_what_a_record_is_cut_to_does_not_depend_on_how_many_a_class_has() -> None:
    [row] = ball(1, longest=1.0) * 100
    alone, beside_others = row[None], np.concatenate([row[None], np.zeros((4000, SIZE))])
    np.testing.assert_array_equal(RELEASE.sum_of(alone, 2, 0), RELEASE.sum_of(beside_others, 2, 0))
    np.testing.assert_array_equal(RELEASE.moments_of(alone, 2, 0)[0], RELEASE.moments_of(beside_others, 2, 0)[0])


@pytest.mark.usefixtures("without_any_noise")
def test_moments_are_sums_and_sums_of_products() -> None:
    rows = ball(20, longest=0.5)
    moments, _ = RELEASE.moments_of(rows, 1, 0)
    np.testing.assert_allclose(moments[:SIZE], rows.sum(axis=0))
    assert np.linalg.norm(moments[SIZE:]) == pytest.approx(np.linalg.norm(rows.T @ rows))


def test_noise_has_the_standard_deviation_that_is_billed() -> None:
    rows, z = ball(30, size=30), 2.5
    release = GaussianRelease(z, Noise.seeded(3), 100)
    with patch.object(GaussianRelease, "_noisy", lambda _self, sums, _std, _purpose: sums):
        exact = release.sum_of(rows, 1, 0), release.moments_of(rows, 1, 0)[0]
    noisy = release.sum_of(rows, 1, 0), release.moments_of(rows, 1, 0)[0]
    for std, plain, found in zip((z, z * math.sqrt(2)), exact, noisy, strict=True):
        residuals = (found - plain) / std
        assert abs(residuals.mean()) < 4 / math.sqrt(residuals.size)
        assert residuals.std() == pytest.approx(1, abs=3 / math.sqrt(residuals.size))


def test_each_class_and_each_sum_has_noise_of_its_own() -> None:
    zeros = np.zeros((1, SIZE))
    drawn = [RELEASE.sum_of(zeros, 2, label) for label in (0, 1)]
    drawn += [RELEASE.moments_of(zeros, 2, label)[0][:SIZE] for label in (0, 1)]
    assert len({tuple(np.sign(one)) + tuple(one) for one in drawn}) == 4
    assert all(np.corrcoef(first, second)[0, 1] < 0.99 for first in drawn for second in drawn if first is not second)


@pytest.mark.parametrize(("target", "share"), [(10, 0.05), (1, 0.05), (1, 0.5)])
def test_both_releases_cost_what_is_billed_and_no_more_than_the_budget(target: float, share: float) -> None:
    settings, heard = Gaussian(centre_share=share), []
    bill = settings.bill(10_000, 2, target, 1e-5)
    assert bill.event == dp_event.GaussianDpEvent(bill.noise_multiplier)
    assert 0.999 * target < epsilon([bill.event] * bill.steps, 1e-5) <= target
    original = Noise.gaussian

    def listen(self: Noise, count: int, std: float, **named: object) -> np.ndarray:
        heard.append((count, std))
        return original(self, count, std, **named)

    with patch.object(Noise, "gaussian", listen):
        settings.generate(
            records_of(ball(50), np.zeros(50, np.int64)), np.array([20, 0]), bill, Noise.seeded(0),
            np.random.default_rng(0),
        )  # fmt: skip
    (few, first), (many, second) = heard
    assert (few, many) == (SIZE, SIZE + SIZE * (SIZE + 1) // 2)
    paid = first**-2 + (second / math.sqrt(2)) ** -2
    assert paid <= bill.noise_multiplier**-2
    assert paid == pytest.approx(bill.noise_multiplier**-2)


def test_nothing_but_the_releases_tells_records_apart() -> None:
    """With the releases held fixed, all that comes out is the same for any records of the same number."""
    labels = np.arange(60) % 2
    generator = np.random.default_rng(9)
    fixed = {}

    def same(_self: GaussianRelease, sums: np.ndarray, _std: float, purpose: str) -> np.ndarray:
        return fixed.setdefault(purpose, generator.standard_normal(sums.shape))

    with patch.object(GaussianRelease, "_noisy", same):
        first = made(records_of(ball(60), labels), [7, 5])
        second = made(records_of(ball(60, seed=1, longest=50.0), np.where(labels, 0, labels)), [7, 5])
    assert torch.equal(first, second)


def test_the_same_noise_makes_the_same_records_and_another_key_makes_others() -> None:
    records = records_of(ball(80), np.arange(80) % 2)
    assert torch.equal(made(records, [5, 6]), made(records, [5, 6]))
    assert not torch.equal(made(records, [5, 6]), made(records, [5, 6], key=1))


def test_a_record_that_is_not_finite_counts_as_none() -> None:
    rows = ball(50)
    rows[3] = 0
    broken = rows.copy()
    broken[3, 2] = math.nan
    labels = np.zeros(50, np.int64)
    with patch.object(GaussianRelease, "_noisy", lambda _self, sums, _std, _purpose: sums):
        sums = RELEASE.sum_of(broken, 2, 0)
    assert np.allclose(sums, np.delete(rows, 3, axis=0).sum(axis=0))
    assert made(records_of(broken, labels), [9, 0]).isfinite().all()


def test_without_noise_draws_have_the_mean_and_the_covariance_of_their_class() -> None:
    rows = 0.2 * ball(200) + np.repeat([[0.3], [-0.2]], 100, axis=0)
    records = records_of(rows, np.repeat([0, 1], 100))
    drawn = made(records, [60, 60], math.inf).numpy().astype(np.float64)
    for own, real in zip(np.split(drawn, 2), np.split(rows, 2), strict=True):
        np.testing.assert_allclose(own.mean(axis=0), real.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(np.cov(own.T, bias=True), np.cov(real.T, bias=True), atol=1e-6)


def test_classes_that_were_not_picked_are_left_out_and_others_come_sorted() -> None:
    rows = np.concatenate([ball(50) * 0.1 - 0.5, ball(50) * 0.1 + 0.5])
    drawn = made(records_of(rows, np.repeat([0, 2], 50), 3), [4, 0, 3], math.inf)
    assert drawn.shape == (7, SIZE)
    assert bool((drawn[:4] < 0).all() and (drawn[4:] > 0).all())
    assert made(records_of(rows, np.repeat([0, 2], 50), 3), [0, 0, 0]).shape == (0, SIZE)
    assert made(records_of(rows, np.repeat([0, 2], 50), 3), [0, 5, 0]).abs().max() <= 1  # one without any record


def test_draws_are_of_the_root_they_are_given() -> None:
    root = np.diag([1.0, 2.0, 0.0])
    many = drawn_as_one(100, root, np.random.default_rng(0))
    np.testing.assert_allclose(many.T @ many / 100, root @ root, atol=1e-9)
    assert abs(many.mean(axis=0)).max() < 1e-12
    assert drawn_as_one(1, root, np.random.default_rng(0)).shape == (1, 3)


def test_shrinking_eigenvalues_brings_them_nearer_to_the_truth() -> None:
    generator, size, std = np.random.default_rng(0), 120, 0.5
    truth = np.sort(generator.exponential(1.0, size))
    noise = generator.standard_normal((size, size)) * std / math.sqrt(size)
    matrix = np.diag(truth) + np.triu(noise, 1) + np.triu(noise, 1).T + np.diag(np.diag(noise)) * math.sqrt(2)
    values, vectors = np.linalg.eigh(matrix)
    best = (vectors**2 * truth[:, None]).sum(axis=0)  # of all that keep these eigenvectors
    cleaned = without_noise(values, std)
    assert np.abs(cleaned - best).mean() < 0.4 * np.abs(values - best).mean()


def test_too_few_records_are_refused_before_anything_is_paid() -> None:
    bill = SETTINGS.bill(5, 2, 1, 1e-5)
    assert "5 records are too few for epsilon 1: a mean needs at least" in bill.refused
    assert SETTINGS.bill(0, 2, math.inf, 1e-5).refused == "no records"


def test_images_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"vectors, .*\(1, 28, 28\): set"):
        SETTINGS.check_shape((1, 28, 28))
    SETTINGS.check_shape((1000,))
