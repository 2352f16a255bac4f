"""Noise is rounded to the grid exactly: held against mpmath, next to the boundaries and in the tails."""

import math
from collections.abc import Callable, Iterator
from itertools import count

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_sim.native.kernel import CompiledNormals, load_kernel
from fl_sim.privacy.mechanisms import (
    DECIDED,
    GAUSSIAN,
    LAPLACE,
    TOLERANCE,
    Law,
    Noise,
    Normals,
    exact_step,
    grid_spacing,
)

STD = 1.37
RATIO = STD / grid_spacing(STD)
LAWS = [GAUSSIAN, LAPLACE]


def compiled() -> CompiledNormals:
    """Return what makes normal numbers in compiled code."""
    kernel, why_not = load_kernel()
    if kernel is None:
        pytest.skip(why_not)
    return CompiledNormals(kernel)


def beyond(law: Law, point: mpmath.mpf) -> mpmath.mpf:
    """Return P(|N| > point) by another road than the code's."""
    return 2 * mpmath.ncdf(-point) if law is GAUSSIAN else mpmath.e ** (-point)


def digits_at(law: Law, boundary: float, ratio: float = RATIO, num_digits: int = 127) -> int:
    """Return the binary digits of the probability of what lies beyond ``boundary`` grid steps."""
    with mpmath.workprec(400):
        return int(mpmath.floor(beyond(law, mpmath.mpf(boundary) / mpmath.mpf(ratio)) * mpmath.mpf(2) ** num_digits))


def no_more() -> int:
    raise AssertionError("127 digits decide")


@given(st.floats(1e-300, 1e300))
def test_the_grid_is_a_power_of_two_and_a_millionth_of_the_noise(std: float) -> None:
    spacing = grid_spacing(std)
    assert math.frexp(spacing)[0] == 0.5
    assert std / 2**21 < spacing <= std / 2**20


@pytest.mark.parametrize("law", LAWS, ids=["gaussian", "laplace"])
@given(st.integers(0, 12 * 2**20))
@settings(max_examples=25, deadline=None)
def test_next_to_a_boundary_the_digits_decide_and_not_float64(law: Law, below: int) -> None:
    digits = digits_at(law, below + 0.5)
    # U a hair above what lies beyond the boundary: N is within it. The neighbours are alike in float64.
    assert exact_step(law, RATIO, digits + 2, 127, no_more) == below
    assert exact_step(law, RATIO, digits - 2, 127, no_more) == below + 1


@pytest.mark.parametrize("law", LAWS, ids=["gaussian", "laplace"])
def test_where_127_digits_do_not_decide_further_ones_are_drawn(law: Law) -> None:
    longer = digits_at(law, 777_777.5, num_digits=127 + 128)
    for away, expected in ((+3, 777_777), (-3, 777_778)):
        further = longer + away
        words = iter([further >> 64 & (2**64 - 1), further & (2**64 - 1)])
        assert exact_step(law, RATIO, further >> 128, 127, lambda words=words: next(words)) == expected
        assert next(words, None) is None


class Planted(Noise):
    """Noise from given words; further digits from a counter."""

    words: np.ndarray
    further: Iterator[int]

    def __init__(self, words: list[int], further: Iterator[int], normals: Normals | None = None) -> None:
        super().__init__(bytes(32), simulation_only=True, normals=normals)
        object.__setattr__(self, "words", np.array(words, dtype=np.uint64))
        object.__setattr__(self, "further", further)

    def _words(self, count: int, purpose: str, server_round: int, *, behind: int = 0) -> np.ndarray:
        if "digits" in purpose:
            return np.array([next(self.further)] * count, dtype=np.uint64)
        return self.words[behind : behind + count]


@pytest.mark.parametrize(
    ("law", "is_compiled"), [(GAUSSIAN, False), (GAUSSIAN, True), (LAPLACE, False)],
    ids=["gaussian", "gaussian, compiled", "laplace"],
)  # fmt: skip
def test_noise_with_planted_words_is_rounded_as_mpmath_rounds_it(law: Law, *, is_compiled: bool) -> None:
    # A third of the words lie closer to a boundary than float64 can tell, a third anywhere, a third in the tail.
    rng = np.random.default_rng(0)
    near = [digits_at(law, int(below) + 0.5) + away for below in rng.integers(0, 2**22, 20) for away in (-9, 9)]
    anywhere = [int(rng.integers(2**63)) << 64 | int(rng.integers(2**63)) << 1 for _ in range(40)]
    digits = [*near, *anywhere, *(one >> shift for shift, one in enumerate(anywhere, 1))]
    signs = rng.integers(0, 2, len(digits)).tolist()
    words = [(one >> 64) << 1 | sign for one, sign in zip(digits, signs, strict=True)]
    planted = [*words, *(one & (2**64 - 1) for one in digits)]
    noise = Planted(planted, count(), compiled() if is_compiled else None)
    drawn = (noise.gaussian if law is GAUSSIAN else noise.laplace)(len(digits), STD, purpose="", server_round=0)
    for found, one, sign in zip(drawn, digits, signs, strict=True):
        magnitude = abs(found)
        assert magnitude == int(magnitude)
        assert math.copysign(1, found) == (-1) ** sign
        assert one <= digits_at(law, magnitude - 0.5) if magnitude else one
        assert one >= digits_at(law, magnitude + 0.5)


PROBABILITIES = np.exp2(-np.concatenate([np.linspace(1e-9, 8, 300), np.linspace(8, 126, 300)]))


def quantiles(law: Law) -> np.ndarray:
    """Return what is exceeded with these probabilities, by the code's approximation."""
    found = PROBABILITIES.copy()
    law.quantile(found)
    return np.abs(found)


def compiled_quantiles(_: Law) -> np.ndarray:
    """Return the same by the compiled code, from the digits of the probabilities, where 63 digits are not all 0."""
    digits = [int(mpmath.mpf(float(one)) * 2**127) for one in PROBABILITIES if one > 2.0**-63]
    first = np.array([one >> 64 << 1 for one in digits], dtype=np.uint64)
    return compiled().draw(first, np.array([one & (2**64 - 1) for one in digits], dtype=np.uint64))


@pytest.mark.parametrize(
    ("law", "found_by"), [(GAUSSIAN, quantiles), (LAPLACE, quantiles), (GAUSSIAN, compiled_quantiles)],
    ids=["gaussian", "laplace", "gaussian, compiled"],
)  # fmt: skip
def test_float64_is_right_to_a_small_part_of_the_tolerance(law: Law, found_by: Callable[[Law], np.ndarray]) -> None:
    # The assumption of the proof, tails included: the approximation's error in grid steps, for the finest grid.
    with mpmath.workprec(200):
        for probability, quantile in zip(PROBABILITIES, found_by(law), strict=False):
            point = mpmath.mpf(float(quantile))
            slope = mpmath.npdf(point) * 2 if law is GAUSSIAN else mpmath.e ** (-point)
            error = (beyond(law, point) - mpmath.mpf(float(probability))) / slope
            # A probability itself is known to 2^-52 of itself, and by the first 63 digits of U to half of the last.
            known = probability * 2.0**-52 + (2.0**-64 if probability >= DECIDED else 0)
            error = abs(error) + known / slope
            assert error * 2**21 < TOLERANCE / 20
