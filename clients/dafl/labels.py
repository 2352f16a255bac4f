"""Private label selection (PLS): a client privately selects its number of synthetic records of each class.

The method was published by Tang, Wang, Liu 2023. A class k with n_k records on the client gets about gamma n_k
synthetic records (gamma is a setting, such as 0.05). Two mechanisms are available for this selection.

Exponential mechanism (McSherry, Talwar 2007): the selected number is r in {0..R}, where R is public. The probability of
r is proportional to exp(epsilon u(r) / (2 gamma)), with the score u(r) = -|r - gamma n_k|. One record changes the score
by gamma, not by 1. The target gamma n_k is not rounded, because rounding would make the score change by 1.

Geometric mechanism (Ghosh, Roughgarden, Sundararajan 2009): two-sided geometric noise is added to n_k. Then the sum is
multiplied by gamma, rounded and clamped. The geometric mechanism needs half the noise of the exponential mechanism.
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
    """Three bounds on the total epsilon of a client's label selection over all L classes, at delta 0.

    Label selection chooses the number of synthetic records of each class. The selection for one class costs epsilon_1.
    ``parallel``: epsilon_1, because adding or removing a record affects only the selection for its class.
    ``sequential``: the paper's bound L epsilon_1, as if a record affected all L classes. ``replace_one``: 2 epsilon_1,
    because a record that changes its class affects two selections.
    """

    parallel: float
    sequential: float
    replace_one: float


class _Selection(Settings):
    """The settings of label selection, in which a client privately selects its number of synthetic records per class.

    The exponential and the geometric mechanism share these settings. The privacy unit is one record, which is added or
    removed. ``epsilon``: epsilon_1, the privacy cost of the selection for one class, at delta 0. ``composition``: the
    rule for the total privacy cost over all classes. ``false_positive``: an upper bound on the probability that a class
    without records gets synthetic records. Selected numbers below the resulting threshold are set to 0; the value 1
    keeps all numbers. ``least_share``: selected numbers below this share of the client's largest selected number are
    set to 0 as well; the value 0 keeps all numbers. For a class with very few records, a generator would make noise
    with wrong labels. Both rules (``false_positive``, ``least_share``) have no privacy cost: they read only selected
    numbers.
    ``largest``: R, the largest number of synthetic records of one class (None: gamma times the public bound on a
    class's records, see ``largest_count``).
    """

    epsilon: float = Field(0.1, gt=0)
    composition: Literal["parallel", "sequential"] = "parallel"
    false_positive: float = Field(0.01, gt=0, le=1)
    least_share: float = Field(0.05, ge=0, le=1)
    largest: int | None = Field(None, ge=0)

    def largest_count(self, gamma: float, public_records: int) -> int:
        """Return R, the largest number of synthetic records that can be selected for one class.

        ``public_records``: a public upper bound on the number of records of one class. R must not depend on the
        client's records. Otherwise two neighbouring data sets could have different values of R. A selected number
        between these two values would then reveal which of the two data sets the client has.
        """
        return math.ceil(Fraction(gamma) * public_records) if self.largest is None else self.largest

    def totals(self, num_classes: int) -> Totals:
        """Return three bounds on the total epsilon of a client's label selection over ``num_classes`` classes."""
        return Totals(parallel=self.epsilon, sequential=num_classes * self.epsilon, replace_one=2 * self.epsilon)

    def total_epsilon(self, num_classes: int) -> float:
        """Return the total epsilon of a client's label selection over all classes, by the rule ``composition``.

        The result may be added to the epsilon of the generator.
        """
        totals = self.totals(num_classes)
        return totals.parallel if self.composition == "parallel" else totals.sequential

    def event(self, num_classes: int) -> "dp_event.DpEvent":
        """Return the privacy event of a client's label selection over all classes, for a privacy ledger.

        Adjacency: one record is added or removed.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (slow to import)

        one = self._event_of_one_class()
        return one if self.composition == "parallel" else dp_event.SelfComposedDpEvent(one, num_classes)

    def threshold(self, gamma: float, largest: int) -> int:
        """Return the threshold below which selected numbers of synthetic records are set to 0.

        It is the smallest number t such that a class without records gets t or more with a probability of at most
        ``false_positive``. The threshold is computed from public numbers only, so it has no privacy cost. If the noise
        is too large for the range of numbers, the threshold is largest + 1. Then all selected numbers become 0.
        """
        if self.false_positive == 1:
            return 0
        reached = np.cumsum(self.pmf(0, gamma, largest)[::-1])[::-1]
        return int((reached > self.false_positive).sum())

    def select(self, class_counts: NDArray[np.int64], gamma: float, largest: int, noise: Noise) -> NDArray[np.int64]:
        """Return the privately selected number of synthetic records of each class, (num_classes,).

        These numbers may be published, once their privacy cost is in the privacy ledger. ``class_counts``: the client's
        own number of records of each class, (num_classes,), SENSITIVE (must stay secret). ``largest``: R, the public
        largest number of synthetic records of one class. ``noise``: the noise of this client and this selection. The
        same noise key (the secret seed of the noise) always gives the same numbers.
        """
        held = np.asarray(class_counts, dtype=np.int64)
        assert held.ndim == 1
        assert (held >= 0).all()
        if gamma == 0:
            return np.zeros_like(held)
        _check(gamma, largest)
        first, second = noise.uniform(4 * len(held), purpose="label selection", server_round=0).reshape(2, 2, -1)
        # Each number in ``coins`` is made from two random numbers of 53 bits, so it can be as small as 2^-107. So even
        # events of this probability can occur. A single random number of 53 bits is 0, or at least 2^-53.
        coins = first + second * 2.0**-53 + 2.0**-107
        drawn = self._draw(coins, held, gamma, largest)
        least = max(self.threshold(gamma, largest), self.least_share * drawn.max(initial=0))
        return np.where(drawn < least, 0, drawn)

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probability of each selected number 0..R, (R + 1,), for a class of ``num_records`` records.

        These are the probabilities before the threshold sets small numbers to 0.
        """
        raise NotImplementedError

    def _draw(self, coins: Floats, held: NDArray[np.int64], gamma: float, largest: int) -> NDArray[np.int64]:
        """Return one selected number of synthetic records per class.

        ``held``: the client's number of records per class, (num_classes,), SENSITIVE (must stay secret). ``coins``:
        uniform random numbers in (0, 1], (2, num_classes).
        """
        raise NotImplementedError

    def _event_of_one_class(self) -> "dp_event.DpEvent":
        raise NotImplementedError


class ExponentialMechanism(_Selection):
    """The paper's exponential mechanism, which selects the number of synthetic records of a class.

    The mechanism's privacy loss lies in an interval of width epsilon. So its cost in zero-concentrated differential
    privacy (zCDP) is epsilon^2 / 8.
    """

    kind: Literal["exponential"] = "exponential"

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probability of each selected number 0..R, (R + 1,), before the threshold."""
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
    """The geometric mechanism, which selects the number of synthetic records of a class.

    It adds noise z to the number of the client's records of the class. The probability of z is proportional to
    exp(-epsilon |z|). Afterwards the noisy number is multiplied by gamma, rounded and clamped.
    """

    kind: Literal["geometric"] = "geometric"

    def pmf(self, num_records: int, gamma: float, largest: int) -> Floats:
        """Return the probabilities of the numbers 0..R before thresholding, shape (R + 1,)."""
        _check(gamma, largest)
        top, bottom = Fraction(gamma).as_integer_ratio()
        # For each r in 1..R: the smallest noisy count m that gives r, so the smallest m with gamma m >= r - 1/2.
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
            f"a range up to {largest} is empty: give the largest number of synthetic records of a class, 0 or more"
        )


def _target(gamma: float, num_records: int) -> tuple[int, float]:
    """Return the target number of synthetic records as (whole number, fraction in [0, 1]).

    The target is gamma times the number of records. A single float would round a large target too coarsely.
    """
    whole, rest = divmod(Fraction(gamma) * num_records, 1)
    return whole, float(rest)


def _two_sided(coins: Floats, rate: float, whole: Floats, rest: Floats, lowest: float, highest: float) -> Floats:
    """Draw r in {lowest..highest} with probability proportional to exp(-rate |r - whole - rest|), one r per class.

    The target is ``whole`` + ``rest``, a whole number plus a fraction. On each side of the target, the distribution is
    a truncated geometric distribution. ``coins``: uniform random numbers. ``coins[0]`` determines the side of the
    target, ``coins[1]`` the distance from it.
    """
    from scipy.special import expit  # noqa: PLC0415 (slow, and most runs need no label selection)

    start = np.minimum(whole, highest)
    sides = start - lowest + 1, np.maximum(highest - whole, 0)
    # if no number is on a side of the target, this side has probability 0, and log 0 = -inf
    with np.errstate(divide="ignore"):
        left, right = (np.log(-np.expm1(-rate * length)) for length in sides)
    log_odds = right - rate * (1 - rest) - (left - rate * (whole - start + rest))
    # Compare the uniform number with the probability of the less likely side: floats near 0 have a finer resolution.
    up = (coins[0] < expit(-np.abs(log_odds))) != (log_odds > 0)
    steps = _truncated_geometric(coins[1], rate, np.where(up, sides[1], sides[0]))
    drawn: Floats = np.where(up, whole + 1 + steps, start - steps)
    return drawn


def _truncated_geometric(coins: Floats, rate: float, lengths: Floats) -> Floats:
    """Return for each number in ``coins`` a j in {0..length-1}, drawn with probability proportional to exp(-rate j)."""
    lost = np.exp(-rate * lengths)
    # Draw a real x with density proportional to exp(-rate x); j is x rounded down. ``reached`` is exp(-rate x).
    reached = coins + (1 - coins) * lost
    with np.errstate(divide="ignore"):
        log_reached = np.where(reached < 0.5, np.log(reached), np.log1p((1 - coins) * np.expm1(-rate * lengths)))
    steps: Floats = np.clip(np.ceil(-log_reached / rate) - 1, 0, lengths - 1)
    return steps


def _mass(near: Floats, length: Floats, epsilon: float) -> Floats:
    """Return the probability that two-sided geometric noise is one of ``length`` successive values on one side of 0.

    ``near``: the smallest absolute value of these values.
    """
    mass: Floats = np.exp(-epsilon * near) * -np.expm1(-epsilon * length) / (1 + math.exp(-epsilon))
    return mass
