"""Reads a csv or parquet file with pyarrow, in batches, so that the table need not fit into memory.

This module also recognises empty cells, and numbers in various notations.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from unicodedata import normalize

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line

Declared: TypeAlias = Literal["", "number", "text", "time", "other"]
"""The type that a parquet file declares for a column; empty for a csv file, which declares none."""

DELIMITERS: Final[Mapping[str, str]] = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}

MISSING: Final = ("", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "null", "NULL", "?")
"""The texts that count as an empty cell, in addition to spellings of ``nan``. Spaces around a text are ignored."""

_NAN: Final = r"^(?i:[+-]?nan(\(.*\))?|[+-]?1\.#(qnan|snan|ind))$"
"""The regular expression of all spellings of NaN that programs write."""

_BLOCK: Final = 2**24
"""The size of a batch of a csv file, in bytes."""

ROWS: Final = 2**16
"""The number of rows in a batch of a parquet file."""

DECIMALS: Final[Mapping[str, str]] = {"point": r"\.", "comma": ","}
_SPACES: Final = " \u00a0\u202f\u2009"
THOUSANDS: Final[Mapping[str, str]] = {"comma": ",", "point": r"\.", "space": f"[{_SPACES}]", "apostrophe": "['\u2019]"}
"""{thousands separator, as in ``data.thousands``: its regular expression}"""

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
"""Regular expression of texts that people read as numbers, such as 0,5 or 1 234 or 45% or 45 kg or $45 or <45."""

_WHOLE: Final = r"^([+-]?\d+)\.0*$"


@dataclass(frozen=True)
class TableReader:
    """A table that can be read several times, in batches of rows.

    ``where``: the path of the file, for messages. ``written``: the column names exactly as in the file. ``declared``:
    the types of the columns, as the file declares them. ``rows``: a function that takes column names (as in
    ``written``), and yields batches of rows with these columns. ``codes``: {column of class codes: the class names of
    the codes 0, 1, ...}. ``delimiter``: the delimiter of a csv file, as a word (comma). ``texts``: the columns of texts
    that must not be changed.
    """

    where: str
    written: tuple[str, ...]
    declared: tuple[Declared, ...]
    rows: Callable[[Sequence[str]], Iterator[Any]]
    codes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    delimiter: str = ""
    texts: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The column names in order, in Unicode's NFC form and without spaces around them."""
        return tuple(normalize("NFC", name).strip() for name in self.written)

    def batches(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield {column: its cells} for each batch of rows, as pyarrow arrays. An empty cell is None.

        Spaces around the entries are removed, except in the columns ``texts``. Raises UserError if the file is damaged.
        """
        written = dict(zip(self.names, self.written, strict=True))
        try:
            for batch in self.rows([written[name] for name in columns]):
                # pyarrow's own search for a column name reads all names; a dictionary is faster for many columns
                places = {name: place for place, name in enumerate(batch.schema.names)}
                yield {
                    name: _cleaned(batch.column(places[written[name]]), is_text=name in self.texts) for name in columns
                }
        except UserError:
            raise
        except Exception as error:
            raise _unreadable(self.where, error) from error


def open_table(path: Path, kind: str, delimiter: str = "") -> TableReader:
    """Open the csv or parquet file ``path`` as a table. ``kind``: csv or parquet.

    ``delimiter``: the delimiter of a csv file, as a word (comma). If empty, the delimiter is inferred from the first
    line. Raises UserError if the file cannot be read, or if two columns have the same name.
    """
    delimiter = delimiter or (_delimiter_of(path) if kind == "csv" else "comma")
    if delimiter not in DELIMITERS:
        valid = ", ".join(DELIMITERS)
        raise UserError(f"data.delimiter = {delimiter!r}{guess(delimiter, DELIMITERS)}; valid: {valid}")
    arrow, is_parquet = pyarrow(), kind == "parquet"

    def csv_reader(convert: Any = None) -> Any:
        return arrow.csv.open_csv(
            path,
            # pyarrow's errors state the row only if pyarrow reads with one thread
            read_options=arrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=arrow.csv.ParseOptions(delimiter=DELIMITERS[delimiter], newlines_in_values=True),
            convert_options=convert,
        )

    def rows(columns: Sequence[str]) -> Iterator[Any]:
        if is_parquet:
            with arrow.parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=ROWS, columns=[*columns])
        else:
            types = dict.fromkeys(columns, arrow.string())
            with csv_reader(arrow.csv.ConvertOptions(column_types=types, include_columns=[*columns])) as reader:
                yield from reader

    try:
        if is_parquet:
            schema = arrow.parquet.read_schema(path)
        else:
            with csv_reader() as reader:
                schema = reader.schema
        return replace(table_of(str(path), schema, rows, is_typed=is_parquet), delimiter=delimiter)
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(str(path), error) from error


def table_of(where: str, schema: Any, rows: Callable[..., Iterator[Any]], *, is_typed: bool = True) -> TableReader:
    """Return a table with the columns of the pyarrow ``schema``. ``rows``: as in ``TableReader``.

    ``is_typed``: True if the schema has the types that the file declares; False for a csv file, whose types pyarrow has
    guessed. Raises UserError if two columns have the same name.
    """
    declared = tuple(_declared(part) if is_typed else "" for part in schema.types)
    table = TableReader(where, tuple(schema.names), declared, rows, _codes(schema))
    names = table.names
    if len(set(names)) < len(names):
        name, count = Counter(names).most_common(1)[0]
        raise UserError(f"{where} has {count} columns called {shortened(name)!r}; rename all but one of them")
    if len(names) == 1 and (found := [word for word, sign in DELIMITERS.items() if sign in names[0]]):
        raise UserError(
            f"{where} has only one column, {shortened(names[0])!r}, so the delimiter is wrong; set "
            f"data.delimiter={found[0]}"
        )
    return table


def pyarrow() -> Any:
    """Import pyarrow and return the module, with its submodules compute, csv and parquet.

    Raises UserError if pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 (an extra, and slow to import)
        import pyarrow.compute  # noqa: PLC0415
        import pyarrow.csv  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"tables need the library pyarrow, which is not installed ({in_one_line(error)}): "
            "pip install 'fl-sim[data]', or pip install pyarrow"
        ) from error
    return pa


