"""Builds a data set from the user's table. One column contains the labels; the other columns are features.

Two optional columns contain the client of each record, and the split (train or test). A column of numbers is used
unchanged. With ``data.range.COLUMN=LOW..HIGH`` the column is scaled to 0..1. Values below LOW become 0, and values
above HIGH become 1. A column of texts becomes one feature per category (one-hot). The mean and standard deviation of
the records are private, so they are used only if ``data.scale=records`` is set.
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
    pyarrow,
    similar_spellings,
    spelling_by,
    texts_of,
)
from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples

_ID: Final = re.compile(r"(?i:(^|[_ .-])(id|uuid|guid)$)|[a-z]I[Dd]$")  # column names such as id, patient_id, patientID
_FEW: Final = 6  # maximum number of names in a list in ``Dataset.note``


@dataclass(frozen=True)
class TestPart:
    """The rule that selects the test records of a table or of a folder of images.

    ``share``: the share of the records that is drawn at random for testing, or 0. ``seed``: the seed of the draw.
    ``other``: the name of a separate table with the test records, or "". Without ``share`` and ``other``, a split
    column of the table must mark the test records.
    """

    share: float = 0.0
    seed: int = 0
    other: str = ""

    def check(self, *, has_column: bool) -> None:
        """Raise UserError unless exactly one setting defines the test records.

        It can set a share, a separate table, or a split column. ``has_column``: True if there is a split column.
        """
        ways = (self.share > 0) + bool(self.other) + has_column
        if ways == 1:
            return
        options = (
            "data.test=0.2 (a fifth of the records, or of each client's records), data.test_file=FILE (another file) "
            "or data.split=COLUMN (a column with train or test)"
        )
        if ways:
            raise UserError(f"{ways} settings define the test records; set only one of {options}")
        raise UserError(f"no setting says which records are for testing; set {options}")

    def drawn(self, count: int, clients: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Draw the test records at random; return a mask, shape (records,), that is True for test records.

        ``count``: the number of records. ``clients``: the index of each record's client (or class). With ``clients``,
        ``share`` of the records of each client (or class) is drawn: at least one record, and at most all but one. If a
        client (or class) has a single record, this record is for training.
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
        # Clients with a single record are skipped to save time: there may be a million of them.
        for place in np.flatnonzero(np.diff(bounds) > 1).tolist():
            of_client = order[bounds[place] : bounds[place + 1]]
            coins = rng(self.seed, "test part", int(numbers[place]))
            chosen[of_client[coins.permutation(len(of_client))[: size(len(of_client))]]] = True
        return chosen

    def described(self, column: str, *, by_client: bool) -> str:
        """Describe the selection of test records, for ``Dataset.note``.

        ``column``: the name of the split column, if any. ``by_client``: True if the share is drawn from each client's
        records.
        """
        if self.other:
            return f"tested on {self.other}"
        if column:
            return f"train and test by {column}"
        whose = "every client's records" if by_client else "the records"
        return f"{self.share:g} of {whose} are for testing, drawn by test_seed {self.seed}"


def test_part_by_setting(own: OwnName) -> TestPart:
    """Return the rule that selects the test records, from the settings ``data.test``, ``test_seed`` and ``test_file``.

    Raises UserError for an invalid share or seed.
    """
    share, seed, file = (own.option(key) for key in ("test", "test_seed", "test_file"))
    if seed and not share:
        raise UserError("data.test_seed is the seed of data.test, which is not set: set data.test, or leave it out")
    number = as_number(share) if share else 0.0
    if number is None or (share and not 0 < number < 1):
        raise UserError(f"data.test = {share!r}: it must be a share of the records, above 0 and below 1, such as 0.2")
    if seed and not (seed.isascii() and seed.isdigit() and len(seed) < 19):
        raise UserError(f"data.test_seed = {seed!r}: it must be a whole number, at least 0")
    return TestPart(number, int(seed or 0), Path(file).name)


@dataclass(frozen=True)
class TablePlan:
    """The rules for the conversion of a table to records: the roles and encodings of its columns.

    ``tables``: the table, or a training and a test table. ``survey``: facts about the contents of the columns.
    ``clients``: the names of all clients, sorted. ``drops``: True if records with empty cells are removed. ``listed``:
    True if ``data.classes`` lists the classes. ``filling``: a description of the values for empty cells. ``left_out``:
    {column: reason} of the columns that cannot be features.
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
        """The path of the (training) table, for error messages."""
        return self.tables[0].where

    @property
    def counting(self) -> tuple[str, ...]:
        """The feature columns that only number the rows, such as the index of pandas; for a warning to the user."""
        if min(self.survey.rows) < columns.ROWS_TO_COUNT:
            return ()
        seen = ((one.name, self.survey.columns[one.name]) for one in self.features if not one.categories)
        return tuple(name for name, column in seen if column.counts and column.number is not None)

    @property
    def ids(self) -> tuple[str, ...]:
        """The columns of categories with a different text in each row, probably IDs; for a warning to the user."""
        rows = sum(self.survey.rows)
        categories = [one for one in self.features if one.categories and not one.is_given]
        return tuple(one.name for one in categories if len(one.categories) == rows >= columns.ROWS_TO_COUNT)

    @cached_property
    def unscaled(self) -> dict[str, None]:
        """The columns of numbers that ``data.range`` does not scale, in order. Only the keys of the dict are used."""
        return dict.fromkeys(one.name for one in self.features if not one.categories and one.bounds is None)

    @property
    def test_records(self) -> str:
        """A description of how test records are selected, for ``Dataset.note``."""
        return self.test_part.described(self.roles.split, by_client=bool(self.clients))


