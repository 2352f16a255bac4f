"""Runs with aggregator=distributed-dp: the bill, the statement, resume, what it works with, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.bill import bills, payments_of_unit, whole_run
from fl_sim.privacy.ledger import Ledger
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.run import run
from strategies.distributed_dp import DistributedDP
from strategies.distributed_sums import terms_of
from strategies.fedavg import FedAvg

BASE: dict[str, Any] = {
    "data": "digits", "partition": "iid", "clients": 4, "model": "logistic", "rounds": 2, "engine": "inprocess",
    "local": {"learning_rate": 0.1, "momentum": 0.0, "batch_size": 64},
}  # fmt: skip
NOISY = {"kind": "distributed-dp", "noise_multiplier": 3.0, "noise": "seeded"}

pytestmark = pytest.mark.usefixtures("coarse_losses")


def settings_of(noise: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**BASE, "aggregator": {**NOISY, **(noise or {})}, **changes}


def ran(out: Path, noise: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(noise, **changes)), out)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_forecast_is_the_bill_and_the_ledger(algorithm: str, tmp_path: Path) -> None:
    experiment = experiment_from(settings_of(algorithm=algorithm))
    bill = planned_bill(job_of(experiment))
    assert bill.payments is not None
    [payment] = bill.payments
    result = run(experiment, tmp_path / "run")
    [said] = result["privacy"]
    charges = Ledger(terms_of(experiment.aggregator), tmp_path / "run" / "ledger.jsonl").charges
    assert [one.release for one in charges] == ["round 1", "round 2"]
    assert (said["unit"], said["adjacency"], said["accountant"]) == ("client", "add-or-remove-one", "rdp")
    assert (said["steps"], said["steps_planned"]) == (2, 2)
    assert said["epsilon"] == said["epsilon_realised"] == payment.epsilon
    assert said["noise_multiplier"] == pytest.approx(3.0, rel=0.01)
    assert "PLD accountant does not support SkellamDpEvent" in said["guarantee"]
    assert "replacing all data of one client by nothing" in said["guarantee"]
    assert (
        said["sampling"] == "public: the server sees which clients take part, so sampling them does not reduce the cost"
    )
    for words in ("Secure aggregation", "plain sum", "trusted to add their noise", "which drop out"):
        assert words in said["does_not_cover"]
    assert result["distributed_sums"]["numbers"] == (1024 if algorithm == "fedavg" else 2048)
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)["train_loss"] is None
        assert json.loads(line)["cohort"] == 4
    [of_client] = bills([bill])
    assert (of_client.unit, of_client.epsilon, of_client.bare) == ("client", said["epsilon"], 0)
    as_record = whole_run(payments_of_unit(bill, "record"), "record").epsilon
    assert as_record is not None
    assert said["epsilon"] < as_record  # a changed record replaces the data of its client


def test_bytes_are_counted_at_the_bits_that_are_sent(tmp_path: Path) -> None:
    sent = {}
    for bits in (16, 20):
        planned = procedure_of(job_of(experiment_from(settings_of({"bits": bits})))).traffic()["rounds"]
        result = ran(tmp_path / str(bits), {"bits": bits})
        assert planned.up == result["bytes"]["rounds"]["up"]
        sent[bits] = result["bytes"]["each_client_in_a_round"]["up"]
    assert sent[20] - sent[16] == 1024 * 4 / 8
    assert 1024 * 2 <= sent[16] < 1024 * 2 + 200


def test_epsilon_finds_the_noise_that_spends_it(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", {"epsilon": 8.0, "noise_multiplier": None})
    [said] = result["privacy"]
    assert 7.99 < said["epsilon_rdp"] <= 8.0
    assert any("All rounds cost epsilon 8 at delta 1e-05 if no client drops out" in one for one in result["warnings"])
    stopped = ran(tmp_path / "other", {"epsilon": 3.0}, rounds=9)
    assert "privacy budget spent after" in stopped["stopped"]
    assert stopped["privacy"][0]["epsilon_realised"] <= 3.0


def test_it_learns_where_many_clients_hide_one_another(tmp_path: Path) -> None:
    accuracy = ran(tmp_path / "run", {"epsilon": 8.0, "noise_multiplier": None}, clients=100, rounds=8)[
        "final_accuracy"
    ]
    central = run(
        experiment_from({
            **BASE, "clients": 100, "rounds": 8, "sampler": "full",
            "aggregator": {"kind": "global-dp", "epsilon": 8.0, "noise_multiplier": "from-epsilon", "noise": "seeded"},
        }),
        tmp_path / "central",
    )["final_accuracy"]  # fmt: skip
    assert accuracy > 0.5
    assert accuracy == pytest.approx(central, abs=0.1)


@pytest.mark.parametrize("algorithm", ["scaffold", "ditto"])
def test_a_resumed_run_has_the_bits_and_the_charges_of_an_uninterrupted_one(
    algorithm: str, tmp_path: Path, resumed_like: Callable[[Any, Path], dict[str, Any]]
) -> None:
    experiment = experiment_from(settings_of(algorithm=algorithm, rounds=3))
    whole = run(experiment, tmp_path / "whole")
    resumed = resumed_like(experiment, tmp_path / "whole")
    assert whole["privacy"][0]["steps"] == resumed["privacy"][0]["steps"] == 3


def test_a_run_without_its_ledger_does_not_go_on(tmp_path: Path, stop_after: Callable[[int], Any]) -> None:
    experiment = experiment_from(settings_of({"noise": "secret"}))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=stop_after(1))
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="ledger"):
        run(experiment, tmp_path / "run")


def test_with_drop_outs_the_statement_has_what_was_spent_and_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ran(tmp_path / "all")["privacy"][0]["epsilon"]
    finish = FedAvg.finish

    def failing(self: Any, task: Any, trained: Any) -> Any:
        if (task.client, task.server_round) == (1, 1):
            raise ValueError("these are my records")
        return finish(self, task, trained)

    monkeypatch.setattr(FedAvg, "finish", failing)
    result = ran(tmp_path / "run")
    [said] = result["privacy"]
    assert (said["steps"], said["steps_planned"]) == (2, 2)
    assert len(said["events"]) == 2
    assert said["epsilon"] == said["epsilon_realised"] > without
    assert "my records" not in json.dumps(result)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedadam"},
        {"algorithm": "fedrep", "model": "2nn"},
        {"algorithm": "fedlc"},
        {"sampler": "cyclic:2"},
        {"partition": "dirichlet:0.05", "algorithm": "feddyn"},
        {"aggregator": {**NOISY, "mechanism": "discrete-gaussian", "bits": 18}},
    ],
)
def test_it_works_with(changes: dict[str, Any], tmp_path: Path) -> None:
    [said] = ran(tmp_path / "run", **changes)["privacy"]
    assert said["steps_planned"] == (1 if "sampler" in changes else 2)
    own = changes.get("algorithm") == "fedrep"
    assert ("trained on its records without noise" in said["does_not_cover"]) == own


class Changed(DistributedDP):
    """A user's change of the aggregator, about which nothing is proven."""


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"algorithm": "fedmix"}, "averages of their records"),
        ({"algorithm": "pate"}, "cannot run with aggregator distributed-dp"),
        ({"algorithm": "feddisco"}, "sum of equal weights"),
        ({"algorithm": "fedexp"}, "under aggregator distributed-dp: clients also send"),
        ({"algorithm": "fednova"}, "under aggregator distributed-dp needs a public"),
        ({"algorithm": "fedproto"}, "under aggregator distributed-dp: the norm of sums"),
        ({"algorithm": "ifca"}, "under aggregator distributed-dp: a client's choice"),
        ({"algorithm": "cfl"}, "under aggregator distributed-dp: the server compares"),
        ({"algorithm": "local-only"}, "aggregator distributed-dp clips nothing"),
        ({"algorithm": "centralized"}, "one client"),
        ({"algorithm": {"kind": "scaffold", "variant": "niid-bench"}}, "under aggregator distributed-dp all clients"),
        ({"preprocess": "da-fl"}, "preprocess da-fl cannot run under aggregator distributed-dp"),
        ({"calibrate": "ccvr"}, "calibrate ccvr cannot run under aggregator distributed-dp"),
        ({"compress": "rand-k"}, "compressed messages cannot be summed modulo"),
        ({"sampler": "poisson:0.5"}, "sampler poisson cannot run .*take sampler=full, or sampler=cyclic"),
        ({"sampler": "fixed-size:2"}, "sampler fixed-size cannot run"),
        ({"sampler": {"kind": "cyclic", "sampling_rate": 0.5}}, "sampler cyclic cannot run"),
        ({"attack": "sign-flip"}, "attack sign-flip cannot run with distributed-dp"),
        ({"server": "fedbuff", "devices": "log-normal"}, "server=fedbuff cannot run with a privacy guarantee"),
        ({"local": {"batch_norm": "average"}}, "under aggregator distributed-dp: running statistics"),
        ({"local": {"privacy": {"kind": "local-dp", "epsilon": 8}}}, "aggregator distributed-dp cannot run with"),
        ({"engine": {"kind": "inprocess", "stack": 2}}, "a stack is a group of clients"),
        ({"evaluate": {"validation": 0.1}}, "evaluate.validation"),
        ({"evaluate": {"clients": "class-shares"}}, "evaluate.clients"),
        ({"aggregator": {"kind": "distributed-dp"}}, r"needs aggregator\.epsilon"),
        ({"aggregator": {**NOISY, "bits": 24}}, "bits"),
        ({"aggregator": {**NOISY, "delta": 1e-13}}, "delta"),
        ({"aggregator": {**NOISY, "epsilon": 0.5}}, "does not afford one round, which costs"),
        ({"aggregator": {"kind": "distributed-dp", "epsilon": 1e-6}}, "out of reach with 16 bits"),
        (
            {"aggregator": {**NOISY, "mechanism": "discrete-gaussian", "bits": 8, "noise_multiplier": 0.001}},
            "noise of .* grid steps; set a larger",
        ),
        ({"aggregator": Changed(noise_multiplier=1.0)}, "Changed changes distributed-dp"),
    ],
)
def test_what_the_sum_would_not_hide_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=match):
        ran(tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_nobody_takes_the_mean_without_paying() -> None:
    with pytest.raises(AssertionError, match="the layer DistributedSums"):
        DistributedDP(noise_multiplier=1.0).mean(None, "uniform")  # type: ignore[arg-type]
