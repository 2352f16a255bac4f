"""The Frechet distance of normal distributions is the one of the formula."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from fl_sim.training.features import frechet_distance


def _drawn(seed, size=4, records=50):
    coins = np.random.default_rng(seed)
    return coins.normal(size=(records, size)) @ coins.normal(size=(size, size)) + coins.normal(size=size)


def test_it_is_the_formula_by_scipys_root():
    first, second = _drawn(0), _drawn(1)
    mean = ((first.mean(axis=0) - second.mean(axis=0)) ** 2).sum()
    one, other = np.cov(first.T), np.cov(second.T)
    expected = mean + np.trace(one + other - 2 * sqrtm(one @ other).real)
    assert frechet_distance(torch.from_numpy(first), torch.from_numpy(second)) == pytest.approx(expected, rel=1e-9)


def test_it_is_nothing_for_the_same_records_and_a_shift_counts_squared():
    records = torch.from_numpy(_drawn(2))
    assert frechet_distance(records, records) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(records, records + 3) == pytest.approx(4 * 9)


def test_one_number_a_record_is_a_distance_of_deviations():
    records = torch.tensor([[-1.0], [1.0]])
    assert frechet_distance(records, 3 * records) == pytest.approx((3 - 1) ** 2 * 2)
