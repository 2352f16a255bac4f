"""Tables of the user's own: all columns except label, client and split become numbers by public settings alone.

A column of numbers is unchanged, or scaled by ``data.range.COLUMN=LOW..HIGH`` to 0..1, where values outside are
clipped. A column of texts becomes one feature per category, at most one of which is 1. Means and deviations of the
clients' records are used only if ``data.scale=records`` asks for them. A note beside results, and one line per column,
describe the table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data import table_columns as columns
from fl_sim.data.dataset import (
    check_classes,
    enumerated,
    listed_classes,
    most_bytes,
    own_dataset,
    read_off_classes,
    unlisted,
)
from fl_sim.data.naming import OwnName
from fl_sim.data.table_columns import Feature, Roles, Survey, roles_of
from fl_sim.data.table_file import (
    TableReader,
    as_number,
    in_order,
    open_table,
    pyarrow,
    similar_spellings,
    spelling_by,
    texts_of,
)
from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples

_ID: Final = re.compile(r"(?i:(^|[_ .-])(id|uuid|guid)$)|[a-z]I[Dd]$")  # names of IDs: id, patient_id, patientID
_FEW: Final = 6  # names that a note lists


@dataclass(frozen=True)
class TestPart:
    """The rule for the test part: a ``share`` of the records drawn by ``seed``, an ``other`` table, or neither."""

    share: float = 0.0
    seed: int = 0
    other: str = ""

    def check(self, *, has_column: bool) -> None:
        """Raise UserError unless exactly one setting defines the test part."""
        ways = (self.share > 0) + bool(self.other) + has_column
        if ways == 1:
            return
        options = (
            "data.test=0.2 (a fifth of the records, or of every client's), data.test_file=FILE (another file) or "
            "data.split=COLUMN (a column that says train or test)"
        )
        if ways:
            raise UserError(f"the test part is said {ways} times; take one of {options}")
        raise UserError(f"nothing says which records are for testing; set {options}")

    def drawn(self, count: int, clients: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Return the mask of the test records: a share of all, or of each client's records if ``clients`` are given.

        ``count``: the number of records. Shares are rounded to whole records, at least one and never all. A client with
        one record keeps it for training.
        """

        def size(records: int) -> int:
            return min(max(1, round(self.share * records)), records - 1)

        chosen = np.zeros(count, dtype=bool)
        if clients is None:
            chosen[rng(self.seed, "test part").permutation(count)[: size(count)]] = True
            return chosen
        order = np.argsort(clients, kind="stable")
        numbers, starts = np.unique(clients[order], return_index=True)
        bounds = np.append(starts, count)
        for place in np.flatnonzero(np.diff(bounds) > 1).tolist():  # of a million clients most may have one record
            of_client = order[bounds[place] : bounds[place + 1]]
            coins = rng(self.seed, "test part", int(numbers[place]))
            chosen[of_client[coins.permutation(len(of_client))[: size(len(of_client))]]] = True
        return chosen

    def described(self, column: str, *, by_client: bool) -> str:
        """Return a description of the test part. ``column``: the name of the split column, if any."""
        if self.other:
            return f"tested on {self.other}"
        if column:
            return f"train and test by {column}"
        whose = "every client's records" if by_client else "the records"
        return f"{self.share:g} of {whose} are for testing, drawn by test_seed {self.seed}"


def test_part_by_setting(own: OwnName) -> TestPart:
    """Return the rule for the test part in a data set's name. Raises UserError for an invalid share or seed."""
    share, seed, file = (own.option(key) for key in ("test", "test_seed", "test_file"))
    if seed and not share:
        raise UserError("data.test_seed draws a share of the records for testing: set data.test, too, or leave it out")
    number = as_number(share) if share else 0.0
    if number is None or (share and not 0 < number < 1):
        raise UserError(f"data.test = {share!r}: it is a share of the records, above 0 and below 1, such as 0.2")
    if seed and not (seed.isascii() and seed.isdigit() and len(seed) < 19):
        raise UserError(f"data.test_seed = {seed!r}: it is a whole number, at least 0")
    return TestPart(number, int(seed or 0), Path(file).name)