@dataclass(frozen=True)
class Rows:
    """The records of a table as arrays. ``clients``: the index of each record's client; zeros without a client column.

    ``kept``: a mask, shape (rows,), True for the rows of the table that are used as records.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    is_test: NDArray[np.bool_]
    kept: NDArray[np.bool_]


def dataset_of(name: str, own: OwnName, tables: Sequence[TableReader], test_part: TestPart) -> Dataset:
    """Convert one table, or a training and a test table, to a data set. ``test_part``: the rule for test records."""
    scales = choice_of(own, "scale", ("ranges", "records")) == "records"
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
    left_out = (f"{dropped:,} records {lacking(plan)} are left out",) if dropped else ()
    public = all(feature.is_public for feature in plan.features)
    return replace(
        own_dataset(name, train, test, *constants, plan.where, listed=plan.classes if plan.listed else ()),
        note=_note(plan, scales=scales),
        counted=(*left_out, *_oddities(plan)),
        columns=tuple(feature.column() for feature in plan.features) if public else (),
        classes=plan.classes,
        names=tuple(name for feature in plan.features for name in feature.names),
        sources=plan.clients,
        shown=_shown(plan, scales=scales),
        inferred=_inferred(plan, own),
        read_off=_read_off(plan),
    )


def planned(own: OwnName, tables: Sequence[TableReader], roles: Roles, test_part: TestPart) -> TablePlan:
    """Read the columns in ``roles`` once, and decide how cells are converted to features and labels (``TablePlan``).

    Raises UserError for labels that are no classes, and for empty cells if no setting allows them.
    """
    where = tables[0].where
    test_part.check(has_column=bool(roles.split))
    for table in tables[1:]:
        if missing := sorted(set(roles.columns) - set(table.names)):
            raise UserError(
                f"{table.where} lacks the column {missing[0]!r}, which {where} has; give both tables the same columns"
            )
        _check_alike(tables[0], table, roles)
    seen = columns.blank_contents(own, roles, tables[0])
    columns.check_types(roles, seen, where)
    found = columns.survey(tables, seen)
    drops = choice_of(own, "missing", ("refuse", "drop", "middle")) == "drop"
    out = columns.left_out(own, roles.features, found)
    if out and len(out) == len(roles.features):
        raise UserError(
            f"{where} has no column that can be a feature: {_reasons(out)}; add columns, or write these as numbers or "
            "categories"
        )
    roles = replace(roles, features=tuple(name for name in roles.features if name not in out))
    if roles.split:
        columns.check_split(seen[roles.split], where)
    features, listed = columns.features_of(own, roles.features, found), listed_classes(own)
    if not drops:
        filled = {feature.name for feature in features if feature.is_filled}
        columns.check_missing(found, [name for name in roles.columns if name not in filled], roles.features)
    if listed and not roles.label:
        raise UserError(f"{where}: data.classes lists the labels, and there is no label column: set data.label=COLUMN")
    classes = listed or (columns.classes_of(seen[roles.label], where) if roles.label else ())
    if listed and not drops and set(seen[roles.label].texts or ("", "")) - set(listed):
        cure = ", or remove such records by data.missing=drop"
        raise unlisted(f"{where}, column {roles.label!r}", cure)
    clients: tuple[str, ...] = ()
    if roles.client:
        if (of := seen[roles.client].texts) is None:
            raise UserError(
                f"{where}: column {roles.client!r} has more than {seen[roles.client].most:,} clients; set data.client "
                "to another column"
            )
        clients = tuple(sorted(of, key=in_order))
    return TablePlan(
        tuple(tables), found, roles, features, classes, clients, test_part, drops, bool(listed), _filling(own), out
    )


def rows_of(plan: TablePlan) -> Rows:
    """Convert all rows of the tables to arrays, as ``plan`` says.

    Raises UserError if the arrays need more than half of the memory, if numbers exceed float32, if there are no
    training or no test records, or if a class has no training records.
    """
    count, width = sum(plan.survey.rows), sum(feature.width for feature in plan.features)
    if 2 * 4 * count * width > most_bytes():  # factor 2: the split makes a second copy of all records
        raise UserError(
            f"{plan.where}: {count:,} records of {width:,} numbers take 2 x {4 * count * width:,} bytes, "
            "more than half of this machine's memory; use fewer records, or leave columns out by data.drop"
        )
    inputs, (labels, clients) = np.zeros((count, width), dtype=np.float32), np.zeros((2, count), dtype=np.int64)
    rows = Rows(inputs, labels, clients, np.zeros(count, dtype=bool), np.ones(count, dtype=bool))
    _fill(rows, plan)
    if not (kept := rows.kept).all():
        rows = Rows(rows.inputs[kept], rows.labels[kept], rows.clients[kept], rows.is_test[kept], kept)
    for feature in plan.features:
        if feature.width == 1 and not np.isfinite(rows.inputs[:, feature.first]).all():
            raise UserError(
                f"{plan.where}: column {feature.name!r} holds numbers beyond 3.4e38, the maximum of float32; "
                f"scale it by data.range.{feature.name}=LOW..HIGH"
            )
    if plan.test_part.share:
        is_test = plan.test_part.drawn(len(rows.labels), rows.clients if plan.roles.client else None)
        rows = replace(rows, is_test=is_test)
    if not len(rows.labels) or rows.is_test.all() or not rows.is_test.any():
        part = "training" if rows.is_test.all() else "test"
        raise UserError(f"{plan.where}: there are no {part} records; add some, or change the split of the records")
    if plan.roles.label and not plan.listed:
        where = f"{plan.where}, column {plan.roles.label!r}"
        check_classes(rows.labels[~rows.is_test], rows.labels[rows.is_test], plan.classes, where)
    return rows


def _note(plan: TablePlan, *, scales: bool) -> str:
    """Return ``Dataset.note``: one line about the encoding of columns, without facts about records.

    All results show the note, so it must not reveal private facts.
    """
    ranged = [feature.name for feature in plan.features if feature.bounds is not None]
    categories = [f"{feature.name} ({feature.width})" for feature in plan.features if feature.categories]
    how = "scaled by the training records' mean and deviation" if scales else "numbers without scaling"
    parts = [
        f"label {plan.roles.label}: {_some(plan.classes) if plan.listed else f'{len(plan.classes)} classes'}",
        f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else "",
        f"numbers scaled by their range: {_some(ranged)}" if ranged else "",
        f"{how}: {_some(plan.unscaled)}" if plan.unscaled else "",
        f"categories: {_some(categories)}" if categories else "",
        plan.filling,
        f"left out: {_reasons(plan.left_out)}" if plan.left_out else "",
        plan.test_records,
        f"records {lacking(plan)} are left out" if plan.drops else "",
    ]
    return "; ".join(filter(None, parts))


def _shown(plan: TablePlan, *, scales: bool) -> tuple[tuple[str, str], ...]:
    """Return pairs (column, description of its use), which the command line shows to the user (``Dataset.shown``).

    The columns of labels, clients and split come first, then features, then unused columns.
    """
    scaled = ", scaled by the mean and deviation of the training records" if scales else ""
    lines = [(plan.roles.label, f"label: {', '.join(plan.classes)}")]
    if plan.clients:
        lines.append((plan.roles.client, f"client: {len(plan.clients):,} clients"))
    if plan.roles.split:
        lines.append((plan.roles.split, "split: train or test"))
    features = ((one.name, f"{one.described()}{scaled if one.name in plan.unscaled else ''}") for one in plan.features)
    return (*lines, *features, *((name, f"left out: {reason}") for name, reason in plan.left_out.items()))


def found_by_name(plan: TablePlan, own: OwnName) -> tuple[str, ...]:
    """Return a line that tells the user which columns were found by their names, such as a column ``label``.

    The result is empty if the settings name the columns of labels, clients and split.
    """
    roles = {"label": plan.roles.label, "client": plan.roles.client, "split": plan.roles.split}
    found = [role for role, name in roles.items() if name and not own.option(role)]
    return (f"columns found by their names: {', '.join(found)}",) if found else ()


def _inferred(plan: TablePlan, own: OwnName) -> tuple[str, ...]:
    cells = "the types of columns are as the file declares them"
    if own.kind == "csv":
        spelling = spelling_by(own.option("decimal"), own.option("thousands"))
        cells = f"the delimiter is {plan.tables[0].delimiter}; {spelling.described()}"
    numbers = [feature for feature in plan.features if not feature.categories]
    are_numbers = all(name.lstrip("-").isdigit() for name in plan.classes)
    return (
        cells,
        f"{len(numbers):,} columns of numbers, {len(plan.features) - len(numbers):,} of categories",
        *found_by_name(plan, own),
        f"{len(plan.classes):,} classes, in {'the order of their numbers' if are_numbers else 'alphabetical order'}",
    )


def _read_off(plan: TablePlan) -> tuple[str, ...]:
    inferred = [feature.name for feature in plan.features if feature.categories and not feature.is_given]
    facts = list(read_off_classes(plan.listed))
    if inferred:
        facts.append(f"the categories of {_some(inferred)} (set data.category.{inferred[0]}=A+B to make them public)")
    if plan.left_out:
        facts.append(f"the list of unused columns (set data.drop={','.join(plan.left_out)} to make it public)")
    return tuple(facts)


def _check_alike(first: TableReader, other: TableReader, roles: Roles) -> None:
    """Raise UserError if a column has different types or codes in the tables ``first`` and ``other``."""
    kinds, others = (dict(zip(table.names, table.declared, strict=True)) for table in (first, other))
    for name in roles.columns:
        if others[name] in {"time", "other"} and others[name] != kinds[name]:
            raise UserError(
                f"{other.where}: column {name!r} holds {'dates or times' if others[name] == 'time' else 'lists'}, but "
                f"in {first.where} it has another type; use the same type in both"
            )
        codes = [table.codes.get(name, ()) for table in (first, other)]
        if all(codes) and codes[0] != codes[1]:
            raise UserError(
                f"{other.where}: the codes of column {name!r} mean {enumerated(codes[1], 10)}, but in "
                f"{first.where} they mean {enumerated(codes[0], 10)}: use the same names in both, or write names in "
                "place of codes"
            )


def _fill(rows: Rows, plan: TablePlan) -> None:
    """Write all records of the tables into the arrays of ``rows``. These arrays must be zero before the call.

    ``rows.kept`` becomes False for the rows that the setting ``data.missing=drop`` leaves out.
    """
    compute = pyarrow().compute
    first = 0
    filled = {feature.name for feature in plan.features if feature.is_filled}
    for number, table in enumerate(plan.tables):
        for batch in table.batches(plan.roles.columns):
            some = slice(first, first + len(batch[plan.roles.columns[0]]))
            for feature in plan.features:
                feature.put_into(rows.inputs[some], batch[feature.name])
            if plan.roles.label:
                rows.labels[some] = _codes(batch[plan.roles.label], plan.classes)
            rows.is_test[some] = number == 1
            if plan.roles.client:
                rows.clients[some] = _codes(batch[plan.roles.client], plan.clients)
            if plan.roles.split:
                is_test = compute.equal(compute.utf8_lower(texts_of(batch[plan.roles.split])), "test")
                rows.is_test[some] = np.asarray(is_test.fill_null(fill_value=False))
            if plan.drops:
                whole = [cells.is_valid() for name, cells in batch.items() if name not in filled]
                rows.kept[some] = np.all([np.asarray(cells) for cells in whole], axis=0)
            if plan.drops and plan.roles.label:
                labels = texts_of(batch[plan.roles.label])
                rows.kept[some] &= np.asarray(compute.is_in(labels, value_set=_texts(plan.classes)))
            first = some.stop


def choice_of(own: OwnName, key: str, valid: Sequence[str]) -> str:
    """Return the value of the setting ``key``; if it is not set, return the first of the ``valid`` values.

    Raises UserError for a value that is not valid.
    """
    chosen = own.option(key) or valid[0]
    if chosen not in valid:
        raise UserError(f"data.{key} = {chosen!r}{guess(chosen, valid)}; valid: {', '.join(valid)}")
    return chosen


def _codes(cells: Any, values: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the index of each cell's text in ``values``, the names of the classes or of the clients.

    An empty cell gets the index 0. The index is never used, because records with an empty cell are removed later.
    """
    found = pyarrow().compute.index_in(texts_of(cells), value_set=_texts(values))
    return np.asarray(found.fill_null(0)).astype(np.int64)


