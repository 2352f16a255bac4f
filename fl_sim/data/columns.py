"""What the columns of a table hold, found by one pass over all of its rows: numbers, categories, or neither."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fl_sim.data.spelling import LIKE_A_NUMBER, Spelling, cure_of, unified
from fl_sim.data.table_file import Declared, TableFile, pyarrow
from fl_sim.errors import UserError
from fl_sim.mistakes import shortened

MOST_CATEGORIES: Final = 200
"""A text column with more different texts is a name or a remark, not a category."""

MOST_CLASSES: Final = 1000
MOST_CLIENTS: Final = 10_000_000

_SAMPLES: Final = 200  # of texts that look like numbers, by which their spelling is told
_LEAST_COUNTED: Final = 10  # rows of a table whose numbers 0, 1, 2 ... are those of its rows

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
    ``spelled``: texts that look like numbers in another ``spelling``; ``word``: the first text that does not.
    ``fraction``: the first text that is a number, and no whole one. ``counts``: its numbers are those of the rows.
    """

    name: str
    declared: Declared
    most: int
    as_text: bool
    spelling: Spelling = field(default_factory=Spelling)
    missing: Cell | None = None
    number: Cell | None = None
    text: Cell | None = None
    infinite: Cell | None = None
    texts: set[str] | None = field(default_factory=set)
    spelled: dict[str, None] = field(default_factory=dict)
    word: Cell | None = None
    fraction: Cell | None = None
    counts: bool = True

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
        numbers = as_numbers(cells, self.spelling)
        is_number = numbers.is_valid()
        self.number = self.number or _first(is_number, file, rows_before, cells)
        infinite = compute.fill_null(compute.is_inf(numbers), fill_value=False)
        self.infinite = self.infinite or _first(infinite, file, rows_before, cells)
        is_text = compute.and_(present, compute.invert(is_number))
        self.text = self.text or _first(is_text, file, rows_before, cells)
        self.counts = self.counts and _continues(numbers, rows_before)
        if _are_texts(cells):
            self._look_at_texts(cells, numbers, is_text, file, rows_before)
        if self.declared != "number" and (self.declared == "text" or self.text):
            self._keep(cells)

    def _look_at_texts(self, cells: Any, numbers: Any, is_text: Any, file: str, rows_before: int) -> None:
        compute = pyarrow().compute
        if self.declared == "text" and not self.fraction:
            is_part = compute.not_equal(numbers, compute.floor(numbers))
            self.fraction = _first(compute.fill_null(is_part, fill_value=False), file, rows_before, cells)
        if self.word or not self.text:
            return
        like = compute.fill_null(compute.match_substring_regex(cells, LIKE_A_NUMBER), fill_value=False)
        self.word = _first(compute.and_(is_text, compute.invert(like)), file, rows_before, cells)
        if len(self.spelled) < _SAMPLES:
            some = compute.unique(cells.filter(compute.and_(is_text, like))).slice(0, _SAMPLES)
            self.spelled.update(dict.fromkeys(some.to_pylist()))

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
    if seen.as_text:
        _check_texts(seen)
        return True
    _check_spelling(seen)
    if seen.declared == "text":
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


def counts_rows(seen: Seen, num_rows: int) -> bool:
    """Say whether a column's numbers are those of the rows, as the index that a program has written is."""
    return seen.counts and seen.number is not None and num_rows >= _LEAST_COUNTED


def as_numbers(cells: Any, spelling: Spelling | None = None) -> Any:
    """Return ``cells`` as float64, None where a text is no number; whole numbers beyond 2^53 lose their last digits."""
    if _are_texts(cells):
        return (spelling or Spelling()).numbers(cells)
    return cells.cast(pyarrow().float64(), safe=False)


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
    """Return ``cells`` as texts; a whole number is written as such, whatever its type, and 1.0 in a text as 1."""
    return unified(cells) if _are_texts(cells) else cells.cast(pyarrow().string())


def _are_texts(cells: Any) -> bool:
    return bool(pyarrow().types.is_string(cells.type))


def _continues(numbers: Any, rows_before: int) -> bool:
    """Say whether ``numbers`` are those of a file's rows after ``rows_before``, counted from 0 or from 1."""
    if numbers.null_count or not len(numbers) or numbers[0].as_py() not in {rows_before, rows_before + 1}:
        return False
    found = numbers.to_numpy(zero_copy_only=False)
    return bool(np.array_equal(found, found[0] + np.arange(len(found))))


def _first(mask: Any, file: str, rows_before: int, cells: Any) -> Cell | None:
    arrow = pyarrow()
    place = arrow.compute.index(mask, value=True).as_py()
    return None if place < 0 else Cell(file, rows_before + place + 1, str(cells[place].as_py()))


def _check_spelling(seen: Seen) -> None:
    """Raise UserError for texts that all look like numbers, and are not read as such."""
    name = seen.name
    kept = f"or take all of the column as names by data.text={name}"
    if seen.text and not seen.word:
        plain = [seen.number.value] if seen.number else []
        is_set = seen.declared == "text"
        cure = "write the column as numbers" if is_set else cure_of([*seen.spelled, *plain])
        raise UserError(
            f"{seen.text.told(name)}: {shortened(seen.text.value)!r} looks like a number in another spelling: {cure}, "
            f"leave it out by data.drop={name}, {kept}"
        )
    if seen.declared == "text" and seen.fraction and not seen.text:
        raise UserError(
            f"{seen.fraction.told(name)}: the file says that the column holds texts, and {seen.fraction.value!r} is a "
            f"number, as all others are: write the column as numbers, {kept}"
        )


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
