"""LiRA finds planted members and no members without a trace of them; left-out records are the run's non-members."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.experiment.node_job import own_job, public_facts
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import MODEL
from fl_sim.threats.canaries import audit
from fl_sim.threats.finished import FinishedRun, Judged
from fl_sim.threats.lira import Audited, attack, check_shadows, log_odds, score, shadow_of
from fl_sim.threats.membership import area_by_loss

QUICK: dict[str, Any] = {
    "model": "mlp", "engine": "inprocess", "partition": "iid", "clients": 3, "rounds": 2, "left_out": 0.5,
    "keep_every": 1, "evaluate_every": 2,
}  # fmt: skip


def quick(**changes: Any) -> Experiment:
    return experiment_from({**QUICK, **changes})


def told(verb: str, out: Path, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["attack", verb, str(out), *options, "--json"]).stdout)
    return found


def noise_in(folder: Path) -> str:
    """Return a data set whose labels have nothing to do with the records: models can only memorise it."""
    coins = np.random.default_rng(0)
    x, y = coins.normal(size=(440, 150)).astype(np.float32), coins.integers(2, size=440)
    np.savez(folder / "noise.npz", x_train=x[:400], y_train=y[:400], x_test=x[400:], y_test=y[400:])
    return f"npz:{folder / 'noise.npz'}"


@pytest.mark.parametrize("is_online", [True, False])
@pytest.mark.parametrize("num_shadows", [16, 64])
def test_the_score_finds_what_a_record_adds_to_its_own_confidence_and_nothing_else(
    num_shadows: int, *, is_online: bool
) -> None:
    coins, records = np.random.default_rng(0), 2_000
    level = coins.normal(0, 5, records)  # how hard each record is, which misleads a single threshold
    is_in = coins.random((num_shadows, records)) < 0.5
    noise, is_member = coins.normal(size=(num_shadows + 1, records)), coins.random(records) < 0.5
    none = np.zeros(records, np.int64)

    def area(gain: float) -> tuple[float, float, float]:
        shadows = level + gain * is_in + noise[1:]
        found = -score(level + gain * is_member + noise[0], shadows, is_in, is_online=is_online)
        one = area_by_loss(*(Judged(found[chosen], chosen[chosen], none[chosen]) for chosen in (is_member, ~is_member)))
        assert one is not None
        return one.low, one.area, one.high

    low, _, high = area(0.0)
    assert low < 0.5 < high
    _, found, most = area(2.0)
    assert 0.85 < found < most
    assert found < norm.cdf(2 / np.sqrt(2)) + 0.02  # the area of the best test with known means


def test_the_score_is_the_log_ratio_of_two_normal_densities_and_unknown_without_runs_on_both_sides() -> None:
    shadows = np.array([[1.0, 0.0], [3.0, 1.0], [-2.0, 2.0], [0.0, 3.0]])
    is_in = np.array([[True, True], [True, True], [False, True], [False, True]])
    found = score(np.array([1.0, 1.0]), shadows, is_in, is_online=True)
    inner, outer = np.sqrt((2 + 5) / (1 + 3)), np.sqrt(2.0)  # pooled: the squares of both records, and of the first
    assert found[0] == pytest.approx(norm.logpdf(1, 2, inner) - norm.logpdf(1, -1, outer))
    assert np.isnan(found[1])
    assert score(np.array([1.0, 1.0]), shadows, is_in, is_online=False)[0] == pytest.approx(-norm.logsf(1, -1, outer))


def test_log_odds_are_those_of_the_probability_without_overflow() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [900.0, 0.0, 0.0]], dtype=torch.float64)
    probability = float(logits[0].softmax(0)[1])
    assert log_odds(logits, torch.tensor([1, 0])) == pytest.approx(
        [np.log(probability / (1 - probability)), 900 - np.log(2)]
    )


def test_lira_recognises_members_of_an_overfit_run_and_goes_on_with_finished_shadow_runs(tmp_path: Path) -> None:
    overfit = quick(data=noise_in(tmp_path), model="logistic", local={"batch_size": 20, "epochs": 10})
    run(overfit, tmp_path / "run")
    finished, said = FinishedRun.of(tmp_path / "run"), list[str]()
    audited = Audited.of(finished)
    everything = job_of(overfit.model_copy(update={"left_out": 0.0})).shards.records
    assert sorted([*audited.members, *audited.others]) == sorted(everything)
    assert np.array_equal(np.sort(audited.members), np.sort(finished.job.shards.records))
    assert 0.4 < len(audited.members) / len(everything) < 0.6
    scored = attack(finished, 8, tmp_path / "shadows", said.append)
    area, by_loss = (area_by_loss(*scored.split(one)) for one in (scored.by_score, scored.by_loss))
    assert area is not None
    assert by_loss is not None
    assert area.low > 0.5
    assert area.area > by_loss.area
    assert scored.rounds == (1, 2)
    assert not np.array_equal(scored.over_rounds.losses, scored.by_score.losses, equal_nan=True)
    assert len(scored.is_scored) == len(everything)
    assert 0 < (~scored.is_scored).sum() < 0.05 * len(everything)  # in all of 8 shadow runs, or in none
    proven = told("canaries", tmp_path / "run")
    assert (proven["canaries"], proven["claimed"]) == (len(everything), None)
    assert 0.3 < proven["epsilon_lower_bound"] < proven["limit"]
    models = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"shadows/*/{MODEL}")}
    assert len(models) == 8
    again = attack(finished, 8, tmp_path / "shadows", said.append)
    assert np.array_equal(again.by_score.losses, scored.by_score.losses, equal_nan=True)
    assert models == {path: path.stat().st_mtime_ns for path in models}


def test_shadow_runs_share_partition_and_first_model_with_the_run_and_draw_their_own_records() -> None:
    experiment = quick(seed=3, left_out=0.3)
    jobs = [job_of(one) for one in (experiment, shadow_of(experiment, 1), shadow_of(experiment, 2))]
    whole = [job_of(one.experiment.model_copy(update={"left_out": 0.0})).shards for one in jobs]
    kept = [np.isin(whole[0].records, job.shards.records) for job in jobs]
    for job, shards, mask in zip(jobs, whole, kept, strict=True):
        assert np.array_equal(shards.records, whole[0].records)
        assert 0.65 < mask.mean() < 0.75
        first, mine = (next(one.model().parameters()) for one in (jobs[0], job))
        assert torch.equal(first, mine)
    assert not np.array_equal(kept[1], kept[2])
    assert np.mean(kept[1] == kept[2]) == pytest.approx(0.7**2 + 0.3**2, abs=0.05)
    assert shadow_of(quick(left_out=0.0), 1).left_out == 0.5


def test_a_run_without_left_out_records_is_compared_with_test_records(tmp_path: Path) -> None:
    run(quick(left_out=0.0, rounds=1, model="logistic", local={"epochs": 1}), tmp_path / "run")
    found = told("membership", tmp_path / "run", "--method", "lira", "--shadows", "8")
    assert (found["form"], found["rounds_used"]) == ("offline", [1])
    assert found["area"]["low"] < 0.55
    assert found["others"] == len(job_of(quick()).dataset.test)
    with pytest.raises(UserError, match=r"has left_out=0, .*: give a run with left_out=0\.5"):
        audit(FinishedRun.of(tmp_path / "run"))


def test_what_would_make_the_test_invalid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--shadows 7 is too few: .* take 8 or more"):
        check_shadows(7)
    run(quick(rounds=1, partition="feature-noise:0.1", model="logistic"), tmp_path / "noisy")
    with pytest.raises(UserError, match=r"changed records \(partition=feature-noise\): take --method loss"):
        Audited.of(FinishedRun.of(tmp_path / "noisy"))
    with pytest.raises(UserError, match=r"left_out=0\.99999 leaves no training record"):
        job_of(quick(left_out=0.99999))
    own: dict[str, Any] = {"data": noise_in(tmp_path), "evaluate": {"test_is_public": True}}
    job_of(quick(**own))
    local = {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1}}
    with pytest.raises(UserError, match=r"left_out=0\.5 follows from the seed, which is published"):
        job_of(quick(**own, local=local, keep_every=0))
    facts = public_facts(job_of(quick()).dataset)
    with pytest.raises(UserError, match=r"left_out=0\.5 chooses records of the server's data set"):
        own_job(quick(), "digits", 0, facts)
