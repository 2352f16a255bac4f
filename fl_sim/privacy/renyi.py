"""Renyi divergences of one release at fixed orders, and the epsilon of several releases (Mironov et al. 2019).

Every curve is an upper bound for all valid parameters, however extreme. Where a value cannot be computed, a larger
bound replaces the value: the value without amplification by sampling, the value at the next order, or ``inf``. To avoid
cancellation, no result is a difference of numbers that are nearly equal.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy.special import gammaln, log_expit, logsumexp

from fl_sim.errors import UserError
from fl_sim.privacy.events import (
    BoundedRangeDpEvent,
    DiscreteGaussiansDpEvent,
    IntegerNoiseDpEvent,
    SkellamDpEvent,
    pure_epsilon,
)

Curve: TypeAlias = NDArray[np.float64]
"""Renyi divergences at ``ORDERS``. The joint curve of several releases is the sum of their curves."""

ORDERS: Final = (
    *(1 + 10 ** (eighth / 8 - 4) for eighth in range(16)),
    1.01,
    1.0133,
    1.0178,
    *(1 + fortieth / 40 for fortieth in range(1, 20)),
    *(1 + tenth / 10 for tenth in range(5, 100)),
    *range(11, 128),
    *range(128, 256, 8),
    *range(256, 1025, 64),
)

_MOST_POINTS: Final = 2_000_000
_ORDERS: Final = np.array(ORDERS)
_LESS: Final = _ORDERS - 1
_SERIES: Final = _ORDERS[(_ORDERS >= 1.01) & (np.floor(_ORDERS) != _ORDERS)]
"""The fractional orders at which dp_accounting's series is evaluated.

``_poisson_curve`` limits the series to noise multipliers and sampling rates for which its error is at most 1e-12.
"""
_SERIES_ERROR: Final = 1e-12
_QUADRATURE_ERROR: Final = 1e-13
# The bound for a sum of discrete Gaussians is proven if each of them has at least this standard deviation.
_LEAST_STD: Final = 0.5


@lru_cache(maxsize=512)
def rdp_curve(event: dp_event.DpEvent) -> Curve:
    """Return the Renyi divergences of one release at ``ORDERS``; ``inf`` where there is no bound.

    The array is read-only, because it is cached.
    """
    curve = _bounded(event, _SERIES)
    curve.setflags(write=False)
    return curve


def searching_curve(event: dp_event.DpEvent, steps: int, delta: float) -> Curve:
    """Return an upper bound on ``rdp_curve``, computed in a fifth of the time, for searches of a noise multiplier.

    The bound equals ``rdp_curve`` at the order that gives the epsilon of ``steps`` releases at ``delta``. Far from that
    order, the values are interpolated linearly between integer orders, without the slow series.
    """
    lines = steps * _bounded(event, _SERIES[:0])
    decides = _ORDERS[np.argmin(lines + prices(delta))]
    return _bounded(event, _SERIES[np.abs(_SERIES - decides) <= 1])


def _bounded(event: dp_event.DpEvent, series: NDArray[np.float64]) -> Curve:
    with np.errstate(all="ignore"), _quiet_excluded_orders():
        curve = checked(_curve(event, series))
    # The exact divergence never decreases with the order. So a bound at a higher order holds at all lower orders, too.
    return np.asarray(np.minimum.accumulate(curve[::-1])[::-1])


def epsilons_of_curves(curves: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Convert each Renyi curve, a row with one value per order, to an epsilon at ``delta``; ``inf`` for no guarantee.

    The conversion is proposition 12 of Canonne, Kamath and Steinke 2020. The epsilon is 0 where the total variation
    distance of the two output distributions is below ``delta``. The Kullback-Leibler divergence bounds this
    distance (Bretagnolle and Huber 1978).
    """
    epsilons = curves + prices(delta)
    nothing = (delta**2 + np.expm1(-curves) > 0).any(axis=-1)
    return np.asarray(np.where(nothing, 0.0, np.maximum(epsilons.min(axis=-1), 0.0)))


def prices(delta: float) -> NDArray[np.float64]:
    """Return, for each of ``ORDERS``, the number t that converts a Renyi divergence D to an epsilon.

    The epsilon at ``delta`` is D + t.
    """
    return np.asarray(np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / _LESS)


