"""Global DP: what one client can change, what the noise is, and the cases that break other implementations."""

import math
import sys

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from fl_sim.privacy.audit import noise_calibration
from fl_sim.privacy.mechanisms import Noise
from fl_sim.types import Aggregate, Cohort, Payloads, Reply
from strategies.global_dp import AdaptiveClipping, GlobalDP

NOISE = Noise.seeded(7)
TEMPLATE: Payloads = {
    "delta": {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)},
    "control_delta": {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)},
}
SIZE = 16
SILENT = GlobalDP(noise_multiplier=0.0, clipping_norm=1.0)


def payloads(values: np.ndarray) -> Payloads:
    rest, filled = torch.tensor(values, dtype=torch.float32), {}
    for group, params in TEMPLATE.items():
        filled[group] = {}
        for name, shape in params.items():
            filled[group][name], rest = rest[: shape.numel()].reshape(shape.shape), rest[shape.numel() :]
    return filled


def cohort(*updates: np.ndarray, server_round: int = 1, expected: float = 4.0, examples: int = 5) -> Cohort:
    replies = tuple(Reply(client, payloads(update), examples, None) for client, update in enumerate(updates))
    return Cohort(server_round, replies, num_clients=20, expected_size=expected)


def flat(aggregate: Aggregate) -> np.ndarray:
    return (
        torch.cat([value.reshape(-1) for params in aggregate.payloads.values() for value in params.values()])
        .double()
        .numpy()
    )


def released_sum(aggregator: GlobalDP, of: Cohort) -> np.ndarray:
    return flat(aggregator.mean(of, noise=NOISE, template=TEMPLATE)) * of.expected_size


vectors = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.floats(1e-3, 1e3).map(lambda size: np.random.default_rng(seed).standard_normal(SIZE) * size)
)


@given(st.lists(vectors, max_size=5), vectors)
@settings(deadline=None)
def test_one_client_more_moves_the_sum_by_at_most_the_clipping_norm(
    others: list[np.ndarray], update: np.ndarray
) -> None:
    for aggregator in (SILENT, GlobalDP(noise_multiplier=1.0, clipping_norm=1.0)):
        moved = released_sum(aggregator, cohort(*others, update)) - released_sum(aggregator, cohort(*others))
        assert np.linalg.norm(moved) <= 1 + 1e-5


@given(st.lists(vectors, max_size=5), vectors, vectors)
@settings(deadline=None)
def test_another_client_moves_the_sum_by_at_most_twice_the_clipping_norm(
    others: list[np.ndarray], update: np.ndarray, other: np.ndarray
) -> None:
    moved = released_sum(SILENT, cohort(*others, update)) - released_sum(SILENT, cohort(*others, other))
    assert np.linalg.norm(moved) <= 2 + 1e-5


def test_the_bound_is_reached_so_noise_is_not_wasted() -> None:
    push = np.full(SIZE, 50.0)
    moved = released_sum(SILENT, cohort(push)) - released_sum(SILENT, cohort(-push))
    assert np.linalg.norm(moved) == pytest.approx(2.0, rel=1e-6)


def test_all_payloads_and_layers_are_clipped_together() -> None:
    # Every tensor alone is within the norm; together they are not.
    update = np.full(SIZE, 0.5)
    result = released_sum(SILENT, cohort(update))
    np.testing.assert_allclose(result, update / np.linalg.norm(update), rtol=1e-6)


def test_small_updates_pass_unchanged_and_the_mean_is_over_the_expected_cohort() -> None:
    first, second = np.full(SIZE, 0.1), np.linspace(-0.2, 0.2, SIZE)
    mean = flat(SILENT.mean(cohort(first, second, expected=8.0), noise=NOISE, template=TEMPLATE))
    np.testing.assert_allclose(mean, (first + second) / 8, atol=1e-8)


@pytest.mark.parametrize("clients", [0, 1, 3, 6])
def test_noise_and_denominator_do_not_depend_on_who_replied(clients: int) -> None:
    aggregator = GlobalDP(noise_multiplier=1.5, clipping_norm=2.0)
    updates = [np.full(SIZE, 0.01 * client) for client in range(clients)]
    residuals = []
    for server_round in range(300):
        of = cohort(*updates, server_round=server_round, expected=4.0)
        mean = flat(aggregator.mean(of, noise=NOISE, template=TEMPLATE))
        residuals.append((mean * 4.0 - sum(updates, np.zeros(SIZE))) / (1.5 * 2.0))
    assert min(noise_calibration(np.array(residuals)).values()) > 1e-4


