"""The audit itself: no false alarms on a true claim, no vacuous passes, an alarm for every kind of wrong noise."""

from functools import cache

import numpy as np
import pytest
from dp_accounting import dp_event
from scipy.stats import norm

from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import (
    EPSILONS,
    ProfileAudit,
    audit_profile,
    audit_ratios,
    least_refuted,
    noise_calibration,
    run_mechanism,
)


@cache  # not where tests are collected, which every worker does
def claimed() -> np.ndarray:
    return delta_profile([dp_event.GaussianDpEvent(1.0)], EPSILONS)


@cache
def epsilon() -> float:
    return epsilon_of_counts({dp_event.GaussianDpEvent(1.0): 1}, 1e-5, accountant="pld")


def worlds(
    seed: int, shift: float, scale: float = 1.0, runs: int = 2000, size: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    without, with_unit = rng.standard_normal((2, runs, size)) * scale
    return without, with_unit + shift / size**0.5


def test_a_true_claim_is_not_refuted() -> None:
    for seed in range(40):
        found = audit_profile(*worlds(seed, 1.0), claimed())
        assert not found.refuted
        assert found.epsilon_lower_bound < epsilon()


def gaussian_claims(noise: float) -> list[float]:
    """Return delta at each epsilon of the Gaussian mechanism (Balle and Wang 2018, theorem 5)."""
    at = [(0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise, epsilon) for epsilon in EPSILONS]
    return [float(norm.cdf(high) - np.exp(epsilon) * norm.cdf(low)) for high, low, epsilon in at]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_least_refuted_noise_is_a_little_more_than_there_is(scale: float) -> None:
    pairs = [worlds(seed, 1.0, scale, runs=4000, size=1) for seed in range(10)]
    found = [least_refuted(audit_profile(*pair, gaussian_claims(1.0)), gaussian_claims, 1.0) for pair in pairs]
    assert scale <= min(found)
    assert np.median(found) < 1.25 * scale


def test_no_noise_is_refuted_where_the_worlds_do_not_differ_and_a_quarter_where_they_always_do() -> None:
    same, apart = (
        audit_profile(*worlds(0, shift, size=1), gaussian_claims(1.0), epsilons=EPSILONS) for shift in (0.0, 100.0)
    )
    assert least_refuted(same, gaussian_claims, 1.0) == np.inf
    assert least_refuted(apart, gaussian_claims, 1.0) == 0.25


def test_the_audit_sees_nearly_all_there_is_to_see() -> None:
    powers = [audit_profile(*worlds(seed, 1.0, runs=4000), claimed()).power for seed in range(10)]
    assert np.mean(powers) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("scale", [0.5, 0.7])
def test_too_little_noise_is_refuted(scale: float) -> None:
    assert audit_profile(*worlds(1, 1.0, scale), claimed()).refuted


def test_leaks_in_one_coordinate_or_in_the_scale_are_refuted() -> None:
    without, with_unit = worlds(1, 0.0)
    assert audit_profile(without, with_unit * 2, claimed()).refuted
    assert audit_profile(without * 2, with_unit, claimed()).refuted
    without[:, 3], with_unit[:, 3] = 0.0, 1e-6
    assert audit_profile(without, with_unit, claimed()).refuted


def test_a_mechanism_that_ignores_its_input_proves_nothing() -> None:
    found = audit_profile(*worlds(1, 0.0), claimed())
    assert max(found.lower_bounds) <= 0.0
    assert 0.0 <= found.epsilon_lower_bound < 0.1
    constant = np.ones((100, 3))
    assert not audit_profile(constant, constant, claimed()).refuted


def test_epsilon_is_proven_up_to_what_the_runs_can_show() -> None:
    far = audit_profile(*worlds(1, 50.0, runs=4000), claimed())
    assert 5.0 < far.epsilon_lower_bound < np.log(4000)


def test_fresh_noise_passes_calibration_and_every_flaw_has_its_test() -> None:
    fresh = np.random.default_rng(0).standard_normal((2000, 12))
    assert min(noise_calibration(fresh).values()) > 1e-3
    flaws = {
        "variance": fresh * 0.5,
        "variance of the worst coordinate": np.concatenate([fresh[:, 1:], np.zeros((2000, 1))], axis=1),
        "mean": fresh + 0.1,
        "shape": np.sign(fresh),
        "independence of runs": np.repeat(fresh[:1000], 2, axis=0),
        "independence of coordinates": np.repeat(fresh[:, :6], 2, axis=1),
    }
    for name, flawed in flaws.items():
        assert noise_calibration(flawed)[name] < 1e-9


def test_what_only_one_direction_shows_is_seen_whichever_it_is() -> None:
    rng = np.random.default_rng(0)
    without, with_unit = 0.01 * rng.standard_normal((2, 4000, 1))
    with_unit[rng.random(4000) < 0.1] += 5.0  # these tell that the unit is there, and none that it is not
    for pair in ((without, with_unit), (with_unit, without)):
        found = audit_profile(*pair, [0.0] * len(EPSILONS))
        assert found.epsilon_lower_bound > 2
        assert found.lower_bounds[-1] > 0.05  # at epsilon 2 the other side has none
        assert found.estimates[-1] > 0.08


def test_one_bound_above_its_claim_refutes_and_one_at_it_does_not() -> None:
    def audit(*bounds: float) -> ProfileAudit:
        return ProfileAudit((0.0, 1.0), (0.25, 0.125), bounds, (0.5, 0.5), 0.0)

    assert not audit(0.25, 0.125).refuted
    assert audit(0.25, 0.126).refuted
    assert audit(0.26, 0.1).refuted
    assert audit(0.0, 0.0).power == 2.0


def test_two_worlds_without_a_common_output_are_told_apart_as_clopper_and_pearson_say() -> None:
    without = np.arange(41.0)[:, None] % 2
    found = audit_profile(without, without + 100, [1.0] * 4, delta=0.1, confidence=0.9)
    level, judged = 0.1 / 20, 21  # the first 20 runs choose the event
    low = level ** (1 / judged)
    assert found.lower_bounds == pytest.approx([low - np.exp(epsilon) * (1 - low) for epsilon in EPSILONS])
    assert found.epsilon_lower_bound == pytest.approx(np.log((low - 0.1) / (1 - low)))
    assert found.estimates == (1.0,) * 4


def test_runs_that_are_judged_choose_nothing() -> None:
    found = audit_profile(*worlds(1, 0.0, runs=60, size=200), [0.0] * 4)
    assert max(found.lower_bounds) <= 0.0, (
        "two Gaussians of 200 coordinates tell the runs apart that they were fitted to"
    )


@pytest.mark.parametrize("start", [0.5, 1.0, 3.0, 10.0])
def test_the_least_refuted_noise_is_refuted_and_a_hundredth_less_is_not(start: float) -> None:
    audit = ProfileAudit((0.0, 1.0), (1.0, 1.0), (0.3, 0.1), (0.3, 0.1), 0.0)
    found = least_refuted(audit, lambda noise: (1 / noise, 1.0), start)
    assert 1 / 0.3 < found < 1.011 / 0.3
    assert least_refuted(audit, lambda noise: (1 / noise, 1.0), 20.0) == 5.0


def test_no_two_runs_of_an_audit_are_the_same_run() -> None:
    without, with_unit = run_mechanism(lambda world, run: np.array([world, run], dtype=np.float64), 3)
    assert without.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert with_unit.tolist() == [[1, 3], [1, 4], [1, 5]]


def test_calibration_is_two_sided() -> None:
    fresh = np.random.default_rng(0).standard_normal((2000, 12))
    turned = fresh * np.where(np.arange(2000) % 2, 1, -1)[:, None]
    flaws = (
        ("variance", fresh * 2),
        ("mean", fresh - 0.1),
        ("independence of runs", np.repeat(turned[:1000], 2, axis=0) * np.tile([1, -1], 1000)[:, None]),
        ("variance of the worst coordinate", fresh * np.array([1.5] + [1.0] * 11)),
    )
    for name, flawed in flaws:
        assert noise_calibration(flawed)[name] < 1e-9
    each = [noise_calibration(fresh[:, [place]])["variance"] for place in range(12)]
    assert noise_calibration(fresh)["variance of the worst coordinate"] == pytest.approx(min(1.0, 12 * min(each)))
    assert noise_calibration(fresh[:, :1])["independence of coordinates"] == 1.0


def ratios_of(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log likelihood ratios in both worlds, for a Gaussian mechanism that should have noise 1."""
    without, with_unit = (outputs[:, 0] for outputs in worlds(seed, 1.0, noise, runs=400, size=1))
    return without - 0.5, with_unit - 0.5


def test_ratios_refute_too_little_noise_and_a_right_claim_seldom() -> None:
    right = [audit_ratios(*ratios_of(seed, 1.0), claimed()).refuted for seed in range(100)]
    assert sum(right) <= 5
    assert all(audit_ratios(*ratios_of(seed, 0.5), claimed()).refuted for seed in range(20))


def test_ratios_prove_more_than_outputs_whose_sets_must_be_found_first() -> None:
    for seed in range(5):
        ratios = ratios_of(seed, 1.0)
        fixed = audit_ratios(*ratios, claimed())
        found = audit_profile(ratios[0][:, np.newaxis], ratios[1][:, np.newaxis], claimed())
        assert fixed.lower_bounds[0] > found.lower_bounds[0]
        assert fixed.power == pytest.approx(1.0, abs=0.15)


def test_ratios_refute_in_either_direction() -> None:
    certain = np.full(200, 9.0)
    doubtful = np.concatenate([np.full(100, 9.0), np.full(100, -9.0)])
    shown, hidden = audit_ratios(doubtful, certain, [0.0] * 4), audit_ratios(-certain, -doubtful, [0.0] * 4)
    assert shown.lower_bounds == hidden.lower_bounds
    assert shown.lower_bounds[0] == pytest.approx(0.375, abs=0.01)  # 0.5 but for both intervals
    assert shown.lower_bounds[3] > 0.15  # low ratios alone tell this much
    assert shown.epsilon_lower_bound == hidden.epsilon_lower_bound > 2
