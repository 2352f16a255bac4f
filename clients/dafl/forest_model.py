"""A graphical model of a table whose graph is a forest: fitted to noisy marginals, sampled column by column.

The estimate is that of McKenna, Sheldon, Miklau (2019, "Graphical-model based estimation and inference for
differential privacy", the package mbi): of all marginals that some table has, those nearest to the noisy ones in
squares, weighted by the noise, found by mirror descent; and of all tables with these, the one of largest entropy. On a
forest the marginals of a model follow from one pass to the roots and one back. All of it works on released numbers
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clients.symmetric import Array

Edge: TypeAlias = tuple[int, int]

_STEPS: Final = 1000
_GROWTH, _CUT = 1.2, 0.5


@dataclass(frozen=True)
class Marginals:
    """Of each class: ``ones`` by column, (classes, cells); ``twos`` by (parent, child), (classes, cells, cells).

    Counts of records. Edges are in an order in which a parent comes before its children, and make a forest.
    """

    ones: Sequence[Array]
    twos: Mapping[Edge, Array]

    def sample(self, counts: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the cells of ``counts[c]`` records of each class c, (records, columns), sorted by class.

        Drawn systematically: of n records with probability p there are n p, rounded up or down, so that drawing adds
        next to nothing to the noise of the release.
        """
        made = np.zeros((int(counts.sum()), len(self.ones)), dtype=np.int64)
        parents = {child: parent for parent, child in self.twos}
        roots = [column for column in range(len(self.ones)) if column not in parents]
        ends = np.cumsum(counts)
        for label, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
            rows = made[start:end]
            for column in roots:
                rows[:, column] = _dealt(self.ones[column][label], len(rows), generator)
            for (parent, child), tables in self.twos.items():
                for cell in np.unique(rows[:, parent]):
                    at = np.flatnonzero(rows[:, parent] == cell)
                    rows[at, child] = _dealt(tables[label, cell], len(at), generator)
        return made


def fitted(noisy: Marginals, std_of_ones: float, std_of_twos: float) -> Marginals:
    """Return the marginals of the model nearest to ``noisy`` ones; the same where there is no noise, both std 0."""
    if not std_of_ones:
        return noisy
    # Sums of squares, each by its noise: in units of the less noisy ones, whose weight is 1.
    if not noisy.twos:
        std_of_twos = std_of_ones
    least = min(std_of_ones, std_of_twos)
    of_ones, of_twos = (least / std_of_ones) ** 2, (least / std_of_twos) ** 2
    totals = _totals(noisy, of_ones, of_twos)
    potentials = Marginals(
        [np.zeros_like(table) for table in noisy.ones],
        {edge: np.zeros_like(table) for edge, table in noisy.twos.items()},
    )
    found = _marginals_of(potentials, totals)
    gaps, loss = _gaps(found, noisy, of_ones, of_twos)
    rate = 1 / totals
    for _ in range(_STEPS):
        tried = _moved(potentials, gaps, rate)
        near = _marginals_of(tried, totals)
        near_gaps, near_loss = _gaps(near, noisy, of_ones, of_twos)
        better = near_loss <= loss
        rate = np.where(better, rate * _GROWTH, rate * _CUT)
        potentials, found = _chosen(better, tried, potentials), _chosen(better, near, found)
        gaps, loss = _chosen(better, near_gaps, gaps), np.where(better, near_loss, loss)
    return found


def _totals(noisy: Marginals, of_ones: float, of_twos: float) -> Array:
    """Return the number of records of each class, at least 1: the mean of all tables' sums, by their precision."""
    sums = [(table.sum(axis=1), of_ones / table[0].size) for table in noisy.ones]
    sums += [(table.sum(axis=(1, 2)), of_twos / table[0].size) for table in noisy.twos.values()]
    total: Array = np.sum([weight * value for value, weight in sums], axis=0) / sum(weight for _, weight in sums)
    return np.maximum(total, 1.0)


def _marginals_of(potentials: Marginals, totals: Array) -> Marginals:
    """Return the marginals of the distribution proportional to exp(sum of potentials), times ``totals`` by class."""
    inward = [table.copy() for table in potentials.ones]
    given: dict[Edge, Array] = {}
    for (parent, child), table in reversed(list(potentials.twos.items())):
        joint = table + inward[child][:, None, :]
        peak = joint.max(axis=2, keepdims=True)
        np.exp(joint - peak, out=joint)
        mass = joint.sum(axis=2, keepdims=True)
        inward[parent] += (peak + np.log(mass))[:, :, 0]
        given[parent, child] = joint / mass
    ones: list[Array] = [_softmax(table) * totals[:, None] for table in inward]  # true of roots; others follow
    twos: dict[Edge, Array] = {}
    for parent, child in potentials.twos:
        twos[parent, child] = ones[parent][:, :, None] * given[parent, child]
        ones[child] = twos[parent, child].sum(axis=1)
    return Marginals(ones, twos)


def _softmax(logits: Array) -> Array:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    normalised: Array = shares / shares.sum(axis=1, keepdims=True)
    return normalised


def _gaps(found: Marginals, noisy: Marginals, of_ones: float, of_twos: float) -> tuple[Marginals, Array]:
    """Return the gradient of the weighted half squares by ``found``, and their sum for each class."""
    ones = [of_ones * (here - there) for here, there in zip(found.ones, noisy.ones, strict=True)]
    twos = {edge: of_twos * (here - noisy.twos[edge]) for edge, here in found.twos.items()}
    loss = sum((table**2).sum(axis=1) for table in ones) / of_ones
    loss = loss + sum((table**2).sum(axis=(1, 2)) for table in twos.values()) / of_twos
    return Marginals(ones, twos), loss


def _moved(potentials: Marginals, gaps: Marginals, rate: Array) -> Marginals:
    ones = [here - rate[:, None] * gap for here, gap in zip(potentials.ones, gaps.ones, strict=True)]
    twos = {edge: here - rate[:, None, None] * gaps.twos[edge] for edge, here in potentials.twos.items()}
    return Marginals(ones, twos)


def _chosen(which: NDArray[np.bool_], first: Marginals, second: Marginals) -> Marginals:
    """Return ``first`` for the classes of ``which``, and ``second`` for the others."""
    ones = [np.where(which[:, None], here, there) for here, there in zip(first.ones, second.ones, strict=True)]
    twos = {edge: np.where(which[:, None, None], here, second.twos[edge]) for edge, here in first.twos.items()}
    return Marginals(ones, twos)


def _dealt(weights: Array, number: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return ``number`` cells in random order, each as often as its share says, rounded up or down at random."""
    total = weights.sum()
    ends = np.cumsum(weights) / total if total > 0 else np.arange(1, len(weights) + 1) / len(weights)
    ends[-1] = 1.0
    reached = np.floor(ends * number + generator.uniform())
    dealt: NDArray[np.int64] = np.repeat(np.arange(len(weights)), np.diff(reached, prepend=0).astype(np.int64))
    return generator.permutation(dealt)
