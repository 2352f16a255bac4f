"""The one-run audit: its bound is right, errs as seldom as it says, and knows what it cannot see."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import stats

from fl_sim.privacy import audit
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.seeding import rng


@pytest.mark.parametrize(("guesses", "correct"), [(40, 40), (100, 90), (1000, 700)])
def test_without_delta_the_bound_is_that_of_clopper_and_pearson(guesses: int, correct: int) -> None:
    bound = audit.epsilon_lower_bound(1000, guesses, correct, 0.0, 0.05)
    share = float(stats.beta.ppf(0.05, correct, guesses - correct + 1))
    assert bound == pytest.approx(math.log(share / (1 - share)), abs=1e-3)


@pytest.mark.parametrize("epsilon", [0.5, 1.5])  # of the means, the first is the largest at 1.5 and not at 0.5
def test_the_delta_term_is_what_theorem_5_2_says(epsilon: float) -> None:
    # Written out for few guesses: the largest mean of the probabilities just below the number of correct guesses.
    law = stats.binom(10, 1 / (1 + math.exp(-epsilon)))
    means = [sum(law.pmf(9 - j) for j in range(1, i + 1)) / i for i in range(1, 10)]
    assert (means[0] == max(means)) == (epsilon == 1.5)
    wanted = law.pmf(9) + law.pmf(10) + 2 * 50 * 1e-3 * max(means)
    assert audit.p_value(50, 10, 9, epsilon, 1e-3) == pytest.approx(wanted, rel=1e-9)


def test_no_right_guess_and_a_large_delta_prove_nothing() -> None:
    for correct, delta in ((0, 1e-3), (10, 0.5)):
        assert audit.p_value(50, 10, correct, 1.0, delta) == 1.0
        assert audit.epsilon_lower_bound(50, 10, correct, delta, 0.05) == 0.0


@pytest.mark.parametrize("correct", range(80, 100, 3))
def test_the_bound_is_refuted_and_hardly_more_is_not(correct: int) -> None:
    bound = audit.epsilon_lower_bound(1000, 100, correct, 1e-5, 0.05)
    assert audit.p_value(1000, 100, correct, bound, 1e-5) <= 0.05
    assert audit.p_value(1000, 100, correct, bound + 3e-4, 1e-5) > 0.05


def test_every_share_calls_as_many_in_as_out_and_at_least_one() -> None:
    scores, taking_part = np.array([4.0, 1, 9, 3, 7, 0, 8, 2, 6, 5]), np.zeros(10, dtype=np.bool_)
    taking_part[[2, 6, 5, 9]] = True  # ranks 9, 8, 0, 5: the lowest is called wrongly, and 7 and 6 above 5
    found = audit.guess(scores, taking_part, 1e-3)
    assert [one.guesses for one in found] == [2, 2, 2, 2, 4, 6, 10]
    assert [one.correct for one in found] == [1, 1, 1, 1, 3, 4, 7]
    scores = np.arange(200.0)
    for one in audit.guess(scores, scores >= 100, 1e-4):
        level = (1 - audit.CONFIDENCE) / len(audit.SHARES)
        assert one.epsilon_lower_bound == audit.epsilon_lower_bound(200, one.guesses, one.guesses, 1e-4, level)


def test_ties_go_to_those_that_stand_first() -> None:
    scores, taking_part = np.arange(1000.0) % 3, np.arange(1000) >= 500
    ranked = taking_part[sorted(range(1000), key=lambda place: scores[place])]
    for one in audit.guess(scores, taking_part, 1e-5):
        side = one.guesses // 2
        assert one.correct == (~ranked[:side]).sum() + ranked[-side:].sum()


def test_delta_can_only_weaken_what_is_proven() -> None:
    bounds = [audit.epsilon_lower_bound(1000, 400, 390, delta, 0.05) for delta in (0.0, 1e-5, 1e-4, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_the_bound_errs_as_often_as_it_may_and_no_oftener() -> None:
    # Randomised response tells every bit truly with probability e^eps / (1 + e^eps): for it theorem 5.2 is tight.
    law = stats.binom(500, 1 / (1 + math.exp(-1.0)))
    enough = next(c for c in range(365, 500) if audit.epsilon_lower_bound(500, 500, c, 0.0, 0.05) > 1.0)
    assert law.sf(enough - 1) <= 0.05 < law.sf(enough - 2)


@pytest.mark.slow
def test_the_best_of_all_shares_still_errs_seldom() -> None:
    epsilon, bounds = 1.0, []
    for run in range(100):
        generator = rng(0, "randomised response", run)
        bits = generator.random(500) < 0.5
        told = bits ^ (generator.random(500) > 1 / (1 + math.exp(-epsilon)))
        scores = told + 1e-3 * generator.random(500)
        bounds.append(max(one.epsilon_lower_bound for one in audit.guess(scores, bits, 1e-6)))
    assert sum(bound > epsilon for bound in bounds) <= stats.binom.ppf(0.999, 100, 0.05)
    assert float(np.mean(bounds)) > 0.6 * epsilon


def test_no_claim_above_the_power_limit_can_be_refuted() -> None:
    level = 0.05 / len(audit.SHARES)
    limits = [audit.power_limit(canaries, 1e-5) for canaries in (100, 300, 1000)]
    assert limits == sorted(limits)
    for canaries, limit in zip((100, 300, 1000), limits, strict=True):
        assert limit < math.log(canaries / math.log(1 / level))  # equal but for delta and e^-x against 1 / (1 + x)


def test_the_power_limit_is_that_of_the_best_share_of_guesses() -> None:
    canaries = 1000
    perfect = np.arange(canaries, dtype=np.float64)
    found = [one.epsilon_lower_bound for one in audit.guess(perfect, perfect >= canaries // 2, 1e-5)]
    assert len(set(found)) > 1
    assert audit.power_limit(canaries, 1e-5) == max(found) > min(found)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],  # appendix D; section 7
)
def test_the_bound_is_the_one_that_steinke_nasr_and_jagielski_print(
    canaries: int, guesses: int, correct: int, delta: float, published: float
) -> None:
    assert audit.epsilon_lower_bound(canaries, guesses, correct, delta, 0.05) == pytest.approx(published, abs=1e-3)


def test_the_estimate_is_the_epsilon_of_a_gaussian_mechanism() -> None:
    draw, std = rng(0, "estimate"), 1.5
    taking_part = draw.random(200_000) < 0.5
    scores = taking_part + std * draw.standard_normal(200_000)
    true = epsilon_of_counts({dp_event.GaussianDpEvent(std): 1}, 1e-5, accountant="pld")
    assert audit.epsilon_estimate(scores, taking_part, 1e-5) == pytest.approx(true, rel=0.02)
    assert audit.epsilon_estimate(-scores, taking_part, 1e-5) == 0.0
    assert audit.epsilon_estimate(taking_part.astype(np.float64), taking_part, 1e-5) == math.inf