@dataclass(frozen=True)
class Spelling:
    """The notation of numbers in a csv file, such as 1.234,5 with a decimal comma.

    ``decimal``: the decimal separator, point or comma. ``thousands``: the thousands separator, as a word of
    ``THOUSANDS``; empty if there is none.
    """

    decimal: str = "point"
    thousands: str = ""

    @cached_property
    def pattern(self) -> str:
        """The regular expression of a number in this notation."""
        decimal = DECIMALS[self.decimal]
        grouped = rf"|[1-9]\d{{0,2}}(?:{THOUSANDS[self.thousands]}\d{{3}})+" if self.thousands else ""
        digits = rf"(?:(?:\d+{grouped})(?:{decimal}\d*)?|{decimal}\d+){_EXPONENT}"
        return rf"^(?:[+-]?{digits}|[+-]?(?i:inf|infinity))$"

    def numbers(self, cells: Any) -> Any:
        """Convert a pyarrow array of texts to float64. A text that is no number in this notation becomes None."""
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

    def value(self, text: str) -> str:
        """Rewrite a number in this notation with a decimal point and without separators: 1.234,5 becomes 1234.5."""
        plain = re.sub(THOUSANDS[self.thousands], "", text) if self.thousands else text
        return f"{float(plain.replace(',', '.') if self.decimal == 'comma' else plain):.15g}"

    def settings(self) -> str:
        """Return the settings that select this notation, as a user writes them, such as ``data.decimal=comma``."""
        decimal = f"data.decimal={self.decimal}" if self.decimal != "point" else ""
        thousands = f"data.thousands={self.thousands}" if self.thousands else ""
        return " ".join(filter(None, (decimal, thousands))) or "no data.decimal and no data.thousands"

    def described(self) -> str:
        """Describe this notation in a sentence, for ``Dataset.inferred``."""
        return f"numbers have a decimal {self.decimal} and {self.thousands or 'no'} thousands separator"


