"""What the columns of a table hold, found by one pass over all of its rows: numbers, categories, or neither."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fl_sim.data.table_file import Declared, TableFile, pyarrow
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened

MOST_CATEGORIES: Final = 200
"""A text column with more different texts is a name or a remark, not a category."""

MOST_CLASSES: Final = 1000
MOST_CLIENTS: Final = 10_000_000

_DATE: Final = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T]\d{1,2}:\d{2}.*)?")


@dataclass(frozen=True)
class Cell:
    """One cell of a table: the file, the row in it (from 1, below the names), and what it holds."""

    file: str
    row: int
    value: str = ""

    def told(self, column: str) -> str:
        """Say where it is."""
        return f"{self.file}: row {self.row}, column {column!r}"


@dataclass
class Seen:
    """What has been seen of a column so far.

    ``most``: how many different texts are kept; None in ``texts``: there are more. ``as_text``: its numbers are names.
    """

    name: str
    declared: Declared
    most: int
    as_text: bool
    missing: Cell | None = None
    number: Cell | None = None
    text: Cell | None = None
    infinite: Cell | None = None
    texts: set[str] | None = field(default_factory=set)

    def look_at(self, cells: Any, file: str, rows_before: int) -> None:
        """Take the next cells, of rows after ``rows_before`` of ``file``, into account."""
        compute = pyarrow().compute
        present = cells.is_valid()
        self.missing = self.missing or _first(compute.invert(present), file, rows_before, cells)
        if self.declared in {"time", "other"}:
            return
        if self.as_text:
            self._keep(cells)
            return
        numbers = as_numbers(cells)
        is_number = numbers.is_valid()
        self.number = self.number or _first(is_number, file, rows_before, cells)
        infinite = compute.fill_null(compute.is_inf(numbers), fill_value=False)
        self.infinite = self.infinite or _first(infinite, file, rows_before, cells)
        is_text = compute.and_(present, compute.invert(is_number))
        self.text = self.text or _first(is_text, file, rows_before, cells)
        if self.declared != "number" and self.text:
            self._keep(cells)

    def _keep(self, cells: Any) -> None:
        if self.texts is None:
            return
        self.texts.update(text for text in texts_of(cells).unique().to_pylist() if text is not None)
        if len(self.texts) > self.most:
            self.texts = None


@dataclass(frozen=True)
class Survey:
    """What a pass over all rows has found: how many rows each file has, and {column: what is in it}."""

    rows: tuple[int, ...]
    columns: Mapping[str, Seen]


def survey(files: Iterable[TableFile], columns: Mapping[str, Seen]) -> Survey:
    """Look at all cells of ``columns``, in every file. Raises UserError for a file without rows."""
    rows = []
    for file in files:
        found = 0
        for batch in file.batches([*columns]):
            for name, cells in batch.items():
                columns[name].look_at(cells, file.where, found)
            found += len(next(iter(batch.values())))
        if not found:
            raise UserError(f"{file.where} has no rows below the names of its columns; wanted is a row a record")
        rows.append(found)
    return Survey(tuple(rows), columns)


def is_category(seen: Seen) -> bool:
    """Say whether a column of features holds categories, not numbers.

    Raises UserError, which names row and column, for one that holds neither, or both.
    """
    name = seen.name
    if seen.declared in {"time", "other"}:
        what = "dates or times" if seen.declared == "time" else "lists or other cells that are neither number nor text"
        raise UserError(f"column {name!r} holds {what}: leave it out by data.drop={name}, or write it as numbers")
    if seen.as_text or seen.declared == "text":
        _check_texts(seen)
        return True
    if seen.number and seen.text:
        raise UserError(
            f"{seen.text.told(name)}: {shortened(seen.text.value)!r} is no number, and row {seen.number.row} holds "
            f"{seen.number.value}: mend the cell, or take all of the column as names by data.text={name}"
        )
    if seen.infinite:
        raise UserError(f"{seen.infinite.told(name)}: the number is not finite; mend the cell")
    if not seen.number and not seen.text:
        raise UserError(f"column {name!r} is empty in every row: leave it out by data.drop={name}")
    if seen.text:
        _check_texts(seen)
    return seen.text is not None


def as_numbers(cells: Any) -> Any:
    """Return ``cells`` as float64, None where a text is no number."""
    arrow = pyarrow()
    try:
        return cells.cast(arrow.float64())
    except arrow.ArrowInvalid:
        pattern = r"^-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
        is_number = arrow.compute.match_substring_regex(cells, pattern)
        return arrow.compute.if_else(is_number, cells, None).cast(arrow.float64())


def as_number(text: str) -> float | None:
    """Return the finite number that ``text`` is, None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def in_order(text: str) -> tuple[float, str]:
    """Return what texts are sorted by: whole numbers by size, in front of all others by the alphabet."""
    return (float(text), text) if text.isascii() and text.isdigit() else (math.inf, text)


def texts_of(cells: Any) -> Any:
    """Return ``cells`` as texts; a whole number is written as such, whatever its type."""
    arrow = pyarrow()
    return cells.cast(arrow.string())


def _first(mask: Any, file: str, rows_before: int, cells: Any) -> Cell | None:
    arrow = pyarrow()
    place = arrow.compute.index(mask, value=True).as_py()
    return None if place < 0 else Cell(file, rows_before + place + 1, str(cells[place].as_py()))


def _check_texts(seen: Seen) -> None:
    name = seen.name
    if seen.texts is None:
        raise UserError(
            f"column {name!r} holds more than {seen.most} different texts: leave it out by data.drop={name}, or list "
            f"the ones that count by data.category.{name}=A+B+C"
        )
    if not seen.texts:
        raise UserError(f"column {name!r} is empty in every row: leave it out by data.drop={name}")
    if not seen.as_text and all(_DATE.fullmatch(text) for text in seen.texts):
        raise UserError(
            f"column {name!r} holds dates, such as {min(seen.texts)}: leave it out by data.drop={name}, or write it "
            "as numbers (days since a day, or the age)"
        )