@lru_cache(maxsize=2)  # every batch of rows needs the same two arrays: the names of classes, and of clients
def _texts(values: tuple[str, ...]) -> Any:
    return pyarrow().array(values, pyarrow().string())


def _oddities(plan: TablePlan) -> list[str]:
    """Return warnings about likely mistakes in the table, such as IDs as features. The warnings do not stop the run."""
    found = [similar_spellings("classes", plan.classes), similar_spellings("clients", plan.clients, with_names=False)]
    found += [
        similar_spellings(f"categories of {one.name}", one.categories) for one in plan.features if not one.is_given
    ]
    found += [
        f"column {name!r} is not used: it holds {reason}; confirm this by data.drop={name}, or use some of its texts "
        f"by data.category.{name}=A+B"
        for name, reason in plan.left_out.items()
    ]
    found += [
        f"column {name!r} has a different text in every row, like an ID: leave it out by data.drop={name}"
        for name in plan.ids
    ]
    found += [
        f"column {one.name!r} is a feature with the name of an ID: leave it out by data.drop={one.name}"
        for one in plan.features
        if not one.categories and one.bounds is None and _ID.search(one.name) and one.name not in plan.counting
    ]
    found += [
        f"column {name!r} contains row numbers: leave it out by data.drop={name}" for name in plan.counting if name
    ]
    if any(not one.name for one in plan.features):
        rows = " and contains row numbers" if "" in plan.counting else ""
        found.append(
            f"a column has no name{rows}, like the index that spreadsheets and DataFrame.to_csv write: leave it out "
            "by data.drop= with nothing after the sign, or give it a name"
        )
    return [one for one in found if one]


def lacking(plan: TablePlan) -> str:
    """Describe, for messages, the records with empty cells, which the setting ``data.missing=drop`` leaves out."""
    return "with an empty cell or a class that is not listed" if plan.listed else "with an empty cell"


def _filling(own: OwnName) -> str:
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
