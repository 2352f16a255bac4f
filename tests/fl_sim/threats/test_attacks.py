"""True-positive rates of membership tests are shares of members, and stay within the bound of an epsilon."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.threats.finished import Judged
from fl_sim.threats.membership import most_allowed, rate_at

QUICK: dict[str, Any] = {
    "model": "mlp", "engine": "inprocess", "partition": "iid", "clients": 5, "rounds": 1, "local": {"batch_size": 32},
}  # fmt: skip
SYNTHETIC = {"kind": "da-fl", "epsilon": 2, "generator": "mean-embedding", "noise": "seeded"}


def told(verb: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["attack", verb, str(out), "--json"]).stdout)
    return found


def test_rates_count_members_below_the_threshold_and_stay_within_the_bound_of_epsilon(tmp_path: Path) -> None:
    zeros = np.zeros(1000, np.int64)
    others = Judged(np.arange(1000.0), np.ones(1000, bool), zeros)
    members = Judged(np.array([5.0, 9.5, 10.0, 500.0]), np.ones(4, bool), zeros[:4])
    rate = rate_at(members, others, 0.01)  # ten of 1,000 are below 10
    assert rate is not None
    assert rate.rate == 0.5
    assert 0 < rate.low < 0.5 < rate.high < 1
    assert rate_at(members, others, 0.0001) is None
    assert most_allowed(0.0, 0.0, 0.01) == pytest.approx(0.01)
    assert most_allowed(None, 0.0, 0.01) == 1
    assert most_allowed(np.log(2.0), 0.001, 0.01) == pytest.approx(0.021)
    run(experiment_from(QUICK), tmp_path / "open")
    found = told("membership", tmp_path / "open")
    assert found["area"]["low"] < 0.55
    assert found["privacy"] == []


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    ("settings", "is_bounded"),
    [
        ({"partition": "label-1", "preprocess": SYNTHETIC}, False),
        ({"partition": "label-1", "preprocess": {**SYNTHETIC, "train_on": "synthetic"}}, True),
        ({"local": {"batch_size": 32, "privacy": {"kind": "dp-sgd", "noise_multiplier": 4, "noise": "seeded"}}}, True),
        (
            {"local": {"batch_size": 32, "privacy": {"kind": "local-dp", "noise_multiplier": 4, "noise": "seeded"}}},
            False,
        ),
    ],
)
def test_an_epsilon_bounds_the_attack_only_if_it_holds_for_the_model(
    tmp_path: Path, settings: dict[str, Any], *, is_bounded: bool
) -> None:
    run(experiment_from({**QUICK, **settings}), tmp_path / "run")
    said = CliRunner().invoke(app, ["attack", "membership", str(tmp_path / "run")]).stdout
    assert ("the run's epsilon allows at most" in said) == is_bounded
    assert "It does not cover: " in said
