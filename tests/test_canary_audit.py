"""The one-run canary audit: its bound is right, it leaves the real mechanism alone, and it catches missing noise."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from fl_sim.seeding import rng

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "canary_audit.py"


@pytest.fixture(scope="module")
def canary_audit() -> ModuleType:
    """The script, loaded from where it lies: other distributions have a package of the name benchmarks."""
    spec = importlib.util.spec_from_file_location("canary_audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("guesses", "correct"), [(40, 40), (100, 90), (1000, 700)])
def test_without_delta_the_bound_is_that_of_clopper_and_pearson(
    canary_audit: ModuleType, guesses: int, correct: int
) -> None:
    bound = canary_audit.epsilon_lower_bound(1000, guesses, correct, 0.0, 0.05)
    share = float(stats.beta.ppf(0.05, correct, guesses - correct + 1))
    assert bound == pytest.approx(math.log(share / (1 - share)), abs=1e-3)


def test_the_delta_term_is_what_theorem_5_2_says(canary_audit: ModuleType) -> None:
    # Written out for few guesses: the largest mean of the probabilities just below the number of correct guesses.
    law = stats.binom(10, 1 / (1 + math.exp(-1.5)))
    means = [sum(law.pmf(9 - j) for j in range(1, i + 1)) / i for i in range(1, 10)]
    wanted = law.pmf(9) + law.pmf(10) + 2 * 50 * 1e-3 * max(means)
    assert canary_audit.p_value(50, 10, 9, 1.5, 1e-3) == pytest.approx(wanted, rel=1e-9)


def test_delta_can_only_weaken_what_is_proven(canary_audit: ModuleType) -> None:
    bounds = [canary_audit.epsilon_lower_bound(1000, 400, 390, delta, 0.05) for delta in (0.0, 1e-5, 1e-4, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_the_bound_errs_as_often_as_it_may_and_no_oftener(canary_audit: ModuleType) -> None:
    # Randomised response tells every bit truly with probability e^eps / (1 + e^eps): for it theorem 5.2 is tight.
    law = stats.binom(500, 1 / (1 + math.exp(-1.0)))
    enough = next(c for c in range(365, 500) if canary_audit.epsilon_lower_bound(500, 500, c, 0.0, 0.05) > 1.0)
    assert law.sf(enough - 1) <= 0.05 < law.sf(enough - 2)


@pytest.mark.slow
def test_the_best_of_all_shares_still_errs_seldom(canary_audit: ModuleType) -> None:
    epsilon, bounds = 1.0, []
    for run in range(100):
        generator = rng(0, "randomised response", run)
        bits = generator.random(500) < 0.5
        told = bits ^ (generator.random(500) > 1 / (1 + math.exp(-epsilon)))
        scores = told + 1e-3 * generator.random(500)
        bounds.append(max(one.epsilon_lower_bound for one in canary_audit.guess(scores, bits, 1e-6)))
    assert sum(bound > epsilon for bound in bounds) <= stats.binom.ppf(0.999, 100, 0.05)
    assert float(np.mean(bounds)) > 0.6 * epsilon


def test_no_claim_above_the_power_limit_can_be_refuted(canary_audit: ModuleType) -> None:
    level = 0.05 / len(canary_audit.SHARES)
    limits = [canary_audit.power_limit(canaries, 1e-5) for canaries in (100, 300, 1000)]
    assert limits == sorted(limits)
    for canaries, limit in zip((100, 300, 1000), limits, strict=True):
        assert limit < math.log(canaries / math.log(1 / level))  # equal but for delta and e^-x against 1 / (1 + x)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_whole_run_of_the_real_mechanism_is_not_refuted_and_one_without_noise_is(
    canary_audit: ModuleType, seed: int
) -> None:
    setting = canary_audit.Setting(num_canaries=300, num_real=20, rounds=10, epsilon=2.0, seed=seed)
    true = canary_audit.audit(setting, "global-dp as it is")
    silent = canary_audit.audit(setting, "no noise")
    assert true.claimed == silent.claimed == pytest.approx(2.0, rel=1e-3)
    assert true.epsilon_lower_bound < true.claimed_pld <= true.claimed
    assert true.epsilon_estimate > 0.3  # the canaries do leave a trace: an audit that sees nothing proves nothing
    assert silent.epsilon_lower_bound > silent.claimed
    assert silent.power_limit > silent.claimed
