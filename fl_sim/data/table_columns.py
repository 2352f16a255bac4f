"""The columns of a table: surveys their cells, assigns roles (label, client, split, feature), and encodes features.

The settings in the data set's name define the roles. Features are encoded as the settings say, or used unchanged.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import enumerated
from fl_sim.data.naming import OwnName
from fl_sim.data.table_file import (
    LIKE_A_NUMBER,
    Declared,
    Spelling,
    TableReader,
    are_texts,
    as_number,
    as_numbers,
    cure_of,
    in_order,
    one_spelling,
    pyarrow,
    spelling_by,
    texts_of,
)
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.types import Column

MOST_CATEGORIES: Final = 200
"""Maximum number of categories of a feature. More different texts are probably IDs, names or free text."""

MOST_CLASSES: Final = 1000
MOST_CLIENTS: Final = 10_000_000

_SAMPLES: Final = 200  # maximum number of texts per column (such as 0,5) from which the notation of numbers is inferred
ROWS_TO_COUNT: Final = 10  # in a table with fewer rows than this, a column 0, 1, 2 ... is a feature, not row numbers

_DATE: Final = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T]\d{1,2}:\d{2}.*)?")

_PARTS = 10  # maximum number of different entries of a split column
_MOST_NAMES: Final = 30  # maximum number of column names in a message
_COMMA: Final = re.compile(r"[+-]?\d*,\d+|\d+")  # matches a number with a decimal comma, such as 0,5

STEPS: Final = 20
"""Generators of synthetic records may round numbers of a column to this many values.

If the lower and the upper bound are whole numbers and less than ``STEPS`` apart, the values are all whole numbers from
the lower to the upper bound.
"""


@dataclass(frozen=True)
class CellPlace:
    """The position and value of a table cell, for error messages. ``row``: counted from 1, without the header."""

    file: str
    row: int
    value: str = ""

    def at(self, column: str) -> str:
        """Describe the position of this cell, for messages: file, row and ``column``."""
        return f"{self.file}: row {self.row}, column {column!r}"


@dataclass
class ColumnContent:
    """The facts about one column of a table, collected in one pass over its cells, to infer its type and encoding.

    ``declared``: the type that the file declares. ``texts``: the different texts in the column; None if there are more
    than ``most`` of them. ``as_text``: True if numbers in the column are names (postal codes). ``spelling``: the
    expected notation of numbers. ``missing``, ``number``, ``text``, ``infinite``: the first cell that is empty, a
    number, a text, or an infinite number, respectively. ``spelled``: texts that look like numbers in another notation.
    ``word``: the first text that does not look like a number. ``fraction``: the first number with a fraction in a
    column of texts. ``counts``: True if all numbers are row numbers. ``are_dates``: True if all texts are dates.
    """

    name: str
    declared: Declared
    most: int
    as_text: bool
    spelling: Spelling = field(default_factory=Spelling)
    missing: CellPlace | None = None
    number: CellPlace | None = None
    text: CellPlace | None = None
    infinite: CellPlace | None = None
    texts: set[str] | None = field(default_factory=set)
    spelled: dict[str, None] = field(default_factory=dict)
    word: CellPlace | None = None
    fraction: CellPlace | None = None
    counts: bool = True
    are_dates: bool = True

    def look_at(self, cells: Any, file: str, rows_before: int) -> None:
        """Update the facts about the column with its next batch of ``cells``.

        ``rows_before``: the number of rows of ``file`` before this batch.
        """
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
        if are_texts(cells):
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
        found = [text for text in texts_of(cells).unique().to_pylist() if text is not None]
        self.are_dates = self.are_dates and all(map(_DATE.fullmatch, found))
        self.texts.update(found)
        if len(self.texts) > self.most:
            self.texts = None


@dataclass(frozen=True)
class Survey:
    """The result of the function ``survey``: the number of rows of each file, and {column: facts about its cells}."""

    rows: tuple[int, ...]
    columns: Mapping[str, ColumnContent]


def survey(files: Iterable[TableReader], columns: Mapping[str, ColumnContent]) -> Survey:
    """Read all cells of ``columns`` in all files, to learn types, categories and empty cells before the conversion.

    ``columns``: {column: an empty ``ColumnContent``}; this function fills them. Raises UserError for a file without
    rows.
    """
    rows = []
    for file in files:
        found = 0
        for batch in file.batches([*columns]):
            for name, cells in batch.items():
                columns[name].look_at(cells, file.where, found)
            found += len(next(iter(batch.values())))
        if not found:
            raise UserError(f"{file.where} has no rows below the names of its columns; add one row per record")
        rows.append(found)
    return Survey(tuple(rows), columns)


def is_category(seen: ColumnContent) -> bool:
    """Return True if a feature column contains categories, False if it contains numbers.

    Raises UserError, with row and column, if the column contains both categories and numbers, or neither.
    """
    name = seen.name
    if seen.declared in {"time", "other"}:
        what = "dates or times" if seen.declared == "time" else "lists or other cells that are neither number nor text"
        raise UserError(f"column {name!r} holds {what}: leave it out by data.drop={name}, or write it as numbers")
    if not seen.as_text:
        _check_spelling(seen)
    if seen.as_text or seen.declared == "text":
        _check_texts(seen)
        return True
    if seen.number and seen.text:
        raise UserError(
            f"{seen.text.at(name)}: {shortened(seen.text.value)!r} is no number, but row {seen.number.row} holds "
            f"{seen.number.value}: correct the cell, or use the whole column as names by data.text={name}"
        )
    if seen.infinite:
        raise UserError(f"{seen.infinite.at(name)}: the number is not finite; correct the cell")
    if not seen.number and not seen.text:
        raise UserError(f"column {name!r} is empty in every row: leave it out by data.drop={name}")
    if seen.text:
        _check_texts(seen)
    return seen.text is not None


@dataclass(frozen=True)
class Roles:
    """The names of the columns by role: "" if there is no such column. Only a table of texts may have no label."""

    label: str
    client: str
    split: str
    features: tuple[str, ...]
    text: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that must be read."""
        return (*filter(None, (self.label, self.client, self.split, self.text)), *self.features)


