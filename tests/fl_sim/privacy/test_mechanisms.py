"""Noise is Gaussian, secret and never repeated; clipping and rounding keep their bounds."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import (
    Noise,
    add_noise,
    clip_factor,
    clipping_norm_on_grid,
    grid_spacing,
    next_clipping_norm,
    takes_part,
    update_noise_multiplier,
)

NOISE = Noise.seeded(0)


def draw(count: int, server_round: int = 1, purpose: str = "test", noise: Noise = NOISE) -> np.ndarray:
    return noise.standard_normal(count, purpose=purpose, server_round=server_round)


def test_secret_coins_are_uniform_and_differ_between_purposes_and_rounds() -> None:
    coins = NOISE.uniform(500_000, purpose="coins", server_round=1)
    assert stats.kstest(coins, "uniform").pvalue > 1e-3
    assert 0 <= coins.min() < coins.max() < 1
    for other in (
        NOISE.uniform(500_000, purpose="coins", server_round=2),
        NOISE.uniform(500_000, purpose="others", server_round=1),
    ):
        assert abs(np.corrcoef(coins, other)[0, 1]) < 5 / math.sqrt(500_000)


@pytest.mark.parametrize("rate", [1.0, 1 - 2.0**-53, 0.7, 256 / 6131, 2.0**-53, 1e-17])
def test_who_takes_part_is_told_from_bits_as_from_the_uniform_numbers_they_make(rate: float) -> None:
    coins = NOISE.uniform(20_000, purpose="coins", server_round=1)
    expected = takes_part(coins, rate)
    assert np.array_equal(NOISE.taking_part(20_000, rate, purpose="coins", server_round=1), expected)
    limit = math.floor(rate * 2**53) << 11
    edge = FixedWords(max(limit, 1) - 1, min(limit, 2**64 - 1))
    expected = takes_part(edge.uniform(2, purpose="", server_round=0), rate)
    assert np.array_equal(edge.taking_part(2, rate, purpose="", server_round=0), expected)


def test_noise_is_standard_normal_in_body_and_tails() -> None:
    numbers = draw(2_000_000)
    assert stats.kstest(numbers, "norm").pvalue > 1e-3
    for moment, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = math.sqrt(stats.norm.moment(2 * moment) / len(numbers))
        assert abs((numbers**moment).mean() - expected) < 4 * spread
    for bound in (3.0, 4.0, 4.5):
        expected = len(numbers) * 2 * stats.norm.sf(bound)
        assert abs((np.abs(numbers) > bound).sum() - expected) < 4 * math.sqrt(expected)


class FixedWords(Noise):
    """Noise from given words instead of a stream."""

    words: np.ndarray

    def __init__(self, first: int, second: int) -> None:
        super().__init__(bytes(32), simulation_only=True)
        object.__setattr__(self, "words", np.array([first, second], dtype=np.uint64))

    def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> np.ndarray:
        return self.words[behind : behind + count]


def test_every_word_makes_a_finite_number_and_the_tail_goes_on() -> None:
    most = 2**64 - 1
    for first in (0, 1, 2, 3, most, most - 1, 2**63, 2**54, 2**54 - 1):
        for second in (0, most):
            assert np.isfinite(draw(1, noise=FixedWords(first, second))[0])
    assert abs(draw(1, noise=FixedWords(most, 0))[0]) < 1e-15
    assert draw(1, noise=FixedWords(0, 0))[0] > 12
    assert draw(1, noise=FixedWords(1, 0))[0] < -12
    # Neighbouring second words move a number of the far tail: it has more than the 63 bits of the first.
    assert draw(1, noise=FixedWords(2, 1 << 30))[0] != draw(1, noise=FixedWords(2, 1 << 40))[0]


def test_a_stream_is_read_from_any_word_on() -> None:
    words = NOISE._words(3000, "stream", 5)
    for behind, count in ((0, 1), (1, 3), (7, 2), (8, 8), (9, 90), (2999, 1), (1234, 0)):
        assert np.array_equal(NOISE._words(count, "stream", 5, behind=behind), words[behind : behind + count])


def test_streams_differ_by_round_purpose_and_key_and_repeat_otherwise() -> None:
    base = draw(20_000)
    np.testing.assert_array_equal(base, draw(20_000))
    np.testing.assert_array_equal(base[:7], draw(20_000)[:7])
    others = [draw(20_000, server_round=2), draw(20_000, purpose="tests"), draw(20_000, noise=Noise.seeded(1))]
    others += [draw(20_000, server_round=11, purpose="x"), draw(20_000, server_round=1, purpose="1:x")]
    everything = np.stack([base, *others, draw(20_000, noise=Noise.secret())])
    correlations = np.corrcoef(everything) - np.eye(len(everything))
    assert np.abs(correlations).max() < 5 / math.sqrt(20_000)


def test_the_stream_is_chacha20_with_a_key_per_purpose_and_round() -> None:
    # The first block of RFC 8439's cipher under the derived key, by an implementation of its own.
    key = hashlib.blake2b(b"1:test", key=NOISE.key, digest_size=32).digest()
    assert NOISE._words(8, "test", 1).tobytes() == _chacha20_block(key)


def test_secret_noise_is_fresh_and_its_key_is_nowhere_to_be_read() -> None:
    first, second = Noise.secret(), Noise.secret()
    assert first.key != second.key
    assert len(first.key) == 32
    assert not first.simulation_only
    assert Noise.seeded(3).simulation_only
    assert first.key.hex() not in repr(first)
    assert repr(first.key) not in repr(first)
    assert first.identity == Noise(first.key, simulation_only=False).identity
    assert first.identity != second.identity
    assert first.identity not in first.key.hex()


@given(st.floats(0, 1e300), st.floats(1e-6, 1e6))
def test_clipped_norms_are_within_the_clipping_norm(norm: float, clipping_norm: float) -> None:
    factor = clip_factor(norm, clipping_norm)
    assert 0 <= factor <= 1
    assert norm * factor <= clipping_norm * (1 + 1e-15)
    assert factor == 1 or norm > clipping_norm


def test_zero_keeps_its_factor_and_what_is_not_finite_has_none() -> None:
    assert clip_factor(0.0, 1.0) == 1.0
    assert [clip_factor(norm, 1.0) for norm in (math.nan, math.inf, -math.inf)] == [0.0, 0.0, 0.0]


def test_noised_sums_lie_on_the_grid_whatever_their_low_bits_were() -> None:
    rng = np.random.default_rng(0)
    total, std = rng.standard_normal(5000), 0.37
    steps = NOISE.gaussian(5000, std, purpose="test", server_round=1)
    released = add_noise(total, std, steps)
    in_units = released / grid_spacing(std)
    np.testing.assert_array_equal(in_units, np.rint(in_units))
    # The noise a release carries is the same on every sum: nothing of the sum is left in the low bits.
    other = add_noise(total + 0.125, std, steps)
    difference = (other - released) / grid_spacing(std)
    np.testing.assert_array_equal(difference, np.rint(difference))
    np.testing.assert_allclose(released, total + std * draw(5000), atol=grid_spacing(std))
    np.testing.assert_array_equal(add_noise(total, 0.0, steps), total)


@given(st.integers(0, 2**32 - 1), st.integers(1, 2000), st.floats(0.05, 50), st.integers(1, 40))
def test_rounding_does_not_push_neighbouring_sums_further_apart_than_promised(
    seed: int, size: int, noise: float, others: int
) -> None:
    clipping_norm, std = 1.0, noise
    limit = clipping_norm_on_grid(clipping_norm, std, size, summands=others + 1)
    rng = np.random.default_rng(seed)
    updates = rng.standard_normal((others + 1, size)).astype(np.float32).astype(np.float64)
    updates *= np.array([clip_factor(1e3 * norm, limit) for norm in np.linalg.norm(updates, axis=1)])[:, None] * 1e3
    silent = np.zeros(size)
    whole = add_noise(np.add.reduce(updates), std, silent)
    without = add_noise(np.add.reduce(updates[1:]), std, silent)
    assert np.linalg.norm(whole - without) <= clipping_norm


def test_two_sums_that_are_rounded_apart_still_differ_by_no_more_than_the_clipping_norm() -> None:
    # The worst that rounding can do: every number of one sum lies just under a boundary, of the other just above it.
    std, size = 40.0, 10_000
    limit, spacing = clipping_norm_on_grid(1.0, std, size, summands=2), grid_spacing(std)
    assert 0.9 < limit < 1.0 - spacing * 0.999 * math.sqrt(size)
    under = np.full(size, (0.5 - 1e-6) * spacing)
    over = under + 0.999999 * limit / math.sqrt(size)
    assert np.linalg.norm(over - under) <= limit
    silent = np.zeros(size)
    moved = np.linalg.norm(add_noise(over, std, silent) - add_noise(under, std, silent))
    assert moved <= 1.0
    assert moved > limit  # a sum clipped to the clipping norm itself would have gone beyond it


def test_more_summands_leave_less_and_too_many_are_refused() -> None:
    few, many = (clipping_norm_on_grid(1.0, 1.0, 100, summands=count) for count in (10, 1_000_000))
    assert many < few
    assert few - many == pytest.approx(1e12 * 2.0**-52, rel=1e-3)
    with pytest.raises(UserError, match="sums of 100000000 vectors"):
        clipping_norm_on_grid(1.0, 1.0, 100, summands=100_000_000)


def test_noise_too_coarse_for_the_model_is_refused() -> None:
    assert clipping_norm_on_grid(1.0, 0.0, 10**6, summands=10) == 1.0
    assert clipping_norm_on_grid(1.0, 1.0, 10**6, summands=10) > 0.99
    with pytest.raises(UserError, match="too coarse"):
        clipping_norm_on_grid(1.0, 2000.0, 10**6, summands=10)


def test_update_and_count_noise_together_are_worth_the_noise_multiplier() -> None:
    for noise, count in ((1.0, 0.6), (1.0, 5.0), (2.0, 2.0)):
        updates = update_noise_multiplier(noise, count)
        assert updates > noise
        assert updates**-2 + (2 * count) ** -2 == pytest.approx(noise**-2)
    assert update_noise_multiplier(1.0, 10.0) == pytest.approx(1.00125, abs=1e-5)  # Andrew et al.: nearly free


@pytest.mark.parametrize(("noise", "count"), [(1.0, 0.5), (1.0, 0.1), (0.0, 1.0)])
def test_counts_that_cost_more_than_everything_are_refused(noise: float, count: float) -> None:
    with pytest.raises(UserError, match="leaves no privacy budget"):
        update_noise_multiplier(noise, count)


def test_the_clipping_norm_moves_geometrically_towards_the_quantile() -> None:
    # Andrew et al. 2021, section 2.2: C <- C exp(-eta (b - gamma)).
    assert next_clipping_norm(2.0, 1.0, target_quantile=0.5, learning_rate=0.2) == pytest.approx(2 * math.exp(-0.1))
    assert next_clipping_norm(2.0, 0.0, target_quantile=0.5, learning_rate=0.2) == pytest.approx(2 * math.exp(0.1))
    assert next_clipping_norm(2.0, 0.5, target_quantile=0.5, learning_rate=0.2) == 2.0


def _chacha20_block(key: bytes) -> bytes:
    state = np.concatenate([np.frombuffer(b"expand 32-byte k", "<u4"), np.frombuffer(key, "<u4"), np.zeros(4, "<u4")])
    work = [int(word) for word in state]

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for into, other, target, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            work[into] = (work[into] + work[other]) % 2**32
            mixed = work[target] ^ work[into]
            work[target] = ((mixed << turn) | (mixed >> (32 - turn))) % 2**32

    for _ in range(10):
        for place in range(4):
            quarter(place, place + 4, place + 8, place + 12)
        for place in range(4):
            quarter(place, (place + 1) % 4 + 4, (place + 2) % 4 + 8, (place + 3) % 4 + 12)
    return b"".join(
        ((word + int(start)) % 2**32).to_bytes(4, "little") for word, start in zip(work, state, strict=True)
    )


def laplace(count: int, noise: Noise = NOISE, purpose: str = "test") -> np.ndarray:
    return noise.laplace(count, 1.0, purpose=purpose, server_round=1) * grid_spacing(1.0)


def test_laplace_noise_is_laplace_in_body_and_tails_and_shares_no_bits_with_other_purposes() -> None:
    numbers = laplace(1_000_000)
    assert stats.kstest(numbers, "laplace").pvalue > 1e-3
    for bound in (2.0, 5.0, 8.0):
        expected = len(numbers) * math.exp(-bound)
        assert abs((np.abs(numbers) > bound).sum() - expected) < 4 * math.sqrt(expected)
    other = laplace(1_000_000, purpose="other")
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 5 / math.sqrt(1_000_000)


def test_noise_does_not_end_where_63_bits_end() -> None:
    # A tail of 63 zeros: the further digits come from the second word, and from a stream of their own.
    for sign in (1, 0):
        deep = laplace(1, FixedWords(sign, 2**63))[0]
        assert deep == pytest.approx((-1) ** sign * 64 * math.log(2), rel=1e-6)
        assert (-1) ** sign * laplace(1, FixedWords(sign, 3))[0] > 120 * math.log(2)
