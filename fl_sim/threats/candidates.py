"""An attacker guesses which of k candidate records a noisy gradient comes from. The success has a known bound.

A DP-SGD step publishes the sum of the clipped gradients of a batch, plus noise. The batch contains one of k candidate
records, chosen at random. The attacker knows the candidates and all other records of the batch. It subtracts the
gradients of the other records. What remains is the clipped gradient of the candidate, plus the noise. The attacker
guesses the candidate with the nearest gradient. This candidate is the most likely one, so no attacker is right more
often.

The noise bounds the probability of a right guess, for any candidates. If the record were not in the batch, the step's
sum would be a Gaussian around 0, and a guess would be right with probability 1 / k. The record shifts the sum by at
most the clipping norm, which is 1 / z standard deviations for the noise multiplier z. So a guess is right with
probability at most Phi(Phi^-1(1 / k) + 1 / z), where Phi is the standard normal distribution function (Hayes et al.
2023, "Bounding Training Data Reconstruction in DP-SGD", theorem 2, for one step; see also Balle et al. 2022). There is
no amplification by sampling here, because the attacker is told that the record is in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch

from fl_sim.threats.membership import share_interval
from fl_sim.types import Params


class Noisy(Protocol):
    """The interface of ``fl_sim.threats.observed.Observed``: gradients as an attacker sees them."""

    def summed(self, inputs: torch.Tensor, labels: torch.Tensor) -> Params:
        """Return the sum of the clipped gradients of n records."""

    def noisy(self, total: Params, draw: int) -> Params:
        """Return ``total`` plus the noise of a private step. ``draw``: the index of the noise.

        Equal indices give equal noise.
        """


@dataclass(frozen=True)
class Recognised:
    """The success of an attacker that chooses among ``candidates`` records.

    ``draws``: the number of noisy gradients, with one guess for each. ``right``: the number of right guesses.
    ``allowed``: an upper bound on the expected number of right guesses, for any attacker.
    """

    candidates: int
    draws: int
    right: int
    allowed: float

    def __add__(self, other: "Recognised") -> "Recognised":
        """Return the total of two results, which must have the same number of candidates."""
        assert self.candidates == other.candidates
        return Recognised(
            self.candidates, self.draws + other.draws, self.right + other.right, self.allowed + other.allowed
        )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the probability of a right guess, by Clopper and Pearson."""
        return share_interval(self.right, self.draws)


def most_found(noise_multiplier: float, candidates: int) -> float:
    """Return the largest probability with which any attacker guesses the right record among ``candidates`` (2 or more).

    >>> round(most_found(1.0, 2), 4)
    0.8413
    """
    if not noise_multiplier:
        return 1.0
    return NormalDist().cdf(NormalDist().inv_cdf(1 / candidates) + 1 / noise_multiplier)


def recognised(
    seen: Noisy, inputs: torch.Tensor, labels: torch.Tensor, *, noise_multiplier: float, draws: int
) -> Recognised:
    """Guess which of k records a noisy gradient comes from, ``draws`` times with new noise; count the right guesses.

    ``inputs``: (k, *input shape), normalised. ``labels``: (k,). Each record is the right answer equally often, up to
    one draw. The bound requires this: it holds for the average over the records, but not for the record that is easiest
    to recognise.
    """
    each = [seen.summed(inputs[[one]], labels[[one]]) for one in range(len(labels))]
    names = seen.noisy(each[0], 0).keys()  # the attacker sees only parameters that leave the client
    vectors = torch.stack([_flat({name: one[name] for name in names}) for one in each])
    halves = vectors.square().sum(1) / 2
    right = 0
    for draw in range(draws):
        true = draw % len(labels)
        found = _flat(seen.noisy(each[true], draw + 1))  # index 0 is the noise of the attacked gradient
        right += int((vectors @ found - halves).argmax()) == true
    return Recognised(len(labels), draws, right, draws * most_found(noise_multiplier, len(labels)))


def _flat(gradient: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in gradient.values()]).double()
