"""Noise rounded to a grid exactly: what is released is then computed from the exact mechanism's result, at no loss.

A float64 generator has no proof by itself: the low bits of what it makes can tell sums apart (Mironov 2012, "On
significance of the least significant bits"). Here sum and noise are rounded to multiples of one power of two, g. For a
sum t on the grid, t + g round(N / g) = g round((t + N) / g): if the noise is rounded *exactly*, the released number is
the Gaussian (or Laplace) mechanism's real-valued result, rounded. Rounding looks at nothing private, so the release is
as private as the exact mechanism on real numbers, with nothing added to epsilon or delta. What is left to show:

1. The rounded sum moves by no more than the clipping norm: ``mechanisms.clipping_norm_on_grid``.
2. round(N / g) is exact. N = Q(U), where U is uniform on (0, 1) and known by its first 63 binary digits. float64 gives
   an approximation of N / g; where that is further than ``TOLERANCE`` from the next boundary k + 1/2, it is rounded the
   right way. The digits behind those 63 move N / g by less than TOLERANCE / 200, unless U is below ``DECIDED``. There,
   and next to a boundary (about one number in 44,000), the boundary's probability is compared with the first 127 digits
   of U in as many digits as it takes, and where 127 do not decide, further ones are drawn.

What is taken for granted: that ChaCha20 under a random key gives random bits; that ``scipy.special.ndtri``,
``numpy.log`` and the compiled quantile (``fl_sim/native/normals.h``) are right to ``TOLERANCE`` grid steps, some 400
times the error that is documented for them (a test compares them with mpmath, tails included); and that mpmath is right
to the digits it was asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TOLERANCE: Final = 2.0**-17
DECIDED: Final = 2.0**-17
"""The least U of which 63 digits say enough: |dQ/dU| is at most 1.3 / U, a standard deviation (the scale of a Laplace
distribution) is less than 2^21 g, and half a unit of the 63rd digit is 2^-64; so Q(U) / g is known to 1.3 x 2^-26."""
_GRID_BITS: Final = 20  # the grid is at most 2^-20 standard deviations wide
_GUARD: Final = 32  # binary digits beyond those of U in what it is compared with


@dataclass(frozen=True)
class Law:
    """A symmetric distribution of scale 1, by P(|N| > x).

    ``quantile`` overwrites float64 probabilities with an approximation of the x that are exceeded with them, up to its
    sign. ``beyond`` returns P(|N| > b / ratio), times 2^digits, rounded to an integer; it is right to 1.
    """

    quantile: Callable[[NDArray[np.float64]], None]
    beyond: Callable[[float, float, int], int]


def grid_spacing(std: float) -> float:
    """Return the power of two to whose multiples a sum and its noise of standard deviation ``std`` > 0 are rounded."""
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def exact_step(law: Law, ratio: float, digits: int, num_digits: int, more: Callable[[], int]) -> int:
    """Return |N| in grid steps, N being ``ratio`` steps times a draw of ``law``, rounded to a whole number exactly.

    P(|N| > x) = U at the x that is returned; ``digits`` are the first ``num_digits`` binary digits of U, and ``more``
    draws 64 further ones.
    """
    while True:
        if digits.bit_length() >= 64:  # else U is not known well enough to say near which boundary it lies
            probability = np.array([digits / (1 << num_digits)])
            law.quantile(probability)
            below = math.floor(abs(float(probability[0])) * ratio)
            boundary = law.beyond(below + 0.5, ratio, num_digits + _GUARD)
            if (digits << _GUARD) > boundary + 1:
                return below
            if ((digits + 1) << _GUARD) < boundary - 1:
                return below + 1
        digits, num_digits = digits << 64 | more(), num_digits + 64


def _gaussian_quantile(probabilities: NDArray[np.float64]) -> None:
    from scipy.special import ndtri  # noqa: PLC0415 (slow, and a run without noise does not need it)

    probabilities *= 0.5
    ndtri(probabilities, out=probabilities)


def _laplace_quantile(probabilities: NDArray[np.float64]) -> None:
    np.log(probabilities, out=probabilities)


def _gaussian_beyond(boundary: float, ratio: float, digits: int) -> int:
    """Return erfc(x / sqrt 2)."""
    from mpmath import libmp  # noqa: PLC0415 (as above)

    precision = digits + 64
    root = libmp.mpf_sqrt(libmp.from_int(2), precision)
    point = libmp.mpf_div(_quotient(boundary, ratio, precision), root, precision)
    return _scaled(libmp.mpf_erfc(point, precision), digits)


def _laplace_beyond(boundary: float, ratio: float, digits: int) -> int:
    from mpmath import libmp  # noqa: PLC0415 (as above)

    precision = digits + 64
    return _scaled(libmp.mpf_exp(libmp.mpf_neg(_quotient(boundary, ratio, precision)), precision), digits)


def _quotient(boundary: float, ratio: float, precision: int) -> Any:
    from mpmath import libmp  # noqa: PLC0415 (as above)

    return libmp.mpf_div(libmp.from_float(boundary), libmp.from_float(ratio), precision)


def _scaled(number: Any, digits: int) -> int:
    from mpmath import libmp  # noqa: PLC0415 (as above)

    return int(libmp.to_int(libmp.mpf_shift(number, digits)))


GAUSSIAN: Final = Law(_gaussian_quantile, _gaussian_beyond)
LAPLACE: Final = Law(_laplace_quantile, _laplace_beyond)
