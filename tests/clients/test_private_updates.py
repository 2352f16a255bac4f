"""The client half of local DP: what moves an update, the noise on it, its cost, what is charged and what is sent."""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import dp_event, rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clients.client_layer import PaidRound
from clients.paid_rounds import ClientProtection
from clients.policy import Policy, open_ledger, read_policy
from clients.private_updates import ClientPrivateUpdates, noise_std, update_cost
from fl_sim.engines.remote import Ticket
from fl_sim.errors import RunError
from fl_sim.local_plan import LocalPlan
from fl_sim.privacy import audit
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.mechanisms import Noise
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask

LOCAL = LocalSettings(learning_rate=0.1, momentum=0.0, weight_decay=0.0, batch_size=10, epochs=1)
PARAMS = {"weight": torch.zeros(2)}
TEMPLATE = {"delta": {"w": torch.zeros(2, 2)}, "control": {"w": torch.zeros(3)}}
PROTECTION = ClientProtection(None, 1e-5, 0.4, 3.0, "secret")


@dataclass(frozen=True)
class Payer:
    """A client with a ledger or a policy."""

    ledger: Path
    policy: Policy | None = None
    ticket: Ticket | None = None
    has_disk: bool = True
    number: int = 4
    run: str = "ab" * 8


def _half(protection: ClientProtection = PROTECTION, rounds: int = 5, template: Any = None) -> ClientPrivateUpdates:
    return ClientPrivateUpdates(protection, "cd" * 8, rounds, template or TEMPLATE)


def _round(payer: Payer, half: ClientPrivateUpdates, server_round: int = 1, count: int = 40) -> PaidRound:
    records = Records.of(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64))
    task = LocalTask(server_round, 4, 9, count, LOCAL, PARAMS)
    return half.protected(payer, {"": LocalJob(task, LocalPlan(), records, np.random.default_rng(0))})


def _update(values: Any, **more: Any) -> ClientUpdate:
    flat = torch.as_tensor(values, dtype=torch.float32)
    return ClientUpdate({"delta": {"w": flat[:4].view(2, 2)}, "control": {"w": flat[4:]}}, 40, 0.7, **more)


def _flat(update: ClientUpdate) -> np.ndarray:
    return torch.cat([value.flatten() for group in update.payloads.values() for value in group.values()]).numpy()


def _with_ticket(number: int = 0) -> Payer:
    return Payer(Path("no ledger"), ticket=Ticket(hashlib.sha256(str(number).encode()).digest(), simulation_only=True))


NUMBER = st.sampled_from([0.0, 1e-30, 0.1, -0.4, 1.0, -1e30, math.nan, math.inf]) | st.integers(-100, 100)
VECTOR = st.lists(NUMBER, min_size=7, max_size=7)


@given(VECTOR, VECTOR)
def test_any_two_updates_differ_by_at_most_two_clipping_norms(first: list[float], second: list[float]) -> None:
    sent = [_flat(_round(_with_ticket(), _half()).release(_update(one))).astype(float) for one in (first, second)]
    assert float(np.linalg.norm(sent[0] - sent[1])) <= 2 * PROTECTION.clipping_norm * (1 + 1e-5)  # float32 is sent


def test_two_updates_can_differ_by_two_clipping_norms_and_all_payloads_have_one_norm() -> None:
    for values in (np.eye(7)[0], np.eye(7)[6], np.ones(7), np.full(7, 1e20)):
        sent = [_flat(_round(_with_ticket(), _half()).release(_update(one * values))) for one in (1, -1)]
        assert np.linalg.norm(sent[0] - sent[1]) == pytest.approx(2 * PROTECTION.clipping_norm, rel=1e-4)
    short = 0.1 * np.eye(7)[3]
    sent = [_flat(_round(_with_ticket(), _half()).release(_update(one * short))) for one in (1, 0)]
    assert sent[0] - sent[1] == pytest.approx(short, abs=1e-5)  # within the norm, nothing is changed