def test_participation_is_the_public_expectation() -> None:
    aggregate = GlobalDP().mean(cohort(np.ones(SIZE), expected=5.0), noise=NOISE, template=TEMPLATE)
    assert aggregate.participation == 5.0 / 20


def test_clients_weigh_the_same_whatever_num_examples_says() -> None:
    update = np.full(SIZE, 0.1)
    few, many = cohort(update, examples=1), cohort(update, examples=10**6)
    np.testing.assert_array_equal(released_sum(GlobalDP(), few), released_sum(GlobalDP(), many))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_counts_as_nothing(bad: float) -> None:
    broken = np.full(SIZE, 0.1)
    broken[11] = bad
    good = np.full(SIZE, 0.2)
    np.testing.assert_array_equal(
        released_sum(GlobalDP(), cohort(good, broken)), released_sum(GlobalDP(), cohort(good, np.zeros(SIZE)))
    )


def test_huge_but_finite_updates_are_clipped_not_dropped() -> None:
    assert np.linalg.norm(released_sum(SILENT, cohort(np.full(SIZE, 3e38)))) == pytest.approx(1.0, rel=1e-6)


def test_zero_updates_and_missing_clients_are_the_same_thing() -> None:
    good, zero = np.full(SIZE, 0.1), np.zeros(SIZE)
    np.testing.assert_array_equal(released_sum(GlobalDP(), cohort(good, zero)), released_sum(GlobalDP(), cohort(good)))
    assert not released_sum(SILENT, cohort(zero)).any()


def test_an_empty_cohort_releases_noise_of_the_right_shape() -> None:
    aggregate = GlobalDP().mean(cohort(), noise=NOISE, template=TEMPLATE)
    shapes = {
        group: {name: value.shape for name, value in params.items()} for group, params in aggregate.payloads.items()
    }
    assert shapes == {
        group: {name: value.shape for name, value in params.items()} for group, params in TEMPLATE.items()
    }
    assert all(value.dtype == torch.float32 for params in aggregate.payloads.values() for value in params.values())
    assert flat(aggregate).std() > 0.05


def test_a_client_that_answers_twice_counts_as_zeros() -> None:
    twice = (Reply(3, payloads(np.ones(SIZE)), 5, None),) * 2
    released = [SILENT.mean(Cohort(1, one, 20, 4.0), noise=NOISE, template=TEMPLATE) for one in (twice, twice[:1])]
    assert [bool(flat(one).any()) for one in released] == [False, True]


def test_other_tensors_than_agreed_count_as_zeros() -> None:
    whole = payloads(np.ones(SIZE))
    for odd in ({"delta": whole["delta"]}, {**whole, "more": whole["delta"]}, {}):
        of = Cohort(1, (Reply(3, odd, 5, None),), 20, 4.0)
        assert not flat(SILENT.mean(of, noise=NOISE, template=TEMPLATE)).any()


def test_the_order_in_which_a_client_names_its_tensors_does_not_matter() -> None:
    update = np.linspace(-0.1, 0.1, SIZE)
    reversed_names = {
        group: dict(reversed(list(params.items()))) for group, params in reversed(list(payloads(update).items()))
    }
    of = Cohort(1, (Reply(0, reversed_names, 5, None),), 20, 4.0)
    np.testing.assert_array_equal(released_sum(GlobalDP(), of), released_sum(GlobalDP(), cohort(update)))


def test_the_same_round_is_the_same_release_and_another_is_not() -> None:
    update = np.full(SIZE, 0.1)
    first = released_sum(GlobalDP(), cohort(update, server_round=3))
    np.testing.assert_array_equal(first, released_sum(GlobalDP(), cohort(update, server_round=3)))
    assert (first != released_sum(GlobalDP(), cohort(update, server_round=4))).all()


def test_the_event_states_the_noise_relative_to_one_client() -> None:
    assert GlobalDP(noise_multiplier=1.3).event() == dp_event.GaussianDpEvent(1.3)
    assert GlobalDP(noise_multiplier=0.0).event() == dp_event.NonPrivateDpEvent()
    adaptive = GlobalDP(noise_multiplier=1.3, adaptive_clipping=AdaptiveClipping())
    assert adaptive.event() == dp_event.GaussianDpEvent(1.3)


