"""The one-run canary audit of Global DP: it leaves the real mechanism alone, and it catches missing noise."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def canary_audit(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("canary_audit")


def test_a_small_run_is_refuted_without_noise_and_not_as_it_is(canary_audit: ModuleType) -> None:
    setting = canary_audit.Setting(num_canaries=60, num_real=4, rounds=2, epsilon=1.0, model="logistic")
    true, silent = (canary_audit.audit(setting, mechanism) for mechanism in ("global-dp as it is", "no noise"))
    assert true.verdict == "not refuted"
    assert silent.verdict == "REFUTED"


def test_canaries_of_several_runs_together_come_near_the_claim_and_not_above(canary_audit: ModuleType) -> None:
    setting = canary_audit.Setting(num_canaries=500, num_real=2, rounds=1, sampling_rate=1.0, model="logistic")
    found = canary_audit.tightness([replace(setting, seed=seed) for seed in (0, 1)])
    assert 0.3 < found.share < 1


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


@pytest.mark.slow
def test_cohorts_from_the_published_seed_are_refuted_and_secret_ones_are_not(canary_audit: ModuleType) -> None:
    setting = canary_audit.Setting(num_canaries=500, num_real=20, rounds=60, sampling_rate=0.05, epsilon=2.0)
    secret, published = (
        canary_audit.audit(setting, mechanism) for mechanism in (canary_audit.SEED_KNOWN, canary_audit.PUBLISHED)
    )
    assert secret.epsilon_lower_bound < 0.5 < secret.claimed_pld
    assert published.epsilon_lower_bound > published.claimed_pld == secret.claimed_pld
