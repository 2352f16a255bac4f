"""Noise that a budget asks for, and what is said where nobody asked: how much is spent, and who takes part."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_sim.__main__ import main
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.terms import rounded_up
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import CONFIG
from strategies.global_dp import GlobalDP, releases_beforehand
from strategies.private import PrivateRounds, planned_charges, told_beforehand

BASE = {"model": "logistic", "rounds": 10, "clients": 20, "partition": "iid", "engine": "inprocess"}


def private(**changes: Any) -> Experiment:
    aggregator = {"kind": "global-dp", "noise": "seeded", "epsilon": 8.0, **changes.pop("aggregator", {})}
    return experiment_from({**BASE, "aggregator": aggregator, **changes})


def spent(experiment: Experiment, noise_multiplier: float | None = None) -> float:
    aggregator = experiment.aggregator
    assert isinstance(aggregator, GlobalDP)
    if noise_multiplier is not None:
        aggregator = aggregator.model_copy(update={"noise_multiplier": noise_multiplier})
    charges = planned_charges(
        aggregator, experiment.sampler, experiment.num_clients, experiment.rounds,
        releases_beforehand(experiment.preprocess, aggregator),
    )  # fmt: skip
    return epsilon_of_counts(charges, aggregator.delta, accountant=aggregator.accountant)


def noise_of(experiment: Experiment) -> float:
    assert isinstance(experiment.aggregator, GlobalDP)
    return experiment.aggregator.noise_multiplier


FOUND = {"noise_multiplier": "from-epsilon"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rounds": 40},
        {"sampler": "full"},
        {"sampler": "fixed-size:3"},
        {"sampler": {"kind": "cyclic", "groups": 4}},
        {"preprocess": {"kind": "private-start", "noise_multiplier": 2.0}, "sampler": "full"},
        {"aggregator": {"epsilon": 0.5, "delta": 1e-6}},
        {"aggregator": {"accountant": "pld"}, "rounds": 2},
        {"aggregator": {"adaptive_clipping": {"target_quantile": 0.5}}},
    ],
    ids=str,
)
def test_the_noise_that_is_found_spends_the_budget_and_a_little_less_would_not_do(changes: dict[str, Any]) -> None:
    asked = {**changes, "aggregator": {**changes.get("aggregator", {}), **FOUND}}
    experiment = private(**asked)
    assert isinstance(experiment.aggregator, GlobalDP)
    budget, noise = experiment.aggregator.epsilon, noise_of(experiment)
    assert budget is not None
    assert 0.995 * budget < spent(experiment) <= budget
    assert spent(experiment, 0.99 * noise) > budget


def test_what_was_found_is_a_setting_like_any_other(tmp_path: Path) -> None:
    experiment = private(aggregator=FOUND, rounds=2)
    result = run(experiment, tmp_path / "run")
    assert result["rounds"] == 2
    assert f"noise_multiplier = {noise_of(experiment)}" in (tmp_path / "run" / CONFIG).read_text()
    assert private(aggregator={"noise_multiplier": noise_of(experiment)}, rounds=2) == experiment
    with pytest.raises(UserError, match=r"holds a run with other settings \(aggregator\)"):
        run(private(aggregator=FOUND, rounds=3), tmp_path / "run")


def test_it_takes_a_budget_and_an_aggregator_with_noise() -> None:
    with pytest.raises(UserError, match=r"finds the noise for aggregator\.epsilon, which is not set"):
        private(aggregator={"epsilon": None, **FOUND})
    with pytest.raises(UserError, match=r"aggregator\.noise_multiplier"):
        experiment_from({**BASE, "aggregator": {"kind": "mean", **FOUND}})
    with pytest.raises(UserError, match="count_noise"):  # found noise is checked as typed noise is
        private(aggregator={"adaptive_clipping": {"count_noise": 0.01}, **FOUND})


def test_a_ceiling_that_is_not_reached_or_too_low_is_told_and_one_that_fits_is_not() -> None:
    [under] = told_beforehand(private(sampler="poisson:0.2"))
    assert f"all 10 rounds cost epsilon {rounded_up(spent(private(sampler='poisson:0.2')))} with" in under
    assert "aggregator.epsilon is 8, of which a part stays unused" in under
    assert "aggregator.noise_multiplier=from-epsilon" in under
    [over] = told_beforehand(private(sampler="full", rounds=50))
    assert "so training stops early" in over
    assert told_beforehand(private(sampler="poisson:0.2", aggregator=FOUND)) == []
    assert told_beforehand(private(sampler="poisson:0.2", aggregator={"epsilon": None})) == []


def test_a_noise_multiplier_typed_in_short_is_told_to_be_no_epsilon_and_what_it_costs() -> None:
    short = experiment_from({**BASE, "aggregator": "global-dp:8", "sampler": "poisson:0.2"})
    assert noise_of(short) == 8
    [told] = PrivateRounds.told(short)
    assert "aggregator.noise_multiplier=8 (in short global-dp:8) sets the noise and not epsilon" in told
    assert f"all 10 rounds cost epsilon {rounded_up(spent(short))}; to set epsilon instead" in told
    settings = told.partition(", give ")[2].split()
    found = experiment_from(with_overrides({**BASE, "aggregator": "global-dp", "sampler": "poisson:0.2"}, settings))
    assert 0.995 * 8 < spent(found) <= 8
    assert PrivateRounds.told(experiment_from({**BASE, "aggregator": "global-dp", "sampler": "poisson:0.2"})) == []


def test_who_takes_part_by_default_is_told_on_the_screen_in_the_plan_and_with_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed_out(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["fl-sim", *words])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr()

    told = "each client takes part in a round by a secret draw of probability 0.1 (sampler=poisson:0.1"
    assert any(told in one for one in told_beforehand(private()))
    assert not any(told in one for one in told_beforehand(private(sampler="full")))
    typed = ["model=logistic", "rounds=1", "aggregator=global-dp", "aggregator.noise=seeded"]
    shown = typed_out("run", *typed, "--out", str(tmp_path / "run"))
    assert told in shown.err
    assert "sampling: poisson: every client takes part in a step with probability 0.1" in shown.out
    assert any(told in one for one in json.loads((tmp_path / "run" / "result.json").read_text())["warnings"])
    assert told in typed_out("plan", *typed, "--quick").out
