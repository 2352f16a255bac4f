"""A guarantee is a number fixed beforehand; what was spent is shown as what it is."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.errors import BudgetExhausted
from fl_sim.privacy.accounting import bounds, epsilon
from fl_sim.privacy.events import amplify_poisson, single_steps
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.statement import Coverage, promised_releases, statement
from fl_sim.privacy.terms import Adjacency, Terms, rounded_up

ROUND = amplify_poisson(dp_event.GaussianDpEvent(6.0), 0.1)
TEST, ANSWER = dp_event.GaussianDpEvent(60.0), dp_event.GaussianDpEvent(20.0)
FREE = dp_event.GaussianDpEvent(1e9)
WORDS = {"covers": "this", "does_not_cover": "that.", "simulation_only": False}


def book(budget: float | None = None, accountant: str = "rdp") -> Ledger:
    return Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=budget, accountant=accountant))


def charge(ledger: Ledger, event: dp_event.DpEvent, count: int, noise: str = "key") -> Ledger:
    for number in range(count):
        ledger.charge(event, release=f"{event} {number}", noise=noise)
    return ledger


def told(ledger: Ledger, planned: Mapping[dp_event.DpEvent, int] | None) -> dict[str, Any]:
    said = ledger.statement(**WORDS, planned=planned)
    json.dumps(said, allow_nan=False)
    return said


def least(counts: Mapping[dp_event.DpEvent, int]) -> float:
    return bounds(counts, 1e-5).least


def test_a_run_that_stops_early_is_promised_the_whole_plan() -> None:
    said = told(charge(book(), ROUND, 3), {ROUND: 10})
    assert said["epsilon"] == least({ROUND: 10}) > said["epsilon_realised"] == least({ROUND: 3})
    assert (said["steps"], said["steps_planned"]) == (3, 10)
    assert "holds wherever the run stops" in said["guarantee"]
    assert f"3 releases so far cost epsilon {rounded_up(said['epsilon_realised'])};" in said["guarantee"]
    assert "no guarantee" in said["guarantee"]
    assert "budget" not in said["guarantee"]
    assert [row["times"] for row in (*said["events"], *said["planned_events"])] == [3, 10]
    whole = bounds({ROUND: 10}, 1e-5)
    assert (said["epsilon_rdp"], said["epsilon_pld"]) == (whole.rdp, whole.pld)


def test_unanswered_queries_are_in_the_guarantee() -> None:
    # Which queries are answered depends on the votes: the realised cost is no guarantee.
    ledger = charge(charge(book(), TEST, 50), ANSWER, 2)
    said = told(ledger, {TEST: 50, ANSWER: 50})
    assert said["epsilon"] == least({TEST: 50, ANSWER: 50}) > 2 * said["epsilon_realised"]
    tested = told(charge(book(), TEST, 2), {TEST: 50, ANSWER: 50})
    assert tested["noise_multiplier"] is None, "answers, with other noise, may follow"


def test_a_budget_that_is_not_used_up_is_the_guarantee() -> None:
    said = told(charge(charge(book(budget=0.8), TEST, 50), ANSWER, 2), {TEST: 500, ANSWER: 500})
    assert said["epsilon"] == 0.8 == said["budget"] > said["epsilon_realised"]
    assert "This is the budget; the RDP accountant checked it" in said["guarantee"]
    small = told(charge(charge(book(budget=30.0), TEST, 5), ANSWER, 2), {TEST: 5, ANSWER: 5})
    assert small["epsilon"] == least({TEST: 5, ANSWER: 5}) < 30


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_equal_rounds_that_use_up_a_budget_cost_what_they_cost(accountant: str) -> None:
    budget = epsilon([ROUND] * 4, 1e-5, accountant=accountant) * 1.01
    ledger = charge(book(budget, accountant), ROUND, 4)
    with pytest.raises(BudgetExhausted):
        ledger.charge(ROUND, release="one more", noise="key")
    said = told(ledger, {ROUND: 50})
    assert said["epsilon"] == said["epsilon_realised"] == least({ROUND: 4}) <= budget
    assert said["budget_accountant"] == accountant
    for earlier in (0, 2):  # how many the budget is good for was certain then, too
        fewer = told(charge(book(budget, accountant), ROUND, earlier), {ROUND: 50})
        assert fewer["epsilon"] == said["epsilon"]
        assert fewer["steps_planned"] == said["steps_planned"] == 4


@pytest.mark.parametrize(("good_for", "promised"), [(3, 3), (4, 4), (5, 5), (7, 5)])
def test_a_budget_is_good_for_the_very_number_of_rounds_that_fit_and_the_plan_for_no_more(
    good_for: int, promised: int
) -> None:
    budget = epsilon([ROUND] * good_for, 1e-5)
    for charged in (0, 2, 3):
        said = told(charge(book(budget), ROUND, charged), {ROUND: 5})
        assert (said["steps_planned"], said["epsilon"]) == (promised, least({ROUND: promised}))


def test_used_up_is_a_budget_that_no_release_of_any_planned_kind_fits() -> None:
    budget = epsilon([ANSWER] * 4, 1e-5) * 1.001
    ledger = charge(book(budget), ANSWER, 4)
    alone = told(ledger, None)
    assert (alone["epsilon"], alone["steps_planned"]) == (least({ANSWER: 4}), 4)
    assert told(ledger, {ANSWER: 50, FREE: 50})["epsilon"] == budget
    unused = told(charge(book(budget), ANSWER, 3), None)
    assert (unused["epsilon"], unused["steps_planned"]) == (budget, None)
    exact = epsilon([ANSWER] * 4, 1e-5)
    assert told(charge(book(exact), ANSWER, 3), None)["epsilon"] == exact, "one more costs just the budget"
    assert told(charge(book(exact), ANSWER, 4), {ANSWER: 50, TEST: 50})["epsilon"] == exact
    several = epsilon([ANSWER] * 3 + [TEST] * 4, 1e-5)
    assert told(charge(charge(book(several), ANSWER, 3), TEST, 3), None)["epsilon"] == several, "a test more fits"


def test_a_budget_that_did_not_hold_promises_nothing() -> None:
    charges = [(f"round {number}", ROUND) for number in range(4)]
    terms = Terms("client", Adjacency.ADD_OR_REMOVE_ONE, 1e-5, budget=epsilon([ROUND] * 2, 1e-5))
    words = Coverage(covers="", does_not_cover="", simulation_only=False)
    assert statement(terms, charges, {ROUND: 10}, words)["epsilon"] == least({ROUND: 10})
    assert statement(terms, charges, None, words)["epsilon"] == least({ROUND: 4})
    exact = replace(terms, budget=epsilon([ROUND] * 4, 1e-5))
    assert statement(exact, charges, {ROUND: 10}, words)["epsilon"] == least({ROUND: 4})
    twice = [("round 1", TEST), ("round 1", ANSWER)]
    assert promised_releases(replace(terms, budget=None), twice, {ANSWER: 3}) == {ANSWER: 3, TEST: 1}


def test_a_budget_below_what_the_plan_costs_is_what_holds_and_above_it_the_plan() -> None:
    whole = bounds({TEST: 5, ANSWER: 5}, 1e-5)
    assert whole.least < whole.rdp
    for budget in (whole.least * 0.99, (whole.least + whole.rdp) / 2):
        said = told(charge(book(budget), TEST, 2), {TEST: 5, ANSWER: 5})
        assert said["epsilon"] == min(budget, whole.least)
        assert said["accountant"] == ("rdp" if budget < whole.least else "pld")


def test_rounds_that_were_paid_for_again_come_on_top_of_the_plan() -> None:
    ledger = charge(charge(book(), ROUND, 3), ROUND, 1, noise="new key")
    for planned, promised in ((10, 11), (3, 4), (2, 4)):
        said = told(ledger, {ROUND: planned})
        assert said["epsilon"] == least({ROUND: promised})
        assert said["steps_planned"] == promised
        assert "1 of the releases were paid for again" in said["guarantee"]
    two = told(charge(ledger, ROUND, 2, noise="new key"), {ROUND: 10})
    assert (two["steps_planned"], "2 of the releases were paid for again" in two["guarantee"]) == (12, True)


def test_without_a_plan_or_a_budget_nothing_holds_for_a_run_that_may_stop_anywhere() -> None:
    said = told(charge(book(), ROUND, 3), None)
    assert said["epsilon"] is None
    assert said["epsilon_realised"] == least({ROUND: 3})
    assert said["guarantee"].startswith("none: the number of releases was not fixed beforehand")
    assert said["planned_events"] is None
    assert told(charge(book(budget=8.0), ROUND, 3), None)["epsilon"] == 8.0


def test_nothing_released_and_released_for_nothing_are_told_apart() -> None:
    nothing = told(book(), {})
    assert (nothing["epsilon"], nothing["steps"]) == (0.0, 0)
    assert nothing["guarantee"] == "complete privacy: nothing is released"
    free = told(charge(book(), FREE, 2), {FREE: 2})
    assert free["epsilon"] == 0.0
    assert free["guarantee"].startswith("(0, 1e-05)-differential privacy")
    waiting = told(book(), {ROUND: 5})
    assert waiting["epsilon"] == least({ROUND: 5})
    assert "Nothing has been released yet" in waiting["guarantee"]


@given(
    st.lists(st.sampled_from([TEST, ANSWER]), max_size=4),
    st.dictionaries(st.sampled_from([TEST, ANSWER]), st.integers(0, 3)),
    st.sampled_from([None, 0.2, 20.0]),
)
@settings(deadline=None, max_examples=8)
def test_the_guarantee_is_never_below_the_cost_of_what_was_released(
    released: list[dp_event.DpEvent], planned: dict[dp_event.DpEvent, int], budget: float | None
) -> None:
    ledger = book(budget)
    for number, event in enumerate(released):
        if ledger.affords(event):
            ledger.charge(event, release=f"release {number}", noise="key")
    said = told(ledger, planned)
    assert said["epsilon"] >= said["epsilon_realised"]
    if budget is None:
        assert said["epsilon"] >= least(single_steps(planned))
    else:
        assert said["epsilon"] <= budget or said["epsilon"] == said["epsilon_realised"]
