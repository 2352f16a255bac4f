"""Which of k records made a noisy gradient, and how often any attacker can be right about it.

The attacker knows k candidates, and all other records of the batch, which it subtracts. It sees the clipped gradient of
one candidate, chosen at random, with the noise of a step of DP-SGD, and names the candidate whose gradient is nearest.
No attacker is right more often: this is the most likely candidate.

The noise bounds this share for any candidates and any attacker. Without the record, the step's sum is a Gaussian around
0, and names the chosen record with probability 1 / k. With the record, the sum is shifted by at most the clipping norm,
1 / z standard deviations for the noise multiplier z. So a guess is right with probability at most
Phi(Phi^-1(1 / k) + 1 / z), where Phi is the normal distribution function (Hayes et al. 2023, "Bounding Training Data
Reconstruction in DP-SGD", theorem 2, for one step; see also Balle et al. 2022). The random choice of batches does not
count here, because the attacker is told that the record is in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch

from fl_sim.threats.membership import share_interval
from fl_sim.types import Params


class Noisy(Protocol):
    """The gradients of a client's steps (``fl_sim.threats.observed.Observed``)."""

    def summed(self, inputs: torch.Tensor, labels: torch.Tensor) -> Params:
        """Return the sum of the clipped gradients of n records."""

    def noisy(self, total: Params, draw: int) -> Params:
        """Return ``total`` with the noise of a step."""


@dataclass(frozen=True)
class Recognised:
    """In ``right`` of ``draws`` draws of the noise, the attacker names the right one of ``candidates`` records.

    ``allowed``: the largest expected number of right draws of any attacker.
    """

    candidates: int
    draws: int
    right: int
    allowed: float

    def __add__(self, other: "Recognised") -> "Recognised":
        """Return the result of both series of draws together, with equally many candidates."""
        assert self.candidates == other.candidates
        return Recognised(
            self.candidates, self.draws + other.draws, self.right + other.right, self.allowed + other.allowed
        )

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of 95 % confidence for the probability of a right draw, by Clopper and Pearson."""
        return share_interval(self.right, self.draws)


def most_found(noise_multiplier: float, candidates: int) -> float:
    """Return the largest probability of naming the right one of ``candidates`` records, at least 2, by any attacker.

    >>> round(most_found(1.0, 2), 4)
    0.8413
    """
    if not noise_multiplier:
        return 1.0
    return NormalDist().cdf(NormalDist().inv_cdf(1 / candidates) + 1 / noise_multiplier)


def recognised(
    seen: Noisy, inputs: torch.Tensor, labels: torch.Tensor, *, noise_multiplier: float, draws: int
) -> Recognised:
    """Name the record behind a noisy gradient, among k records, in ``draws`` draws of the noise.

    ``inputs``: (k, *input shape), normalised. ``labels``: (k,). Each record is behind every k-th draw, because
    the bound holds on average over the records and not for the most conspicuous one.
    """
    each = [seen.summed(inputs[[one]], labels[[one]]) for one in range(len(labels))]
    names = seen.noisy(each[0], 0).keys()  # parameters that stay on the client tell the attacker nothing
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
