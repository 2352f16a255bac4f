"""An attacker guesses which of k records made a noisy gradient; a bound on its success holds for every attacker.

The attacker has k candidates, and all other records of the batch, whose gradients it subtracts. It sees the clipped
gradient of one candidate, chosen at random, with the noise of a DP-SGD step, and guesses the candidate with the nearest
gradient. This is the most likely candidate, so no attacker is right more often.

The noise bounds the probability of a right guess, for any candidates. Without the record, the step's sum is a Gaussian
around 0, and a guess is right with probability 1 / k. With the record, the sum is shifted by at most the clipping norm,
which is 1 / z standard deviations for the noise multiplier z. So a guess is right with probability at most
Phi(Phi^-1(1 / k) + 1 / z), where Phi is the normal distribution function (Hayes et al. 2023, "Bounding Training Data
Reconstruction in DP-SGD", theorem 2, for one step; see also Balle et al. 2022). There is no amplification by sampling
here, because the attacker is told that the record is in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch

from fl_sim.threats.membership import share_interval
from fl_sim.types import Params


class Noisy(Protocol):
    """The gradients that an attacker sees (class ``fl_sim.threats.observed.Observed``)."""

    def summed(self, inputs: torch.Tensor, labels: torch.Tensor) -> Params:
        """Return the sum of the clipped gradients of n records."""

    def noisy(self, total: Params, draw: int) -> Params:
        """Return ``total`` plus the noise of a private step. Equal indices ``draw`` give equal noise."""


@dataclass(frozen=True)
class Recognised:
    """The success of an attacker that guesses one of ``candidates`` records: ``right`` of ``draws`` guesses are right.

    ``allowed``: an upper bound on the expected number of right guesses, for any attacker.
    """

    candidates: int
    draws: int
    right: int
    allowed: float

    def __add__(self, other: "Recognised") -> "Recognised":
        """Return the sum of two series of draws. Both must have the same number of candidates."""
        assert self.candidates == other.candidates
        return Recognised(
            self.candidates, self.draws + other.draws, self.right + other.right, self.allowed + other.allowed
        )

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the probability of a right guess, by Clopper and Pearson."""
        return share_interval(self.right, self.draws)


def most_found(noise_multiplier: float, candidates: int) -> float:
    """Return an upper bound on any attacker's probability to guess the right one of ``candidates`` (2 or more) records.

    >>> round(most_found(1.0, 2), 4)
    0.8413
    """
    if not noise_multiplier:
        return 1.0
    return NormalDist().cdf(NormalDist().inv_cdf(1 / candidates) + 1 / noise_multiplier)


def recognised(
    seen: Noisy, inputs: torch.Tensor, labels: torch.Tensor, *, noise_multiplier: float, draws: int
) -> Recognised:
    """Guess which of k records made a noisy gradient, in ``draws`` draws of the noise, and count the right guesses.

    ``inputs``: (k, *input shape), normalised. ``labels``: (k,). Each record makes the gradient of every k-th draw: the
    bound holds on average over the records, not for the most conspicuous one.
    """
    each = [seen.summed(inputs[[one]], labels[[one]]) for one in range(len(labels))]
    names = seen.noisy(each[0], 0).keys()  # the attacker sees only parameters that leave the client
    vectors = torch.stack([_flat({name: one[name] for name in names}) for one in each])
    halves = vectors.square().sum(1) / 2
    right = 0
    for draw in range(draws):
        true = draw % len(labels)
        found = _flat(seen.noisy(each[true], draw + 1))  # draw 0 is the noise of the reconstructed gradient
        right += int((vectors @ found - halves).argmax()) == true
    return Recognised(len(labels), draws, right, draws * most_found(noise_multiplier, len(labels)))


def _flat(gradient: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in gradient.values()]).double()