def spelling_by(decimal: str, thousands: str) -> Spelling:
    """Return the notation that the settings ``data.decimal`` and ``data.thousands`` select (empty: not set).

    Raises UserError for an unknown separator, and if both settings name the same separator.
    """
    for key, given, valid in (("decimal", decimal, DECIMALS), ("thousands", thousands, THOUSANDS)):
        if given and given not in valid:
            meant = {",": " (did you mean 'comma'?)", ".": " (did you mean 'point'?)"}.get(given, guess(given, valid))
            raise UserError(f"data.{key} = {given!r}{meant}; valid: {', '.join(valid)}")
    if (decimal or "point") == thousands:
        raise UserError(
            f"data.thousands={thousands} is also the decimal separator; set data.decimal="
            f"{'comma' if thousands == 'point' else 'point'}, too, or leave data.thousands out"
        )
    return Spelling(decimal or "point", thousands)


def cure_of(texts: Iterable[str]) -> str:
    """Return advice for the error message about ``texts`` that look like numbers in another notation, such as 0,5.

    The advice is a setting with which all ``texts`` are read as numbers, such as ``data.decimal=comma``. If there is no
    such setting, the advice is to change the file.
    """
    found, sample = [*texts], ""
    ways: dict[str, Spelling] = {}
    for decimal in DECIMALS:
        for thousands in ("", *(sign for sign in THOUSANDS if sign != decimal)):
            way = Spelling(decimal, thousands)
            if all(re.match(way.pattern, text) for text in found):
                sample = max(found, key=len)
                ways.setdefault(way.value(sample), way)
    if not ways:
        return "write the cells as plain numbers, without units and other signs"
    if len(ways) == 1:
        return f"set {next(iter(ways.values())).settings()}"
    several = [f"{way.settings()} if {sample} means {value}" for value, way in ways.items()]
    return f"set {' or '.join(several)}"


def one_spelling(text: str) -> str:
    """Normalise a category or class name: Unicode's NFC form, and no ``.0`` after a whole number."""
    return re.sub(_WHOLE, r"\1", normalize("NFC", text))


def similar_spellings(what: str, texts: Iterable[str], *, with_names: bool = True) -> str:
    """Return a warning about ``texts`` that differ only in case, spaces or leading zeros; empty if there are none.

    ``what``: the noun for the texts, such as classes. ``with_names``: False if the texts are private; the warning then
    states only their number.
    """
    alike: dict[str, list[str]] = {}
    for text in texts:
        bare = "".join(normalize("NFKC", text).casefold().split())
        alike.setdefault(bare.lstrip("0") or "0" if bare.isdigit() else bare, []).append(text)
    found = [sorted(group) for group in alike.values() if len(group) > 1]
    if not found:
        return ""
    if not with_names:
        return f"{len(found):,} {what} have several spellings (case, spaces), which count as different {what}"
    some = ", ".join(" and ".join(map(repr, group[:3])) for group in found[:3])
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    return f"{what} that differ only in case or spaces count as different: {some}{more}"


def as_numbers(cells: Any, spelling: Spelling | None = None) -> Any:
    """Convert a pyarrow array to float64. ``spelling``: the notation of numbers in texts.

    A text that is no number becomes None. Whole numbers beyond 2^53 lose digits.
    """
    if are_texts(cells):
        return (spelling or Spelling()).numbers(cells)
    return cells.cast(pyarrow().float64(), safe=False)


