"""Private label selection (PLS): the private number of synthetic records of each class (Tang, Wang, Liu 2023).

A class with n_k records on the client gets about gamma n_k synthetic records (gamma is a setting, such as 0.05). Two
mechanisms are available.

Exponential mechanism (McSherry, Talwar 2007): the number r in {0..R}, R public, has probability proportional to
exp(epsilon u(r) / (2 gamma)), with the score u(r) = -|r - gamma n_k|. One record changes u by gamma, not by 1; the
target gamma n_k is not rounded, because rounding would make the score change by 1.

Geometric mechanism (Ghosh, Roughgarden, Sundararajan 2009): two-sided geometric noise is added to n_k, the sum is
multiplied by gamma, rounded and clamped. It needs half the noise.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from dp_accounting import dp_event

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Totals:
    """Three bounds on the epsilon of the label selection for all classes, at delta 0. One class costs epsilon_1.

    ``parallel``: a record is in one class, so adding or removing the record affects one selection: epsilon_1.
    ``sequential``: the paper's bound L epsilon_1, as if a record affected all L classes. ``replace_one``: a record that
    changes its class affects two selections: 2 epsilon_1.
    """

    parallel: float
    sequential: float
    replace_one: float


class _Selection(Settings):
    """The settings that both mechanisms of label selection share. Privacy unit: one record, add or remove.

    ``epsilon``: epsilon_1, the cost of the selection for one class at delta 0. ``composition``: the rule for the total
    over all classes that is charged. ``false_positive``: an upper bound on the probability that a class without records
    gets synthetic records; selected counts below the resulting threshold are set to 0, and 1 keeps all counts.
    ``least_share``: selected counts below this share of the client's largest count are set to 0 as well, because a
    generator makes mislabelled noise of a class with very few records; 0 keeps all counts. Both rules read only the
    selected counts and have no privacy cost. ``largest``: R, the largest number of synthetic records of one class
    (None: gamma times the public bound on a class's records, see ``largest_count``).
    """

    epsilon: float = Field(0.1, gt=0)
    composition: Literal["parallel", "sequential"] = "parallel"
    false_positive: float = Field(0.01, gt=0, le=1)
    least_share: float = Field(0.05, ge=0, le=1)
    largest: int | None = Field(None, ge=0)

    def largest_count(self, gamma: float, public_records: int) -> int:
        """Return R, the largest number of synthetic records that can be selected for one class.

        ``public_records``: a public upper bound on the number of records of one class. An R that depends on the
        client's records would reveal them: a count above one R and below another would be possible for only one of two
        neighbouring data sets.
        """
        return math.ceil(Fraction(gamma) * public_records) if self.largest is None else self.largest

    def totals(self, num_classes: int) -> Totals:
        """Return three bounds on the epsilon of the selections for ``num_classes`` classes together."""
        return Totals(parallel=self.epsilon, sequential=num_classes * self.epsilon, replace_one=2 * self.epsilon)

    def total_epsilon(self, num_classes: int) -> float:
        """Return the epsilon of the selections for all classes, by ``composition``, to be added to other epsilons."""
        totals = self.totals(num_classes)
        return totals.parallel if self.composition == "parallel" else totals.sequential

    def event(self, num_classes: int) -> "dp_event.DpEvent":
        """Return the privacy event of the selections for all classes, for a privacy ledger (add or remove a record)."""
        from dp_accounting import dp_event  # noqa: PLC0415 (slow to import)

        one = self._event_of_one_class()
        return one if self.composition == "parallel" else dp_event.SelfComposedDpEvent(one, num_classes)

    def threshold(self, gamma: float, largest: int) -> int:
        """Return the threshold below which selected counts are set to 0.

        It is the least count that a class without records reaches with probability ``false_positive`` at most. It is
        computed from public numbers only, so it has no privacy cost. If the noise is too large for the range, the
        threshold is largest + 1, and all counts become 0.
        """
        if self.false_positive == 1:
            return 0
        reached = np.cumsum(self.pmf(0, gamma, largest)[::-1])[::-1]
        return int((reached > self.false_positive).sum())

    def select(self, class_counts: NDArray[np.int64], gamma: float, largest: int, noise: Noise) -> NDArray[np.int64]:
        """Return the number of synthetic records of each class, (num_classes,): a private release.

        The result may be published, once its cost is charged to the privacy ledger. ``class_counts``: (num_classes,)
        the client's own number of records of each class, SENSITIVE. ``largest``: R, public. ``noise``: the noise of
        this client and release; the same key always gives the same selection.
        """
        held = np.asarray(class_counts, dtype=np.int64)
        assert held.ndim == 1
        assert (held >= 0).all()
        if gamma == 0:
            return np.zeros_like(held)
        _check(gamma, largest)
        first, second = noise.uniform(4 * len(held), purpose="label selection", server_round=0).reshape(2, 2, -1)
        # Two words for each uniform number: probabilities down to 2^-107 are then possible, not only down to 2^-53.
        coins = first + second * 2.0**-53 + 2.0**-107
        drawn = self._draw(coins, held, gamma, largest)
        least = max(self.threshold(gamma, largest), self.least_share * drawn.max(initial=0))
        return np.where(drawn < least, 0, drawn)

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probability of each selected count 0..R, (R + 1,), for a class of ``num_records`` records.

        This is the distribution before the threshold.
        """
        raise NotImplementedError

    def _draw(self, coins: Floats, held: NDArray[np.int64], gamma: float, largest: int) -> NDArray[np.int64]:
        """Return one selected count per class. ``held``: the client's records per class, (num_classes,), SENSITIVE.

        ``coins``: (2, num_classes), uniform random numbers in (0, 1].
        """
        raise NotImplementedError

    def _event_of_one_class(self) -> "dp_event.DpEvent":
        raise NotImplementedError


class ExponentialMechanism(_Selection):
    """The paper's exponential mechanism. Its privacy loss lies in a range of width epsilon: epsilon^2 / 8 in zCDP."""

    kind: Literal["exponential"] = "exponential"

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probability of each selected count 0..R, (R + 1,), before the threshold."""
        _check(gamma, largest)
        whole, rest = _target(gamma, num_records)
        distance = np.abs(np.arange(largest + 1) - float(whole) - rest)
        weights = np.exp(-self.epsilon / (2 * gamma) * (distance - distance.min()))
        pmf: Floats = weights / weights.sum()
        return pmf

    def _draw(self, coins: Floats, held: NDArray[np.int64], gamma: float, largest: int) -> NDArray[np.int64]:
        targets = [_target(gamma, int(count)) for count in held]
        whole = np.array([target[0] for target in targets], dtype=np.float64)
        rest = np.array([target[1] for target in targets])
        drawn = _two_sided(coins, self.epsilon / (2 * gamma), whole, rest, 0.0, float(largest))
        return drawn.astype(np.int64)

    def _event_of_one_class(self) -> "dp_event.DpEvent":
        from fl_sim.privacy.events import BoundedRangeDpEvent  # noqa: PLC0415 (slow to import)

        return BoundedRangeDpEvent(self.epsilon)


class Geometric(_Selection):
    """The geometric mechanism: noise z on the number of records, with probability proportional to exp(-epsilon |z|).

    Afterwards the noisy count is multiplied by gamma, rounded and clamped.
    """

    kind: Literal["geometric"] = "geometric"

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probability of each selected count 0..R, (R + 1,), before the threshold."""
        _check(gamma, largest)
        top, bottom = Fraction(gamma).as_integer_ratio()
        # The least noisy counts that are rounded to 1..R, exactly: the least m with gamma m >= r - 1/2.
        least = [-((1 - 2 * count) * bottom // (2 * top)) - num_records for count in range(1, largest + 1)]
        edges = np.array([-math.inf, *least, math.inf])
        above, below = np.maximum(edges, 1), np.minimum(edges, 1)
        masses = _mass(above[:-1], np.diff(above), self.epsilon) + _mass(1 - below[1:], np.diff(below), self.epsilon)
        pmf: Floats = masses
        return pmf

    def _draw(self, coins: Floats, held: NDArray[np.int64], gamma: float, largest: int) -> NDArray[np.int64]:
        whole = held.astype(np.float64)
        noisy = _two_sided(coins, self.epsilon, whole, np.zeros_like(whole), -math.inf, math.inf)
        exact, half = Fraction(gamma), Fraction(1, 2)
        return np.array([min(max(math.floor(exact * int(count) + half), 0), largest) for count in noisy], np.int64)

    def _event_of_one_class(self) -> "dp_event.DpEvent":
        from dp_accounting import dp_event  # noqa: PLC0415 (slow to import)

        return dp_event.DiscreteLaplaceDpEvent(self.epsilon, 1)


LabelPicker: TypeAlias = ExponentialMechanism | Geometric


def _check(gamma: float, largest: int) -> None:
    if not 0 < gamma < math.inf:
        raise UserError(
            f"gamma {gamma} is not a positive number: give the number of synthetic records per record, such as 0.05"
        )
    if largest < 0:
        raise UserError(
            f"a range up to {largest} is empty: give the largest number of synthetic records of one class, 0 or more"
        )


def _target(gamma: float, num_records: int) -> tuple[int, float]:
    """Return gamma n_k as (whole number, fraction in [0, 1]). One float would round a large product too coarsely."""
    whole, rest = divmod(Fraction(gamma) * num_records, 1)
    return whole, float(rest)


def _two_sided(coins: Floats, rate: float, whole: Floats, rest: Floats, lowest: float, highest: float) -> Floats:
    """Draw r in {lowest..highest} with probability proportional to exp(-rate |r - whole - rest|), one r per class.

    ``whole`` + ``rest`` is the target: its whole number and its fraction. On each side of the target, the distribution
    is a truncated geometric one. ``coins``: uniform random numbers; ``coins[0]`` decides the side, ``coins[1]`` the
    distance.
    """
    from scipy.special import expit  # noqa: PLC0415 (slow, and most runs need no label selection)

    start = np.minimum(whole, highest)
    sides = start - lowest + 1, np.maximum(highest - whole, 0)
    with np.errstate(divide="ignore"):  # a side without values has the log probability -inf
        left, right = (np.log(-np.expm1(-rate * length)) for length in sides)
    log_odds = right - rate * (1 - rest) - (left - rate * (whole - start + rest))
    # The coin is compared with the smaller probability: numbers near 0 have the finer resolution.
    up = (coins[0] < expit(-np.abs(log_odds))) != (log_odds > 0)
    steps = _truncated_geometric(coins[1], rate, np.where(up, sides[1], sides[0]))
    drawn: Floats = np.where(up, whole + 1 + steps, start - steps)
    return drawn


def _truncated_geometric(coins: Floats, rate: float, lengths: Floats) -> Floats:
    """Return numbers j in {0..length-1} with probability proportional to exp(-rate j), one for each uniform coin."""
    lost = np.exp(-rate * lengths)
    reached = coins + (1 - coins) * lost  # exp(-rate x), where j is x rounded down
    with np.errstate(divide="ignore"):
        log_reached = np.where(reached < 0.5, np.log(reached), np.log1p((1 - coins) * np.expm1(-rate * lengths)))
    steps: Floats = np.clip(np.ceil(-log_reached / rate) - 1, 0, lengths - 1)
    return steps


def _mass(near: Floats, length: Floats, epsilon: float) -> Floats:
    """Return the probability that two-sided geometric noise is one of ``length`` successive values on one side of 0.

    ``near``: the smallest absolute value among them.
    """
    mass: Floats = np.exp(-epsilon * near) * -np.expm1(-epsilon * length) / (1 + math.exp(-epsilon))
    return mass
