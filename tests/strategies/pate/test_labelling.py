"""Noisy majorities: they do what they say, the budget stops them in time, and an audit can tell them from impostors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from pydantic import ValidationError
from scipy import stats

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import compose, delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import EPSILONS, ProfileAudit, World, audit_profile, noise_calibration, run_mechanism
from fl_sim.privacy.mechanisms import Noise, grid_spacing
from fl_sim.privacy.pate import labelling_cost
from fl_sim.privacy.renyi import ORDERS
from strategies.pate import labelling
from strategies.pate.labelling import (
    UNANSWERED,
    ConfidentGNMax,
    GNMax,
    Labelled,
    Labelling,
    LNMax,
    Mechanism,
    NoNoise,
    VotingMechanism,
    count_votes,
    label,
)

NOISE = Noise.seeded(0)
CLEAR = np.array([[0, 100, 0]] * 50)
MECHANISMS = [LNMax(gamma=0.5), GNMax(sigma=4.0), ConfidentGNMax(threshold=40.0, sigma_threshold=5.0, sigma=4.0)]


def labelled(counts: np.ndarray, labelling: Labelling, noise: Noise = NOISE) -> Labelled:
    return label(counts, labelling, ledger=labelling.open_ledger(None), noise=noise)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, NoNoise()], ids=str)
def test_clear_votes_win_whatever_the_noise(mechanism: Mechanism) -> None:
    found = labelled(CLEAR, Labelling(mechanism=mechanism))
    assert found.labels.tolist() == [1] * 50
    assert (found.num_asked, found.num_answered) == (50, 50)


@pytest.mark.parametrize(("mechanism", "family"), [(MECHANISMS[0], stats.laplace), (MECHANISMS[1], stats.norm)])
def test_labels_are_as_often_wrong_as_the_noise_says(mechanism: LNMax | GNMax, family: stats.rv_continuous) -> None:
    scale = 2.0 if isinstance(mechanism, LNMax) else 4.0
    winners = [mechanism.winner(np.array([3, 0]), noise=NOISE, query=query) for query in range(20_000)]
    points = np.linspace(-80, 80, 200_001)
    chance = np.trapezoid(family.pdf(points, scale=scale) * family.cdf(points - 3, scale=scale), points)
    assert np.mean(winners) == pytest.approx(chance, abs=4 * math.sqrt(chance / 20_000))


def test_few_votes_are_left_unanswered_and_many_are_not() -> None:
    mechanism = ConfidentGNMax(threshold=60.0, sigma_threshold=5.0, sigma=1.0)
    found = labelled(np.array([[30, 40, 30], [5, 90, 5]] * 20), Labelling(mechanism=mechanism))
    assert found.labels[::2].tolist() == [UNANSWERED] * 20
    assert found.labels[1::2].tolist() == [1] * 20
    assert (found.num_asked, found.num_answered) == (40, 20)


def test_the_test_and_the_answer_do_not_share_their_noise() -> None:
    mechanism = ConfidentGNMax(threshold=10.0, sigma_threshold=1e-3, sigma=1.0)
    assert not np.isclose(
        NOISE.standard_normal(1, purpose="pate votes", server_round=3),
        NOISE.standard_normal(1, purpose="pate threshold", server_round=3),
    )
    assert mechanism.passes(np.array([11, 0]), noise=NOISE, query=3)
    assert not mechanism.passes(np.array([9, 0]), noise=NOISE, query=3)


def test_another_query_or_key_has_other_noise() -> None:
    votes = np.full(1000, 5)
    for mechanism in MECHANISMS[:2]:
        winners = {mechanism.winner(votes, noise=NOISE, query=query) for query in range(20)}
        assert len(winners) > 10
        assert mechanism.winner(votes, noise=NOISE, query=0) != mechanism.winner(votes, noise=Noise.secret(), query=0)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_labelling_stops_before_the_budget_is_exceeded(mechanism: Mechanism) -> None:
    counts = np.tile(CLEAR, (20, 1))
    labelling = Labelling(mechanism=mechanism, epsilon=5.0, noise="seeded")
    ledger = labelling.open_ledger(None)
    found = label(counts, labelling, ledger=ledger, noise=NOISE)
    assert 0 < found.num_asked < 1000
    assert (found.labels[found.num_asked :] == UNANSWERED).all()
    assert ledger.epsilon is not None
    assert ledger.epsilon <= 5.0
    unlimited = labelling.model_copy(update={"epsilon": None})
    one_more = unlimited.open_ledger(None)
    label(counts[: found.num_asked + 1], unlimited, ledger=one_more, noise=NOISE)
    assert one_more.epsilon is not None
    assert one_more.epsilon > 5.0 * (1 - 1e-6)


def test_a_budget_that_buys_nothing_buys_nothing() -> None:
    labelling = Labelling(mechanism=GNMax(sigma=1.0), epsilon=0.1)
    ledger = labelling.open_ledger(None)
    found = label(CLEAR, labelling, ledger=ledger, noise=NOISE)
    assert (found.num_asked, found.num_answered, ledger.epsilon) == (0, 0, 0.0)
    assert labelling.planned(len(CLEAR), found.num_asked) == {}


def test_nothing_of_a_vote_is_seen_before_it_is_paid_for() -> None:
    order: list[str] = []

    class Watched(Noise):
        def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> np.ndarray:
            order.append(f"noise {purpose} {server_round}")
            return super()._words(count, purpose, server_round, behind=behind)

    labelling = Labelling(mechanism=MECHANISMS[2])
    ledger = labelling.open_ledger(None)
    charge = ledger.charge

    def watched_charge(event: dp_event.DpEvent, *, release: str, noise: str) -> float | None:
        order.append(release)
        return charge(event, release=release, noise=noise)

    ledger.charge = watched_charge  # type: ignore[method-assign]
    label(CLEAR[:1], labelling, ledger=ledger, noise=Watched(bytes(32), simulation_only=True))
    assert order == ["test of query 0", "noise pate threshold 0", "answer to query 0", "noise pate votes 0"]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_the_ledger_is_charged_at_least_what_the_analysis_says(mechanism: Mechanism) -> None:
    test, answer = mechanism.charges()
    events = [answer] if test is None else [test, answer]
    charged = compose(dict.fromkeys(events, 1))
    worst = mechanism.cost().worst_case(np.array(ORDERS))
    assert (worst <= charged * (1 + 1e-9)).all()
    assert charged == pytest.approx(worst, rel=1e-9)


def test_lnmax_costs_what_two_laplace_mechanisms_cost() -> None:
    event = LNMax(gamma=0.05).charges()[1]
    assert epsilon_of_counts({event: 100}, 1e-5, accountant="pld") == pytest.approx(2.893, abs=2e-3)
    assert epsilon_of_counts({event: 100}, 1e-5) == pytest.approx(3.126, abs=2e-3)


def test_a_data_dependent_budget_goes_further_and_is_kept() -> None:
    counts = np.tile([[200, 45, 5], [190, 60, 0]], (150, 1))
    plain = Labelling(mechanism=GNMax(sigma=40.0), epsilon=1.0, noise="seeded")
    dependent = plain.model_copy(update={"budget": "data-dependent"})
    few, many = labelled(counts, plain), labelled(counts, dependent)
    assert few.num_asked < many.num_asked < 300
    spent = [
        labelling_cost.analyse(counts[: many.num_asked + more], labelling_cost.GNMaxCost(40.0), 1e-5) for more in (0, 1)
    ]
    assert spent[0].dependent.total <= 1.0 < spent[1].dependent.total


@pytest.mark.parametrize("forgotten", ["nothing", "answers", "tests of unanswered queries"])
def test_a_data_dependent_budget_counts_answers_and_the_tests_of_queries_left_unanswered(forgotten: str) -> None:
    mechanism = ConfidentGNMax(threshold=110.0, sigma_threshold=20.0, sigma=20.0)
    counts = np.tile([[130, 60, 10], [105, 85, 10], [90, 80, 30]], (40, 1))
    labelling = Labelling(mechanism=mechanism, epsilon=2.5, budget="data-dependent", noise="seeded")
    found = labelled(counts, labelling)
    answered = found.labels != UNANSWERED
    assert 20 < found.num_answered < found.num_asked - 20
    assert found.num_asked < len(counts)

    def affords(query: int) -> bool:
        """Return whether a query fits behind those before it, as the analysis, not the labelling, counts them."""
        before = np.arange(query)
        if forgotten == "tests of unanswered queries":
            before = before[answered[before]]
        rows = np.append(before, query)
        flags = answered[rows] if forgotten != "answers" else np.zeros(len(rows), dtype=bool)
        flags[-1] = True
        return labelling_cost.analyse(counts[rows], mechanism.cost(), 1e-5, answered=flags).dependent.total <= 2.5

    stops_there = affords(found.num_asked - 1) and not affords(found.num_asked)
    assert stops_there == (forgotten == "nothing")


def test_a_resumed_labelling_gives_the_same_labels_at_no_cost(tmp_path: Path) -> None:
    counts = np.array([[52, 48], [70, 30], [45, 55], [51, 49]] * 10)
    mechanism = ConfidentGNMax(threshold=60.0, sigma_threshold=10.0, sigma=10.0)
    labelling = Labelling(mechanism=mechanism, epsilon=2.0, noise="seeded")
    path = tmp_path / "ledger.jsonl"
    first = label(counts, labelling, ledger=labelling.open_ledger(path), noise=NOISE)
    size = path.stat().st_size
    again = label(counts, labelling, ledger=labelling.open_ledger(path), noise=NOISE)
    assert 0 < first.num_answered < first.num_asked < len(counts)
    assert again.labels.tolist() == first.labels.tolist()
    assert (again.num_asked, path.stat().st_size) == (first.num_asked, size)
    other = label(counts, labelling, ledger=labelling.open_ledger(path), noise=Noise.secret())
    assert other.num_asked == 0


def test_no_noise_has_no_epsilon_and_must_be_named() -> None:
    assert Labelling().mechanism == LNMax()
    labelling = Labelling(mechanism="none")
    ledger = labelling.open_ledger(None)
    label(CLEAR, labelling, ledger=ledger, noise=NOISE)
    assert ledger.epsilon is None
    with pytest.raises(ValidationError, match="no epsilon can limit it"):
        Labelling(mechanism="none", epsilon=3.0)
    with pytest.raises(UserError, match="choose lnmax"):
        NoNoise().cost()


@pytest.mark.parametrize(
    "mechanism",
    [{"kind": "gnmax", "sigma": 0}, {"kind": "lnmax", "gamma": 0}, {"kind": "confident", "sigma_threshold": 0}],
    ids=str,
)
def test_noise_cannot_be_turned_off_by_a_number(mechanism: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Labelling(mechanism=mechanism)


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert Labelling(mechanism="lnmax:0.1").mechanism == LNMax(gamma=0.1)
    with pytest.raises(ValidationError, match="needs an epsilon"):
        Labelling(budget="data-dependent")


def test_votes_are_counted_and_a_vote_for_no_class_is_refused() -> None:
    predictions = np.array([[0, 2], [0, 1], [1, 2]])
    assert count_votes(predictions, 3).tolist() == [[2, 1, 0], [0, 1, 2]]
    with pytest.raises(UserError, match=r"class that does not exist: .*0 to 1"):
        count_votes(predictions, 2)
    with pytest.raises(UserError, match="adds up to 3"):
        labelled(np.array([[2, 1], [2, 2]]), Labelling())


# The audit: one teacher's vote moves from class 0 to class 1, which decides a tie; see fl_sim.privacy.audit.

ANSWER_WORLDS: dict[World, np.ndarray] = {0: np.array([10, 9, 0]), 1: np.array([9, 10, 0])}
TEST_WORLDS: dict[World, np.ndarray] = {0: np.array([10, 0]), 1: np.array([9, 1])}


def audited(release: Callable[[World, int], float], claim: list[dp_event.DpEvent], runs: int = 4000) -> ProfileAudit:
    outputs = run_mechanism(lambda world, run: np.array([release(world, run)]), runs)
    return audit_profile(*outputs, delta_profile(claim, EPSILONS))


def answers(mechanism: VotingMechanism) -> Callable[[World, int], float]:
    return lambda world, run: float(mechanism.winner(ANSWER_WORLDS[world], noise=NOISE, query=run))


def passing(mechanism: VotingMechanism) -> Callable[[World, int], float]:
    return lambda world, run: float(mechanism.passes(TEST_WORLDS[world], noise=NOISE, query=run))


LAPLACE_CLAIM = [dp_event.LaplaceDpEvent(1.0)] * 2
GAUSSIAN_CLAIM = [dp_event.GaussianDpEvent(1.0)]
TRUE_GNMAX = GNMax(sigma=math.sqrt(2))


def confident(**noise: float) -> ConfidentGNMax:
    return ConfidentGNMax(**{"threshold": 9.5, "sigma_threshold": 1.0, "sigma": math.sqrt(2), **noise})


def test_the_audit_clears_the_true_mechanisms_and_sees_nearly_all_there_is_to_see() -> None:
    for release, claim, power in (
        (answers(TRUE_GNMAX), GAUSSIAN_CLAIM, 1.0),
        (answers(LNMax(gamma=1.0)), LAPLACE_CLAIM, 0.8),  # the winner keeps less of two Laplace mechanisms
        (answers(confident()), GAUSSIAN_CLAIM, 1.0),
        (passing(confident()), GAUSSIAN_CLAIM, 1.0),
    ):
        found = audited(release, claim)
        assert not found.refuted
        assert power - 0.1 <= found.power <= 1.1


def test_claims_are_the_ones_that_are_charged() -> None:
    assert TRUE_GNMAX.charges() == (None, dp_event.GaussianDpEvent(pytest.approx(1.0)))
    assert confident().charges() == (dp_event.GaussianDpEvent(1.0), TRUE_GNMAX.charges()[1])
    assert LNMax(gamma=0.5).charges() == (None, dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(2.0), 2))


def test_the_plan_is_that_every_query_is_answered() -> None:
    test, answer = MECHANISMS[2].charges()
    assert Labelling(mechanism=MECHANISMS[2]).planned(5, 5) == {test: 5, answer: 5}
    alike = confident()  # its test costs what an answer costs
    assert Labelling(mechanism=alike).planned(5, 5) == {alike.charges()[0]: 10}
    assert Labelling(mechanism=TRUE_GNMAX).planned(5, 5) == {TRUE_GNMAX.charges()[1]: 5}


@pytest.mark.usefixtures("coarse_losses")  # the larger claim is the harder one to refute
@pytest.mark.parametrize(
    ("fault", "release", "claim"),
    [
        ("half the noise", answers(GNMax(sigma=math.sqrt(2) / 2)), GAUSSIAN_CLAIM),
        ("no noise", answers(NoNoise()), GAUSSIAN_CLAIM),
        ("two votes move, one was counted", answers(GNMax(sigma=1.0)), GAUSSIAN_CLAIM),
        ("half the noise", answers(LNMax(gamma=2.0)), LAPLACE_CLAIM),
        ("no noise", answers(NoNoise()), LAPLACE_CLAIM),
        ("two votes move, one was counted", answers(LNMax(gamma=1.0)), [dp_event.LaplaceDpEvent(2.0)]),
        ("half the noise on the test", passing(confident(sigma_threshold=0.5)), GAUSSIAN_CLAIM),
        ("no noise on the test", passing(confident(sigma_threshold=1e-6)), GAUSSIAN_CLAIM),
        ("half the noise on the answer", answers(confident(sigma=math.sqrt(2) / 2)), GAUSSIAN_CLAIM),
        ("one noise for all queries", lambda world, run: answers(TRUE_GNMAX)(world, 1), GAUSSIAN_CLAIM),
    ],
)
def test_the_audit_catches_every_planted_fault(
    fault: str, release: Callable[[World, int], float], claim: list[dp_event.DpEvent]
) -> None:
    assert audited(release, claim, runs=1000).refuted, fault


def test_the_noise_on_the_counts_is_what_it_claims_to_be() -> None:
    said = {"purpose": "pate votes"}
    normal = np.stack([NOISE.gaussian(6, 1.0, **said, server_round=query) for query in range(2000)]) * grid_spacing(1.0)
    laplace = np.stack([NOISE.laplace(6, 1.0, **said, server_round=query) for query in range(2000)]) * grid_spacing(1.0)
    as_normal = stats.norm.ppf(stats.laplace.cdf(laplace))
    assert min(noise_calibration(normal).values()) > 1e-3
    assert min(noise_calibration(as_normal).values()) > 1e-3
    assert min(noise_calibration(normal / 2).values()) < 1e-9
    assert min(noise_calibration(laplace).values()) < 1e-9


def test_a_count_that_just_reaches_the_threshold_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "add_noise", lambda total, *_: total)
    noise = Noise.seeded(0)
    for threshold, answered in ((6.0, True), (6.0 + 1e-9, False), (5.0, True)):
        mechanism = ConfidentGNMax(threshold=threshold, sigma_threshold=1.0, sigma=1.0)
        assert mechanism.passes(np.array([1, 6, 3]), noise=noise, query=0) is answered


def test_a_vote_for_the_first_class_that_does_not_exist_is_no_vote() -> None:
    assert count_votes(np.array([[0, 2], [2, 1]]), 3).tolist() == [[1, 0, 1], [0, 1, 1]]
    for beyond in (3, -1):
        with pytest.raises(UserError, match="classes are 0 to 2"):
            count_votes(np.array([[0], [beyond]]), 3)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_budget_that_is_just_enough_for_queries_affords_them(queries: int) -> None:
    each = GNMax(sigma=5.0).charges()[1]
    exact = epsilon_of_counts({each: queries}, 1e-5)
    votes = np.array([[9, 1, 0]] * 5)
    for budget, asked in ((exact, queries), (exact * (1 - 1e-9), queries - 1)):
        settings = Labelling(mechanism=GNMax(sigma=5.0), epsilon=budget)
        found = label(votes, settings, ledger=settings.open_ledger(None), noise=Noise.seeded(0))
        assert found.num_asked == found.num_answered == asked


@pytest.mark.parametrize("mechanism", MECHANISMS[:2], ids=str)
def test_a_data_dependent_budget_is_refused_where_it_affords_no_query_for_any_votes(mechanism: LNMax | GNMax) -> None:
    least = labelling_cost.least_epsilon(mechanism.cost(), 30, 3, 1e-5)
    assert 0 < least < labelling_cost.least_epsilon(mechanism.cost(), 2, 3, 1e-5)
    enough = Labelling(mechanism=mechanism, epsilon=least, budget="data-dependent", noise="seeded")
    enough.check_budget(30, 3)
    assert labelled(np.array([[30, 0, 0]]), enough).num_asked == 1
    less = enough.model_copy(update={"epsilon": least * (1 - 1e-9)})
    assert labelled(np.array([[30, 0, 0]]), less).num_asked == 0
    with pytest.raises(UserError, match=r"does not afford one query, .*, a lower bound for all votes"):
        less.check_budget(30, 3)
