"""PLS: exact distributions, the DP inequality by enumeration, and wrong variants that the same checker must catch."""

import itertools
import json
import math
import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import stats

from clients.dafl import labels
from clients.dafl.labels import ExponentialMechanism, Geometric, LabelPicker
from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import BoundedRangeDpEvent
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.renyi import bounded_loss_curve
from fl_sim.privacy.terms import Adjacency, Terms

_DEFAULT = Path(__file__).resolve().parents[4] / "shared" / "reference"
_FILE = Path(os.environ.get("FL_SIM_REFERENCE", _DEFAULT)) / "label_picker.json"
_REFERENCE: dict[str, list[dict[str, Any]]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}

needs_reference = pytest.mark.skipif(not _REFERENCE, reason=f"no {_FILE}: set FL_SIM_REFERENCE to its directory")

Pmf = Callable[[int], NDArray[np.float64]]
MECHANISMS = (ExponentialMechanism, Geometric)


def worst_log_ratio(pmf: Pmf, most: int) -> float:
    """The largest |log P(r | n) / P(r | n + 1)| over all r and all n below ``most``; inf where supports differ."""
    worst, laws = 0.0, [pmf(n) for n in range(most + 1)]
    for one, other in itertools.pairwise(laws):
        if len(one) != len(other):
            return math.inf
        if ((one == 0) != (other == 0)).any():
            return math.inf
        possible = one > 0
        worst = max(worst, float(np.abs(np.log(one[possible]) - np.log(other[possible])).max()))
    return worst


def worst_renyi(pmf: Pmf, most: int, order: float) -> float:
    laws = [np.log(pmf(n)) for n in range(most + 1)]
    pairs = [*itertools.pairwise(laws), *itertools.pairwise(laws[::-1])]
    return max(float(np.logaddexp.reduce(order * p + (1 - order) * q)) for p, q in pairs) / (order - 1)


