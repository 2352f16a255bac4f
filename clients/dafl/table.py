"""Records of a table as cells of its columns, and back: by public knowledge of the columns alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clients.symmetric import Array
from fl_sim.types import Column


def unnamed(num_features: int, cells: int) -> tuple[Column, ...]:
    """Return columns for features of which nothing is known: each a number in the middle of ``cells`` equal parts."""
    middles = tuple((2 * cell + 1) / (2 * cells) for cell in range(cells))
    return tuple(Column(f"feature {place}", values=middles) for place in range(num_features))


def cells_of(features: NDArray[np.float32] | Array, columns: Sequence[Column]) -> NDArray[np.int64]:
    """Return the cell of each record in each column, (records, columns). Every record has one, whatever it holds.

    A number is in the cell of the nearest of its column's values, at the ends, too; a category in its own, and in the
    last one if it is none of those listed.
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
    """Return a record for each row of ``cells``: (records, features), a column's value or a one for its category."""
    parts = []
    for place, column in enumerate(columns):
        shown = np.array(column.values)[:, None] if column.values else np.eye(column.cells, column.width)
        parts.append(shown[cells[:, place]])
    return np.concatenate(parts, axis=1).astype(np.float32)


@dataclass(frozen=True)
class Table:
    """Records as cells: ``rows`` (records, columns), each below its column's ``sizes``; ``labels``: (records,)."""

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_classes: int
    sizes: tuple[int, ...]

    def ones(self) -> list[Array]:
        """Return how many records of each class are in each cell, of every column: (classes, cells)."""
        return [self._counts(column)[:, :, 0] for column in range(len(self.sizes))]

    def two(self, left: int, right: int) -> Array:
        """Return how many records of each class are in each pair of cells, (classes, cells, cells)."""
        return self._counts(left, right)

    def cells(self, left: int, right: int) -> int:
        """Return how many pairs of cells two columns have."""
        return self.sizes[left] * self.sizes[right]

    def _counts(self, left: int, right: int | None = None) -> Array:
        shape = (self.num_classes, self.sizes[left], 1 if right is None else self.sizes[right])
        place = self.labels * shape[1] + self.rows[:, left]
        if right is not None:
            place = place * shape[2] + self.rows[:, right]
        size = shape[0] * shape[1] * shape[2]
        return np.bincount(place, minlength=size).reshape(shape).astype(np.float64)
