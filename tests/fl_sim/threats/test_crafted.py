"""Crafted canaries move sums by the clipping norm, prove nearly the claim, and refute too little noise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.mechanisms import Noise
from fl_sim.simulation.run import run
from fl_sim.threats.crafted import AuditedSteps, _sums, audit_crafted
from fl_sim.threats.finished import FinishedRun
from fl_sim.training import private_steps

pytestmark = pytest.mark.usefixtures("coarse_losses")


def finished(out: Path, **local: Any) -> FinishedRun:
    run(experiment_from({
        "model": "logistic", "engine": "inprocess", "partition": "iid", "clients": 5, "rounds": 2,
        "local": {"batch_size": 2000, **local},
    }), out)  # fmt: skip
    return FinishedRun.of(out)


def private(**changes: Any) -> dict[str, Any]:
    return {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1.5, "noise": "seeded", **changes}}


def test_the_bound_is_near_the_claim_and_half_the_noise_is_refuted(tmp_path: Path) -> None:
    made = finished(tmp_path, **private())
    typed = ["attack", "canaries", str(tmp_path), "--crafted", "--audit-runs", "1"]
    found = json.loads(CliRunner().invoke(app, [*typed, "--json"], catch_exceptions=False).stdout)
    assert found["claimed"] == max(one.of_run[0] for one in made.covering)
    assert (found["canaries"], found["steps"], found["sampling_rate"]) == (2000, 2, 1.0)
    assert 0.5 * found["claimed"] < found["epsilon_lower_bound"] < found["claimed"]
    assert found["one_run"] < found["claimed"]
    assert found["estimate"] == pytest.approx(found["claimed"], rel=0.15)
    gaussian = Noise.gaussian

    def half(*args: Any, **names: Any) -> NDArray[np.float64]:
        return gaussian(*args, **names) / 2

    with (
        mock.patch.object(private_steps, "is_compiled", return_value=False),
        mock.patch.object(Noise, "gaussian", half),
    ):
        faulty = audit_crafted(made, 1)
        shown = CliRunner().invoke(app, typed, catch_exceptions=False).stdout
    assert faulty.epsilon_lower_bound > faulty.claimed
    assert "REFUTED" in shown


def test_the_audited_steps_are_those_of_the_client_with_the_largest_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = finished(tmp_path, batch_size=32, **private(clipping="automatic"))
    steps, sizes = AuditedSteps.of(made), made.job.shards.sizes
    assert steps.count % int(sizes.min()) == 0
    assert steps.rate == 32 / sizes.min()
    assert steps.count >= 2000
    total = 2 * -(-int(sizes.min()) // 32)
    assert (steps.rounds, steps.steps, steps.noise) == (total, 1, 1.5)  # the model is seen after every step
    monkeypatch.setattr("fl_sim.threats.crafted.MOST_SEEN", 3)
    assert AuditedSteps.of(made).rounds * AuditedSteps.of(made).steps == total
    assert AuditedSteps.of(made).rounds <= 3
    assert steps.epsilon_with(1.5) == pytest.approx(steps.claimed, rel=0.05)


def test_a_canary_moves_the_sum_along_itself_alone_by_one_clipping_norm_in_each_step_it_joins() -> None:
    steps = AuditedSteps(2, 3, 50, 50, 0.01, 1e6, 1e-5, "seeded")
    taking_part = np.arange(50) % 3 == 0
    assert _sums(steps, taking_part, 4) == pytest.approx(np.tile(3.0 * taking_part, (2, 1)), abs=0.1)
    sampled = AuditedSteps(4, 5, 10, 50, 0.01, 1e6, 1e-5, "seeded")
    sums = _sums(sampled, taking_part, 4)
    assert np.abs(sums - sums.round()).max() < 0.15
    assert np.abs(sums[:, ~taking_part]).max() < 0.15
    assert 0.5 < sums[:, taking_part].mean() < 1.5  # 5 steps, each with probability 1/5


def test_scores_are_log_likelihood_ratios_of_both_worlds() -> None:
    steps = AuditedSteps(1, 6, 20, 100, 0.9, 4.0, 1e-5, "seeded")
    points, width = np.linspace(-25, 45, 7001, retstep=True)
    out = stats.norm(0, 0.9 * 6**0.5).pdf(points)
    joined = np.arange(7)
    shares = stats.binom(6, 0.2).pmf(joined)
    inside = (shares[:, None] * stats.norm(joined[:, None], 0.9 * 6**0.5).pdf(points)).sum(0)
    ratios = steps.ratios(points[None])
    assert out * np.exp(ratios) == pytest.approx(inside, rel=1e-9)
    assert (out * np.exp(ratios)).sum() * width == pytest.approx(1.0, rel=1e-9)
    assert steps.ratios(np.stack([points, points])) == pytest.approx(2 * ratios)


def test_a_run_without_private_steps_is_refused(tmp_path: Path) -> None:
    for name, local in (("open", {}), ("updates", private(kind="local-dp"))):
        with pytest.raises(UserError, match="claims no epsilon for local steps"):
            audit_crafted(finished(tmp_path / name, **local), 1)
    made = finished(tmp_path / "steps", **private())
    release = {"event": {"kind": "pure", "epsilon": 1.0}, "times": 1}
    statement, *more = made.facts["privacy"]
    events = [release, *statement["events"]]
    joint = replace(made, facts={**made.facts, "privacy": [{**statement, "events": events}, *more]})
    with pytest.raises(UserError, match="other releases besides equal local steps"):
        audit_crafted(joint, 1)
    assert CliRunner().invoke(app, ["attack", "canaries", str(tmp_path / "open"), "--audit-runs", "2"]).exit_code == 2
