"""What a run's accuracies over its rounds come to, and what it took to get anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fl_sim.store.run_directory import RoundRecord

LADDER = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Accuracies for which ``result.json`` says what they took."""


@dataclass(frozen=True)
class Spent:
    """Bytes to and from all clients, seconds, and those of the virtual clock; None where nobody knows or may tell."""

    bytes: int | None = 0
    seconds: float | None = 0.0
    virtual_seconds: float | None = 0.0


@dataclass(frozen=True)
class Reached:
    """The first evaluated round whose test accuracy is at least ``accuracy``, and what it took to finish it."""

    accuracy: float
    round: int
    bytes: int | None
    seconds: float | None
    virtual_seconds: float | None = None


def mean_of_last(rounds: Sequence[RoundRecord], count: int = 10) -> float | None:
    """Return the mean test accuracy of the last ``count`` rounds, of those that were evaluated; None without any."""
    accuracies = [one.test_accuracy for one in rounds[-count:] if one.test_accuracy is not None]
    return sum(accuracies) / len(accuracies) if accuracies else None


def area_under(rounds: Sequence[RoundRecord]) -> float | None:
    """Return the mean height, in [0, 1], of the curve of test accuracies, straight between evaluated rounds.

    The curve begins with the first of these. None without any.
    """
    curve = [(one.round, one.test_accuracy) for one in rounds if one.test_accuracy is not None]
    if len(curve) < 2:
        return curve[0][1] if curve else None
    area = sum((later - round_) * (before + after) / 2 for (round_, before), (later, after) in pairwise(curve))
    return area / (curve[-1][0] - curve[0][0])


def reached(rounds: Sequence[RoundRecord], accuracy: float, beforehand: Spent = Spent()) -> Reached | None:
    """Return what it took to a test accuracy of at least ``accuracy``; None where no evaluated round has it.

    ``rounds``: all from the first on. ``beforehand``: what was spent before the first of them. What is unknown of one
    round is unknown of the sum.
    """
    for one, spent in zip(rounds, spent_by(rounds, beforehand), strict=True):
        if one.test_accuracy is not None and one.test_accuracy >= accuracy:
            return Reached(accuracy, one.round, spent.bytes, spent.seconds, spent.virtual_seconds)
    return None


def spent_by(rounds: Sequence[RoundRecord], beforehand: Spent = Spent()) -> list[Spent]:
    """Return what was spent by the end of each round, with what was spent ``beforehand``."""
    return list(accumulate((_spent(one) for one in rounds), _plus, initial=beforehand))[1:]


def _spent(one: RoundRecord) -> Spent:
    known = one.bytes_down is not None and one.bytes_up is not None
    return Spent((one.bytes_down or 0) + (one.bytes_up or 0) if known else None, one.seconds, one.virtual_seconds)


def _plus(left: Spent, right: Spent) -> Spent:
    return Spent(
        None if left.bytes is None or right.bytes is None else left.bytes + right.bytes,
        _sum(left.seconds, right.seconds),
        _sum(left.virtual_seconds, right.virtual_seconds),
    )


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right