def as_number(text: str) -> float | None:
    """Convert ``text`` to a finite number; return None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def in_order(text: str) -> tuple[float, str]:
    """Return the sort key of ``text``, the name of a class or client.

    Whole numbers come first, sorted by size, then other texts in alphabetical order.
    """
    return (float(text), text) if text.isascii() and text.isdigit() else (math.inf, text)


def texts_of(cells: Any) -> Any:
    """Convert a pyarrow array to texts. A whole number with ``.0``, such as 1.0, becomes the text 1.

    So a class or client has the same name in every table, whether a column has integers, floats or texts.
    """
    if not are_texts(cells):
        return cells.cast(pyarrow().string())
    return pyarrow().compute.replace_substring_regex(cells, _WHOLE, r"\1")


def _delimiter_of(path: Path) -> str:
    """Infer the delimiter of a csv file from its first line, as a word.

    The delimiter is a comma if the line has a comma outside of quotes. Otherwise it is the most frequent of the other
    delimiters.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_BLOCK).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise _unreadable(str(path), error) from error
    bare = re.sub(r'"[^"]*"', "", line)
    counts = {word: bare.count(sign) for word, sign in DELIMITERS.items()}
    return "comma" if counts["comma"] else max(counts, key=lambda word: counts[word])


def _unreadable(where: str, error: Exception) -> UserError:
    if "Empty CSV" in str(error):
        return UserError(f"{where} is empty; the first line must name the columns, and each further line is a record")
    cure = "save it as UTF-8" if re.search("utf-?8", str(error), re.IGNORECASE) else "correct or replace the file"
    return UserError(f"{where} cannot be read as a table ({in_one_line(error)}); {cure}")


def _codes(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return {column: class names} from the metadata of Hugging Face's ``datasets`` in a parquet file's ``schema``."""
    try:
        written = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            normalize("NFC", name).strip(): tuple(map(str, feature["names"]))
            for name, feature in written.items()
            if feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _declared(part: Any) -> Declared:
    kinds = pyarrow().types
    if kinds.is_dictionary(part):
        return _declared(part.value_type)
    if kinds.is_integer(part) or kinds.is_floating(part) or kinds.is_decimal(part) or kinds.is_boolean(part):
        return "number"
    if kinds.is_string(part) or kinds.is_large_string(part):
        return "text"
    return "time" if kinds.is_temporal(part) else "other"


def _cleaned(cells: Any, *, is_text: bool) -> Any:
    """Replace empty cells by None, and remove spaces around texts.

    Words such as NaN count as empty, too. ``is_text``: True for a column of texts that must not be changed; only blank
    texts then count as empty.
    """
    arrow = pyarrow()
    kinds, compute = arrow.types, arrow.compute
    if kinds.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if kinds.is_string(cells.type) or kinds.is_large_string(cells.type):
        cells = cells.cast(arrow.string())
        if is_text:
            return compute.if_else(compute.equal(compute.utf8_trim_whitespace(cells), ""), None, cells)
        buffer = cells.buffers()[2]
        letters = buffer.to_pybytes().lower() if buffer is not None else b""
        if not letters.isascii():
            cells = compute.utf8_normalize(cells, form="NFC")
        cells = compute.utf8_trim_whitespace(cells)
        missing = compute.is_in(cells, value_set=arrow.array(MISSING))
        # The regular expression for words such as NaN is slow, so it is used only if some cell contains their letters.
        if b"nan" in letters or b"1.#" in letters:
            is_nan = compute.match_substring_regex(cells, _NAN)
            missing = compute.or_(missing, compute.fill_null(is_nan, fill_value=True))
        return compute.if_else(missing, None, cells)
    if kinds.is_floating(cells.type):
        return compute.if_else(compute.is_nan(cells), None, cells)
    return cells


def are_texts(cells: Any) -> bool:
    """Return True if the pyarrow array ``cells`` contains texts."""
    return bool(pyarrow().types.is_string(cells.type))
