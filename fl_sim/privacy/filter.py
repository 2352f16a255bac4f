"""A budget for releases of which each may be chosen after the ones before it were seen.

For such a sequence the smallest epsilon over all Renyi orders, taken when it ends, proves nothing: which order that is
depends on what was released. A Renyi filter does (Feldman and Zrnic 2021): the divergences add up at one order, which
was fixed before anything was released. Here the first releases, which were ordered before there was anything to see,
fix it: the order at which most of their like fit the budget. So they fit wherever some order has room for them.
"""

import math
from collections.abc import Mapping

import numpy as np
from dp_accounting import dp_event

from fl_sim.privacy.accounting import common_adjacency, compose, single_steps, valid_delta
from fl_sim.privacy.pure import pure_epsilon
from fl_sim.privacy.renyi import ORDERS, prices


def fixed_order(first: Mapping[dp_event.DpEvent, int], epsilon: float, delta: float) -> float:
    """Return the order at which most releases like ``first`` fit ``epsilon`` at ``delta``.

    Infinity, at which pure epsilons add up, where they fit no other.
    """
    curve, room = compose(first), epsilon - prices(valid_delta(delta))
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(room > 0, room / curve, 0.0)
    best = int(np.argmax(np.where(np.isnan(times), 0.0, times)))
    return ORDERS[best] if times[best] >= 1 or _pure_sum(first) > epsilon else math.inf


def epsilon_at(order: float, counts: Mapping[dp_event.DpEvent, int], delta: float) -> float:
    """Return the epsilon that a sequence of releases, however chosen, has at an ``order`` fixed before it."""
    common_adjacency(list(counts))
    if math.isinf(order):
        return _pure_sum(counts)
    place = ORDERS.index(order)
    return max(0.0, float(compose(counts)[place] + prices(valid_delta(delta))[place]))


def _pure_sum(counts: Mapping[dp_event.DpEvent, int]) -> float:
    return sum(count * pure_epsilon(event) for event, count in single_steps(counts).items())