def checked(curve: Curve) -> Curve:
    """Return the Renyi curve ``curve``, with values in [-1e-9, 0) set to 0.

    Such values are rounding errors. Raises ArithmeticError for lower values and for NaN. Without this check a NaN would
    turn into an epsilon of 0.
    """
    if np.isnan(curve).any() or (curve < -1e-9).any():
        raise ArithmeticError("a Renyi divergence is NaN or negative: the accountant failed, so no epsilon is known")
    return np.maximum(curve, 0.0)


def _curve(event: dp_event.DpEvent, series: NDArray[np.float64]) -> Curve:
    match event:
        case dp_event.GaussianDpEvent(noise_multiplier=noise):
            return _gaussian_curve(noise)
        case dp_event.PoissonSampledDpEvent(
            sampling_probability=rate, event=dp_event.GaussianDpEvent(noise_multiplier=noise)
        ) if 0 < rate < 1 and noise > 0:
            return np.minimum(_gaussian_curve(noise), _poisson_curve(event, rate, noise, series))
        case dp_event.TruncatedSubsampledGaussianDpEvent():
            return _fixed_size_curve(event)
        case dp_event.LaplaceDpEvent(noise_multiplier=scale):
            return laplace_curve(math.inf if scale == 0 else 1 / scale, _ORDERS)
    if (is_integer := isinstance(event, IntegerNoiseDpEvent)) or math.isfinite(pure_epsilon(event)):
        return (integer_noise_curve if is_integer else bounded_loss_curve)(event, _ORDERS)
    return np.asarray(RdpAccountant(ORDERS).compose(event).rdp)