@pytest.mark.parametrize(("norm", "noise_multiplier"), [(0.4, 3.0), (20.0, 0.5)])
def test_the_noise_has_the_stated_deviation_on_every_number(norm: float, noise_multiplier: float) -> None:
    template = {"delta": {"w": torch.zeros(2000)}, "control": {"w": torch.zeros(2000)}}
    half = _half(ClientProtection(None, 1e-5, norm, noise_multiplier, "secret"), template=template)
    sent = _flat(_round(_with_ticket(), half).release(ClientUpdate(template, 1)))
    for part in (sent[:2000], sent[2000:]):
        assert stats.kstest(part / (norm * noise_multiplier), "norm").pvalue > 1e-3
        assert float(part.std()) == pytest.approx(norm * noise_multiplier, rel=0.06)
    again = _flat(_round(_with_ticket(1), half).release(ClientUpdate(template, 1)))
    assert abs(float(np.corrcoef(sent, again)[0, 1])) < 0.06


@pytest.mark.parametrize(("noise_multiplier", "rounds"), [(8.0, 10), (2.0, 1), (40.0, 200)])
def test_the_cost_is_that_of_dp_accounting_for_twice_the_clipping_norm(noise_multiplier: float, rounds: int) -> None:
    cost = update_cost(replace(PROTECTION, noise_multiplier=noise_multiplier), rounds)
    # The noise is noise_multiplier * C, and two updates differ by 2 C.
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise_multiplier / 2), rounds)
    theirs = rdp.RdpAccountant()
    theirs.compose(event)
    ours = epsilon_of_counts({cost.charge: rounds}, 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=0.02)  # the RDP orders of both differ
    exact = dp_accounting.pld.PLDAccountant()
    exact.compose(event)
    assert ours >= exact.get_epsilon(1e-5)
    assert epsilon_of_counts({cost.charge: rounds}, 1e-5, accountant="pld") == pytest.approx(
        exact.get_epsilon(1e-5), rel=1e-3
    )
    found = update_cost(replace(PROTECTION, epsilon=ours, noise_multiplier=None), rounds)
    assert noise_std(PROTECTION, found) == pytest.approx(noise_multiplier * PROTECTION.clipping_norm, rel=1e-3)


