"""The ledger: charge first, refuse what would overrun, forget nothing, survive a crash."""

import json
from collections import Counter
from pathlib import Path

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.errors import BudgetExhausted, RunError, UserError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import BoundedRangeDpEvent, adjacency, amplify_fixed_size, amplify_poisson
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.renyi import ORDERS
from fl_sim.privacy.terms import Adjacency, Terms

pytestmark = pytest.mark.usefixtures("coarse_losses")

POISSON = amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.1)
QUIET = amplify_poisson(dp_event.GaussianDpEvent(3.0), 0.1)
ZCDP = dp_event.ZCDpEvent(0.01)
FIXED = amplify_fixed_size(dp_event.GaussianDpEvent(4.0), 30, 1000)
TERMS = Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5)
WORDS = {"covers": "this", "does_not_cover": "that.", "simulation_only": False}


def repeated(event: dp_event.DpEvent, times: int) -> dp_event.DpEvent:
    return dp_event.SelfComposedDpEvent(event, times)


def charge_rounds(book: Ledger, count: int, event: dp_event.DpEvent = POISSON, noise: str = "key") -> None:
    for number in range(1, count + 1):
        book.charge(event, release=f"round {number}", noise=noise)


def test_epsilon_is_kept_after_every_release() -> None:
    book = Ledger(TERMS)
    assert book.epsilon == 0.0
    charge_rounds(book, 3)
    assert [charge.epsilon for charge in book.charges] == [epsilon([POISSON] * n, 1e-5) for n in (1, 2, 3)]
    assert book.epsilon == book.charges[-1].epsilon


@given(st.lists(st.sampled_from([POISSON, QUIET, ZCDP, dp_event.GaussianDpEvent(5.0)]), min_size=1, max_size=12))
@settings(deadline=None, max_examples=6)
def test_random_schedules_are_never_under_counted(schedule: list[dp_event.DpEvent]) -> None:
    book = Ledger(TERMS)
    spent = [book.charge(event, release=f"release {number}", noise="key") for number, event in enumerate(schedule)]
    oracle = RdpAccountant(ORDERS)
    for event, times in Counter(schedule).items():
        oracle.compose(event, times)
    assert spent == sorted(spent)
    assert book.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)
    without_zcdp = [event for event in schedule if event != ZCDP]
    assert book.epsilon >= epsilon(without_zcdp, 1e-5, accountant="pld")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_release_that_would_overrun_is_refused_and_not_charged(accountant: str) -> None:
    afforded = 6
    budget = epsilon([POISSON] * afforded, 1e-5, accountant=accountant)
    book = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=budget, accountant=accountant))
    charge_rounds(book, afforded)
    assert book.epsilon == budget
    assert not book.affords(POISSON)
    with pytest.raises(BudgetExhausted, match="budget spent after 6 releases") as caught:
        book.charge(POISSON, release="round 7", noise="key")
    assert caught.value.num_releases == afforded
    assert caught.value.would_be > budget
    assert len(book.charges) == afforded
    assert book.epsilon == budget


@pytest.mark.parametrize("event", [POISSON, FIXED, ZCDP, dp_event.GaussianDpEvent(5.0), BoundedRangeDpEvent(0.1)])
def test_one_repeated_charge_costs_what_its_steps_cost_one_by_one(event: dp_event.DpEvent, tmp_path: Path) -> None:
    terms = Terms("record", adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE, 1e-5)
    one_by_one, at_once = Ledger(terms), Ledger(terms, tmp_path / "ledger.jsonl")
    charge_rounds(one_by_one, 12, event)
    spent = at_once.charge(repeated(repeated(event, 3), 4), release="training", noise="key")
    assert spent == at_once.epsilon == one_by_one.epsilon > 0
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") == 2
    said = at_once.statement(**WORDS, planned={repeated(event, 12): 1})
    assert said == one_by_one.statement(**WORDS, planned={event: 12}) | {"ledger": at_once.identity}
    assert said["steps"] == 12
    assert Ledger(terms, tmp_path / "ledger.jsonl").statement(**WORDS, planned={event: 12}) == said


def test_a_repeated_charge_is_read_through_and_added_to_others() -> None:
    book = Ledger(TERMS)
    book.charge(repeated(POISSON, 5), release="training", noise="key")
    said = book.statement(**WORDS)
    assert (said["noise_multiplier"], said["sampling_rate"]) == (1.0, 0.1)
    assert said["sampling"].startswith("poisson")
    book.charge(POISSON, release="one more", noise="key")
    assert book.epsilon == epsilon([POISSON] * 6, 1e-5)
    assert book.statement(**WORDS)["steps"] == 6
    with pytest.raises(UserError, match="replace-one"):
        book.charge(repeated(FIXED, 5), release="other", noise="key")
    with pytest.raises(UserError, match="-1 releases"):
        book.charge(repeated(POISSON, -1), release="other", noise="key")


