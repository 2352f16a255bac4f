"""The mean embedding: what a record can move, what is paid, and whether the images have the data's moments."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from clients.generation import PrivateRecords
from clients.mean_embedding import MeanEmbedding, frequencies_of, lowest_frequencies
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.mechanisms import Noise

SHAPE = (1, 6, 6)


def blobs(number: int = 400, num_classes: int = 3, seed: int = 0) -> PrivateRecords:
    """Records of class k about a mean of their own, well within [-1, 1]."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % num_classes
    means = generator.uniform(-0.4, 0.4, (num_classes, *SHAPE))
    inputs = means[labels] + 0.1 * generator.standard_normal((number, *SHAPE))
    return PrivateRecords(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels), num_classes)


def made(records: PrivateRecords, counts: list[int], target: float, seed: int = 0) -> torch.Tensor:
    settings = MeanEmbedding(frequencies=12)
    bill = settings.bill(len(records.labels), records.num_classes, target, 1e-5)
    return settings.generate(records, np.array(counts), bill, Noise.seeded(seed), np.random.default_rng(seed))


def test_the_bill_is_one_gaussian_release_within_the_budget() -> None:
    bill = MeanEmbedding().bill(6000, 10, 3.0, 1e-5)
    assert (bill.steps, bill.sampling_rate, bill.refused) == (1, 1.0, "")
    assert bill.event == dp_event.GaussianDpEvent(bill.noise_multiplier)
    assert epsilon([bill.event], 1e-5) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("target", [1.0, math.inf])
def test_too_few_records_are_refused_and_one_record_is_no_crash(target: float) -> None:
    assert "too few" in MeanEmbedding().bill(1, 10, 1.0, 1e-5).refused
    one = PrivateRecords(torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.int64), 3)
    assert made(one, [2, 0, 0], target).shape == (2, *SHAPE)


def test_without_noise_the_moments_are_the_data_s() -> None:
    records = blobs()
    images = made(records, [0, 20_000, 0], math.inf)
    order = lowest_frequencies(SHAPE, 12)
    of_data = frequencies_of(records.inputs[records.labels == 1], order)
    of_images = frequencies_of(images, order)
    np.testing.assert_allclose(of_images.mean(0), of_data.mean(0), atol=0.01)
    np.testing.assert_allclose(np.cov(of_images.T), np.cov(of_data.T, bias=True), atol=0.002)


def test_images_are_sorted_by_class_clamped_and_repeatable() -> None:
    records = blobs(3000)
    images = made(records, [3, 0, 2], 10.0)
    assert images.dtype == torch.float32
    assert images.shape == (5, *SHAPE)
    assert images.abs().max() <= 1
    assert torch.equal(images, made(records, [3, 0, 2], 10.0))
    assert not torch.equal(images, made(records, [3, 0, 2], 10.0, seed=1))
    assert made(records, [0, 0, 0], 10.0).shape == (0, *SHAPE)
