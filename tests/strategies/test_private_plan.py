"""Plans of Global DP with turns, noise bands, adaptive clipping and a private start: what a run is charged."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_sim.cli.privacy import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.mechanisms import update_noise_multiplier
from fl_sim.simulation.run import run

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 6, "model": "logistic", "rounds": 3, "engine": "inprocess",
}  # fmt: skip
NOISY: dict[str, Any] = {"kind": "global-dp", "noise_multiplier": 3.0, "noise": "seeded"}
TURNS = {"kind": "cyclic", "groups": 3, "sampling_rate": 0.5}
START = {"kind": "private-start", "noise_multiplier": 4.0, "images": 50, "frequencies": 5, "server_epochs": 1}
NOISE = ("--noise-multiplier", "3", "--rounds", "3")

pytestmark = pytest.mark.usefixtures("coarse_losses")


def plan(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["global-dp", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (
            (*NOISE[:2], "--rounds", "7", "--groups", "3", "--sampling-rate", "0.5", "--noise-bands", "2"),
            {"sampler": TURNS, "rounds": 7, "aggregator": {**NOISY, "noise_bands": 2}},
        ),
        (
            (*NOISE, "--sampling-rate", "0.5", "--clients", "6", "--adaptive-clipping"),
            {"sampler": "poisson:0.5", "aggregator": {**NOISY, "adaptive_clipping": {}}},
        ),
        (
            (*NOISE, "--sampling-rate", "0.5", "--start-noise", "4"),
            {"sampler": "poisson:0.5", "aggregator": NOISY, "preprocess": START},
        ),
        (
            (*NOISE, "--clients", "6", "--cohort", "4", "--start-noise", "4"),
            {"sampler": "fixed-size:4", "aggregator": NOISY, "preprocess": START},
        ),
    ],
    ids=["turns and bands", "adaptive clipping", "private start", "private start of fixed-size cohorts"],
)
def test_the_planned_cost_is_what_a_run_states_and_charges(
    arguments: Sequence[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    found = plan(*arguments)
    [said] = run(experiment_from({**BASE, **settings}), tmp_path / "run")["privacy"]
    assert found["epsilon_least"] == pytest.approx(said["epsilon"], rel=1e-9)
    assert said["epsilon"] == said["epsilon_realised"]  # the ledger's charges, of all rounds
    assert (found["steps"], found["adjacency"], found["unit"]) == (said["steps"], said["adjacency"], said["unit"])


def test_the_noise_for_an_epsilon_is_that_of_a_run_and_the_rounds_that_fit_are_those_of_a_budget(
    tmp_path: Path,
) -> None:
    options = ("--groups", "3", "--noise-bands", "3", "--clients", "6")
    bands = {"kind": "global-dp", "epsilon": 4.0, "noise_bands": 3, "noise": "seeded"}
    whole = {**BASE, "sampler": {"kind": "cyclic", "groups": 3}, "rounds": 7}
    experiment = experiment_from({**whole, "aggregator": {**bands, "noise_multiplier": "from-epsilon"}})
    found = plan("--rounds", "7", "--epsilon", "4", *options)
    assert found["noise_multiplier"] == experiment.aggregator.noise_multiplier  # type: ignore[attr-defined]
    assert found["epsilon"] <= 4
    fits = plan("--noise-multiplier", "2", "--epsilon", "4", *options)
    stopped = experiment_from({**whole, "rounds": 12, "aggregator": {**bands, "noise_multiplier": 2.0}})
    run(stopped, tmp_path / "run")
    rounds = len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert rounds == fits["steps_that_fit"] == 3 * fits["steps"]
    assert 0 < rounds < 12


def test_the_counts_of_adaptive_clipping_have_their_share_of_the_bill() -> None:
    found = plan(*NOISE, "--sampling-rate", "0.5", "--count-noise", "2.5")
    assert found["further"]["adaptive clipping"].startswith("36 % of the cost")
    assert f"{update_noise_multiplier(3.0, 2.5):.6g}" in found["further"]["adaptive clipping"]
    assert found["epsilon"] == plan(*NOISE, "--sampling-rate", "0.5")["epsilon"]


def test_delta_at_an_epsilon_counts_the_private_start() -> None:
    known = (*NOISE, "--sampling-rate", "0.5", "--epsilon", "2")
    assert plan(*known, "--start-noise", "4")["delta_at_target"] > plan(*known)["delta_at_target"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--groups", "0", *NOISE), "must be from 1 to the number of --clients"),
        (("--groups", "9", "--clients", "6", *NOISE), "must be from 1 to the number of --clients"),
        (("--groups", "2", "--clients", "6", "--cohort", "3", *NOISE), "must be from 1 to the number of --clients"),
        (("--groups", "2", "--start-noise", "2", *NOISE), "from one group"),
        (("--groups", "2", "--noise-bands", "3", *NOISE), "at most once in any 3 rounds"),
        (("--sampling-rate", "0.5", "--noise-bands", "3", *NOISE), "at most once in any 3 rounds"),
        (("--sampling-rate", "0.5", "--adaptive-clipping", *NOISE), "give --clients"),
        (("--sampling-rate", "0.5", "--count-noise", "1", *NOISE), "for the updates at noise_multiplier 3"),
        (
            ("--sampling-rate", "0.5", "--start-noise", "0.5", "--rounds", "3", "--epsilon", "1"),
            "the private start by itself costs",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named_with_their_fix(arguments: Sequence[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, ["global-dp", *arguments], catch_exceptions=False)
