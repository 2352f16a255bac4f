"""Integer noise: its exact distribution, its secret source, and divergences that are never below the true ones."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fl_sim.errors import RunError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import epsilon_of_counts, supports_pld
from fl_sim.privacy.events import DiscreteGaussiansDpEvent, SkellamDpEvent
from fl_sim.privacy.integer_noise import Mechanism, drawn, table_of
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.renyi import ORDERS, integer_noise_curve, rdp_curve
from fl_sim.privacy.terms import Adjacency

MECHANISMS: tuple[Mechanism, ...] = ("skellam", "discrete-gaussian")
NOISE = Noise.seeded(7)


def _log_probabilities(mechanism: Mechanism, variance: float, reach: int) -> np.ndarray:
    """Logarithms of the probabilities of -reach, ..., reach."""
    k = np.arange(-reach, reach + 1)
    if mechanism == "skellam":
        with np.errstate(divide="ignore"):
            return np.asarray(stats.skellam.logpmf(k, variance / 2, variance / 2))
    logs = -(k**2) / (2 * variance)
    return np.asarray(logs - np.log(np.exp(logs).sum()))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("variance", [0.25, 1.0, 37.5, 4096.0])
def test_the_table_is_the_distribution_function(mechanism: Mechanism, variance: float) -> None:
    table, reach = table_of(mechanism, variance), math.ceil(9 * math.sqrt(variance)) + 20
    each = np.exp(_log_probabilities(mechanism, variance, reach))
    inside = np.array([each[reach - k : reach + k + 1].sum() for k in range(reach + 1)])
    wanted = table.high[: reach + 1].astype(np.float64) / 2.0**63
    assert np.abs(wanted - inside[: len(wanted)]).max() < 1e-13
    assert (np.diff(table.high.astype(np.float64)) >= 0).all()
    assert table.high[-1] == 2**63 - 1
    words = NOISE.words(5000, purpose="any", server_round=1) >> np.uint64(1)
    edges = np.concatenate([table.high[:-1], table.high[:-1] - np.uint64(1), words, words >> np.uint64(30)])
    assert (table.num_below(edges) == np.searchsorted(table.high, edges, side="right")).all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("variance", [0.25, 3.0, 900.0])
def test_drawn_numbers_have_the_distribution(mechanism: Mechanism, variance: float) -> None:
    numbers = drawn(mechanism, variance, NOISE, 60_000, purpose="test", server_round=1)
    edge = math.ceil(2.2 * math.sqrt(variance))
    reach = edge + math.ceil(12 * math.sqrt(variance)) + 20
    each = np.exp(_log_probabilities(mechanism, variance, reach))
    expected = [each[: reach - edge].sum(), *each[reach - edge : reach + edge + 1], each[reach + edge + 1 :].sum()]
    counts = Counter(np.clip(numbers, -edge - 1, edge + 1).tolist())
    found = [counts[k] for k in range(-edge - 1, edge + 2)]
    assert stats.chisquare(found, np.array(expected) / np.sum(expected) * len(numbers)).pvalue > 1e-3
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    if mechanism == "skellam":
        assert numbers.var() == pytest.approx(variance, rel=0.03)


@dataclass(frozen=True)
class Words(Noise):
    """A source whose number at the index ``place`` has the given first and second word; all others are 0."""

    place: int = 0
    first: int = 0
    second: int = 0

    def words(self, count: int, *, purpose: str, server_round: int, behind: int = 0) -> np.ndarray:
        del purpose, server_round
        if behind:
            assert (count, behind) == (1, 5 + self.place)  # the second words of a stream follow all first words
            return np.array([self.second], np.uint64)
        found = np.zeros(count, np.uint64)
        found[self.place] = self.first
        return found


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("more", "wanted"), [(-1, 2), (0, 3), (1, 3)])
def test_first_digits_that_equal_a_threshold_are_decided_by_further_ones(
    mechanism: Mechanism, more: int, wanted: int
) -> None:
    table = table_of(mechanism, 4.0)
    source = Words(bytes(32), True, None, 3, int(table.high[2]) << 1, int(table.low[2]) + more)  # noqa: FBT003
    assert drawn(mechanism, 4.0, source, 5, purpose="x", server_round=1).tolist() == [0, 0, 0, wanted, 0]


def test_no_noise_is_zeros_and_streams_differ() -> None:
    assert not drawn("skellam", 0.0, NOISE, 5, purpose="x", server_round=1).any()
    one, other = (drawn("skellam", 100.0, NOISE, 1000, purpose="x", server_round=number) for number in (1, 2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.15
    assert (drawn("skellam", 100.0, NOISE, 1000, purpose="x", server_round=1) == one).all()
    secret = drawn("skellam", 100.0, Noise.secret(), 1000, purpose="x", server_round=1)
    assert (secret != one).any()


def _divergence(logs: np.ndarray, shift: int, order: float) -> float:
    """The exact Renyi divergence of the noise and the noise moved by ``shift``."""
    moved, still = logs[:-shift], logs[shift:]
    terms = order * moved + (1 - order) * still
    assert 0 < terms.argmax() < len(terms) - 1, "the sum reaches too few terms"
    return float((terms.max() + np.log(np.exp(terms - terms.max()).sum())) / (order - 1))


@pytest.mark.parametrize("variance", [0.3, 1.0, 3.0, 20.0, 400.0])
def test_the_bound_for_skellam_noise_is_never_below_the_exact_divergence(variance: float) -> None:
    logs = _log_probabilities("skellam", variance, 60 + math.ceil(14 * variance**0.5))
    logs = logs[np.isfinite(logs)]
    for shift in (1, 2, 3):
        for order in (1.05, 1.5, 2.0, 2.5, 3.0, 5.0, 8.0):
            if variance < 3 and order * shift > 6:
                continue
            [bound] = integer_noise_curve(SkellamDpEvent(variance, shift, shift), np.array([order]))
            exact = _divergence(logs, shift, order)
            assert exact <= bound
            if variance == 400 and order in {2.0, 5.0}:
                assert bound < 1.01 * exact


@pytest.mark.parametrize("shares", [1, 2, 5, 20])
@pytest.mark.parametrize("each", [0.25, 0.5, 1.0, 4.0])
def test_the_bound_for_discrete_gaussians_is_never_below_the_exact_divergence(shares: int, each: float) -> None:
    one = np.exp(_log_probabilities("discrete-gaussian", each, 60).astype(np.longdouble))
    total = np.ones(1, np.longdouble)
    for _ in range(shares):
        total = np.convolve(total, one)
    logs = np.log(total[total > 0]).astype(np.float64)
    for shift in (1, 2, 5):
        for order in (1.05, 1.5, 2.0, 3.0, 5.0):
            event = DiscreteGaussiansDpEvent(shares * each, shift, shift, shares=shares)
            [bound] = integer_noise_curve(event, np.array([order]))
            assert _divergence(logs, shift, order) <= bound * (1 + 1e-9)


def test_the_bound_for_skellam_noise_is_that_of_its_paper() -> None:
    """alpha D2^2 / (2 mu) + min(((2 alpha - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu)), with D1 = 6 and D2 = 2."""
    orders = np.array([2.0, 3.0, 2.5])
    found = integer_noise_curve(SkellamDpEvent(8.0, 6.0, 2.0), orders)
    assert found[0] == pytest.approx(0.5 + (3 * 4 + 36) / 256)
    assert found[1] == pytest.approx(0.75 + (5 * 4 + 36) / 256)
    assert found[2] == pytest.approx((0.5 * found[0] + 0.5 * 2 * found[1]) / 1.5)  # a line in (order - 1) D
    [small] = integer_noise_curve(SkellamDpEvent(0.5, 6.0, 2.0), orders[:1])
    assert small == pytest.approx(8 + min((12 + 36) / 1.0, 18.0))


@given(st.floats(1e-3, 1e12), st.floats(1.0, 1e6), st.integers(1, 2**22))
def test_curves_rise_with_the_order_and_are_no_numbers_that_accountants_refuse(
    variance: float, l2: float, dimension: int
) -> None:
    l1 = min(l2 * math.sqrt(dimension), l2**2)
    for event in (
        SkellamDpEvent(variance, l1, l2),
        DiscreteGaussiansDpEvent(variance, l1, l2, shares=7, dimension=dimension),
    ):
        curve = rdp_curve(event)
        assert (curve[1:] >= curve[:-1]).all()
        gaussian = rdp_curve(dp_event.GaussianDpEvent(math.sqrt(variance) / l2))
        assert (curve >= gaussian * (1 - 1e-9)).all()  # rounding never makes a release cheaper


def test_both_noises_cost_what_a_gaussian_costs_where_the_grid_is_fine() -> None:
    wanted = epsilon_of_counts({dp_event.GaussianDpEvent(2.0): 10}, 1e-5)
    std, l2 = 2e6, 1e6
    for event in (
        SkellamDpEvent(std**2, 32 * l2, l2),
        DiscreteGaussiansDpEvent(std**2, 32 * l2, l2, shares=50, dimension=1024),
    ):
        assert epsilon_of_counts({event: 10}, 1e-5) == pytest.approx(wanted, rel=2e-3)
        assert epsilon_of_counts({event: 10}, 1e-5) >= wanted * (1 - 1e-9)


def test_without_a_proof_there_is_no_bound() -> None:
    for event in (SkellamDpEvent(0.0, 1, 1), DiscreteGaussiansDpEvent(10 * 0.24, 1, 1, shares=10)):
        assert np.isinf(integer_noise_curve(event, np.array(ORDERS))).all()
    assert np.isfinite(integer_noise_curve(DiscreteGaussiansDpEvent(10 * 0.25, 1, 1, shares=10), np.array([2.0]))).all()


@pytest.mark.parametrize(
    "event", [SkellamDpEvent(8.0, 6.0, 2.0), DiscreteGaussiansDpEvent(8.0, 6.0, 2.0, shares=4, dimension=9)]
)
def test_events_are_written_replaced_and_described(event: events.IntegerNoiseDpEvent) -> None:
    assert events.from_json(events.to_json(event)) == event
    assert events.adjacency(event) == Adjacency.ADD_OR_REMOVE_ONE
    replaced = events.under_replacement(event)
    assert events.adjacency(replaced) == Adjacency.REPLACE_ONE
    assert events.under_replacement(replaced) == replaced
    assert (rdp_curve(replaced) == rdp_curve(replace(event, l1=12.0, l2=4.0))).all()
    assert events.noise_multiplier(event) == pytest.approx(math.sqrt(2))
    assert "the server sees which clients take part" in events.sampling_in_words(event, "client")
    assert events.sampling_rate(event) == 1.0
    assert not supports_pld(event)
    with pytest.raises(RunError, match="privacy event"):
        events.from_json({**events.to_json(event), "variance": -1.0})
