"""Runs with local.privacy=local-dp: what is charged and said, spent clients, resume, what it works with, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from safetensors.torch import load_file

from clients.policy import open_ledger
from clients.private_updates import ClientPrivateUpdates
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import bounds
from fl_sim.privacy.bill import bills, payments_of_unit, whole_run
from fl_sim.simulation.client_ledgers import ledger_path
from fl_sim.simulation.rounds import planned_bill
from fl_sim.simulation.run import run
from fl_sim.types import ClientUpdate
from strategies.compression.layer import ClientCompression

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 3, "model": "logistic", "rounds": 2, "engine": "inprocess",
}  # fmt: skip
NOISY = {"kind": "local-dp", "noise_multiplier": 3.0, "noise": "seeded"}


pytestmark = pytest.mark.usefixtures("coarse_losses")


def settings_of(privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    local = {"learning_rate": 0.1, "momentum": 0.0, "batch_size": 64, "privacy": {**NOISY, **(privacy or {})}}
    return {**BASE, **changes, "local": {**local, **changes.get("local", {})}}


def ran(out: Path, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(privacy, **changes)), out)


def _charges(client: int, **changes: Any) -> list[Any]:
    path = ledger_path(job_of(experiment_from(settings_of(**changes))), client)
    return list(open_ledger(path).charges) if path.exists() else []


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_forecast_is_the_bill_and_the_ledgers(algorithm: str, tmp_path: Path) -> None:
    experiment = experiment_from(settings_of(algorithm=algorithm))
    bill = planned_bill(job_of(experiment))
    assert bill.payments is not None
    [payment] = bill.payments
    result = run(experiment, tmp_path / "run")
    [said] = result["privacy"]
    for client in range(3):
        charges = _charges(client, algorithm=algorithm)
        assert [one.release.rpartition(", ")[2] for one in charges] == ["round 1", "round 2"]
        assert {one.event for one in charges} == {dp_event.GaussianDpEvent(1.5)}
    charged = bounds({dp_event.GaussianDpEvent(1.5): 2}, 1e-5).least
    assert (said["unit"], said["adjacency"], said["noise_multiplier"]) == ("client", "replace-one", 3.0)
    assert (said["steps"], said["steps_planned"]) == (2, 2)
    assert said["epsilon"] == said["epsilon_realised"] == payment.epsilon == pytest.approx(charged, rel=1e-6)
    assert (payment.unit, payment.delta) == ("client", said["delta"])
    assert said["sampling"] == "full: every client takes part in every step"
    assert result["local_privacy"] == {"kind": "local-dp", "noise_multiplier": 3.0, "rounds": 2}
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line).get("train_loss") is None
    [of_client] = bills([bill])
    assert (of_client.unit, of_client.epsilon) == ("client", said["epsilon"])


def test_a_guarantee_for_a_client_is_one_for_its_records_at_the_same_cost() -> None:
    planned = planned_bill(job_of(experiment_from(settings_of())))
    assert planned.payments is not None
    assert whole_run(payments_of_unit(planned, "record"), "record").epsilon == planned.payments[0].epsilon


def test_charged_before_the_update_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> ClientUpdate:
        assert len(_charges(0)) == 1
        raise RunError("nothing is sent")

    monkeypatch.setattr(ClientPrivateUpdates, "_released", broken)
    with pytest.raises(RunError, match="client 0 in round 1") as refused:
        ran(tmp_path / "run")
    assert "nothing is sent" not in str(refused.value)  # a client's message may quote its records
    assert len(_charges(0)) == 1


def test_a_client_whose_budget_is_spent_sends_nothing(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", {"epsilon": 8.0}, rounds=9)
    rounds = result["local_privacy"]["rounds"]
    assert 0 < rounds < 9
    assert len(_charges(0)) == rounds
    [said] = result["privacy"]
    assert said["epsilon"] <= 8.0
    assert said["steps"] == rounds
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    losses = [one["test_loss"] for one in lines]
    assert len({*losses[:rounds]}) == rounds
    assert {*losses[rounds:]} == {losses[rounds - 1]}  # the model stays as it was


def test_epsilon_finds_the_noise_that_spends_it(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", {"epsilon": 8.0, "noise_multiplier": None})
    [said] = result["privacy"]
    assert 7.99 < said["epsilon_rdp"] <= 8.0
    assert said["steps"] == 2
    with pytest.raises(UserError, match=r"epsilon=1 does not allow the first round of clients, which costs epsilon"):
        ran(tmp_path / "other", {"epsilon": 1.0})
    for epsilon in (1e-9, 1e-5):
        with pytest.raises(UserError, match=r"out of reach|too coarse"):
            ran(tmp_path / f"run-{epsilon}", {"epsilon": epsilon, "noise_multiplier": None})
    with pytest.raises(UserError, match=r"local\.privacy=local-dp needs local\.privacy\.epsilon"):
        experiment_from({**BASE, "local": {"privacy": "local-dp"}})


def test_a_second_run_with_secret_noise_is_charged_again_and_a_seeded_one_is_not(tmp_path: Path) -> None:
    for number in range(2):
        ran(tmp_path / f"seeded-{number}")
    assert len(_charges(0)) == 2
    for number in range(2):
        ran(tmp_path / f"secret-{number}", {"noise": "secret"})
    assert len(_charges(0)) == 6
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("seeded-0", "seeded-1", "secret-0")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    assert not all(models[0][name].equal(models[2][name]) for name in models[0])


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto"])
def test_a_resumed_run_has_the_bits_and_the_charges_of_an_uninterrupted_one(
    algorithm: str, tmp_path: Path, resumed_like: Callable[[Any, Path], dict[str, Any]]
) -> None:
    experiment = experiment_from(settings_of(algorithm=algorithm, rounds=3))
    whole = run(experiment, tmp_path / "whole")
    charged = [one.release for one in _charges(0)]
    assert len(charged) == 3
    resumed = resumed_like(experiment, tmp_path / "whole")
    assert [one.release for one in _charges(0)] == charged  # seeded noise: the same release
    assert whole["privacy"][0]["steps"] == resumed["privacy"][0]["steps"] == 3


def test_a_run_with_secret_noise_pays_again_for_what_it_releases_again(
    tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    experiment = experiment_from(settings_of({"noise": "secret"}, rounds=2))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=stop_after(1))
    assert len(_charges(0)) == 1
    lines = (tmp_path / "run" / "rounds.jsonl").read_text()
    run(experiment, tmp_path / "run")
    assert (tmp_path / "run" / "rounds.jsonl").read_text().startswith(lines)
    assert [one.release.rpartition(", ")[2] for one in _charges(0)] == ["round 1", "round 2"]
    assert len({one.noise for one in _charges(0)}) == 2


def test_a_run_says_how_long_the_noise_in_the_mean_is(tmp_path: Path) -> None:
    said = " ".join(ran(tmp_path / "run")["warnings"])
    assert "each number of an update has noise of 3 clipping norms" in said
    length = 3.0 * (650 / 3) ** 0.5  # z sqrt(d / m): 650 numbers, 3 clients
    assert f"The noise of the mean of 3 updates has a norm of {length:.3g} clipping norms" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedprox"},
        {"algorithm": "fedadam"},
        {"algorithm": "fedrep", "model": "2nn"},
        {"algorithm": "fedlc"},
        {"algorithm": "moon"},
        {"algorithm": "pfedme"},
        {"compress": "qsgd"},
        {"compress": "top-k", "algorithm": "scaffold"},
        {"aggregator": "median"},
        {"sampler": "fixed-size:2"},
        {"local": {"personal": "head"}, "model": "2nn"},
    ],
)
def test_it_works_with(changes: dict[str, Any], tmp_path: Path) -> None:
    [said] = ran(tmp_path / "run", **changes)["privacy"]
    assert said["steps_planned"] == 2
    own = changes.get("algorithm") in {"fedrep", "pfedme"} or "personal" in changes.get("local", {})
    assert ("trained on its records without noise" in said["does_not_cover"]) == own


def test_noise_is_added_before_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    sent = ClientCompression.sent

    def spy(self: Any, came: Any, task: Any, trained: Any, update: ClientUpdate) -> ClientUpdate:
        squares = [float(value.square().sum()) for value in update.payloads["delta"].values()]
        norms.append(np.sqrt(sum(squares)))
        return sent(self, came, task, trained, update)

    monkeypatch.setattr(ClientCompression, "sent", spy)
    ran(tmp_path / "run", {"noise_multiplier": 30.0}, compress="qsgd", rounds=1)
    assert len(norms) == 3
    assert min(norms) > 0.8 * 30 * np.sqrt(650)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "fedmix"}, "share facts"),
        ({"algorithm": "pate"}, "no rounds of local training"),
        ({"algorithm": "feddisco"}, "weighs clients by numbers that they send"),
        ({"algorithm": "fedexp"}, "clients also send"),
        ({"algorithm": "fednova"}, "clients also send"),
        ({"algorithm": "fedproto"}, "clients also send"),
        ({"algorithm": "ifca"}, "clients also send"),
        ({"algorithm": "local-only"}, "clients send no parameters"),
        ({"aggregator": "global-dp"}, "aggregator global-dp cannot run"),
        ({"preprocess": "da-fl"}, "preprocess da-fl reads"),
        ({"calibrate": "ccvr"}, "calibrate ccvr reads"),
        ({"local": {"batch_norm": "average"}}, "running statistics are sent"),
        ({"server": "fedbuff", "devices": "log-normal"}, "server=fedbuff cannot run with a privacy guarantee"),
        ({"evaluate": {"validation": 0.1}}, "evaluate.validation"),
        ({"evaluate": {"clients": "class-shares"}}, "evaluate.clients"),
    ],
)
def test_what_would_leave_a_client_without_noise_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path / "run", **changes)
    assert not _charges(0)