def roles_of(own: OwnName, table: TableReader, *, with_features: bool = True, text: str = "") -> Roles:
    """Return the roles of the columns of ``table``, by the settings or by the column names label, client and split.

    ``text``: the column of texts that become tokens, if any. Texts need no labels. Raises UserError for a missing
    column, and for a column with two roles.
    """
    label = own.option("label") or ("label" if "label" in table.names else "")
    if not label and not text:
        raise UserError(
            f"{table.where} has no column called label: name the label column by data.label=COLUMN; its columns are "
            f"{enumerated(table.names, _MOST_NAMES)}"
        )
    has_test = any(own.option(key) for key in ("test", "test_file"))
    client = own.option("client") or ("client" if "client" in table.names else "")
    split = own.option("split") or ("split" if "split" in table.names and not has_test else "")
    uses: dict[str, str] = {}
    for key, name in (("label", label), ("client", client), ("split", split), ("text", text)):
        if name:
            _check_column(name, key, table)
            if name in uses:
                raise UserError(f"data.{uses[name]} and data.{key} are both {name!r}; use two different columns")
            uses[name] = key
    return Roles(label, client, split, _features(own, uses, table) if with_features else (), text)


def listed_columns(own: OwnName, key: str, table: TableReader) -> list[str]:
    """Return the columns that the setting ``key`` lists.

    ``+`` separates names. A comma also separates names, unless it is part of a column name.
    """
    given = own.options.get(key, ())
    parts = [[name] if name in table.names else name.split(",") for name in given]
    return [name.strip() for some in parts for name in some]


def blank_contents(own: OwnName, roles: Roles, table: TableReader) -> dict[str, ColumnContent]:
    """Return {column: an empty ``ColumnContent``} for all columns that ``survey`` must read and fill."""
    uses = ((roles.label, MOST_CLASSES), (roles.client, MOST_CLIENTS), (roles.split, _PARTS), (roles.text, 0))
    most = {name: count for name, count in uses if name}
    texts = {*listed_columns(own, "text", table), *own.of_columns("category"), *most}
    declared = dict(zip(table.names, table.declared, strict=True))
    spelling = spelling_by(own.option("decimal"), own.option("thousands"))
    return {
        name: ColumnContent(
            name, declared[name], most.get(name, MOST_CATEGORIES), as_text=name in texts, spelling=spelling
        )
        for name in roles.columns
    }


def check_types(roles: Roles, seen: Mapping[str, ColumnContent], where: str) -> None:
    """Raise UserError if the file declares a label, client, split or text column as neither text nor number."""
    for name in filter(None, (roles.label, roles.client, roles.split, roles.text)):
        if seen[name].declared in {"time", "other"}:
            what = "dates or times" if seen[name].declared == "time" else "lists"
            several = "; several labels per record (multi-label) are not supported" if name == roles.label else ""
            raise UserError(f"{where}: column {name!r} holds {what}, but must hold texts or whole numbers{several}")


