"""What one run with canaries proves (Steinke, Nasr, Jagielski 2023, algorithm 1, theorem 5.2).

Each of m canaries takes part with probability 1/2, independently. The auditor sees what the run released, guesses of
some canaries whether they took part, and abstains on the others. Guessing too well refutes (epsilon, delta). One run
can prove only so much: with every guess right, about ln(m / ln(1 / p)).
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

CONFIDENCE: Final = 0.95
SHARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Of the canaries, how many to call "in", and as many "out"; decided before looking, paid for by Bonferroni."""


@dataclass(frozen=True)
class Guess:
    """How well the auditor guessed with ``guesses`` guesses, and the epsilon that this proves."""

    guesses: int
    correct: int
    epsilon_lower_bound: float


def guess(
    scores: NDArray[np.float64], taking_part: NDArray[np.bool_], delta: float, *, confidence: float = CONFIDENCE
) -> tuple[Guess, ...]:
    """Call the highest scores "in" and as many of the lowest "out", for every share; the bounds hold together.

    ``scores``, ``taking_part``: (canaries,). Ties go to those that stand first, so scores must not know the answer.
    """
    order = np.argsort(scores, kind="stable")
    found = []
    for share in SHARES:
        side = max(1, int(share * len(scores)))
        correct = int((~taking_part[order[:side]]).sum() + taking_part[order[-side:]].sum())
        bound = epsilon_lower_bound(len(scores), 2 * side, correct, delta, (1 - confidence) / len(SHARES))
        found.append(Guess(2 * side, correct, bound))
    return tuple(found)


def epsilon_lower_bound(num_canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """Return the largest epsilon that is refuted at ``level`` (a probability of error); 0 where none is."""

    def gap(epsilon: float) -> float:
        return p_value(num_canaries, guesses, correct, epsilon, delta) - level

    if gap(0.0) >= 0:
        return 0.0
    return float(optimize.bisect(gap, 0.0, 30.0, xtol=1e-4)) - 1e-4  # on the refuted side of the root


def p_value(num_canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return how likely an (epsilon, delta) mechanism is to allow so many correct guesses, at most (theorem 5.2).

    At delta 0 each guess is right with probability at most e^epsilon / (1 + e^epsilon), whatever the others are; delta
    adds 2 m delta max_i P(correct > W >= correct - i) / i for the binomial W of that probability.
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(law.pmf(np.arange(correct - 1, -1, -1))) / np.arange(1, correct + 1)
    extra = 2 * num_canaries * delta * float(below.max(initial=0.0))
    return min(1.0, float(law.sf(correct - 1)) + extra)


def power_limit(num_canaries: int, delta: float) -> float:
    """Return what would be proven if every guess were right: no claim above it can be refuted."""
    perfect = np.arange(num_canaries, dtype=np.float64)
    return max(one.epsilon_lower_bound for one in guess(perfect, perfect >= num_canaries // 2, delta))