@dataclass(frozen=True)
class TablePlan:
    """The plan of a table, made before its records are read.

    ``clients``: in order. ``listed``: True if the user lists the classes. ``drops``: True if records with empty cells
    are left out. ``filling``: a description of the values for empty cells. ``left_out``: {column: reason} of columns
    whose content cannot be a feature.
    """

    tables: tuple[TableReader, ...]
    survey: Survey
    roles: Roles
    features: tuple[Feature, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    test_part: TestPart
    drops: bool
    listed: bool
    filling: str
    left_out: Mapping[str, str]

    @property
    def where(self) -> str:
        """The name of the (training) table in messages."""
        return self.tables[0].where

    @property
    def counting(self) -> tuple[str, ...]:
        """The number columns that just count the rows, such as an index that a program has written."""
        if min(self.survey.rows) < columns.ROWS_TO_COUNT:
            return ()
        seen = ((one.name, self.survey.columns[one.name]) for one in self.features if not one.categories)
        return tuple(name for name, column in seen if column.counts and column.number is not None)

    @property
    def ids(self) -> tuple[str, ...]:
        """The category columns with a different text in every row."""
        rows = sum(self.survey.rows)
        categories = [one for one in self.features if one.categories and not one.is_given]
        return tuple(one.name for one in categories if len(one.categories) == rows >= columns.ROWS_TO_COUNT)

    @cached_property
    def unscaled(self) -> dict[str, None]:
        """The number columns without a range, in order."""
        return dict.fromkeys(one.name for one in self.features if not one.categories and one.bounds is None)

    @property
    def test_records(self) -> str:
        """A description of the test part."""
        return self.test_part.described(self.roles.split, by_client=bool(self.clients))


@dataclass(frozen=True)
class Rows:
    """The rows of a table: numbers, labels, clients (0 if there are none), and a mask of the test rows."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    is_test: NDArray[np.bool_]


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the data set in the table at ``path``.

    Raises UserError, with row and column, for anything but classification data.
    """
    test_part, delimiter = test_part_by_setting(own), own.option("delimiter")
    tables = [open_table(path, own.kind, delimiter)]
    if test_part.other:
        tables.append(open_table(Path(own.option("test_file")).expanduser().absolute(), own.kind, delimiter))
    return dataset_of(name, own, tables, test_part)


def dataset_of(name: str, own: OwnName, tables: Sequence[TableReader], test_part: TestPart) -> Dataset:
    """Return the data set of one table, or of a training table and a test table."""
    scales = _choice(own, "scale", ("ranges", "records")) == "records"
    plan = planned(own, tables, roles_of(own, tables[0]), test_part)
    rows = rows_of(plan)
    train, test = (
        Examples(rows.inputs[mask], rows.labels[mask], rows.clients[mask] if plan.roles.client else None)
        for mask in (~rows.is_test, rows.is_test)
    )
    mean, std = np.zeros(train.inputs.shape[1]), np.ones(train.inputs.shape[1])
    for feature in plan.features if scales else ():
        if feature.name in plan.unscaled:
            column = train.inputs[:, feature.first].astype(np.float64)
            mean[feature.first], std[feature.first] = column.mean(), column.std() or 1.0
    constants = tuple(mean.tolist()), tuple(std.tolist())
    dropped = sum(plan.survey.rows) - len(rows.labels)
    left_out = (f"{dropped:,} records {_lacking(plan)} are left out",) if dropped else ()
    public = all(feature.is_public for feature in plan.features)
    return replace(
        own_dataset(name, train, test, *constants, plan.where, listed=plan.classes if plan.listed else ()),
        note=_note(plan, scales=scales),
        counted=(*left_out, *_oddities(plan)),
        columns=tuple(feature.column() for feature in plan.features) if public else (),
        classes=plan.classes,
        names=tuple(name for feature in plan.features for name in feature.names),
        shown=_shown(plan, scales=scales),
        inferred=_inferred(plan, own),
        read_off=_read_off(plan),
    )


def planned(own: OwnName, tables: Sequence[TableReader], roles: Roles, test_part: TestPart) -> TablePlan:
    """Return the plan of the tables after a pass over the columns in ``roles``.

    Raises UserError for a table without classes, and for empty cells that no setting allows.
    """
    where = tables[0].where
    test_part.check(has_column=bool(roles.split))
    for table in tables[1:]:
        if missing := sorted(set(roles.columns) - set(table.names)):
            raise UserError(
                f"{table.where} lacks the column {missing[0]!r} that {where} has; both need the same columns"
            )
        _check_alike(tables[0], table, roles)
    seen = columns.blank_contents(own, roles, tables[0])
    columns.check_types(roles, seen, where)
    found = columns.survey(tables, seen)
    drops = _choice(own, "missing", ("refuse", "drop", "middle")) == "drop"
    out = columns.left_out(own, roles.features, found)
    if out and len(out) == len(roles.features):
        raise UserError(
            f"{where} has no column to learn from: {_reasons(out)}; add others, or write these as numbers or categories"
        )
    roles = replace(roles, features=tuple(name for name in roles.features if name not in out))
    if roles.split:
        columns.check_split(seen[roles.split], where)
    features, listed = columns.features_of(own, roles.features, found), listed_classes(own)
    if not drops:
        filled = {feature.name for feature in features if feature.is_filled}
        columns.check_missing(found, [name for name in roles.columns if name not in filled], roles.features)
    classes = listed or columns.classes_of(seen[roles.label], where)
    if listed and not drops and set(seen[roles.label].texts or ("", "")) - set(listed):
        cure = ", or leave such records out, uncounted, by data.missing=drop"
        raise unlisted(f"{where}, column {roles.label!r}", cure)
    clients: tuple[str, ...] = ()
    if roles.client:
        if (of := seen[roles.client].texts) is None:
            raise UserError(f"{where}: column {roles.client!r} holds over {seen[roles.client].most:,} clients")
        clients = tuple(sorted(of, key=in_order))
    return TablePlan(
        tuple(tables), found, roles, features, classes, clients, test_part, drops, bool(listed), _filling(own), out
    )


def rows_of(plan: TablePlan) -> Rows:
    """Return all rows. Raises UserError if they take too much memory, or if numbers are too large."""
    count, width = sum(plan.survey.rows), sum(feature.width for feature in plan.features)
    if 2 * 4 * count * width > most_bytes():  # all records, and a second copy when they are split
        raise UserError(
            f"{plan.where}: {count:,} records of {width:,} numbers take {4 * count * width:,} bytes twice, "
            "more than half of this machine's memory; take fewer records, or leave columns out by data.drop"
        )
    inputs, (labels, clients) = np.zeros((count, width), dtype=np.float32), np.zeros((2, count), dtype=np.int64)
    rows = Rows(inputs, labels, clients, np.zeros(count, dtype=bool))
    kept = _fill(rows, plan)
    if not kept.all():
        rows = Rows(rows.inputs[kept], rows.labels[kept], rows.clients[kept], rows.is_test[kept])
    for feature in plan.features:
        if feature.width == 1 and not np.isfinite(rows.inputs[:, feature.first]).all():
            raise UserError(
                f"{plan.where}: column {feature.name!r} holds numbers beyond 3.4e38, the largest of 32 bits; "
                f"scale it by data.range.{feature.name}=LOW..HIGH"
            )
    if plan.test_part.share:
        is_test = plan.test_part.drawn(len(rows.labels), rows.clients if plan.roles.client else None)
        rows = replace(rows, is_test=is_test)
    if not len(rows.labels) or rows.is_test.all() or not rows.is_test.any():
        part = "training" if rows.is_test.all() else "test"
        raise UserError(f"{plan.where}: no records in the {part} part; take other records")
    if not plan.listed:
        where = f"{plan.where}, column {plan.roles.label!r}"
        check_classes(rows.labels[~rows.is_test], rows.labels[rows.is_test], plan.classes, where)
    return rows


def _note(plan: TablePlan, *, scales: bool) -> str:
    """Return the note beside results: one line, whatever the number of columns, without facts about records."""
    ranged = [feature.name for feature in plan.features if feature.bounds is not None]
    categories = [f"{feature.name} ({feature.width})" for feature in plan.features if feature.categories]
    how = "scaled by the training records' mean and deviation" if scales else "numbers as they are, not scaled"
    parts = [
        f"label {plan.roles.label}: {_some(plan.classes) if plan.listed else f'{len(plan.classes)} classes'}",
        f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else "",
        f"numbers scaled by their range: {_some(ranged)}" if ranged else "",
        f"{how}: {_some(plan.unscaled)}" if plan.unscaled else "",
        f"categories: {_some(categories)}" if categories else "",
        plan.filling,
        f"left out: {_reasons(plan.left_out)}" if plan.left_out else "",
        plan.test_records,
        f"records {_lacking(plan)} are left out" if plan.drops else "",
    ]
    return "; ".join(filter(None, parts))


def _shown(plan: TablePlan, *, scales: bool) -> tuple[tuple[str, str], ...]:
    """Return (column, its use) for each column: label, client and split, then features in file order, then left out."""
    scaled = ", scaled by the mean and deviation of the training records" if scales else ""
    lines = [(plan.roles.label, f"label: {', '.join(plan.classes)}")]
    if plan.clients:
        lines.append((plan.roles.client, f"client: {len(plan.clients):,} of them"))
    if plan.roles.split:
        lines.append((plan.roles.split, "says train or test"))
    features = ((one.name, f"{one.described()}{scaled if one.name in plan.unscaled else ''}") for one in plan.features)
    return (*lines, *features, *((name, f"left out: {reason}") for name, reason in plan.left_out.items()))


def _inferred(plan: TablePlan, own: OwnName) -> tuple[str, ...]:
    """Return the assumptions about the file, as text lines."""
    cells = "types of columns are those that the file declares"
    if own.kind == "csv":
        spelling = spelling_by(own.option("decimal"), own.option("thousands"))
        cells = f"cells stand between signs called {plan.tables[0].delimiter}; {spelling.described()}"
    roles = {"label": plan.roles.label, "client": plan.roles.client, "split": plan.roles.split}
    by_name = [role for role, name in roles.items() if name and not own.option(role)]
    numbers = [feature for feature in plan.features if not feature.categories]
    are_numbers = all(name.lstrip("-").isdigit() for name in plan.classes)
    return (
        cells,
        f"{len(numbers):,} columns of numbers, {len(plan.features) - len(numbers):,} of categories",
        *([f"columns by their names: {', '.join(by_name)}"] if by_name else []),
        f"{len(plan.classes):,} classes, in {'the order of their numbers' if are_numbers else 'alphabetical order'}",
    )


def _read_off(plan: TablePlan) -> tuple[str, ...]:
    """Return the facts that were read off the records, each with the setting that makes it public."""
    inferred = [feature.name for feature in plan.features if feature.categories and not feature.is_given]
    facts = list(read_off_classes(plan.listed))
    if inferred:
        facts.append(f"the categories of {_some(inferred)} (data.category.{inferred[0]}=A+B lists public ones)")
    if plan.left_out:
        facts.append(f"which columns are left out (data.drop={','.join(plan.left_out)} sets it)")
    return tuple(facts)


def _check_alike(first: TableReader, other: TableReader, roles: Roles) -> None:
    """Raise UserError if the cells of a column have different meanings in the tables ``first`` and ``other``."""
    kinds, others = (dict(zip(table.names, table.declared, strict=True)) for table in (first, other))
    for name in roles.columns:
        if others[name] in {"time", "other"} and others[name] != kinds[name]:
            raise UserError(
                f"{other.where}: column {name!r} holds {'dates or times' if others[name] == 'time' else 'lists'}, and "
                f"{first.where} has other cells there; write both alike"
            )
        codes = [table.codes.get(name, ()) for table in (first, other)]
        if all(codes) and codes[0] != codes[1]:
            raise UserError(
                f"{other.where}: the codes of column {name!r} stand for {enumerated(codes[1], 10)}, and in "
                f"{first.where} for {enumerated(codes[0], 10)}: write both with the same names, or names in place of "
                "codes"
            )


def _fill(rows: Rows, plan: TablePlan) -> NDArray[np.bool_]:
    """Write the tables into ``rows``, which are zeros before; return the mask of the rows to keep."""
    compute = pyarrow().compute
    kept, first = np.ones(len(rows.labels), dtype=bool), 0
    filled = {feature.name for feature in plan.features if feature.is_filled}
    for number, table in enumerate(plan.tables):
        for batch in table.batches(plan.roles.columns):
            labels = batch[plan.roles.label]
            some = slice(first, first + len(labels))
            for feature in plan.features:
                feature.put_into(rows.inputs[some], batch[feature.name])
            rows.labels[some] = _codes(labels, plan.classes)
            rows.is_test[some] = number == 1
            if plan.roles.client:
                rows.clients[some] = _codes(batch[plan.roles.client], plan.clients)
            if plan.roles.split:
                is_test = compute.equal(compute.utf8_lower(texts_of(batch[plan.roles.split])), "test")
                rows.is_test[some] = np.asarray(is_test.fill_null(fill_value=False))
            if plan.drops:
                whole = [cells.is_valid() for name, cells in batch.items() if name not in filled]
                kept[some] = np.all([np.asarray(cells) for cells in whole], axis=0)
                kept[some] &= np.asarray(compute.is_in(texts_of(labels), value_set=_texts(plan.classes)))
            first = some.stop
    return kept


def _choice(own: OwnName, key: str, valid: Sequence[str]) -> str:
    chosen = own.option(key) or valid[0]
    if chosen not in valid:
        raise UserError(f"data.{key} = {chosen!r}{guess(chosen, valid)}; valid: {', '.join(valid)}")
    return chosen


def _codes(cells: Any, values: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the index of each cell in ``values``; 0 for an empty cell, whose record is left out."""
    found = pyarrow().compute.index_in(texts_of(cells), value_set=_texts(values))
    return np.asarray(found.fill_null(0)).astype(np.int64)


@lru_cache(maxsize=2)  # labels and clients, of which there may be a million, for every part of a file
def _texts(values: tuple[str, ...]) -> Any:
    return pyarrow().array(values, pyarrow().string())


def _oddities(plan: TablePlan) -> list[str]:
    """Return descriptions of likely mistakes in the file; the file is nevertheless read without a change."""
    found = [similar_spellings("classes", plan.classes), similar_spellings("clients", plan.clients, with_names=False)]
    found += [
        similar_spellings(f"categories of {one.name}", one.categories) for one in plan.features if not one.is_given
    ]
    found += [
        f"column {name!r} is left out: it holds {reason}; data.drop={name} confirms it, and "
        f"data.category.{name}=A+B takes some of its texts"
        for name, reason in plan.left_out.items()
    ]
    found += [
        f"column {name!r} has another text in every row, as an ID: leave it out by data.drop={name}"
        for name in plan.ids
    ]
    found += [
        f"column {one.name!r} is called like an ID, and models learn from it: leave it out by data.drop={one.name}"
        for one in plan.features
        if not one.categories and one.bounds is None and _ID.search(one.name) and one.name not in plan.counting
    ]
    found += [f"column {name!r} numbers the rows: leave it out by data.drop={name}" for name in plan.counting if name]
    if any(not one.name for one in plan.features):
        rows = " and numbers the rows" if "" in plan.counting else ""
        found.append(
            f"a column has no name{rows}, as the index that spreadsheets and DataFrame.to_csv write: leave it out by "
            "data.drop= with nothing behind, or give it a name"
        )
    return [one for one in found if one]


def _lacking(plan: TablePlan) -> str:
    return "with an empty cell or a class that is not listed" if plan.listed else "with an empty cell"


def _filling(own: OwnName) -> str:
    """Return a description of the values for empty cells by the settings; empty if no setting fills cells."""
    fixed = [f"{name} {value}" for name, (value,) in own.of_columns("fill").items()]
    middle = "the middle of a number's range, zeros for a category" if own.option("missing") == "middle" else ""
    said = "; ".join(filter(None, (_some(fixed), middle)))
    return f"empty cells become: {said}" if said else ""


def _reasons(left_out: Mapping[str, str]) -> str:
    return _some([f"{name} ({reason})" for name, reason in left_out.items()])


def _some(names: Iterable[str]) -> str:
    found = [name or "''" for name in names]
    more = f" and {len(found) - _FEW} more" if len(found) > _FEW + 1 else ""
    return ", ".join(found if not more else found[:_FEW]) + more