def adaptive_run(count_noise: float, rounds: int, scale: float, start: float) -> list[float]:
    aggregator = GlobalDP(
        noise_multiplier=0.5,
        clipping_norm=start,
        adaptive_clipping=AdaptiveClipping(target_quantile=0.5, learning_rate=0.2, count_noise=count_noise),
    )
    rng = np.random.default_rng(0)
    norms = []
    for server_round in range(rounds):
        updates = [rng.standard_normal(SIZE) * scale / SIZE**0.5 for _ in range(40)]
        of = cohort(*updates, server_round=server_round, expected=40.0)
        _, start = aggregator.release(of, noise=NOISE, template=TEMPLATE, clipping_norm=start)
        norms.append(start)
    return norms


@pytest.mark.parametrize("start", [0.1, 10.0])
def test_adaptive_clipping_finds_the_median_norm_from_either_side(start: float) -> None:
    # Flower's built-in wrapper runs away from it: from 10 to 546, from 0.1 to 0.0018 in forty rounds.
    norms = adaptive_run(count_noise=2.0, rounds=80, scale=1.0, start=start)
    assert np.mean(norms[-20:]) == pytest.approx(1.0, rel=0.15)


def test_adaptive_clipping_follows_the_paper_for_one_round() -> None:
    # Andrew et al. 2021, algorithm 1, with the noise drawn apart: b~ = (sum (b - 1/2) + N(0, sigma_b^2)) / m + 1/2.
    aggregator = GlobalDP(noise_multiplier=1.0, adaptive_clipping=AdaptiveClipping(count_noise=2.0, learning_rate=0.3))
    inside, outside = np.full(SIZE, 0.1), np.full(SIZE, 5.0)
    missing = 1  # expected 4, three replied: the missing client adds nothing to the centred sum
    of = cohort(inside, inside, outside, expected=3.0 + missing)
    _, following = aggregator.release(of, noise=NOISE, template=TEMPLATE, clipping_norm=1.0)
    noise = 2.0 * NOISE.standard_normal(1, purpose="global-dp count", server_round=1)[0]
    share = ((0.5 + 0.5 - 0.5) + noise) / 4 + 0.5
    assert following == pytest.approx(math.exp(-0.3 * (share - 0.5)), rel=1e-5)


def test_adaptive_clipping_raises_the_noise_on_updates_to_pay_for_the_counts() -> None:
    aggregator = GlobalDP(noise_multiplier=1.0, adaptive_clipping=AdaptiveClipping(count_noise=0.7))
    rounds = [cohort(server_round=server_round) for server_round in range(400)]
    released = [aggregator.release(of, noise=NOISE, template=TEMPLATE, clipping_norm=2.0)[0] for of in rounds]
    spread = np.concatenate([flat(aggregate) * 4.0 for aggregate in released]).std() / 2.0
    expected = (1 - (2 * 0.7) ** -2) ** -0.5
    low, high = np.sqrt(stats.chi2.ppf([1e-4, 1 - 1e-4], 400 * SIZE) / (400 * SIZE))
    assert expected * low < spread < expected * high


def test_what_is_not_finite_does_not_vote_on_the_clipping_norm() -> None:
    aggregator = GlobalDP(noise_multiplier=1.0, adaptive_clipping=AdaptiveClipping())
    broken = np.full(SIZE, math.nan)
    releases = [
        aggregator.release(of, noise=NOISE, template=TEMPLATE, clipping_norm=1.0)[1]
        for of in (cohort(), cohort(broken))
    ]
    assert releases[0] == releases[1]


def test_a_changing_clipping_norm_has_to_be_carried_along() -> None:
    with pytest.raises(AssertionError, match="release"):
        GlobalDP(adaptive_clipping=AdaptiveClipping()).mean(cohort(), noise=NOISE, template=TEMPLATE)


def test_the_raw_median_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"leaks: the guarantee would be false.*target_quantile"):
        GlobalDP.model_validate({"adaptive_clipping": "median"})


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"clipping_norm": 0.0},
        {"clipping_norm": math.inf},
        {"delta": 1.0},
        {"epsilon": 0.0},
        {"sampling_rate": 0.1},
        {"noise_multiplier": 1.0, "adaptive_clipping": {"count_noise": 0.5}},
        {"noise_multiplier": 0.0, "adaptive_clipping": {}},
        {"adaptive_clipping": {"target_quantile": 1.0}},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GlobalDP.model_validate(bad)


def test_noise_code_does_not_know_accountants() -> None:
    for name in ("strategies.global_dp", "fl_sim.privacy.mechanisms"):
        loaded = vars(sys.modules[name])
        assert not any("dp_accounting" in (getattr(value, "__module__", None) or "") for value in loaded.values())
        assert not {"accounting", "ledger", "RdpAccountant", "dp_event"} & set(loaded)
