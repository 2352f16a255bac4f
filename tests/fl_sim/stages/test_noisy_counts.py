"""Noisy counts on the clients' own test records: what is charged and when, what is drawn, said and refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from clients import noisy_counts
from clients.noisy_counts import COUNTED, noisy_count
from clients.policy import open_ledger
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.mechanisms import Noise
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.rounds import planned_bill
from fl_sim.simulation.run import run
from fl_sim.training.loop import to_tensors

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 3, "model": "logistic", "rounds": 3, "engine": "inprocess",
}  # fmt: skip
POOLED = {"clients": "pooled:0.25", "test": "never", "personal_every": 2, "count_noise": 5.0}
NOISY = {"kind": "dp-sgd", "noise_multiplier": 1.0, "noise": "seeded"}

pytestmark = pytest.mark.usefixtures("coarse_losses")


def settings_of(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    local = {"learning_rate": 0.5, "momentum": 0.0, "batch_size": 64, "privacy": {**NOISY, **(privacy or {})}}
    return {**BASE, "evaluate": POOLED, "local": local, **changes}


def ran(out: Path, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(privacy, **changes)), out)


def charges(client: int, privacy: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    path = ledger_path(job_of(experiment_from(settings_of(privacy, **changes))), client)
    return [charge.release for charge in open_ledger(path).charges] if path.exists() else []


def of_counts(found: list[str]) -> list[str]:
    return [one.rpartition(", ")[2] for one in found if one.startswith(COUNTED)]


def test_the_noise_on_a_count_has_its_deviation_and_no_count_leaves_its_range() -> None:
    noise = Noise.seeded(3)
    found = np.array([noisy_count(5000, 10_000, 7.0, noise, number) for number in range(2000)])
    assert found.std() == pytest.approx(7.0, rel=0.06)
    assert abs(found.mean() - 5000) < 4 * 7.0 / math.sqrt(2000)
    ends = [noisy_count(right, 3, 50.0, noise, number) for right in (0, 3) for number in range(50)]
    assert {*ends} == {0, 1, 2, 3}


def test_every_measuring_is_one_charge_and_all_measures_come_from_the_noisy_counts(tmp_path: Path) -> None:
    result = ran(tmp_path)
    job, params = job_of(experiment_from(settings_of())), load_file(tmp_path / "model.safetensors")
    personal, exact = result["personal"], []
    for client in range(3):
        assert of_counts(charges(client)) == ["round 3", "round 4"]  # after rounds 2 and 3, as a part of the next one
        assert len(charges(client)) == 5  # and a measuring is no round of training
        tests = job.dataset.test.take(job.own_tests[client])
        exact.append(round(job.trainer.evaluate(params, *to_tensors(tests, job.dataset)).accuracy * len(tests)))
    sizes = job.own_tests.sizes
    found = np.rint(np.array(personal["by_client"]["own"]) * sizes)
    assert found.tolist() != exact
    assert np.abs(found - exact).max() < 6 * 5.0
    assert personal["own_accuracy"] == pytest.approx(np.mean(found / sizes))
    assert personal["own_worst_tenth"] == min(found / sizes)
    assert personal["own_accuracy_pooled"] == pytest.approx(found.sum() / sizes.sum())
    assert (personal["count_noise"], personal["clients_tested"]) == (5.0, 3)
    assert "noisy counts" in personal["in_words"]
    assert not [name for name in personal if "recalls" in name or "f1" in name or "received" in name]
    assert result["final_accuracy"] is None


def test_the_bill_has_a_statement_for_test_records(tmp_path: Path) -> None:
    result = ran(tmp_path)
    steps, counts = result["privacy"]
    [event] = {charge.event for charge in _ledger(0).charges if charge.release.startswith(COUNTED)}
    assert event.noise_multiplier == 5.0
    spent = [epsilon_of_counts({event: times}, 1e-5, accountant="pld") for times in (1, 2)]
    assert counts["epsilon"] == pytest.approx(spent[1], rel=1e-6)
    assert counts["epsilon"] > spent[0]
    assert "noisy numbers only" in counts["covers"]
    assert "How many test records a client has" in counts["does_not_cover"]
    whole = counts["epsilon_whole_run"]  # an upper bound: no record pays for both
    assert max(steps["epsilon"], counts["epsilon"]) < whole <= steps["epsilon"] + counts["epsilon"]
    planned = planned_bill(job_of(experiment_from(settings_of()))).payments
    assert planned is not None
    assert [one.epsilon for one in planned][1] == pytest.approx(spent[1], rel=1e-6)


def _ledger(client: int) -> Any:
    return open_ledger(ledger_path(job_of(experiment_from(settings_of())), client))


def test_a_count_is_charged_before_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise RunError("no count is made")

    monkeypatch.setattr(noisy_counts, "noisy_count", broken)
    with pytest.raises(RunError, match="client 0") as refused:
        ran(tmp_path)
    assert "no count is made" not in str(refused.value)  # a client's message may quote its records
    assert of_counts(charges(0)) == ["round 3"]


def test_a_finished_measuring_is_neither_drawn_nor_charged_again(
    tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    secret = {"noise": "secret"}
    experiment = experiment_from(settings_of(secret))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, observer=stop_after(3))
    before, found = charges(0, secret), json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["metrics"]
    result = run(experiment, tmp_path)  # after the last round the stage asks again, and the model is the same
    assert charges(0, secret) == before
    assert result["personal"]["own_accuracy"] == found["own_accuracy"]


def test_counts_of_another_model_have_other_noise(tmp_path: Path) -> None:
    results = [ran(tmp_path / str(number), {"noise": "secret"}) for number in range(2)]
    assert len(of_counts(charges(0, {"noise": "secret"}))) == 4
    assert results[0]["personal"]["by_client"] != results[1]["personal"]["by_client"]


def test_noise_is_found_from_epsilon_and_a_larger_cost_is_refused(tmp_path: Path) -> None:
    privacy = {"epsilon": 3.0, "noise_multiplier": None}
    result = ran(tmp_path / "found", privacy, evaluate={**POOLED, "count_noise": None})
    of_steps, counts = result["privacy"]
    assert 2.9 < counts["epsilon_rdp"] <= 3.0
    assert of_steps["epsilon"] <= 3.0
    with pytest.raises(UserError, match=r"count_noise=1 allows 0 measurements .* and the run has 2: set a larger"):
        ran(tmp_path / "dear", privacy, evaluate={**POOLED, "count_noise": 1.0})


def test_a_client_whose_budget_is_spent_by_repetitions_sends_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_counts, "counting_cost", _with_one_round(noisy_counts.counting_cost))
    result = ran(tmp_path, {"epsilon": 9.0})
    assert of_counts(charges(0, {"epsilon": 9.0})) == ["round 3"]
    assert result["personal"]["clients_tested"] == 0
    assert "own_accuracy" not in result["personal"]


def _with_one_round(cost: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: replace(cost(*given), most_rounds=1)


def _with_sources(path: Path) -> str:
    coins, names = np.random.default_rng(0), np.array(["west", "east", "north"])
    arrays: dict[str, Any] = {}
    for part, count in {"train": 150, "test": 30}.items():
        arrays[f"x_{part}"] = coins.normal(size=(count, 4)).astype(np.float32)
        arrays |= {f"y_{part}": np.arange(count) % 2, f"client_{part}": names[np.arange(count) % 3]}
    np.savez(path, **arrays)
    return f"npz:{path}"


def test_public_test_records_are_counted_exactly_and_cost_nothing(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data": _with_sources(tmp_path / "own.npz"), "partition": "natural"}
    public = {"clients": "own", "test_is_public": True, "test": "last"}
    result = ran(tmp_path / "public", **changes, evaluate=public)
    assert len(result["privacy"]) == 1
    assert "as evaluate.test_is_public=true says" in result["privacy"][0]["does_not_cover"]
    assert (len(charges(0, **changes, evaluate=public)), "count_noise" in result["personal"]) == (3, False)
    assert not [name for name in result["personal"] if "trained" in name]  # one more round would have no noise
    private = {"clients": "own", "test": "never", "count_noise": 4.0}
    result = ran(tmp_path / "private", **changes, evaluate=private)
    assert len(result["privacy"]) == 2
    assert of_counts(charges(0, **changes, evaluate=private)) == ["round 4"]
    own_metric = {**public, "count_noise": 4.0, "metrics": "fl_sim.testing:check"}
    with pytest.raises(UserError, match="on the clients' test records without noise"):
        ran(tmp_path / "metric", **changes, evaluate=own_metric)
    with pytest.raises(UserError, match="source among its clients by their labels"):
        ran(tmp_path / "shared", **{**changes, "partition": "domain"}, clients=6, evaluate=private)


@pytest.mark.parametrize(
    ("evaluate", "match"),
    [
        ({"clients": "class-shares"}, "labels of the clients' training records"),
        ({"fine_tune_epochs": 2}, "fine_tune_epochs=2 trains on a client's records without noise"),
        ({"test": "last"}, r"set evaluate\.test=never"),
        ({"count_noise": None}, r"set evaluate\.count_noise"),
    ],
)
def test_what_would_publish_exact_numbers_is_refused(evaluate: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path, evaluate={**POOLED, **evaluate})


def test_noise_without_a_promise_and_other_promises_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"count_noise=5 is for runs that promise privacy"):
        run(experiment_from({**BASE, "evaluate": {"clients": "pooled:0.25", "count_noise": 5.0}}), tmp_path / "bare")
    with pytest.raises(UserError, match=r"no epsilon covers that; leave evaluate\.clients out"):
        ran(tmp_path / "local-dp", {"kind": "local-dp"})
