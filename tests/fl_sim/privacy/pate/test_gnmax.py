"""Theorem 6 of the 2018 paper, where it speaks."""

import numpy as np
import pytest

from fl_sim.privacy.pate import gnmax


@pytest.mark.parametrize("sigma", [5.0, 40.0])
def test_theorem_6_grows_with_q_wherever_it_speaks_as_only_a_bound_on_q_is_known(sigma: float) -> None:
    log_q, orders = -np.geomspace(600.0, 1e-3, 2000), np.array([1.1, 1.5, 2.0, 4.0, 10.0])
    curves = gnmax.theorem_6(log_q, sigma, orders)
    speaks = np.isfinite(curves)
    assert speaks.sum() > 2000
    rises = np.where(speaks, curves, 0.0)
    both = speaks[1:] & speaks[:-1]
    assert (np.diff(rises, axis=0)[both] >= 0).all()


def test_a_certain_answer_costs_nothing() -> None:
    orders = np.array([1.1, 2.0, 10.0])
    assert (gnmax.theorem_6(np.array([-np.inf, -1e-9]), 2.0, orders) == [[0.0] * 3, [np.inf] * 3]).all()


def test_a_test_costs_the_same_as_far_below_its_threshold_as_above_it() -> None:
    orders = np.array([1.5, 2.0])
    below, above = gnmax.threshold_dependent(np.array([[4, 1], [8, 1]]), 6.0, 0.5, orders)
    assert (below == above).all()
    assert (below < gnmax.threshold_independent(0.5, orders) / 2).all()
