"""How the columns of a table become the numbers of a record: by public settings, or as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.columns import Survey, as_number, as_numbers, in_order, is_category, texts_of
from fl_sim.data.naming import OwnName
from fl_sim.data.spelling import Spelling, one_spelling
from fl_sim.data.table_file import pyarrow
from fl_sim.errors import UserError
from fl_sim.types import Column

STEPS: Final = 20
"""A number with a range has so many steps for generators that count; whole numbers with fewer have one each."""


@dataclass(frozen=True)
class Feature:
    """How one column is read: a number, within ``bounds`` where they are given, or one of ``categories``.

    ``first``: its place among the numbers of a record. ``is_given``: the settings say which categories there are.
    """

    name: str
    first: int
    bounds: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    is_given: bool = False
    spelling: Spelling = field(default_factory=Spelling)

    @property
    def width(self) -> int:
        """Return how many numbers of a record it takes."""
        return len(self.categories) or 1

    @property
    def is_public(self) -> bool:
        """Say whether nothing of how it is read comes from the records."""
        return self.is_given if self.categories else self.bounds is not None

    @property
    def names(self) -> list[str]:
        """Return a name for each of its numbers."""
        return [f"{self.name}={category}" for category in self.categories] or [self.name]

    def told(self) -> str:
        """Say how it is read."""
        if self.categories:
            given = " (as set; all others are zeros)" if self.is_given else ""
            return f"category: {', '.join(self.categories)}{given}"
        if self.bounds is None:
            return "number, as it is"
        return f"number: {self.bounds[0]:g}..{self.bounds[1]:g} becomes 0..1"

    def column(self) -> Column:
        """Return what is public of it."""
        if self.categories:
            return Column(self.name, categories=len(self.categories))
        assert self.bounds is not None
        wide = self.bounds[1] - self.bounds[0]
        whole = all(bound == round(bound) for bound in self.bounds) and wide < STEPS
        steps = round(wide) if whole else STEPS - 1
        return Column(self.name, tuple(step / steps for step in range(steps + 1)))

    def put_into(self, rows: NDArray[np.float32], cells: Any) -> None:
        """Write the column's ``cells`` into the ``rows`` of their records, which are zeros so far."""
        if self.categories:
            values = pyarrow().array(self.categories)
            codes = np.asarray(pyarrow().compute.index_in(texts_of(cells), value_set=values).fill_null(-1))
            (found,) = np.nonzero(codes >= 0)
            rows[found, self.first + codes[found]] = 1.0
            return
        numbers = as_numbers(cells, self.spelling).to_numpy(zero_copy_only=False)
        if self.bounds is not None:
            low, high = self.bounds
            numbers = (np.clip(numbers, low, high) - low) / (high - low)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused later
            rows[:, self.first] = numbers


def features_of(own: OwnName, names: Sequence[str], found: Survey) -> tuple[Feature, ...]:
    """Return how the columns ``names`` are read. Raises UserError for settings that do not fit what they hold."""
    ranges, categories = own.of_columns("range"), own.of_columns("category")
    features: list[Feature] = []
    first = 0
    for name in names:
        features.append(_feature(name, first, ranges, categories, found))
        first += features[-1].width
    return tuple(features)


def _feature(
    name: str,
    first: int,
    ranges: Mapping[str, tuple[str, ...]],
    categories: Mapping[str, tuple[str, ...]],
    found: Survey,
) -> Feature:
    if name in categories:
        if name in ranges:
            raise UserError(f"data.range.{name} and data.category.{name}: a column is a number or a category")
        return Feature(name, first, categories=_categories(name, categories[name]), is_given=True)
    seen = found.columns[name]
    if is_category(seen):
        if name in ranges:
            raise UserError(f"data.range.{name} is for numbers, and the column {name!r} holds texts; leave it out")
        return Feature(name, first, categories=tuple(sorted(seen.texts or (), key=in_order)))
    bounds = _bounds(name, ranges[name]) if name in ranges else None
    return Feature(name, first, bounds, spelling=seen.spelling)


def _categories(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    given = tuple(map(one_spelling, given))
    if "" in given or len(set(given)) < len(given):
        raise UserError(f"data.category.{name} lists its categories, each once: data.category.{name}=A+B+C")
    return given


def _bounds(name: str, given: tuple[str, ...]) -> tuple[float, float]:
    numbers = [as_number(text) for text in given]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None or numbers[0] >= numbers[1]:
        raise UserError(f"data.range.{name} = {'..'.join(given)!r}: it is LOW..HIGH, two numbers, such as 0..100")
    return numbers[0], numbers[1]
