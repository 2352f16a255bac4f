"""What the columns of a table hold, found by one pass over all of its rows: numbers, categories, or neither.

And how numbers and names are spelled in their cells: decimal sign, thousands, units, names in two ways.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from fl_sim.data.table_file import Declared, TableFile, pyarrow
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

DECIMALS: Final[Mapping[str, str]] = {"point": r"\.", "comma": ","}
_SPACES: Final = " \u00a0\u202f\u2009"
THOUSANDS: Final[Mapping[str, str]] = {
    "comma": ",",
    "point": r"\.",
    "space": f"[{_SPACES}]",
    "apostrophe": "['\u2019]",
}
"""{what a setting calls a sign: the pattern of it}"""

_EXPONENT: Final = r"(?:[eE][+-]?\d+)?"
_CURRENCY: Final = r"(?:[$€£¥₹₩₽]|EUR|USD|GBP|CHF|JPY|CNY|INR|SEK|NOK|DKK|PLN)"
_UNIT: Final = (
    rf"[{_SPACES}]?[%‰°]|[{_SPACES}][\pL°µ²³/%]{{1,12}}|"
    r"(?:kg|g|mg|µg|ug|ng|lbs?|oz|km|m|cm|mm|µm|nm|ft|l|L|dl|dL|ml|mL|h|min|s|sec|ms|us|ns|d|y|yrs?|k|K|M|kB|MB|GB|"
    r"mmHg|bpm|Hz|kHz|MHz|GHz|kW|mA|°C|°F|px|mg/d[lL]|mmol/[lL]|g/d[lL])"
)
_ANY_NUMBER: Final = "|".join([
    r"\d+(?:[.,]\d*)?",
    r"[.,]\d+",
    r"\d{1,3}(?:,\d{2,3})+(?:[.,]\d*)?",
    *(rf"\d{{1,3}}(?:{sign}\d{{3}})+(?:[.,]\d*)?" for sign in [*list(THOUSANDS.values())[1:], "_"]),
])  # fmt: skip
_SIGN: Final = "[+\u2212\u2013-]?"
LIKE_A_NUMBER: Final = (
    rf"^(?:(?:[<>≤≥~≈]=?[{_SPACES}]?)?{_SIGN}(?:{_CURRENCY}[{_SPACES}]?)?{_SIGN}(?:{_ANY_NUMBER}){_EXPONENT}"
    rf"(?:[{_SPACES}]?{_CURRENCY}|{_UNIT})?-?|\((?:{_ANY_NUMBER})\))$"
)
"""What people read as a number, in any spelling: 0,5 and 1 234 and 45% and 45 kg and $45 and <45."""

_WHOLE: Final = r"^([+-]?\d+)\.0*$"

MOST_CATEGORIES: Final = 200
"""A text column with more different texts is a name or a remark, not a category."""

MOST_CLASSES: Final = 1000
MOST_CLIENTS: Final = 10_000_000

_SAMPLES: Final = 200  # of texts that look like numbers, by which their spelling is told
_LEAST_COUNTED: Final = 10  # rows of a table whose numbers 0, 1, 2 ... are those of its rows

_DATE: Final = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T]\d{1,2}:\d{2}.*)?")


@dataclass(frozen=True)
class Spelling:
    """The signs of numbers in a csv file: ``decimal`` and ``thousands``, the latter empty where there is none."""

    decimal: str = "point"
    thousands: str = ""

    @cached_property
    def pattern(self) -> str:
        """Return the regular expression of a number."""
        decimal = DECIMALS[self.decimal]
        grouped = rf"|[1-9]\d{{0,2}}(?:{THOUSANDS[self.thousands]}\d{{3}})+" if self.thousands else ""
        digits = rf"(?:(?:\d+{grouped})(?:{decimal}\d*)?|{decimal}\d+){_EXPONENT}"
        return rf"^(?:[+-]?{digits}|[+-]?(?i:inf|infinity))$"

    def numbers(self, cells: Any) -> Any:
        """Return texts as float64, None where one is no number."""
        arrow = pyarrow()
        compute = arrow.compute
        if self == Spelling():
            try:
                return cells.cast(arrow.float64())
            except arrow.ArrowInvalid:
                pass
        kept = compute.if_else(compute.match_substring_regex(cells, self.pattern), cells, None)
        if self.thousands:
            kept = compute.replace_substring_regex(kept, THOUSANDS[self.thousands], "")
        if self.decimal == "comma":
            kept = compute.replace_substring(kept, ",", ".")
        return kept.cast(arrow.float64())

    def reads(self, texts: Iterable[str]) -> bool:
        """Say whether each of ``texts`` is a number so spelled."""
        return all(re.match(self.pattern, text) for text in texts)

    def value(self, text: str) -> str:
        """Return the number that ``text`` is, as a program writes it."""
        plain = re.sub(THOUSANDS[self.thousands], "", text) if self.thousands else text
        return f"{float(plain.replace(',', '.') if self.decimal == 'comma' else plain):.15g}"

    def settings(self) -> str:
        """Return the settings that say so."""
        decimal = f"data.decimal={self.decimal}" if self.decimal != "point" else ""
        thousands = f"data.thousands={self.thousands}" if self.thousands else ""
        return " ".join(filter(None, (decimal, thousands))) or "no data.decimal and no data.thousands"

    def told(self) -> str:
        """Say it in words."""
        return f"numbers have a decimal {self.decimal}, and {self.thousands or 'no sign'} between thousands"


def spelling_by(decimal: str, thousands: str) -> Spelling:
    """Return what the settings say. Raises UserError for other signs, and for one sign with two meanings."""
    for key, given, valid in (("decimal", decimal, DECIMALS), ("thousands", thousands, THOUSANDS)):
        if given and given not in valid:
            meant = {",": " (did you mean 'comma'?)", ".": " (did you mean 'point'?)"}.get(given, guess(given, valid))
            raise UserError(f"data.{key} = {given!r}{meant}; valid: {', '.join(valid)}")
    if (decimal or "point") == thousands:
        raise UserError(
            f"data.thousands={thousands} and a decimal {thousands}: one sign has one meaning; set data.decimal="
            f"{'comma' if thousands == 'point' else 'point'}, too, or leave data.thousands out"
        )
    return Spelling(decimal or "point", thousands)


def cure_of(texts: Iterable[str]) -> str:
    """Say how a csv file's ``texts``, each like a number, are read as numbers: by which settings, or written anew."""
    found, sample = [*texts], ""
    ways: dict[str, Spelling] = {}
    for decimal in DECIMALS:
        for thousands in ("", *(sign for sign in THOUSANDS if sign != decimal)):
            way = Spelling(decimal, thousands)
            if way.reads(found):
                sample = max(found, key=len)
                ways.setdefault(way.value(sample), way)
    if not ways:
        return "write the cells as plain numbers, without units and other signs"
    if len(ways) == 1:
        return f"set {next(iter(ways.values())).settings()}"
    several = [f"{way.settings()} where {sample} is {value}" for value, way in ways.items()]
    return f"set {' or '.join(several)}"


