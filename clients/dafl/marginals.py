"""Synthetic table records from a graphical model of noisy marginals (after McKenna, Miklau, Sheldon 2021, "MST").

Public knowledge divides the values of every column into a few cells (bins). A client then makes three private
computations. First, it counts the records in every column's cells, for each class, and adds noise. Second, the
exponential mechanism selects pairs of dependent columns. Third, the client counts the records in these pairs' cells,
for each class, and adds noise. (The label is one more column, so the counts are marginals of two and of three columns.)
All other computation is post-processing: a graphical model, whose graph is a forest, is fitted to the noisy counts, and
the synthetic records are drawn from this model.

Sensitivity, if one record is added or removed: the record is in exactly one cell of each of k tables. So the counts of
all k tables together change by exactly sqrt(k) in Euclidean norm. The score of a pair of columns is the sum of absolute
differences between the pair's counts and the expected counts of independent columns. The expected counts are computed
from noisy counts that are already released, so they do not change. One count of the pair changes by 1. So the score
changes by at most 1.

The estimator was published by McKenna, Sheldon, Miklau (2019, "Graphical-model based estimation and inference for
differential privacy", the package mbi). Mirror descent finds consistent marginals with the least squared distance to
the noisy marginals, weighted by the noise. The model is the distribution of largest entropy with these marginals. On a
forest, the marginals of a model are computed by one pass to the roots and one pass back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.dafl.generator import GeneratorBill, PrivateRecords
from clients.moments import Array
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise, add_noise, grid_spacing
from fl_sim.settings import Settings
from fl_sim.types import Column

Edge: TypeAlias = tuple[int, int]

# a factor that enlarges the noise, so that the rounded noise is at least as large as the bill assumes
_UP: Final = 1 + 2.0**-50
_STEPS: Final = 1000  # the number of steps of mirror descent
# factors of mirror descent's learning rate: _GROWTH after a step that does not raise the loss, _CUT after a step that
# does
_GROWTH, _CUT = 1.2, 0.5


class Marginals(Settings):
    """Draw records of a table from noisy counts of single columns and of pairs of columns.

    ``columns_share``: the share of the budget for the counts of single columns; budgets are in zero-concentrated
    differential privacy (zCDP). ``pairs_share``: the share for the selection of pairs. The remaining budget is for the
    counts of pairs. The published method uses a third of the budget for each of these three computations. ``cells``:
    the number of equal intervals into which the range 0 to 1 of a number is divided, if the data set does not describe
    its columns.
    """

    kind: Literal["marginals"] = "marginals"
    columns_share: float = Field(1 / 3, gt=0, lt=1)
    pairs_share: float = Field(1 / 3, gt=0, lt=1)
    cells: int = Field(16, ge=2)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for images: this generator makes only table records."""
        if len(shape) != 1:
            raise UserError(
                f"preprocess.generator marginals is for tables, and these records are images of shape {shape}: set "
                "preprocess.generator=dp-cgan or mean-embedding"
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the zCDP cost of the three private computations (see the module's docstring): rho = 1 / (2 z^2).

        Noisy counts with the noise multiplier z cost this rho. An exponential mechanism with the parameter epsilon
        costs epsilon^2 / 8 (Cesar, Rogers 2021). The costs add up, even if each computation depends on the earlier
        results (Bun, Steinke 2016, lemma 2.3). No synthetic records are made if the noise on the count of a single cell
        exceeds the number of all records; the bill's ``refused`` is the reason.
        """
        # dp_accounting loads slowly, and most runs need no generator.
        from dp_accounting import dp_event  # noqa: PLC0415

        from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415

        del num_classes
        if self.columns_share + self.pairs_share >= 1:
            raise UserError(
                f"columns_share {self.columns_share:g} and pairs_share {self.pairs_share:g} leave nothing for the "
                "counts of pairs: their sum must be below 1"
            )
        if math.isinf(epsilon):
            return GeneratorBill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
        z = noise_multiplier(lambda event: dp_event.ZCDpEvent(_rho(event.noise_multiplier)), 1, epsilon, delta)
        refused = f"{num_records} records are too few for epsilon {epsilon:g}: counts need at least {z:.0f} records"
        return GeneratorBill(dp_event.ZCDpEvent(_rho(z)), 1, z, 1.0, refused if num_records < z else "")

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return synthetic records, (sum of counts, features) in [-1, 1], sorted by class.

        Every number in a record is one of the column's values, and every category is one of the column's categories.
        """
        self.check_shape(tuple(records.inputs.shape[1:]))
        columns = records.columns or unnamed(records.inputs.shape[1], self.cells)
        present = np.flatnonzero(counts)
        if not len(present):
            return records.inputs[:0]
        # If a class gets no synthetic records, its real records are left out: they are not counted in any cell.
        own = np.isin(records.labels.numpy(), present)
        cells = cells_of((records.inputs.numpy()[own] + 1) / 2, columns)
        labels = np.searchsorted(present, records.labels.numpy()[own])
        table = CellTable(cells, labels, len(present), tuple(column.cells for column in columns))
        z = bill.noise_multiplier
        z_of_twos = z / math.sqrt(1 - self.columns_share - self.pairs_share)
        # the pairs are the edges of a forest, and a forest over n columns has at most n - 1 edges
        most = max(1, len(table.sizes) - 1)
        ones, std_of_ones = released(table.ones(), z / math.sqrt(self.columns_share), noise, "columns")
        epsilon = math.sqrt(8 * self.pairs_share * _rho(z) / most)
        edges = chosen_pairs(table, ones, z_of_twos * math.sqrt(most), epsilon, noise)
        twos, std_of_twos = released([table.counts(*edge) for edge in edges], z_of_twos, noise, "pairs")
        model = fitted(ForestMarginals(ones, dict(zip(edges, twos, strict=True))), std_of_ones, std_of_twos)
        made = model.sample(counts[present], generator)
        return torch.from_numpy(records_of(made, columns) * 2 - 1)


def released(tables: Sequence[Array], noise_multiplier: float, noise: Noise, purpose: str) -> tuple[list[Array], float]:
    """Return the counts in ``tables`` with noise, and the standard deviation of the noise.

    A record is in exactly one cell of each table. Noise is rounded to a rounding grid. Whole numbers, such as counts,
    lie on this grid if its spacing is at most 1. Raises UserError if the spacing is larger. ``purpose``: the name of
    the noise stream.
    """
    std = noise_multiplier * math.sqrt(len(tables)) * _UP
    if not std:
        return list(tables), 0.0
    if grid_spacing(std) > 1:
        raise UserError(f"the noise on every count has a standard deviation of {std:g} records: set a larger epsilon")
    exact = np.concatenate([table.ravel() for table in tables])
    drawn = noise.gaussian(exact.size, std, purpose=f"marginals: {purpose}", server_round=1)
    parts = np.split(add_noise(exact, std, drawn), np.cumsum([table.size for table in tables])[:-1])
    return [part.reshape(table.shape) for part, table in zip(parts, tables, strict=True)], std


def chosen_pairs(table: CellTable, ones: Sequence[Array], std: float, epsilon: float, noise: Noise) -> list[Edge]:
    """Return pairs of dependent columns, the edges of a forest, selected one by one by the exponential mechanism.

    Each edge is (parent, child), and a parent comes before its children. ``ones``: the noisy counts of single columns.
    ``epsilon``: the privacy cost of each selection; inf selects the best pair every time. ``std``: the standard
    deviation of the later noise on a pair's counts. The score of a pair is the dependence of its columns (see
    ``score``), minus the expected contribution of this noise (McKenna et al. 2022, "AIM"). In each selection, the
    decision to stop is one more candidate, with the score 0.
    """
    columns = len(table.sizes)
    pairs = [(left, right) for left in range(columns) for right in range(left + 1, columns)]
    expected = math.sqrt(2 / math.pi) * std * table.num_classes
    found = [score(table, ones, pair) - expected * (table.sizes[pair[0]] * table.sizes[pair[1]]) for pair in pairs]
    scores = np.array([*found, 0.0])
    tree = np.arange(columns)  # tree[c]: the index of the tree that contains column c, in the forest
    chosen: list[Edge] = []
    for draw in range(columns - 1):
        joins = [tree[left] != tree[right] for left, right in pairs]
        open_ones = np.flatnonzero([*joins, True])
        place = open_ones[exponential_mechanism(scores[open_ones], epsilon, noise, draw)]
        if place == len(pairs):
            break
        left, right = pairs[place]
        chosen.append((left, right))
        tree[tree == tree[right]] = tree[left]
    return _parents_first(chosen)


def score(table: CellTable, ones: Sequence[Array], pair: Edge) -> float:
    """Return the dependence of two columns: the sum over classes and pairs of cells of |count - expected count|.

    The expected counts are those of independent columns. They are computed from ``ones``, the noisy counts of single
    columns, which are already released. Adding or removing one record changes the score by at most 1.
    """
    left, right = (np.maximum(ones[column], 0.0) for column in pair)
    number = np.maximum(right.sum(axis=1), 1.0)
    independent = left[:, :, None] * right[:, None, :] / number[:, None, None]
    return float(np.abs(table.counts(*pair) - independent).sum())


def exponential_mechanism(scores: Array, epsilon: float, noise: Noise, draw: int) -> int:
    """Return an index of ``scores``, drawn with probability proportional to exp(epsilon score / 2).

    The privacy cost of the draw is ``epsilon`` if the sensitivity of a score is 1. The function draws an exponential
    random number for each index, with these probabilities as rates. It returns the index of the smallest number,
    similar to the Gumbel trick. The exponential numbers are made from uniform numbers with a fine resolution near 0.
    This resolution decides the probability of unlikely indices. ``draw``: the index of this draw. Each draw has its own
    noise.
    """
    if math.isinf(epsilon):
        return int(scores.argmax())
    first, second = noise.uniform(2 * len(scores), purpose="marginals: which pair", server_round=draw).reshape(2, -1)
    coins = first + second * 2.0**-53 + 2.0**-107
    return int((np.log(-np.log1p(-np.minimum(coins, 1 - 2.0**-53))) - epsilon * scores / 2).argmin())


def unnamed(num_features: int, cells: int) -> tuple[Column, ...]:
    """Return a column description for each of ``num_features`` features in [0, 1], if the data set has none.

    The values of a column are the midpoints of ``cells`` equal intervals from 0 to 1.
    """
    middles = tuple((2 * cell + 1) / (2 * cells) for cell in range(cells))
    return tuple(Column(f"feature {place}", values=middles) for place in range(num_features))


def cells_of(features: NDArray[np.float32] | Array, columns: Sequence[Column]) -> NDArray[np.int64]:
    """Return the cell index of each record in each column, shape (records, columns).

    Every possible record has a cell. A number is in the cell of its column's nearest value, even if the number is
    outside the range of these values. Every listed category has its own cell. Unlisted categories share the last cell.
    """
    found = np.zeros((len(features), len(columns)), dtype=np.int64)
    start = 0
    for place, column in enumerate(columns):
        part = features[:, start : start + column.width]
        start += column.width
        if column.values:
            between = np.convolve(column.values, [0.5, 0.5], "valid")
            found[:, place] = np.searchsorted(between, part[:, 0])
        else:
            listed = part > 0.5
            found[:, place] = np.where(listed.any(axis=1), listed.argmax(axis=1), column.width)
    return found


def records_of(cells: NDArray[np.int64], columns: Sequence[Column]) -> NDArray[np.float32]:
    """Return a record for each row of ``cells``, shape (records, features).

    A cell of a numeric column becomes the cell's value; a cell of a column of categories becomes one-hot features.
    """
    parts = []
    for place, column in enumerate(columns):
        shown = np.array(column.values)[:, None] if column.values else np.eye(column.cells, column.width)
        parts.append(shown[cells[:, place]])
    return np.concatenate(parts, axis=1).astype(np.float32)


@dataclass(frozen=True)
class CellTable:
    """Records of a table, in which every value is replaced by the index of its cell (bin).

    SENSITIVE: these are a client's private records.

    ``rows``: the cell of each record in each column, (records, columns). ``labels``: the class of each record,
    (records,). ``sizes``: the number of cells of each column.
    """

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_classes: int
    sizes: tuple[int, ...]

    def ones(self) -> list[Array]:
        """Return for every column a table (classes, cells): the number of records of each class in each cell."""
        return [self.counts(column) for column in range(len(self.sizes))]

    def counts(self, *columns: int) -> Array:
        """Return the number of records of each class in each combination of the columns' cells.

        The result has the shape (classes, cells of the first column, cells of the second column, ...).
        """
        shape = (self.num_classes, *(self.sizes[column] for column in columns))
        place = np.ravel_multi_index((self.labels, *(self.rows[:, column] for column in columns)), shape)
        return np.bincount(place, minlength=math.prod(shape)).reshape(shape).astype(np.float64)


@dataclass(frozen=True)
class ForestMarginals:
    """Marginals of a table: numbers of records per class in the cells of columns, and of pairs of columns.

    ``ones``: a table (classes, cells) for each column. ``twos``: a table (classes, cells, cells) for each pair
    (parent, child); the pairs are the edges of a forest, and a parent comes before its children.
    """

    ones: Sequence[Array]
    twos: Mapping[Edge, Array]

    def sample(self, counts: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``counts[c]`` records of each class c, and return the cells of their values, sorted by class.

        The result has the shape (records, columns). Sampling is systematic: a cell with probability p gets n times p of
        the n draws, rounded up or down. So sampling adds almost no error to the error that comes from the noise.
        """
        made = np.zeros((int(counts.sum()), len(self.ones)), dtype=np.int64)
        parents = {child: parent for parent, child in self.twos}
        roots = [column for column in range(len(self.ones)) if column not in parents]
        ends = np.cumsum(counts)
        for label, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
            rows = made[start:end]
            for column in roots:
                rows[:, column] = _systematic_sample(self.ones[column][label], len(rows), generator)
            for (parent, child), tables in self.twos.items():
                for cell in np.unique(rows[:, parent]):
                    at = np.flatnonzero(rows[:, parent] == cell)
                    rows[at, child] = _systematic_sample(tables[label, cell], len(at), generator)
        return made


def fitted(noisy: ForestMarginals, std_of_ones: float, std_of_twos: float) -> ForestMarginals:
    """Return the marginals of the forest model that fits the ``noisy`` marginals best.

    A forest model is a graphical model whose graph is a forest. The result has the least weighted squared distance to
    the noisy marginals. It is consistent: tables that share a column agree on the counts of this column.
    ``std_of_ones``, ``std_of_twos``: the standard deviations of the noise on ``noisy.ones`` and ``noisy.twos``. They
    determine the weights. If both standard deviations are 0, the result is ``noisy`` itself.
    """
    if not std_of_ones:
        return noisy
    # The weights of squared differences: inverse noise variances, scaled so that the largest weight is 1.
    if not noisy.twos:
        std_of_twos = std_of_ones
    least = min(std_of_ones, std_of_twos)
    of_ones, of_twos = (least / std_of_ones) ** 2, (least / std_of_twos) ** 2
    # The sum over the cells of a noisy table estimates the number of records of each class. The estimates of all tables
    # are averaged, with weights 1 / variance. The result is at least 1.
    sums = [(table.sum(axis=1), of_ones / table[0].size) for table in noisy.ones]
    sums += [(table.sum(axis=(1, 2)), of_twos / table[0].size) for table in noisy.twos.values()]
    mean = np.sum([weight * value for value, weight in sums], axis=0) / sum(weight for _, weight in sums)
    totals: Array = np.maximum(mean, 1.0)
    potentials = ForestMarginals(
        [np.zeros_like(table) for table in noisy.ones],
        {edge: np.zeros_like(table) for edge, table in noisy.twos.items()},
    )
    found = _marginals_of(potentials, totals)
    gaps, loss = _gradient_and_loss(found, noisy, of_ones, of_twos)
    rate = 1 / totals
    for _ in range(_STEPS):
        tried = _combine_tables(lambda rate, here, gap: here - rate * gap, rate, potentials, gaps)
        near = _marginals_of(tried, totals)
        near_gaps, near_loss = _gradient_and_loss(near, noisy, of_ones, of_twos)
        better = near_loss <= loss
        rate = np.where(better, rate * _GROWTH, rate * _CUT)
        potentials = _combine_tables(np.where, better, tried, potentials)
        found = _combine_tables(np.where, better, near, found)
        gaps, loss = _combine_tables(np.where, better, near_gaps, gaps), np.where(better, near_loss, loss)
    return found


def _parents_first(edges: Sequence[Edge]) -> list[Edge]:
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
        # a loop over the growing list: columns that the loop appends to ``waiting`` are visited, too
        for parent in waiting:
            children = [one for one in neighbours[parent] if one not in seen]
            ordered += [(parent, child) for child in children]
            seen.update(children)
            waiting += children
    return ordered


def _rho(noise_multiplier: float) -> float:
    return 0.5 / noise_multiplier**2 if noise_multiplier else math.inf


def _marginals_of(potentials: ForestMarginals, totals: Array) -> ForestMarginals:
    """Return the marginals of the forest model proportional to exp(sum of ``potentials``), as counts of records.

    A forest model is a graphical model whose graph is a forest. ``totals``: the number of records of each class. The
    function makes one pass over the forest to the roots, and one pass back.
    """
    inward = [table.copy() for table in potentials.ones]
    given: dict[Edge, Array] = {}
    for (parent, child), table in reversed(list(potentials.twos.items())):
        joint = table + inward[child][:, None, :]
        peak = joint.max(axis=2, keepdims=True)
        np.exp(joint - peak, out=joint)
        mass = joint.sum(axis=2, keepdims=True)
        inward[parent] += (peak + np.log(mass))[:, :, 0]
        given[parent, child] = joint / mass
    shares = [np.exp(table - table.max(axis=1, keepdims=True)) for table in inward]
    # Here only the values of the forest's roots are correct. The loop below replaces the values of all other columns.
    ones: list[Array] = [share / share.sum(axis=1, keepdims=True) * totals[:, None] for share in shares]
    twos: dict[Edge, Array] = {}
    for parent, child in potentials.twos:
        twos[parent, child] = ones[parent][:, :, None] * given[parent, child]
        ones[child] = twos[parent, child].sum(axis=1)
    return ForestMarginals(ones, twos)


def _gradient_and_loss(
    found: ForestMarginals, noisy: ForestMarginals, of_ones: float, of_twos: float
) -> tuple[ForestMarginals, Array]:
    """Return the gradient of half the loss with respect to ``found``, and the loss of each class, for mirror descent.

    The loss is the weighted sum of squared differences between ``found`` and ``noisy`` marginals. ``of_ones``,
    ``of_twos``: the weights of the tables of columns and of pairs.
    """
    ones = [of_ones * (here - there) for here, there in zip(found.ones, noisy.ones, strict=True)]
    twos = {edge: of_twos * (here - noisy.twos[edge]) for edge, here in found.twos.items()}
    loss = sum((table**2).sum(axis=1) for table in ones) / of_ones
    loss = loss + sum((table**2).sum(axis=(1, 2)) for table in twos.values()) / of_twos
    return ForestMarginals(ones, twos), loss


def _combine_tables(
    combine: Callable[..., Any], by_class: NDArray[Any], first: ForestMarginals, second: ForestMarginals
) -> ForestMarginals:
    """Call ``combine`` for each table of ``first`` and the corresponding table of ``second``; return the results.

    ``by_class``: one value for each class. It is the first argument of ``combine``, in a shape that broadcasts over the
    tables.
    """
    ones = [combine(by_class[:, None], *tables) for tables in zip(first.ones, second.ones, strict=True)]
    twos = {edge: combine(by_class[:, None, None], table, second.twos[edge]) for edge, table in first.twos.items()}
    return ForestMarginals(ones, twos)


def _systematic_sample(weights: Array, number: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw ``number`` cell indices by systematic sampling, and return them in random order.

    A cell with the fraction p of all ``weights`` occurs p times ``number`` times, rounded up or down at random.
    """
    total = weights.sum()
    ends = np.cumsum(weights) / total if total > 0 else np.arange(1, len(weights) + 1) / len(weights)
    ends[-1] = 1.0
    reached = np.floor(ends * number + generator.uniform())
    dealt: NDArray[np.int64] = np.repeat(np.arange(len(weights)), np.diff(reached, prepend=0).astype(np.int64))
    return generator.permutation(dealt)
