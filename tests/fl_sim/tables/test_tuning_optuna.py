"""What Optuna proposes: values of the space, spread over it as the space says."""

import pytest

from fl_sim.tables.tuning_optuna import proposed
from fl_sim.tables.tuning_space import Choices, Range

pytest.importorskip("optuna")


def test_proposals_of_a_logarithmic_range_are_short_and_spread_over_its_decades_and_differ_from_seed_to_seed() -> None:
    space = {"rate": Range(low=0.001, high=1.0, log=True), "even": Range(low=0.001, high=1.0), "kind": Choices((1, 2))}
    tried = [({"rate": 0.03, "even": 0.5, "kind": 1}, 0.5)]
    found = [proposed(space, tried, seed) for seed in range(40)]
    assert found[:3] == [proposed(space, tried, seed) for seed in range(3)]
    assert all(one[key] == float(f"{one[key]:.3g}") for one in found for key in ("rate", "even"))
    assert sum(one["rate"] < 0.03 for one in found) >= 12
    assert sum(one["even"] < 0.03 for one in found) <= 6
    assert len({one["even"] for one in found}) >= 35
