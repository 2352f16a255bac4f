"""A record is read off its gradient to 1e-6, and not under DP-SGD; true-positive rates are shares of members."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.threats.finished import Judged
from fl_sim.threats.inversion import gradient_of, invert, linear_layers
from fl_sim.threats.membership import most_allowed, rate_at

QUICK: dict[str, Any] = {
    "model": "mlp", "engine": "inprocess", "partition": "iid", "clients": 5, "rounds": 1, "local": {"batch_size": 32},
}  # fmt: skip


def told(verb: str, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["attack", verb, str(out), "--json"]).stdout)
    return found


@pytest.mark.usefixtures("quick_accounting")
def test_records_are_read_off_their_gradients_and_not_under_dp_sgd(tmp_path: Path) -> None:
    run(experiment_from(QUICK), tmp_path / "open")
    found = told("inversion", tmp_path / "open")
    assert found["exact"] == found["records"] == found["labels_found"] == 5
    local = {"batch_size": 32, "privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0, "noise": "seeded"}}
    run(experiment_from({**QUICK, "local": local}), tmp_path / "private")
    found = told("inversion", tmp_path / "private")
    assert found["exact"] == 0
    assert found["median_error"] > 0.1
    assert found["privacy"][0]["unit"] == "record"


def test_the_gradient_of_one_record_gives_it_away_whatever_the_weights() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, record = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(1, 3, 3)
    gradient = gradient_of(model, record, torch.tensor([2]))
    assert invert(gradient, linear_layers(model), record, 2).error < 1e-6
    assert invert(gradient, linear_layers(model), record, 2).label_found
    assert invert(gradient, linear_layers(model), record + 1, 2).error > 0.1
    with pytest.raises(UserError, match=r"first layer with parameters .* is Conv2d"):
        linear_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3)))


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
        ({"preprocess": {"kind": "da-fl", "epsilon": 1, "generator": "mean-embedding"}}, False),
        ({"preprocess": {"kind": "da-fl", "epsilon": 1, "generator": "mean-embedding", "train_on": "synthetic"}}, True),
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


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    ("privacy", "named"),
    [({"kind": "local-dp"}, "local-dp"), ({"kind": "dp-sgd", "clipping": "automatic", "clipping_norm": 1.0}, "dp-sgd")],
)
def test_a_protection_that_the_inversion_does_not_know_is_refused(
    tmp_path: Path, privacy: dict[str, Any], named: str
) -> None:
    local = {"batch_size": 32, "privacy": {"noise_multiplier": 4, "noise": "seeded", **privacy}}
    run(experiment_from({**QUICK, "local": local}), tmp_path / "run")
    with pytest.raises(UserError, match=f"has local.privacy={named}, .*: give such a run, or a run without"):
        CliRunner().invoke(app, ["attack", "inversion", str(tmp_path / "run")], catch_exceptions=False)