def classes_of(seen: ColumnContent, where: str) -> tuple[str, ...]:
    """Return the classes: the different entries of the label column, sorted as numbers or as texts.

    Raises UserError for numbers with a fraction, and for more than 1000 different entries: these cannot be classes.
    """
    if seen.texts is None:
        raise UserError(
            f"{where}: column {seen.name!r} holds more than {seen.most:,} different entries, so it cannot be the "
            "label; regression is not supported. Set data.label to a column with classes"
        )
    has_commas = all(_COMMA.fullmatch(text) for text in seen.texts)
    numbers = {text: as_number(text.replace(",", ".") if has_commas else text) for text in seen.texts}
    if fractions := sorted((text, number) for text, number in numbers.items() if number is not None and number % 1):
        raise UserError(
            f"{where}: column {seen.name!r} holds numbers such as {fractions[0][0]}: regression is not supported. Set "
            "data.label to a column with classes, or replace the numbers by ranges"
        )
    if None not in numbers.values():
        return tuple(sorted(seen.texts, key=lambda text: (float(text), text)))
    return tuple(sorted(seen.texts))


def left_out(own: OwnName, names: Iterable[str], found: Survey) -> dict[str, str]:
    """Return {column: reason} of the unused columns: they contain dates, or more than 200 different texts.

    A column for which ``data.range``, ``data.category`` or ``data.fill`` is set is always used.
    """
    mentioned = {name for key in ("range", "category", "fill") for name in own.of_columns(key)}
    reasons = {}
    for name in names:
        seen = found.columns[name]
        is_text = seen.text is not None and seen.number is None and seen.word is not None and not seen.as_text
        if name in mentioned:
            continue
        if seen.declared == "time" or (is_text and seen.are_dates):
            reasons[name] = "dates"
        elif is_text and seen.texts is None:
            reasons[name] = f"over {seen.most} different texts"
    return reasons


def check_missing(found: Survey, names: Iterable[str], features: Sequence[str]) -> None:
    """Raise UserError if a column in ``names`` has an empty cell. The message lists all such columns.

    ``features``: the feature columns, for which ``data.fill`` is a possible cure.
    """
    lacking = [(name, missing) for name in names if (missing := found.columns[name].missing)]
    if not lacking:
        return
    name, first = lacking[0]
    rest = enumerated([other for other, _ in lacking[1:]], _MOST_NAMES)
    others = f" (and cells of {rest})" if rest else ""
    fills = (
        f" (data.fill.{name}=VALUE, or data.missing=middle for columns with a range), leave the column out by "
        f"data.drop={name}"
        if name in features
        else ""
    )
    raise UserError(
        f"{first.at(name)} is empty{others}: fill it in{fills}, or remove all records with an empty cell by "
        "data.missing=drop"
    )


def check_split(seen: ColumnContent, where: str) -> None:
    """Raise UserError unless every entry of the split column is train or test. ``where``: the file."""
    known = {"train", "test"}
    if seen.texts is None or (others := sorted({text.lower() for text in seen.texts} - known)):
        said = "over ten different entries" if seen.texts is None else f"the entry {', '.join(map(shortened, others))}"
        is_validation = seen.texts is not None and others[0].startswith("val")
        way = "; for validation records, set evaluate.validation=0.1" if is_validation else ""
        raise UserError(f"{where}: column {seen.name!r} has {said}, but only train and test are valid{way}")