def case_id(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={case[key]}" for key in ("n_k", "gamma", "eps", "R") if key in case)


@needs_reference
@pytest.mark.parametrize("case", _REFERENCE.get("pmf", []), ids=case_id)
def test_the_distribution_is_the_reference(case: dict[str, Any]) -> None:
    pmf = ExponentialMechanism(epsilon=case["eps"]).pmf(case["n_k"], case["gamma"], case["R"])
    np.testing.assert_allclose(pmf, case["p"], rtol=1e-9, atol=0)
    assert pmf @ np.arange(case["R"] + 1) == pytest.approx(case["mean"], rel=1e-9)


@needs_reference
@pytest.mark.parametrize("case", _REFERENCE.get("dp_exact", []), ids=case_id)
def test_neighbouring_data_sets_are_as_close_as_the_reference_says(case: dict[str, Any]) -> None:
    mechanism = ExponentialMechanism(epsilon=case["eps"])

    @cache
    def pmf(n: int) -> NDArray[np.float64]:
        return mechanism.pmf(n, case["gamma"], case["R"])

    worst = worst_log_ratio(pmf, case["n_range"])
    assert worst == pytest.approx(case["max_log_ratio"], rel=1e-9)
    assert worst <= case["eps"]
    orders = np.array(case["alphas"], dtype=np.float64)
    exact = [worst_renyi(pmf, case["n_range"], order) for order in orders]
    np.testing.assert_allclose(exact, case["rdp_exact"], rtol=1e-9)
    assert (bounded_loss_curve(BoundedRangeDpEvent(case["eps"]), orders) >= exact).all()


@pytest.mark.parametrize(("epsilon_1", "gamma", "largest"), [(1.0, 0.1, 20), (0.1, 0.05, 12), (2.0, 1.0, 30)])
def test_one_record_changes_no_probability_by_more_than_epsilon_and_some_by_much_of_it(
    epsilon_1: float, gamma: float, largest: int
) -> None:
    # A target that is rounded before it is scored moves by a whole 1 at once, not by gamma: the ratio is 5 epsilon.
    picker = ExponentialMechanism(epsilon=epsilon_1)
    worst = worst_log_ratio(lambda n: picker.pmf(n, gamma, largest), 60)
    assert 0.6 * epsilon_1 <= worst <= epsilon_1 * (1 + 1e-9)


def test_what_is_drawn_follows_a_target_that_is_not_rounded() -> None:
    # Targets 7.0 to 7.9 by steps of gamma, and much epsilon: the share drawn above 7 grows with each record.
    picker = ExponentialMechanism(epsilon=1.0, false_positive=1, least_share=0)
    for held in range(70, 80):
        drawn = picker.select(np.full(4000, held), 0.1, 20, Noise.seeded(held))
        above = float(picker.pmf(held, 0.1, 20)[8:].sum())
        assert (drawn > 7).mean() == pytest.approx(above, abs=0.04)


@needs_reference
def test_the_inequality_is_nearly_reached_somewhere() -> None:
    assert max(case["over_eps"] for case in _REFERENCE["dp_exact"]) >= 0.98
    assert worst_log_ratio(lambda n: ExponentialMechanism(epsilon=1.0).pmf(n, 0.1, 20), 400) >= 0.98


@pytest.mark.parametrize(
    ("epsilon_1", "gamma", "largest"), [(0.1, 0.05, 8), (1.0, 1.0, 12), (1.0, 0.37, 9), (2.0, 2.0, 9)]
)
def test_the_geometric_mechanism_reaches_epsilon_and_never_exceeds_it(
    epsilon_1: float, gamma: float, largest: int
) -> None:
    mechanism = Geometric(epsilon=epsilon_1)
    worst = worst_log_ratio(lambda n: mechanism.pmf(n, gamma, largest), 100)
    assert worst == pytest.approx(epsilon_1, rel=1e-6)
    assert worst <= epsilon_1 * (1 + 1e-9)


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_the_geometric_event_costs_what_the_mechanism_does(order: float) -> None:
    mechanism = Geometric(epsilon=0.7)
    exact = worst_renyi(lambda n: mechanism.pmf(n + 60, 1.0, 121), 1, order)
    stated = bounded_loss_curve(mechanism.event(1), np.array([order]))[0]
    assert exact == pytest.approx(stated, rel=1e-9)


# What must fail: the checker that clears the real mechanism catches every known mistake.


def range_that_follows_the_data(n: int) -> NDArray[np.float64]:
    return ExponentialMechanism(epsilon=1.0).pmf(n, 1.0, n + 8)


def sensitivity_one(n: int) -> NDArray[np.float64]:
    weights = np.exp(-np.abs(np.arange(41) - 2.0 * n) / 2)  # 2 * 1, where it should be 2 * gamma = 4
    return weights / weights.sum()


def no_factor_two(n: int) -> NDArray[np.float64]:
    return ExponentialMechanism(epsilon=2.0).pmf(n, 2.0, 40)


def rounded_before_scoring(n: int) -> NDArray[np.float64]:
    weights = np.exp(-np.abs(np.arange(21) - round(0.1 * n)) / (2 * 0.1))
    return weights / weights.sum()


@needs_reference
@pytest.mark.parametrize(
    ("control", "wrong"),
    list(enumerate((range_that_follows_the_data, sensitivity_one, no_factor_two, rounded_before_scoring))),
)
def test_wrong_variants_exceed_what_they_claim(control: int, wrong: Pmf) -> None:
    worst = worst_log_ratio(wrong, 60)
    assert worst == pytest.approx(float(_REFERENCE["controls"][control]["max_log_ratio"]), rel=1e-9)
    assert worst > 1.3


@needs_reference
@pytest.mark.parametrize("mechanism", [ExponentialMechanism(epsilon=1.0), Geometric(epsilon=1.0)])
def test_classes_compose_in_parallel_and_a_changed_label_costs_twice(mechanism: LabelPicker) -> None:
    case = _REFERENCE["composition"][0]
    single = [np.log(mechanism.pmf(n, case["gamma"], case["R"])) for n in range(case["n_range"] + 1)]
    joint = {
        counts: single[counts[0]][:, None, None] + single[counts[1]][:, None] + single[counts[2]]
        for counts in itertools.product(range(case["n_range"] + 1), repeat=case["L"])
    }

    def worst(change: tuple[int, ...]) -> float:
        moved = ((a, tuple(n + step for n, step in zip(a, change, strict=True))) for a in joint)
        return max(float(np.abs(joint[a] - joint[b]).max()) for a, b in moved if b in joint)

    totals = mechanism.totals(case["L"])
    added, relabelled = worst((0, 1, 0)), worst((1, 0, -1))
    if isinstance(mechanism, ExponentialMechanism):
        assert added == pytest.approx(case["joint_add_remove"], rel=1e-9)
        assert relabelled == pytest.approx(case["joint_replace_label"], rel=1e-9)
    assert added <= totals.parallel * (1 + 1e-9)
    assert added < relabelled <= totals.replace_one * (1 + 1e-9)
    assert totals.sequential == case["naive_L_eps"]


# Sampling.


@pytest.mark.parametrize(
    "mechanism", [ExponentialMechanism(false_positive=1, least_share=0), Geometric(false_positive=1, least_share=0)]
)
@pytest.mark.parametrize(
    ("num_records", "gamma", "largest"),
    [(600, 0.05, 400), (3, 1.0, 20), (0, 1.0, 200), (10**6, 0.05, 50_010), (10**6, 0.05, 100), (7, 0.5, 0)],
)
def test_selections_are_as_frequent_as_the_distribution_says(
    mechanism: LabelPicker, num_records: int, gamma: float, largest: int
) -> None:
    draws = 4000
    drawn = mechanism.select(np.full(draws, num_records), gamma, largest, Noise.seeded(0))
    pmf = mechanism.pmf(num_records, gamma, largest)
    assert drawn.dtype == np.int64
    assert 0 <= drawn.min() <= drawn.max() <= largest
    # Neighbouring outcomes are pooled until 20 draws are expected of each pool.
    pools = np.minimum((np.cumsum(pmf) * draws / 20).astype(np.int64), draws // 20 - 1)
    expected = np.bincount(pools, weights=pmf * draws)
    seen = np.bincount(pools[drawn], minlength=len(expected))
    used = expected > 0
    if used.sum() == 1:
        assert (drawn == largest).all()
    else:
        assert stats.chisquare(seen[used], expected[used]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("target", "rate", "largest"), [(7.3, 0.4, 20), (0.0, 0.05, 50), (19.5, 3.0, 20), (55.9, 0.1, 20)]
)
def test_a_lattice_of_coins_gives_the_distribution_exactly(target: float, rate: float, largest: int) -> None:
    side = 1500
    points = (np.arange(side) + 0.5) / side
    coins = np.stack([grid.ravel() for grid in np.meshgrid(points, points)])
    whole, rest = np.full(side**2, math.floor(target)), np.full(side**2, target % 1)
    drawn = labels._two_sided(coins, rate, whole.astype(np.float64), rest, 0.0, float(largest))
    weights = np.exp(-rate * np.abs(np.arange(largest + 1) - target))
    frequencies = np.bincount(drawn.astype(np.int64), minlength=largest + 1) / side**2
    # A boundary of the law falls between two coins of the lattice, on either axis.
    np.testing.assert_allclose(frequencies, weights / weights.sum(), rtol=0, atol=2 / side)


@pytest.mark.parametrize(("rate", "length"), [(0.5, 40), (1e-5, 10**6), (3e-7, 10**6), (40.0, 18), (0.02, 10**6)])
def test_the_inverse_is_exact_on_both_sides_of_every_boundary(rate: float, length: int) -> None:
    steps = sorted({1, 2, length // 1000 + 1, length // 3, length // 2, length - 2, length - 1})
    for step in (s for s in steps if rate * s < 80):
        with localcontext(prec=60):  # the chance to get at least ``step`` steps away
            lost = (-Decimal(rate) * length).exp()
            chance = float(((-Decimal(rate) * step).exp() - lost) / (1 - lost))
        if chance < 2.0**-100:
            continue
        # How far apart two boundaries lie in relative terms limits what a coin of float64 can tell.
        near = max(1e-9 * min(1.0, rate * length), 8 * 2.0**-53)
        coins = np.array([chance * (1 - near), chance * (1 + near)])
        drawn = labels._truncated_geometric(coins, rate, np.full(2, float(length)))
        assert drawn.tolist() == [step, step - 1]


def test_rare_outcomes_keep_their_probability() -> None:
    # 45 nats down, where coins of 53 bits would give probability 0 or 2^-53 instead of 2^-65.
    coins = np.array([math.exp(-45) * 0.999, math.exp(-45) * 1.001])
    assert labels._truncated_geometric(coins, 1.0, np.full(2, math.inf)).tolist() == [45, 44]
    smallest = np.array([2.0**-107])
    assert labels._truncated_geometric(smallest, 0.5, np.full(1, math.inf)) == math.ceil(2 * 107 * math.log(2)) - 1


def test_the_same_key_selects_the_same_and_another_key_another() -> None:
    held = np.full(50, 400)
    mechanism = ExponentialMechanism()
    one, again, other = (mechanism.select(held, 0.5, 1000, Noise.seeded(seed)) for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()
    assert len(set(one.tolist())) > 10  # classes do not share coins


# Size, thresholds, totals.


@given(
    st.sampled_from(MECHANISMS),
    st.integers(0, 10**6),
    st.floats(1e-3, 4.0),
    st.floats(1e-3, 50.0),
    st.integers(0, 3000),
    st.integers(0, 1000),
)
def test_any_numbers_give_a_distribution_about_the_target(
    mechanism: type[LabelPicker], num_records: int, gamma: float, epsilon_1: float, largest: int, seed: int
) -> None:
    picker = mechanism(epsilon=epsilon_1)
    pmf = picker.pmf(num_records, gamma, largest)
    assert pmf.shape == (largest + 1,)
    assert np.isfinite(pmf).all()
    assert (pmf >= 0).all()
    assert math.fsum(pmf) == pytest.approx(1.0, abs=1e-12)
    if isinstance(picker, ExponentialMechanism):
        nearest = np.abs(np.arange(largest + 1) - gamma * num_records).argmin()
        assert pmf[nearest] == pytest.approx(pmf.max(), rel=1e-6)
        assert (np.diff(pmf[: nearest + 1]) >= -1e-15).all()
        assert (np.diff(pmf[nearest:]) <= 1e-15).all()
    threshold = picker.threshold(gamma, largest)
    drawn = picker.select(np.array([num_records, 0]), gamma, largest, Noise.seeded(seed))
    assert ((drawn == 0) | ((threshold <= drawn) & (drawn <= largest))).all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("gamma", [0.05, 1.0])
def test_a_million_records_overflow_nothing(mechanism: type[LabelPicker], gamma: float) -> None:
    largest = round(1.5 * gamma * 10**6)
    pmf = mechanism(epsilon=0.1).pmf(10**6, gamma, largest)
    counts = np.arange(largest + 1)
    mean = float(pmf @ counts)
    assert mean == pytest.approx(gamma * 10**6, rel=1e-6)
    std = math.sqrt(float(pmf @ (counts - mean) ** 2))
    # Laplace-like: sqrt(2) times the scale, 2 gamma / epsilon or, for the geometric mechanism, gamma / epsilon.
    scale = gamma / 0.1 * (2 if mechanism is ExponentialMechanism else 1)
    assert std == pytest.approx(math.sqrt(2) * scale, rel=0.15)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("gamma", "chance"), [(0.01, 0.01), (0.05, 0.01), (0.05, 1e-4), (1.0, 0.01)])
def test_a_class_without_records_yields_junk_as_seldom_as_promised(
    mechanism: type[LabelPicker], gamma: float, chance: float
) -> None:
    picker = mechanism(false_positive=chance, least_share=0)
    threshold, pmf = picker.threshold(gamma, 1000), picker.pmf(0, gamma, 1000)
    assert pmf[threshold:].sum() <= chance
    assert pmf[threshold - 1 :].sum() > chance
    absent = picker.select(np.zeros(5_000, dtype=np.int64), gamma, 1000, Noise.seeded(3))
    assert (absent > 0).mean() <= chance + 4 * math.sqrt(chance / 5_000)
    keeping = mechanism(false_positive=1, least_share=0)
    assert keeping.threshold(gamma, 1000) == 0
    kept = keeping.select(np.zeros(5_000, dtype=np.int64), gamma, 1000, Noise.seeded(3))
    assert (np.where(kept < threshold, 0, kept) == absent).all()
    if gamma >= 0.05:
        assert (kept > 0).mean() > 0.1  # what the threshold is there for


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_class_far_below_the_largest_is_left_out_and_even_classes_are_not(mechanism: type[LabelPicker]) -> None:
    picker, noise = mechanism(epsilon=1.0, false_positive=1), Noise.seeded(5)
    drawn = picker.select(np.array([6000, 200, 400, 0]), 0.05, 1000, noise)
    everything = mechanism(epsilon=1.0, false_positive=1, least_share=0).select(
        np.array([6000, 200, 400, 0]), 0.05, 1000, noise
    )
    assert everything[1] > 5
    assert (drawn == np.where(everything < 0.05 * everything.max(), 0, everything)).all()
    assert (drawn > 0).tolist() == [True, False, True, False]
    assert (picker.select(np.full(100, 500), 0.05, 1000, noise) > 0).all()


def test_sensitivity_one_would_fill_absent_classes_with_junk() -> None:
    # Labels of an absent class at gamma .01 and epsilon .1, on average.
    counts = np.arange(61)
    wrong = np.exp(-0.1 / 2 * counts)
    assert wrong @ counts / wrong.sum() > 15
    assert ExponentialMechanism(epsilon=0.1).pmf(0, 0.01, 60) @ counts == pytest.approx(0.0068, rel=0.05)


def test_noise_too_large_for_the_range_selects_nothing() -> None:
    picker = ExponentialMechanism(epsilon=0.1)
    assert picker.threshold(5.0, 10) == 11
    assert not picker.select(np.array([2, 2]), 5.0, 10, Noise.seeded(0)).any()


def test_gamma_zero_selects_nothing_and_senseless_numbers_are_refused() -> None:
    assert ExponentialMechanism().select(np.array([5, 0]), 0.0, 10, Noise.seeded(0)).tolist() == [0, 0]
    for gamma in (-0.1, math.inf, math.nan):
        with pytest.raises(UserError, match="gamma"):
            ExponentialMechanism().select(np.array([5]), gamma, 10, Noise.seeded(0))
    with pytest.raises(UserError, match="range up to -1"):
        Geometric().pmf(5, 0.1, -1)
    for wrong in ({"epsilon": 0.0}, {"epsilon": math.inf}, {"false_positive": 0.0}, {"composition": "none"}):
        with pytest.raises(ValidationError):
            ExponentialMechanism(**wrong)


def test_the_range_is_a_public_rule() -> None:
    assert ExponentialMechanism().largest_count(0.05, 6000) == 301  # the float .05 lies a little above 1 / 20
    assert ExponentialMechanism().largest_count(0.5, 7) == 4
    assert Geometric(largest=40).largest_count(0.05, 6000) == 40


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_ledger_is_charged_by_the_composition_that_was_named(mechanism: type[LabelPicker]) -> None:
    parallel, sequential = mechanism(epsilon=0.2), mechanism(epsilon=0.2, composition="sequential")
    assert parallel.total_epsilon(10) == parallel.totals(10).parallel == 0.2
    assert sequential.total_epsilon(10) == sequential.totals(10).sequential == 2.0
    assert parallel.totals(10).replace_one == sequential.totals(10).replace_one == 0.4
    training = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(1.5)), 200)
    alone = epsilon([training], 1e-5)
    for picker, most in ((parallel, 0.2), (sequential, 2.0)):
        book = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5))
        spent = book.charge(picker.event(10), release="labels", noise="key")
        assert 0 < spent <= most
        assert spent == 0.2 or picker is sequential
        both = book.charge(training, release="generator", noise="key")
        assert alone < both < alone + most
    with pytest.raises(UserError, match="add-or-remove-one"):
        Ledger(Terms("record", Adjacency.REPLACE_ONE, 1e-5)).charge(parallel.event(10), release="labels", noise="key")