def unified(texts: Any) -> Any:
    """Return texts of cells in one spelling of each: whole numbers without ``.0`` behind them."""
    return pyarrow().compute.replace_substring_regex(texts, _WHOLE, r"\1")


def one_spelling(text: str) -> str:
    """Return one text as ``unified`` has it, in Unicode's composed form."""
    return re.sub(_WHOLE, r"\1", unicodedata.normalize("NFC", text))


def doubles(texts: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the texts that differ from one another in case, spaces and leading zeros alone."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        bare = "".join(unicodedata.normalize("NFKC", text).casefold().split())
        alike.setdefault(bare.lstrip("0") or "0" if bare.isdigit() else bare, []).append(text)
    return [tuple(sorted(group)) for group in alike.values() if len(group) > 1]


def told_doubles(what: str, texts: Iterable[str], *, with_names: bool = True) -> str:
    """Say which of ``texts`` look like two spellings of one; nothing where there are none."""
    found = doubles(texts)
    if not found:
        return ""
    if not with_names:
        return f"{len(found):,} {what} are spelled in several ways (case, spaces), which count as different ones"
    some = ", ".join(" and ".join(map(repr, group[:3])) for group in found[:3])
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    return f"{what} that differ in case or spaces alone count as different ones: {some}{more}"


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