@dataclass(frozen=True)
class Feature:
    """The encoding of one feature column, of numbers or of categories.

    ``first``: the index of the column's first number in a record's vector. ``bounds``: the numbers that become 0 and 1;
    None for no scaling. ``categories``: empty for a column of numbers. ``is_given``: True if ``data.category`` lists
    the categories. ``spelling``: the notation of numbers. ``fill``: the value for empty cells, if a setting defines
    one. ``is_filled``: True if empty cells are allowed. In a column of categories without ``fill``, an empty cell
    becomes zeros.
    """

    name: str
    first: int
    bounds: tuple[float, float] | None = None
    categories: tuple[str, ...] = ()
    is_given: bool = False
    spelling: Spelling = field(default_factory=Spelling)
    fill: float | str | None = None
    is_filled: bool = False

    @property
    def width(self) -> int:
        """The number of elements in a record's vector for this column: 1, or one per category."""
        return len(self.categories) or 1

    @property
    def is_public(self) -> bool:
        """True if the encoding depends only on settings, not on private records."""
        return self.is_given if self.categories else self.bounds is not None

    @property
    def names(self) -> list[str]:
        """The names of this column's numbers in a record's vector: COLUMN, or COLUMN=CATEGORY (``sex=female``)."""
        return [f"{self.name}={category}" for category in self.categories] or [self.name]

    def described(self) -> str:
        """Describe the encoding in a few words, for ``Dataset.shown``."""
        if self.categories:
            given = " (as set; any other value becomes zeros)" if self.is_given else ""
            return f"category: {', '.join(self.categories)}{given}"
        if self.bounds is None:
            return "number, unchanged"
        return f"number: {self.bounds[0]:g}..{self.bounds[1]:g} becomes 0..1"

    def column(self) -> Column:
        """Return the public facts of this column for generators of synthetic records.

        For a column of categories, the result has the number of categories. For a column of numbers, it has the values
        to which a generator may round. Call this method only if ``is_public``.
        """
        if self.categories:
            return Column(self.name, categories=len(self.categories))
        assert self.bounds is not None
        wide = self.bounds[1] - self.bounds[0]
        whole = all(bound == round(bound) for bound in self.bounds) and wide < STEPS
        steps = round(wide) if whole else STEPS - 1
        return Column(self.name, tuple(step / steps for step in range(steps + 1)))

    def put_into(self, rows: NDArray[np.float32], cells: Any) -> None:
        """Encode the ``cells`` of this column, and write the results into ``rows``, the vectors of the records.

        ``rows``: shape (cells, numbers per record). The elements of this column must be 0 before the call.
        """
        if self.categories:
            values = pyarrow().array(self.categories)
            texts = texts_of(cells) if self.fill is None else texts_of(cells).fill_null(self.fill)
            codes = np.asarray(pyarrow().compute.index_in(texts, value_set=values).fill_null(-1))
            (found,) = np.nonzero(codes >= 0)
            rows[found, self.first + codes[found]] = 1.0
            return
        numbers = as_numbers(cells, self.spelling)
        numbers = (numbers if self.fill is None else numbers.fill_null(self.fill)).to_numpy(zero_copy_only=False)
        if self.bounds is not None:
            low, high = self.bounds
            numbers = (np.clip(numbers, low, high) - low) / (high - low)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are refused later
            rows[:, self.first] = numbers


def features_of(own: OwnName, names: Sequence[str], found: Survey) -> tuple[Feature, ...]:
    """Return the encodings of the feature columns ``names``. ``found``: the result of ``survey``.

    Raises UserError if a setting does not fit the content of its column.
    """
    ranges, given = own.of_columns("range"), own.of_columns("category")
    features: list[Feature] = []
    first = 0
    for name in names:
        fill = _fill_of(own, name)
        is_filled = fill is not None or own.option("missing") == "middle"
        if name in given:
            if name in ranges:
                raise UserError(
                    f"data.range.{name} is for numbers and data.category.{name} for texts; leave one of them out"
                )
            categories = tuple(map(one_spelling, given[name]))
            if "" in categories or len(set(categories)) < len(categories):
                raise UserError(f"data.category.{name} must list each category once, as data.category.{name}=A+B+C")
            if fill is not None and fill not in categories:
                raise UserError(
                    f"data.fill.{name} = {fill!r} is none of data.category.{name}; use one of {enumerated(categories)}"
                )
            made = Feature(name, first, categories=categories, is_given=True, fill=fill, is_filled=is_filled)
        elif is_category(seen := found.columns[name]):
            if name in ranges:
                raise UserError(
                    f"data.range.{name} is for numbers, but the column {name!r} holds texts; leave this setting out"
                )
            texts = {*(seen.texts or ()), *([] if fill is None else [fill])}
            categories = tuple(sorted(texts, key=in_order))
            made = Feature(name, first, categories=categories, fill=fill, is_filled=is_filled)
        else:
            bounds = _bounds(name, ranges[name]) if name in ranges else None
            number = _number_to_fill(name, fill, bounds) if is_filled and (seen.missing or fill is not None) else None
            made = Feature(name, first, bounds, spelling=seen.spelling, fill=number, is_filled=is_filled)
        features.append(made)
        first += made.width
    return tuple(features)


def _fill_of(own: OwnName, name: str) -> str | None:
    filling = own.of_columns("fill")
    return one_spelling(filling[name][0]) if name in filling else None