def laplace_curve(epsilon: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Renyi divergences at ``orders`` of the Laplace mechanism that is (``epsilon``, 0)-private.

    The formula is proposition 6 of Mironov 2017.
    """
    if math.isinf(epsilon):
        return np.full(len(orders), math.inf)
    if epsilon < 1e-4:
        # The terms of the exact formula would cancel. So an upper bound on the divergence is returned: order * rho,
        # where rho = epsilon + e^-epsilon - 1 <= epsilon^2 / 2 (Harrison, Manurangsi 2026).
        return np.asarray(orders * (epsilon**2 / 2))
    less = orders - 1
    return np.asarray(np.log1p(less * np.expm1(-epsilon * (less + orders)) / (less + orders)) / less + epsilon)


def bounded_loss_curve(event: dp_event.DpEvent, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an upper bound on the Renyi divergences at ``orders`` > 1 of an event with a pure epsilon.

    Among all mechanisms of the same pure epsilon, randomised response has the largest privacy loss: +epsilon or
    -epsilon (Kairouz, Oh, Viswanath 2015). Its divergence at order a is log(p e^x + (1 - p) e^-x) / (a - 1) with
    x = (a - 1) epsilon and p = 1 / (1 + e^-epsilon). Bounded-range events are also (epsilon^2 / 8)-zCDP
    (zero-concentrated differential privacy), which gives a second bound.
    """
    epsilon = pure_epsilon(event)
    exponent = (orders - 1) * epsilon
    # The divergence by two equal formulas: ``small`` avoids cancellation for small exponents, and ``large`` avoids
    # overflow for large exponents.
    few = np.minimum(exponent, 1.0)
    small = np.log1p(2 * np.sinh(few / 2) ** 2 + math.tanh(epsilon / 2) * np.sinh(few))
    large = np.logaddexp(log_expit(epsilon) + exponent, log_expit(-epsilon) - exponent)
    curve: NDArray[np.float64] = np.where(exponent < 1.0, small, large) / (orders - 1)
    return np.minimum(curve, epsilon**2 / 8 * orders) if isinstance(event, BoundedRangeDpEvent) else curve


def integer_noise_curve(event: dp_event.DpEvent, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return upper bounds on the Renyi divergences of integer noise at ``orders`` > 1; ``inf`` where none is proven."""
    match event:
        case SkellamDpEvent():
            return _skellam_curve(event, orders)
        case DiscreteGaussiansDpEvent():
            return _discrete_gaussians_curve(event, orders)
    raise TypeError(f"{event} is no event of integer noise that this version supports")


def _skellam_curve(event: SkellamDpEvent, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bound of Agarwal, Kairouz and Liu 2021 at integer orders, and interpolated values at other orders.

    (order - 1) times the divergence is a convex function of the order, and 0 at order 1. So a linear interpolation
    between two orders is an upper bound.
    """
    l1, l2, variance = event.vectors * event.l1, event.vectors * event.l2, event.variance
    if not variance > 0:
        return np.full(len(orders), math.inf)

    def scaled(whole: NDArray[np.float64]) -> NDArray[np.float64]:
        correction = np.minimum(((2 * whole - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
        return np.asarray((whole - 1) * (whole * l2**2 / (2 * variance) + correction))

    below = np.floor(orders)
    share = orders - below
    line = (1 - share) * scaled(below) + np.where(share > 0, share * scaled(below + 1), 0.0)
    # NaN comes from 0 times a number that overflowed to infinity. The divergence then has no finite bound.
    return np.where(np.isnan(line), math.inf, line / (orders - 1))


def _discrete_gaussians_curve(event: DiscreteGaussiansDpEvent, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bound of Kairouz, Liu and Steinke 2021 for sums of discrete Gaussians: the minimum of three bounds."""
    l1, l2, d = event.vectors * event.l1, event.vectors * event.l2, event.dimension
    each = event.variance / event.shares
    if not each >= _LEAST_STD**2:
        return np.full(len(orders), math.inf)
    k = np.arange(1, event.shares, dtype=np.float64)
    tau = 10 * float(np.exp(-2 * math.pi**2 * each * k / (k + 1)).sum())
    moved, moved_l1 = l2 / math.sqrt(event.variance), l1 / math.sqrt(event.variance)
    bounds = (
        orders / 2 * moved**2 + tau * d,
        orders / 2 * (moved**2 + 2 * tau * moved_l1 + tau**2 * d),
        orders / 2 * (moved + tau * math.sqrt(d)) ** 2,
    )
    return np.asarray(np.minimum.reduce(bounds))


def _gaussian_curve(noise: float) -> Curve:
    """Return the Renyi divergences of the Gaussian mechanism, order / (2 z^2), under add-or-remove-one adjacency.

    z is the noise multiplier. The sensitivity is one clipping norm.
    """
    return np.asarray(_ORDERS / 2 / np.float64(noise) / np.float64(noise))


def _poisson_curve(event: dp_event.DpEvent, rate: float, noise: float, series: NDArray[np.float64]) -> Curve:
    """Return an upper bound on the Renyi divergences of the sampled Gaussian mechanism.

    The bound follows section 3.3 of Mironov et al. 2019. Let D_a be the divergence at order a, and A(a) = exp((a - 1)
    D_a). At an integer order, A - 1 is a sum of positive terms, so even a tiny divergence is precise. log A is a convex
    function of a, so a linear interpolation between two integer orders is an upper bound.
    """
    # The result of dp_accounting is not always an upper bound: rounding can make the divergence too small.
    # The reason is that the library computes A (see the docstring), not A - 1, and A may be close to 1.
    # The relative error is 1e-9 at a sampling rate of 0.01, 1e-5 at a rate of 1e-6, and 1 between the orders 1 and 2.
    logs = _log_moments(rate, noise)
    below = np.floor(_ORDERS).astype(int)
    share = _ORDERS - below
    line = np.array([(1 - s) * logs[n] + (s * logs[n + 1] if s else 0.0) for n, s in zip(below, share, strict=True)])
    curve: Curve = line / _LESS
    if len(series) and 1e-2 <= noise <= 1e3 and 1e-9 <= rate <= 1 - 1e-9:
        found = np.asarray(RdpAccountant(series).compose(event).rdp) + _SERIES_ERROR / (series - 1)
        places = np.isin(_ORDERS, series)
        curve[places] = np.fmin(curve[places], found)
    return curve


@lru_cache(maxsize=4)
def _log_moments(rate: float, noise: float) -> dict[int, float]:
    """Return {n: log A(n)} for all integer orders that ``_poisson_curve`` needs.

    A(n) = sum_k C(n, k) (1 - q)^(n - k) q^k exp(k (k - 1) / (2 z^2)), where C(n, k) is a binomial coefficient, q the
    sampling rate and z the noise multiplier.
    """
    whole = sorted({int(order) for order in ORDERS} | {int(order) + 1 for order in ORDERS if order != int(order)})
    k = np.arange(2, whole[-1] + 1, dtype=np.float64)
    growth = k / 2 / noise * (k - 1) / noise
    terms = growth + np.log(-np.expm1(-growth)) + k * math.log(rate) - gammaln(k + 1)
    factorials, rest = gammaln(np.arange(1, whole[-1] + 2, dtype=np.float64)), math.log1p(-rate)
    logs = {1: 0.0}
    for n in whole[1:]:
        few = n - 1  # number of terms k = 2, ..., n in the sum A(n) - 1
        exponents = terms[:few] + factorials[n] - factorials[few - 1 :: -1] + np.arange(few - 1, -1, -1) * rest
        largest = exponents.max()
        # The same as scipy's logsumexp, but eight times as fast for a few numbers.
        log_less_one = largest + np.log(np.exp(exponents - largest).sum()) if math.isfinite(largest) else largest
        logs[n] = float(np.logaddexp(0.0, log_less_one))
    return logs


def _fixed_size_curve(event: dp_event.TruncatedSubsampledGaussianDpEvent) -> Curve:
    """Return an upper bound on the Renyi divergences of Gaussian noise on the sum of a cohort of fixed size.

    The adjacency is replace-one. Let q be the sampling rate, z the noise multiplier and S the clipping norm. In the
    adjacent data set, another unit replaces a unit of the cohort, so the sensitivity is 2S. The dominating pair of
    distributions for sampling without replacement is (1-q) N(0, z^2) + q N(+2, z^2) against (1-q) N(0, z^2) + q N(-2,
    z^2). Its divergence is the same in both directions. Without amplification by sampling, the divergence at order a is
    2 a / z^2. Both bounds hold, so the smaller bound holds.
    """
    if event.sampling_probability != 1:
        raise UserError(
            "only cohorts of a fixed size are supported here: the sampling probability before truncation must be 1"
        )
    noise, rate = event.noise_multiplier, event.truncated_batch_size / event.dataset_size
    plain = 4 * _gaussian_curve(noise)
    if rate == 1 or noise < 1e-3:  # with so little noise, amplification by sampling is negligible
        return plain
    return np.minimum(plain, [_mixture_divergence(order, rate, 2 / noise) for order in ORDERS])


def _mixture_divergence(order: float, rate: float, shift: float) -> float:
    """Return D_order((1-q) N(0,1) + q N(s,1) || (1-q) N(0,1) + q N(-s,1)), q = ``rate``, s = ``shift``.

    The integral is computed by the trapezoid rule. The integrand has Gaussian tails, and is analytic in a strip about
    the real line. The strip ends at the zeros of the second density, so its half-width is pi / s. Therefore the error
    decreases as exp(-2 pi (pi / s) / step). With the step chosen here, only rounding errors are left, and a margin
    covers these errors.
    """
    reach = shift * (2 * order - 1)  # the position of that peak of the integrand which is farthest from 0
    num_points = int(16 * max(1.0, shift) * (reach + shift + 24)) + 1
    if num_points > _MOST_POINTS:
        return math.inf
    points = np.linspace(-shift - 12, reach + 12, num_points)
    base = math.log1p(-rate) - points**2 / 2
    towards = np.logaddexp(base, math.log(rate) - (points - shift) ** 2 / 2)
    away = np.logaddexp(base, math.log(rate) - (points + shift) ** 2 / 2)
    step = points[1] - points[0]
    log_integral = logsumexp(order * towards - (order - 1) * away) + math.log(step / math.sqrt(2 * math.pi))
    return float((max(log_integral, 0.0) + _QUADRATURE_ERROR * max(1.0, abs(log_integral))) / (order - 1))


@contextmanager
def _quiet_excluded_orders() -> Iterator[None]:
    """Silence dp_accounting's log messages about Renyi orders that it leaves out.

    The library leaves out an order at which a series does not converge. The epsilon stays an upper bound, because it is
    the minimum over all remaining orders.
    """

    def is_other_notice(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(is_other_notice)
    try:
        yield
    finally:
        logger.removeFilter(is_other_notice)