def test_a_repeated_charge_is_refused_whole() -> None:
    book = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=epsilon([POISSON] * 5, 1e-5)))
    assert book.affords(repeated(POISSON, 5))
    assert not book.affords(repeated(POISSON, 6))
    with pytest.raises(BudgetExhausted):
        book.charge(repeated(POISSON, 6), release="training", noise="key")
    assert book.epsilon == 0.0
    pld = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, accountant="pld"))
    with pytest.raises(UserError, match="RDP"):
        pld.charge(repeated(ZCDP, 2), release="labels", noise="key")
    two = pld.charge(repeated(POISSON, 2), release="training", noise="key")
    assert two == epsilon([POISSON] * 2, 1e-5, accountant="pld")


def test_no_steps_cost_nothing() -> None:
    book = Ledger(TERMS)
    assert book.charge(repeated(POISSON, 0), release="training", noise="key") == 0.0
    assert book.charge(repeated(dp_event.NonPrivateDpEvent(), 0), release="nothing", noise="key") == 0.0


def test_a_smaller_release_may_still_fit() -> None:
    book = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=epsilon([POISSON, QUIET], 1e-5)))
    book.charge(POISSON, release="round 1", noise="key")
    assert not book.affords(POISSON)
    assert book.affords(QUIET)
    book.charge(QUIET, release="round 2", noise="key")


def test_the_same_release_with_the_same_noise_is_free_and_with_new_noise_costs_again() -> None:
    book = Ledger(TERMS)
    charge_rounds(book, 2)
    before = book.epsilon
    assert book.charge(POISSON, release="round 1", noise="key") == before
    assert book.epsilon == before
    assert [book.has_charged("round 1", noise) for noise in ("key", "another key")] == [True, False]
    book.charge(POISSON, release="round 1", noise="another key")
    assert book.epsilon == epsilon([POISSON] * 3, 1e-5)
    with pytest.raises(RunError, match="the same noise must not serve"):
        book.charge(QUIET, release="round 2", noise="key")


def test_no_guarantee_is_none_and_never_fits_a_budget() -> None:
    free = Ledger(TERMS)
    assert free.charge(dp_event.NonPrivateDpEvent(), release="round 1", noise="key") is None
    assert free.charge(POISSON, release="round 2", noise="key") is None
    said = free.statement(**WORDS, planned={POISSON: 2})
    assert said["epsilon"] is said["epsilon_realised"] is said["epsilon_rdp"] is said["epsilon_pld"] is None
    assert said["guarantee"].startswith("none")
    bounded = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=1e6))
    with pytest.raises(BudgetExhausted, match="none"):
        bounded.charge(dp_event.NonPrivateDpEvent(), release="round 1", noise="key")


def test_adjacencies_do_not_meet_in_one_ledger() -> None:
    with pytest.raises(UserError, match="replace-one"):
        Ledger(TERMS).charge(FIXED, release="round 1", noise="key")
    with pytest.raises(UserError, match="add-or-remove-one"):
        Ledger(Terms("client", Adjacency.REPLACE_ONE, 1e-5)).charge(POISSON, release="round 1", noise="key")


def test_a_pld_ledger_refuses_what_pld_does_not_know() -> None:
    book = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, accountant="pld"))
    with pytest.raises(UserError, match="RDP"):
        book.charge(ZCDP, release="labels", noise="key")


@pytest.mark.parametrize("terms", [{"delta": 0.0}, {"delta": 1.0}, {"budget": 0.0}, {"budget": float("inf")}])
def test_senseless_terms_are_refused(terms: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Terms(**{"unit": "client", "adjacency": Adjacency.ADD_OR_REMOVE_ONE, "delta": 1e-5, **terms})


def test_the_log_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    book = Ledger(TERMS, path)
    for number, event in enumerate([POISSON, QUIET, ZCDP, dp_event.GaussianDpEvent(5.0), dp_event.LaplaceDpEvent(4.0)]):
        book.charge(event, release=f"release {number}", noise="key")
    again = Ledger(TERMS, path)
    assert again.charges == book.charges
    assert again.epsilon == book.epsilon
    again.charge(POISSON, release="release 5", noise="new key")
    assert Ledger(TERMS, path).charges == again.charges


def test_every_single_charge_of_another_ledger_of_the_log_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    book, other = Ledger(TERMS, path), Ledger(TERMS, path)
    for number in range(2):
        book.charge(POISSON, release=f"round {number}", noise="key")
        assert other.affords(QUIET)
        assert (other.charges, other.epsilon) == (book.charges, book.epsilon)


def test_a_log_under_other_terms_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    charge_rounds(Ledger(TERMS, path), 1)
    with pytest.raises(UserError, match="fresh output directory"):
        Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-4), path)