def _number_to_fill(name: str, fill: str | None, bounds: tuple[float, float] | None) -> float:
    if fill is not None:
        if (number := as_number(fill)) is None:
            raise UserError(f"data.fill.{name} = {fill!r}: the column {name!r} holds numbers; set a number")
        return number
    if bounds is None:
        raise UserError(
            f"column {name!r} has empty cells, but data.missing=middle needs its range: set data.range.{name}="
            f"LOW..HIGH, or set the number for empty cells, data.fill.{name}=NUMBER"
        )
    return (bounds[0] + bounds[1]) / 2


def _continues(numbers: Any, rows_before: int) -> bool:
    """Return True if ``numbers``, the next cells of a column, continue row numbers that began at 0 or 1.

    ``rows_before``: the number of rows before these cells.
    """
    if numbers.null_count or not len(numbers) or numbers[0].as_py() not in {rows_before, rows_before + 1}:
        return False
    found = numbers.to_numpy(zero_copy_only=False)
    return bool(np.array_equal(found, found[0] + np.arange(len(found))))


def _first(mask: Any, file: str, rows_before: int, cells: Any) -> CellPlace | None:
    arrow = pyarrow()
    place = arrow.compute.index(mask, value=True).as_py()
    return None if place < 0 else CellPlace(file, rows_before + place + 1, str(cells[place].as_py()))


def _check_spelling(seen: ColumnContent) -> None:
    """Raise UserError if all texts of a column look like numbers in another notation, such as 0,5."""
    name = seen.name
    kept = f"or use the whole column as names by data.text={name}"
    if seen.text and not seen.word:
        plain = [seen.number.value] if seen.number else []
        is_set = seen.declared == "text"
        cure = "write the column as numbers" if is_set else cure_of([*seen.spelled, *plain])
        raise UserError(
            f"{seen.text.at(name)}: {shortened(seen.text.value)!r} looks like a number in another notation: {cure}, "
            f"leave the column out by data.drop={name}, {kept}"
        )
    if seen.declared == "text" and seen.fraction and not seen.text:
        raise UserError(
            f"{seen.fraction.at(name)}: the file declares the column as texts, but {seen.fraction.value!r} and all "
            f"others are numbers: write the column as numbers, {kept}"
        )


def _check_texts(seen: ColumnContent) -> None:
    name = seen.name
    if seen.texts is None:
        raise UserError(
            f"column {name!r} holds more than {seen.most} different texts: leave it out by data.drop={name}, or list "
            f"the categories to use by data.category.{name}=A+B+C"
        )
    if not seen.texts:
        raise UserError(f"column {name!r} is empty in every row: leave it out by data.drop={name}")
    if not seen.as_text and all(_DATE.fullmatch(text) for text in seen.texts):
        raise UserError(
            f"column {name!r} holds dates, such as {min(seen.texts)}: leave it out by data.drop={name}, or write it "
            "as numbers (days since a day, or the age)"
        )


def _features(own: OwnName, uses: Mapping[str, str], table: TableReader) -> tuple[str, ...]:
    """Return the feature columns: all columns without a role in ``uses`` that ``data.drop`` does not name.

    ``uses``: {column: its role, label, client or split}.
    """
    dropped = {*listed_columns(own, "drop", table)}
    for key in ("drop", "text"):
        for name in listed_columns(own, key, table):
            _check_column(name, key, table)
    if clash := sorted(dropped & {*uses}):
        raise UserError(f"data.drop names {clash[0]!r}, which is also data.{uses[clash[0]]}: remove one of the two")
    features = tuple(name for name in table.names if name not in uses and name not in dropped)
    if not features:
        raise UserError(
            f"{table.where} has no feature columns in addition to {enumerated(uses, _MOST_NAMES)}; add some"
        )
    for key in ("range", "category", "fill"):
        for name in own.of_columns(key):
            _check_column(name, key, table)
            if name in uses or name in dropped:
                raise UserError(f"data.{key}.{name}: the column {name!r} is no feature; leave data.{key}.{name} out")
    return features


def _check_column(name: str, key: str, table: TableReader) -> None:
    if name not in table.names:
        several = ""
        if key == "label" and "+" in name and all(part in table.names for part in name.split("+")):
            several = "; several labels per record (multi-label) are not supported"
        raise UserError(
            f"data.{key}: {table.where} has no column {shortened(name)!r}{guess(name, table.names)}{several}; its "
            f"columns are {enumerated(table.names, _MOST_NAMES)}"
        )


def _bounds(name: str, given: tuple[str, ...]) -> tuple[float, float]:
    numbers = [as_number(text) for text in given]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None or numbers[0] >= numbers[1]:
        raise UserError(f"data.range.{name} = {'..'.join(given)!r}: write LOW..HIGH, two numbers, such as 0..100")
    return numbers[0], numbers[1]
