"""The client half of DP-SGD: what is charged for a round and when, what the algorithm may see, what is sent."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.paid_rounds import ClientProtection
from clients.policy import Policy, open_ledger, read_policy
from clients.private_steps import CLASS_COUNTS, RECORDS, ClientPrivateSteps, round_cost
from fl_sim.engines.remote import Ticket
from fl_sim.errors import RunError, UserError
from fl_sim.local_plan import LocalPlan, Phase
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Trained

LOCAL = LocalSettings(learning_rate=0.1, momentum=0.0, weight_decay=0.0, batch_size=10, epochs=1)
PARAMS = {"weight": torch.zeros(2)}
PROTECTION = ClientProtection(None, 1e-5, 1.0, 1.0, "secret")


@dataclass(frozen=True)
class Payer:
    """A client with a ledger or a policy."""

    ledger: Path
    policy: Policy | None = None
    ticket: Ticket | None = None
    has_disk: bool = True
    number: int = 4
    run: str = "ab" * 8


def _job(count: int = 40, server_round: int = 1, plan: LocalPlan = LocalPlan()) -> LocalJob:  # noqa: B008 (frozen)
    records = Records.of(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64))
    task = LocalTask(server_round, 4, 9, count, LOCAL, PARAMS)
    return LocalJob(task, plan, records, np.random.default_rng(0))


def _half(protection: ClientProtection = PROTECTION, rounds: int = 5) -> ClientPrivateSteps:
    return ClientPrivateSteps(protection, "cd" * 8, rounds)


def test_the_models_of_a_client_are_charged_together_and_have_noise_of_their_own(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    jobs = _half().protected(payer, {"": _job(), "own": _job()}).jobs
    [charge] = open_ledger(payer.ledger).charges
    cost = round_cost(PROTECTION, LOCAL, 40, 5, 8)
    assert (charge.event, cost.num_steps) == (cost.charge, 8)
    private = [job.plan.private for job in jobs.values()]
    assert private[0] is not None
    assert private[1] is not None
    assert private[0].noise == private[1].noise
    assert private[0].stream != private[1].stream
    assert [job.plan.private for job in _half().protected(payer, {"": _job()}).jobs.values()] != private[:1]


def test_the_phases_of_a_round_are_charged_together_and_have_noise_of_their_own(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    plan = LocalPlan(phases=(Phase(frozenset({"weight"}), 3), Phase(frozenset({"weight"}), 1)))
    job = _half().protected(payer, {"": _job(plan=plan)}).jobs[""]
    [charge] = open_ledger(payer.ledger).charges
    assert charge.event == round_cost(PROTECTION, LOCAL, 40, 5, 16).charge  # four epochs of four steps
    streams = [phase.private.stream for phase in (job.in_phase(0).plan, job.in_phase(1).plan) if phase.private]
    assert len({*streams}) == 2
    assert [job.in_phase(number).num_steps for number in (0, 1)] == [12, 4]


def test_each_round_and_each_repetition_with_secret_noise_is_charged(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    for server_round in (1, 1, 2):
        _half().protected(payer, {"": _job(server_round=server_round)})
    assert len(open_ledger(payer.ledger).charges) == 3
    seeded = _half(replace(PROTECTION, noise="seeded"))
    for server_round in (1, 1, 2):
        seeded.protected(payer, {"": _job(server_round=server_round)})
    assert len(open_ledger(payer.ledger).charges) == 5


def test_a_repeated_round_counts_against_the_budget(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    epsilon = 1.01 * epsilon_of_counts({round_cost(PROTECTION, LOCAL, 40, 5, 4).charge: 2}, 1e-5)
    half = _half(replace(PROTECTION, epsilon=epsilon))
    rounds = [half.protected(payer, {"": _job(server_round=number)}).jobs[""] for number in (1, 1, 2)]
    assert [len(job.records) for job in rounds] == [40, 40, 0]
    assert [job.task.num_examples for job in rounds] == [40, 40, 0]
    assert rounds[2].plan.private is None
    assert rounds[2].num_steps == 0
    assert len(open_ledger(payer.ledger).charges) == 2
    other = replace(payer, run="ef" * 8)  # another run has a budget of its own, in the same ledger
    assert len(half.protected(other, {"": _job()}).jobs[""].records) == 40


def test_a_client_without_records_is_not_charged(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    _half().protected(payer, {"": _job(0)})
    assert not payer.ledger.exists()


def test_a_policy_limits_the_cost_and_wants_secret_noise(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("epsilon = 6.0")
    payer = Payer(tmp_path / "unused", read_policy(tmp_path / "policy.toml"))
    _half().protected(payer, {"": _job()})
    assert len(open_ledger(tmp_path / "policy.toml.private" / "ledger.jsonl").charges) == 1
    assert not payer.ledger.exists()
    two = round_cost(PROTECTION, LOCAL, 40, 5, 4).charge
    assert epsilon_of_counts({two: 1}, 1e-5) < 6 < epsilon_of_counts({two: 2}, 1e-5)
    with pytest.raises(RunError, match=r"epsilon 6 at delta 1e-05 .*local\.privacy\.epsilon"):
        _half().protected(payer, {"": _job(server_round=2)})
    with pytest.raises(RunError, match="policy allows secret noise only"):
        _half(replace(PROTECTION, noise="seeded")).protected(payer, {"": _job()})


def test_a_plan_with_terms_that_read_records_in_the_clear_is_refused_before_it_is_charged(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    plan = LocalPlan(logit_shift=torch.zeros(2))
    with pytest.raises(UserError, match="logit_shift"):
        _half().protected(payer, {"": _job(), "own": _job(plan=plan)})
    assert not payer.ledger.exists()


def test_the_algorithm_sees_neither_records_nor_their_numbers() -> None:
    task = replace(_job().task, class_counts=(39, 1))
    seen = _half().received(task)
    assert seen.num_examples == 1
    assert _half().received(replace(task, num_examples=0)).num_examples == 0
    for read in (len, list, sum, bool, lambda counts: counts[0]):
        with pytest.raises(UserError, match="number of a client's records of each class"):
            read(seen.class_counts)
    assert seen.class_counts is CLASS_COUNTS
    assert _half().shown(_job().records) is RECORDS
    with pytest.raises(UserError, match="reads a client's records"):
        RECORDS.tensors()


def test_an_update_has_no_loss_and_the_weight_of_one_record() -> None:
    task, update = _job().task, ClientUpdate({"delta": PARAMS}, 40, 0.7)
    sent = _half().sent(task, task, Trained(PARAMS, {}, 4, None), update)
    assert (sent.loss, sent.num_examples) == (None, 1)
    assert _half().sent(task, task, Trained(PARAMS, {}, 0, None), update).num_examples == 0