def test_the_statement_says_what_was_done_in_words_and_numbers() -> None:
    book = Ledger(TERMS)
    charge_rounds(book, 5)
    said = book.statement(**WORDS, planned={POISSON: 5})
    json.dumps(said, allow_nan=False)
    assert (said["unit"], said["delta"], said["steps"], said["accountant"]) == ("client", 1e-5, 5, "pld")
    assert (said["noise_multiplier"], said["sampling_rate"], said["adjacency"]) == (1.0, 0.1, "add-or-remove-one")
    assert said["epsilon"] == said["epsilon_realised"] == said["epsilon_pld"] < said["epsilon_rdp"] == book.epsilon
    assert "every client takes part in a step with probability 0.1" in said["sampling"]
    assert "by the RDP accountant" in said["guarantee"]
    assert "the numbers of clients and of records stay public" in said["guarantee"]
    assert said["events"] == said["planned_events"] == [{"event": events.to_json(POISSON), "times": 5}]
    assert (said["covers"], said["does_not_cover"]) == ("this", "that.")
    seeded = book.statement(**{**WORDS, "simulation_only": True})
    assert "simulation" in seeded["does_not_cover"]


def test_the_statement_of_a_fixed_size_run_says_replace_one() -> None:
    book = Ledger(Terms("client", Adjacency.REPLACE_ONE, 1e-5, accountant="pld"))
    charge_rounds(book, 2, FIXED)
    said = book.statement(**WORDS, planned={FIXED: 2})
    assert (said["sampling_rate"], said["noise_multiplier"]) == (0.03, 4.0)
    assert said["epsilon"] == said["epsilon_pld"] < said["epsilon_rdp"]
    assert "replacing one client" in said["guarantee"]
    assert "30 of 1000 clients" in said["sampling"]


def test_a_mixed_statement_has_no_single_noise_and_no_pld_where_there_is_none() -> None:
    book = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5))
    book.charge(ZCDP, release="labels", noise="key")
    book.charge(dp_event.GaussianDpEvent(2.0), release="step 1", noise="key")
    said = book.statement(**WORDS)
    assert said["noise_multiplier"] is said["sampling_rate"] is said["epsilon_pld"] is None
    assert "full: every record" in said["sampling"]
    assert Ledger(TERMS).statement(**WORDS)["sampling"] == "none yet"


def test_every_event_survives_json() -> None:
    plain = (POISSON, FIXED, ZCDP, dp_event.LaplaceDpEvent(2.0), dp_event.NonPrivateDpEvent())
    pure = (BoundedRangeDpEvent(0.1), dp_event.DiscreteLaplaceDpEvent(0.1, 1))
    for event in (*plain, *pure, repeated(POISSON, 7), repeated(repeated(ZCDP, 2), 3)):
        assert events.from_json(json.loads(json.dumps(events.to_json(event)))) == event
    with pytest.raises(TypeError, match="no JSON form"):
        events.to_json(dp_event.UnsupportedDpEvent())
    gaussian = {"kind": "gaussian", "noise_multiplier": 1.0}
    half = {"kind": "fixed-size", "cohort": 5, "population": 10, "noise_multiplier": 1.0}
    assert events.from_json(gaussian) == dp_event.GaussianDpEvent(1.0)
    assert adjacency(events.from_json(half)) is Adjacency.REPLACE_ONE
    for wrong in (
        {"kind": "gaussian"},
        {"kind": "zcdp", "rho": 1.0, "xi": 0.0, "more": 1},
        {"kind": ["none"]},
        {},
        *(gaussian | {"noise_multiplier": value} for value in (-1.0, float("nan"), float("inf"), "1", True, 10**400)),
        {"kind": "poisson", "sampling_rate": 1.5, "event": gaussian},
        {"kind": "poisson", "sampling_rate": 0.5, "event": {"kind": "none"}},
        {"kind": "poisson", "sampling_rate": 0.5, "event": gaussian, "more": 1},
        {"kind": "repeated", "times": -1, "event": gaussian},
        {"kind": "repeated", "times": 1.5, "event": gaussian},
        {"kind": "repeated", "times": 2, "event": []},
        half | {"cohort": 11},
        half | {"cohort": 0},
        half | {"more": 1},
    ):
        with pytest.raises(RunError, match="does not know"):
            events.from_json(wrong)
    assert events.noise_multiplier(ZCDP) is events.sampling_rate(ZCDP) is None
    assert events.sampling_in_words(dp_event.NonPrivateDpEvent(), "client").startswith("any")
