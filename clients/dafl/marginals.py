"""Records of tables, drawn from a graphical model of noisy marginals (after McKenna, Miklau, Sheldon 2021, "MST").

Every column of a table becomes a few cells, by public knowledge alone. A client releases once, in three parts: the
counts of every column's cells, in each class; which pairs of columns belong together, by the exponential mechanism; and
the counts of these pairs' cells, in each class. The label is one more column of every count, so of m columns the
counts are marginals of two and of three. All else is post-processing: a model whose graph is a forest is fitted
(``clients.dafl.forest_model``), and records are drawn from it.

What a record can move, when it is added or removed: it is in exactly one cell of each of k tables, so their counts,
taken together, move by sqrt(k) in Euclidean length, no more and no less. The score of a pair is the sum of absolute
differences between its counts and what they would be if its columns were independent, which is computed from the
released counts and stands still: one cell moves by 1, and so the score by at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.dafl.forest_model import Edge, fitted
from clients.dafl.forest_model import Marginals as Counted
from clients.dafl.generator import Bill, PrivateRecords
from clients.dafl.table import Table, cells_of, records_of, unnamed
from clients.symmetric import Array
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.privacy.grid import grid_spacing
from fl_sim.privacy.mechanisms import Noise, add_noise
from fl_sim.settings import Settings

_UP: Final = 1 + 2.0**-50  # rounding must not make noise less than what was billed


class Marginals(Settings):
    """Draw records of a table from noisy counts of its columns and of pairs of them.

    ``columns_share`` and ``pairs_share``: which part of the budget (in zCDP) goes to the counts of single columns and
    to choosing the pairs; the rest goes to the counts of pairs. The published method takes a third for each. ``cells``:
    into how many equal parts of 0 to 1 a number is cut where the data set does not say what its columns are.
    """

    kind: Literal["marginals"] = "marginals"
    columns_share: float = Field(1 / 3, gt=0, lt=1)
    pairs_share: float = Field(1 / 3, gt=0, lt=1)
    cells: int = Field(16, ge=2)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for images."""
        if len(shape) != 1:
            raise UserError(f"preprocess.generator marginals is for tables; these records are images of shape {shape}")

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> Bill:  # noqa: ARG002 (slot's)
        """Price all three parts together as one zCDP release of rho = 1 / (2 z^2).

        A Gaussian release of noise z costs that much, an exponential mechanism of epsilon costs epsilon^2 / 8 (Cesar,
        Rogers 2021), and they add up, each chosen after what precedes it is seen (Bun, Steinke 2016, lemma 2.3).
        Refused where the noise on the count of a single cell is larger than all records together.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

        from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

        if self.columns_share + self.pairs_share >= 1:
            raise UserError(
                f"columns_share {self.columns_share:g} and pairs_share {self.pairs_share:g} leave nothing for the "
                "counts of pairs: give less than 1 together"
            )
        if math.isinf(epsilon):
            return Bill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
        z = noise_multiplier(lambda event: dp_event.ZCDpEvent(_rho(event.noise_multiplier)), 1, epsilon, delta)
        refused = f"{num_records} records are too few for epsilon {epsilon:g}: each count would be noise below {z:.0f}"
        return Bill(dp_event.ZCDpEvent(_rho(z)), 1, z, 1.0, refused if num_records < z else "")

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: Bill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return records of which every number is one of its column's values, and every category a category."""
        self.check_shape(tuple(records.inputs.shape[1:]))
        columns = records.columns or unnamed(records.inputs.shape[1], self.cells)
        present = np.flatnonzero(counts)
        if not len(present):
            return records.inputs[:0]
        # A record of a class that was not released takes part, and is counted nowhere.
        own = np.isin(records.labels.numpy(), present)
        cells = cells_of((records.inputs.numpy()[own] + 1) / 2, columns)
        labels = np.searchsorted(present, records.labels.numpy()[own])
        table = Table(cells, labels, len(present), tuple(column.cells for column in columns))
        counted, stds = self._counted(table, bill.noise_multiplier, noise)
        made = fitted(counted, *stds).sample(counts[present], generator)
        return torch.from_numpy(records_of(made, columns) * 2 - 1)

    def _counted(self, table: Table, noise_multiplier: float, noise: Noise) -> tuple[Counted, tuple[float, float]]:
        """Make the three parts of the release: return the noisy counts, and the noise's standard deviation on each."""
        z_of_ones = noise_multiplier / math.sqrt(self.columns_share)
        z_of_twos = noise_multiplier / math.sqrt(1 - self.columns_share - self.pairs_share)
        most = max(1, len(table.sizes) - 1)  # edges of a forest
        ones, std_of_ones = released(table.ones(), z_of_ones, noise, "columns")
        epsilon = math.sqrt(8 * self.pairs_share * _rho(noise_multiplier) / most)
        edges = chosen_pairs(table, ones, z_of_twos * math.sqrt(most), epsilon, noise)
        twos, std_of_twos = released([table.two(*edge) for edge in edges], z_of_twos, noise, "pairs")
        return Counted(ones, dict(zip(edges, twos, strict=True))), (std_of_ones, std_of_twos)


