"""Theorem 3 of the 2017 paper, where it holds."""

import numpy as np
import pytest

from fl_sim.privacy.pate import lnmax


@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
def test_theorem_3_holds_below_its_range_of_q_alone(gamma: float) -> None:
    log_end = -np.log(np.exp(2 * gamma) + 1)
    curves = lnmax.theorem_3(log_end + np.array([-1e-3, 1e-3]), gamma, np.array([1.5, 2.0, 9.0]))
    assert np.isfinite(curves[0]).all()
    assert np.isinf(curves[1]).all()