def test_each_round_is_charged_first_and_seeded_noise_only_once(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    for server_round in (1, 1, 2):
        _round(payer, _half(), server_round)
    charges = open_ledger(payer.ledger).charges
    assert [charge.event for charge in charges] == [dp_event.GaussianDpEvent(1.5)] * 3  # half of the noise multiplier
    seeded = _half(replace(PROTECTION, noise="seeded"))
    sent = [_flat(_round(payer, seeded, number).release(_update(np.ones(7)))) for number in (1, 1, 2)]
    assert len(open_ledger(payer.ledger).charges) == 5
    assert (sent[0] == sent[1]).all()
    assert (sent[0] != sent[2]).all()


def test_a_client_whose_budget_is_spent_sends_zeros_of_weight_zero(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    epsilon = 1.01 * epsilon_of_counts({update_cost(PROTECTION, 5).charge: 2}, 1e-5)
    half = _half(replace(PROTECTION, epsilon=epsilon))
    rounds = [_round(payer, half, number) for number in (1, 1, 2)]
    assert [len(one.jobs[""].records) for one in rounds] == [40, 40, 0]
    assert len(open_ledger(payer.ledger).charges) == 2
    spent = rounds[2].release(_update(np.ones(7)))
    assert (_flat(spent) == 0).all()
    assert (spent.num_examples, spent.loss) == (0, None)
    beyond = _round(Payer(tmp_path / "none", ticket=rounds[2].ticket), half)
    assert (_flat(beyond.release(_update(np.ones(7)))) == 0).all()  # the ticket of a spent client


def test_a_client_without_records_sends_zeros_and_is_not_charged(tmp_path: Path) -> None:
    payer = Payer(tmp_path / "ledger.jsonl")
    sent = _round(payer, _half(), count=0).release(_update(np.ones(7)))
    assert (_flat(sent) == 0).all()
    assert sent.num_examples == 0
    assert not payer.ledger.exists()


def test_nothing_else_is_sent(tmp_path: Path) -> None:
    payer, state = Payer(tmp_path / "ledger.jsonl"), {"control": {"w": torch.ones(3)}}
    sent = _round(payer, _half()).release(_update(np.ones(7), state=state))
    assert sent == ClientUpdate(sent.payloads, 1, None, state)  # neither loss, nor number of records, nor packed
    assert _half().received(LocalTask(1, 4, 9, 40, LOCAL, PARAMS, class_counts=(39, 1))).num_examples == 1
    payloads = _update(np.ones(7)).payloads
    for other in (
        ClientUpdate({**payloads, "more": {"w": torch.ones(1)}}, 1),
        ClientUpdate({"delta": payloads["delta"]}, 1),
        ClientUpdate({**payloads, "control": {"w": torch.ones(4)}}, 1),
        ClientUpdate(payloads, 1, packed={"delta": torch.ones(1)}),  # type: ignore[dict-item]
    ):
        with pytest.raises(RunError, match="other tensors than the update of a client without records"):
            _round(_with_ticket(), _half()).release(other)


def test_a_policy_limits_the_cost_and_wants_secret_noise(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("epsilon = 6.0")
    payer = Payer(tmp_path / "unused", read_policy(tmp_path / "policy.toml"))
    cost = update_cost(PROTECTION, 5)
    assert epsilon_of_counts({cost.charge: 1}, 1e-5) < 6
    _round(payer, _half())
    assert len(open_ledger(tmp_path / "policy.toml.private" / "ledger.jsonl").charges) == 1
    loud = _half(replace(PROTECTION, noise_multiplier=0.5))
    with pytest.raises(RunError, match=r"epsilon 6 at delta 1e-05 .*local\.privacy\.epsilon"):
        _round(payer, loud, 2)
    with pytest.raises(RunError, match="policy allows secret noise only"):
        _round(payer, _half(replace(PROTECTION, noise="seeded")))
    with pytest.raises(RunError, match="no access to the client's privacy ledger"):
        _round(replace(payer, policy=None, has_disk=False), _half())


def _charge(noise_multiplier: float) -> Any:
    return update_cost(replace(PROTECTION, noise_multiplier=noise_multiplier), 1).charge


def _audited(noise_multiplier: float, runs: int) -> audit.ProfileAudit:
    """Audit the release of one client with the two updates that are furthest apart, against the charged event."""
    protection = replace(PROTECTION, noise_multiplier=noise_multiplier)
    half, worlds = _half(protection), (_update(np.eye(7)[0]), _update(-np.eye(7)[0]))

    def mechanism(world: audit.World, number: int) -> np.ndarray:
        return _flat(_round(_with_ticket(number), half).release(worlds[world])).astype(np.float64)

    claimed = delta_profile([update_cost(protection, 1).charge], audit.EPSILONS)
    return audit.audit_profile(*audit.run_mechanism(mechanism, runs), claimed)


def test_an_audit_does_not_refute_the_claim_and_comes_near_to_it() -> None:
    found = _audited(3.0, 3000)
    assert not found.refuted
    assert found.power > 0.9

    def claims(noise_multiplier: float) -> list[float]:
        return delta_profile([_charge(noise_multiplier)], audit.EPSILONS)

    proven = audit.least_refuted(found, claims, 3.0)  # the mechanism protects no better than with this noise
    claimed = epsilon_of_counts({_charge(3.0): 1}, 1e-5, accountant="pld")
    assert 0.5 * claimed < epsilon_of_counts({_charge(proven): 1}, 1e-5, accountant="pld") < claimed


def test_a_release_has_the_noise_of_its_own_source() -> None:
    half = _half()
    kept = [Noise(_with_ticket(number).ticket.key, simulation_only=True) for number in range(2)]  # type: ignore[union-attr]
    std = noise_std(PROTECTION, update_cost(PROTECTION, 5))
    for number, noise in enumerate(kept):
        direct = half._released(_update(np.ones(7)), std=std, noise=noise, server_round=1)
        assert (_flat(_round(_with_ticket(number), half).release(_update(np.ones(7)))) == _flat(direct)).all()