def released(tables: Sequence[Array], noise_multiplier: float, noise: Noise, purpose: str) -> tuple[list[Array], float]:
    """Return noisy counts, and the noise's standard deviation. A record is in exactly one cell of each of ``tables``.

    Counts are whole numbers, and so on the grid that noise is rounded to, as long as it is no wider than 1.
    """
    std = noise_multiplier * math.sqrt(len(tables)) * _UP
    if not std:
        return list(tables), 0.0
    if grid_spacing(std) > 1:
        raise UserError(f"noise of {std:g} records on every count leaves nothing: give a larger epsilon")
    exact = np.concatenate([table.ravel() for table in tables])
    drawn = noise.gaussian(exact.size, std, purpose=f"marginals: {purpose}", server_round=1)
    parts = np.split(add_noise(exact, std, drawn), np.cumsum([table.size for table in tables])[:-1])
    return [part.reshape(table.shape) for part, table in zip(parts, tables, strict=True)], std


def chosen_pairs(table: Table, ones: Sequence[Array], std: float, epsilon: float, noise: Noise) -> list[Edge]:
    """Return the edges of a forest, each parent before its children, chosen one by one by the exponential mechanism.

    ``epsilon``: of each choice, inf for the best pair at every turn. A pair's score is what it tells beyond its columns
    (see ``score``), less what noise of ``std`` on its counts would add to that (McKenna et al. 2022, "AIM"). The
    choice "no more pairs" has the score 0.
    """
    columns = len(table.sizes)
    pairs = [(left, right) for left in range(columns) for right in range(left + 1, columns)]
    expected = math.sqrt(2 / math.pi) * std * table.num_classes
    scores = np.array([score(table, ones, pair) - expected * table.cells(*pair) for pair in pairs] + [0.0])
    tree = np.arange(columns)  # which tree a column is in
    chosen: list[Edge] = []
    for turn in range(columns - 1):
        joins = [tree[left] != tree[right] for left, right in pairs]
        open_ones = np.flatnonzero([*joins, True])
        place = open_ones[exponential_mechanism(scores[open_ones], epsilon, noise, turn)]
        if place == len(pairs):
            break
        left, right = pairs[place]
        chosen.append((left, right))
        tree[tree == tree[right]] = tree[left]
    return _from_the_roots(chosen)


def score(table: Table, ones: Sequence[Array], pair: Edge) -> float:
    """Return the sum, over classes and cells, of |count of the pair - what it would be of independent columns|.

    ``ones``: released counts of the columns. One record more or less changes this by at most 1.
    """
    left, right = (np.maximum(ones[column], 0.0) for column in pair)
    number = np.maximum(right.sum(axis=1), 1.0)
    independent = left[:, :, None] * right[:, None, :] / number[:, None, None]
    return float(np.abs(table.two(*pair) - independent).sum())


def exponential_mechanism(scores: Array, epsilon: float, noise: Noise, turn: int) -> int:
    """Return a place with probability proportional to exp(epsilon score / 2): private where a score moves by 1.

    A race: the least of exponential random numbers of these rates (as in Gumbel's trick, with the coins resolved near
    0, where unlikely places win).
    """
    if math.isinf(epsilon):
        return int(scores.argmax())
    first, second = noise.uniform(2 * len(scores), purpose="marginals: which pair", server_round=turn).reshape(2, -1)
    coins = first + second * 2.0**-53 + 2.0**-107
    return int((np.log(-np.log1p(-np.minimum(coins, 1 - 2.0**-53))) - epsilon * scores / 2).argmin())


def _from_the_roots(edges: Sequence[Edge]) -> list[Edge]:
    """Return the edges of a forest as (parent, child), each parent before its children."""
    neighbours: dict[int, list[int]] = {}
    for left, right in edges:
        neighbours.setdefault(left, []).append(right)
        neighbours.setdefault(right, []).append(left)
    ordered: list[Edge] = []
    seen: set[int] = set()
    for root in sorted(neighbours):
        if root in seen:
            continue
        seen.add(root)
        waiting = [root]
        for parent in waiting:  # grows as it goes
            children = [one for one in neighbours[parent] if one not in seen]
            ordered += [(parent, child) for child in children]
            seen.update(children)
            waiting += children
    return ordered


def _rho(noise_multiplier: float) -> float:
    return 0.5 / noise_multiplier**2 if noise_multiplier else math.inf
