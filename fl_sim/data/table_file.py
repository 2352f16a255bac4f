"""A table in a csv or parquet file, read in batches with pyarrow, as often as wanted: it need not fit into memory."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from unicodedata import normalize

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.own_code import in_one_line

Declared: TypeAlias = Literal["", "number", "text", "time", "other"]
"""What a file says of a column's type: a csv file nothing."""

DELIMITERS: Final[Mapping[str, str]] = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}

MISSING: Final = ("", "NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "null", "NULL", "?")
"""What a cell without a value is written as, beside ``nan``; spaces around a text do not count."""

_NAN: Final = r"^(?i:[+-]?nan(\(.*\))?|[+-]?1\.#(qnan|snan|ind))$"
"""What programs write for a number that is none."""

_BLOCK: Final = 2**24
"""Bytes of a csv file that are looked at together: of a table with many columns these are few rows."""

ROWS: Final = 2**16
"""How many are read at a time."""


@dataclass(frozen=True)
class TableFile:
    """A table that can be read again and again.

    ``where``: what it is called in messages; ``written``: its columns as they are written; ``declared``: what is said
    of their types; ``rows``: a function from columns, as written, to batches of their cells; ``codes``: what the file
    says that the codes 0, 1 ... of a column stand for.
    """

    where: str
    written: tuple[str, ...]
    declared: tuple[Declared, ...]
    rows: Callable[[Sequence[str]], Iterator[Any]]
    codes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return its columns in order, without spaces around their names."""
        return tuple(normalize("NFC", name).strip() for name in self.written)

    def batches(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield {column: its next cells} as pyarrow's arrays: texts without spaces around them, None where missing.

        Raises UserError where the file is damaged.
        """
        written = dict(zip(self.names, self.written, strict=True))
        try:
            for batch in self.rows([written[name] for name in columns]):
                places = {name: place for place, name in enumerate(batch.schema.names)}  # by name they are looked for
                yield {name: _cleaned(batch.column(places[written[name]])) for name in columns}
        except UserError:
            raise
        except Exception as error:
            raise _unreadable(self.where, error) from error


def open_table(path: Path, kind: str, delimiter: str = "comma") -> TableFile:
    """Return the table in ``path``. Raises UserError for one that cannot be read, or has two columns of one name."""
    if delimiter not in DELIMITERS:
        valid = ", ".join(DELIMITERS)
        raise UserError(f"data.delimiter = {delimiter!r}: valid are {valid}{guess(delimiter, DELIMITERS)}")
    arrow = pyarrow()
    rows = partial(_of_parquet, path) if kind == "parquet" else partial(_of_csv, path, DELIMITERS[delimiter])
    try:
        if kind == "parquet":
            schema = arrow.parquet.read_schema(path)
        else:
            with _open_csv(path, DELIMITERS[delimiter], None) as reader:
                schema = reader.schema
        return table_of(str(path), schema, rows, is_typed=kind == "parquet")
    except UserError:
        raise
    except Exception as error:
        raise _unreadable(str(path), error) from error


def table_of(where: str, schema: Any, rows: Callable[..., Iterator[Any]], *, is_typed: bool = True) -> TableFile:
    """Return a table with the columns of ``schema``, whose types count if it ``is_typed``.

    Raises UserError for two columns of one name.
    """
    declared = tuple(_declared(part) if is_typed else "" for part in schema.types)
    table = TableFile(where, tuple(schema.names), declared, rows, _codes(schema))
    _check_names(where, table.names)
    return table


def pyarrow() -> Any:
    """Return pyarrow, with all of it that is used here. Raises UserError where it is not installed."""
    try:
        import pyarrow as pa  # noqa: PLC0415 (an extra, and slow to import)
        import pyarrow.compute  # noqa: PLC0415
        import pyarrow.csv  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"tables are read by pyarrow, which is not installed ({in_one_line(error)}): pip install 'fl-sim[data]', "
            "or pip install pyarrow"
        ) from error
    return pa


def _of_parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    with pyarrow().parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS, columns=[*columns])


def _of_csv(path: Path, delimiter: str, columns: Sequence[str]) -> Iterator[Any]:
    arrow = pyarrow()
    text = dict.fromkeys(columns, arrow.string())
    convert = arrow.csv.ConvertOptions(column_types=text, include_columns=[*columns])
    with _open_csv(path, delimiter, convert) as reader:
        yield from reader


def _open_csv(path: Path, delimiter: str, convert: Any) -> Any:
    arrow = pyarrow()
    return arrow.csv.open_csv(
        path,
        # one thread, so that a mistake is told with its row
        read_options=arrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        parse_options=arrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=convert,
    )


def _unreadable(where: str, error: Exception) -> UserError:
    if "Empty CSV" in str(error):
        return UserError(f"{where} is empty; wanted is a first line with the names of the columns, and a line a record")
    return UserError(f"{where} cannot be read as a table ({in_one_line(error)}); mend the file, or write it again")


def _check_names(where: str, names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        name, count = Counter(names).most_common(1)[0]
        raise UserError(f"{where} has {count} columns called {shortened(name)!r}; rename all but one of them")
    if len(names) == 1 and (found := [word for word, sign in DELIMITERS.items() if sign in names[0]]):
        raise UserError(
            f"{where} has one column alone, {shortened(names[0])!r}: its cells stand between other signs; set "
            f"data.delimiter={found[0]}"
        )


def _codes(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return what Hugging Face's ``datasets`` writes into a file of the names of classes: {column: names}."""
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


@lru_cache(maxsize=1)
def _missing() -> Any:
    return pyarrow().array(MISSING)


def _cleaned(cells: Any) -> Any:
    arrow = pyarrow()
    kinds, compute = arrow.types, arrow.compute
    if kinds.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if kinds.is_string(cells.type) or kinds.is_large_string(cells.type):
        cells = cells.cast(arrow.string())
        buffer = cells.buffers()[2]
        letters = buffer.to_pybytes().lower() if buffer is not None else b""
        if not letters.isascii():
            cells = compute.utf8_normalize(cells, form="NFC")
        cells = compute.utf8_trim_whitespace(cells)
        missing = compute.is_in(cells, value_set=_missing())
        if b"nan" in letters or b"1.#" in letters:  # building the expression takes longer than a thousand cells do
            is_nan = compute.match_substring_regex(cells, _NAN)
            missing = compute.or_(missing, compute.fill_null(is_nan, fill_value=True))
        return compute.if_else(missing, None, cells)
    if kinds.is_floating(cells.type):
        return compute.if_else(compute.is_nan(cells), None, cells)
    return cells
