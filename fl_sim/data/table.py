"""Tables of the user's own: every column but label, client and split becomes numbers from public settings alone.

A column of numbers is taken as it is, or by ``data.range.COLUMN=LOW..HIGH`` to 0..1, where what lies outside counts as
the nearer end. A column of texts takes a feature for each category, at most one of which is 1. Means and deviations of
the clients' records are taken only where ``data.scale=records`` asks for them. What a table was found to hold is told
in words: a note beside results, and a line for each column.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.dataset import check_classes, listed_classes, most_bytes, own_dataset, read_off_classes, unlisted
from fl_sim.data.naming import OwnName
from fl_sim.data.table_columns import (
    Feature,
    Roles,
    Survey,
    check_missing,
    check_split,
    check_types,
    classes_of,
    columns_to_survey,
    counts_rows,
    features_of,
    roles_of,
    survey,
)
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
from fl_sim.mistakes import guess, shortened
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples

_FEW: Final = 6  # names that a note lists


@dataclass(frozen=True)
class TestPart:
    """What is said of the test part: a ``share`` of the records drawn by ``seed``, an ``other`` table, or neither."""

    share: float = 0.0
    seed: int = 0
    other: str = ""

    def check(self, *, has_column: bool) -> None:
        """Raise UserError unless exactly one thing says which records are for testing."""
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
        """Return which of ``count`` records are for testing: a share of all, or of each client's where they are known.

        Shares are rounded to whole records, at least one and never all; who has a single record trains on it.
        """
        chosen = np.zeros(count, dtype=bool)
        if clients is None:
            chosen[rng(self.seed, "test part").permutation(count)[: self._size(count)]] = True
            return chosen
        order = np.argsort(clients, kind="stable")
        numbers, starts = np.unique(clients[order], return_index=True)
        bounds = np.append(starts, count)
        for place in np.flatnonzero(np.diff(bounds) > 1).tolist():  # of a million clients most may have one record
            of_client = order[bounds[place] : bounds[place + 1]]
            coins = rng(self.seed, "test part", int(numbers[place]))
            chosen[of_client[coins.permutation(len(of_client))[: self._size(len(of_client))]]] = True
        return chosen

    def told(self, column: str, *, by_client: bool = False) -> str:
        """Say it in words."""
        if self.other:
            return f"tested on {self.other}"
        if column:
            return f"train and test by {column}"
        whose = "every client's records" if by_client else "the records"
        return f"{self.share:g} of {whose} are for testing, drawn by test_seed {self.seed}"

    def _size(self, count: int) -> int:
        return min(max(1, round(self.share * count)), count - 1)


def test_part_by_setting(own: OwnName) -> TestPart:
    """Return what the name of a data set says of its test part. Raises UserError for what is no share, or no seed."""
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
    """All that is known before records are read; ``clients`` are in order. ``listed``: the user lists the classes."""

    tables: tuple[TableReader, ...]
    found: Survey
    roles: Roles
    features: tuple[Feature, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    held: TestPart
    drops: bool
    listed: bool

    @property
    def counting(self) -> tuple[str, ...]:
        """Return the features that number the rows."""
        seen, rows = self.found.columns, min(self.found.rows)
        is_number = [one.name for one in self.features if not one.categories]
        return tuple(name for name in is_number if counts_rows(seen[name], rows))


@dataclass(frozen=True)
class Rows:
    """The rows that are kept: numbers, labels, clients (0 where there are none), and which are for testing."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: NDArray[np.int64]
    is_test: NDArray[np.bool_]

    def part(self, *, test: bool, has_clients: bool) -> Examples:
        """Return the training records, or the test records."""
        mask = self.is_test if test else ~self.is_test
        return Examples(self.inputs[mask], self.labels[mask], self.clients[mask] if has_clients else None)


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Return the table at ``path``. Raises UserError, with row and column, for what is no classification data."""
    held, delimiter = test_part_by_setting(own), own.option("delimiter") or "comma"
    tables = [open_table(path, own.kind, delimiter)]
    if held.other:
        tables.append(open_table(Path(own.option("test_file")).expanduser().absolute(), own.kind, delimiter))
    return dataset_of(name, own, tables, held)


def dataset_of(name: str, own: OwnName, tables: Sequence[TableReader], held: TestPart) -> Dataset:
    """Return the records of one table, or of one to train and one to test on."""
    scales = _choice(own, "scale", ("ranges", "records")) == "records"
    plan = planned(own, tables, roles_of(own, tables[0]), held)
    rows = rows_of(plan)
    train, test = (rows.part(test=part, has_clients=bool(plan.roles.client)) for part in (False, True))
    mean, std = _constants(rows, plan.features, from_records=scales)
    dropped = sum(plan.found.rows) - len(rows.labels)
    told = TableFacts(
        plan.roles, plan.features, plan.classes, plan.clients, held, scales, dropped, plan.listed, plan.drops,
        plan.counting,
    )  # fmt: skip
    public = all(feature.is_public for feature in plan.features)
    return replace(
        own_dataset(name, train, test, mean, std, tables[0].where, listed=plan.classes if plan.listed else ()),
        note=note(told),
        counted=counted(told),
        columns=tuple(feature.column() for feature in plan.features) if public else (),
        classes=plan.classes,
        names=tuple(name for feature in plan.features for name in feature.names),
        shown=shown(told),
        inferred=inferred(told, own),
        read_off=read_off(told),
    )


def planned(own: OwnName, tables: Sequence[TableReader], roles: Roles, held: TestPart) -> TablePlan:
    """Look at all that ``roles`` name. Raises UserError for what holds no classes, or has missing cells."""
    where = tables[0].where
    held.check(has_column=bool(roles.split))
    for table in tables[1:]:
        if missing := sorted(set(roles.columns) - set(table.names)):
            raise UserError(
                f"{table.where} lacks the column {missing[0]!r} that {where} has; both need the same columns"
            )
        _check_alike(tables[0], table, roles)
    seen = columns_to_survey(own, roles, tables[0])
    check_types(roles, seen, where)
    found = survey(tables, seen)
    drops = _choice(own, "missing", ("refuse", "drop")) == "drop"
    if not drops:
        check_missing(found)
    if roles.split:
        check_split(seen[roles.split], where)
    features, listed = features_of(own, roles.features, found), listed_classes(own)
    classes = listed or classes_of(seen[roles.label], where)
    if listed and not drops and set(seen[roles.label].texts or ("", "")) - set(listed):
        cure = ", or leave such records out, uncounted, by data.missing=drop"
        raise unlisted(f"{where}, column {roles.label!r}", cure)
    clients: tuple[str, ...] = ()
    if roles.client:
        if (of := seen[roles.client].texts) is None:
            raise UserError(f"{where}: column {roles.client!r} holds over {seen[roles.client].most:,} clients")
        clients = tuple(sorted(of, key=in_order))
    return TablePlan(tuple(tables), found, roles, features, classes, clients, held, drops, bool(listed))


def rows_of(plan: TablePlan) -> Rows:
    """Read all records. Raises UserError where they would take too much memory, or numbers are too large."""
    count, width = sum(plan.found.rows), sum(feature.width for feature in plan.features)
    if 2 * 4 * count * width > most_bytes():  # all of it, and once more when it is parted
        raise UserError(
            f"{plan.tables[0].where}: {count:,} records of {width:,} numbers take {4 * count * width:,} bytes twice, "
            "more than half of this machine's memory; take fewer records, or leave columns out by data.drop"
        )
    inputs, (labels, clients) = np.zeros((count, width), dtype=np.float32), np.zeros((2, count), dtype=np.int64)
    rows = Rows(inputs, labels, clients, np.zeros(count, dtype=bool))
    kept = _fill(rows, plan)
    if not kept.all():
        rows = Rows(rows.inputs[kept], rows.labels[kept], rows.clients[kept], rows.is_test[kept])
    _check_finite(rows.inputs, plan)
    if plan.held.share:
        rows = replace(rows, is_test=plan.held.drawn(len(rows.labels), rows.clients if plan.roles.client else None))
    _check_parts(rows, plan)
    return rows


@dataclass(frozen=True)
class TableFacts:
    """What is to be told.

    ``scales``: numbers are scaled by the records. ``dropped``: how many rows are left out, where the user ``drops``
    those with an empty cell. ``listed``: the user lists the classes; all others are read off the records.
    """

    roles: Roles
    features: tuple[Feature, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    held: TestPart
    scales: bool
    dropped: int
    listed: bool
    drops: bool
    counting: tuple[str, ...] = ()

    @cached_property
    def as_they_are(self) -> dict[str, None]:
        """Return the columns of numbers that have no range, in order."""
        kept = (feature.name for feature in self.features if not feature.categories and feature.bounds is None)
        return dict.fromkeys(kept)

    @property
    def test_part(self) -> str:
        """Say which records are for testing."""
        return self.held.told(self.roles.split, by_client=bool(self.clients))


def note(told: TableFacts) -> str:
    """Return what stands beside results: one line, however many columns there are, and nothing that records say."""
    ranged = [feature.name for feature in told.features if feature.bounds is not None]
    categories = [f"{feature.name} ({feature.width})" for feature in told.features if feature.categories]
    unscaled = f"scaled by the training records' mean and deviation: {_some(told.as_they_are)}"
    parts = [
        f"label {told.roles.label}: {_some(told.classes) if told.listed else f'{len(told.classes)} classes'}",
        f"{len(told.clients):,} clients by {told.roles.client}" if told.clients else "",
        f"numbers scaled by their range: {_some(ranged)}" if ranged else "",
        (unscaled if told.scales else f"numbers as they are, not scaled: {_some(told.as_they_are)}")
        if told.as_they_are
        else "",
        f"categories: {_some(categories)}" if categories else "",
        told.test_part,
        f"records {_lacking(told)} are left out" if told.drops else "",
    ]
    return "; ".join(filter(None, parts))


def counted(told: TableFacts) -> tuple[str, ...]:
    """Return what was counted and noticed among the records, which stands beside no result of a private run."""
    left_out = [f"{told.dropped:,} records {_lacking(told)} are left out"] if told.dropped else []
    return (*left_out, *_oddities(told))


def shown(told: TableFacts) -> tuple[tuple[str, str], ...]:
    """Return (column, how it is read) for each, in the order of the file's features."""
    scaled = ", scaled by the mean and deviation of the training records" if told.scales else ""
    lines = [(told.roles.label, f"label: {', '.join(told.classes)}")]
    if told.clients:
        lines.append((told.roles.client, f"client: {len(told.clients):,} of them"))
    if told.roles.split:
        lines.append((told.roles.split, "says train or test"))
    for feature in told.features:
        is_scaled = scaled if feature.name in told.as_they_are else ""
        lines.append((feature.name, f"{feature.told()}{is_scaled}"))
    return tuple(lines)


def inferred(told: TableFacts, own: OwnName) -> tuple[str, ...]:
    """Return what was taken for granted of the file, a line each."""
    spelling = spelling_by(own.option("decimal"), own.option("thousands"))
    roles = {"label": told.roles.label, "client": told.roles.client, "split": told.roles.split}
    by_name = [role for role, name in roles.items() if name and not own.option(role)]
    cells = {
        "csv": f"cells stand between signs called {own.option('delimiter') or 'comma'}; {spelling.told()}",
    }.get(own.kind, "types of columns are those that the file declares")
    numbers = [feature for feature in told.features if not feature.categories]
    kinds = f"{len(numbers):,} columns of numbers, {len(told.features) - len(numbers):,} of categories"
    return (
        cells,
        kinds,
        *([f"columns by their names: {', '.join(by_name)}"] if by_name else []),
        f"{len(told.classes):,} classes, in {_order(told.classes)}",
    )


def read_off(told: TableFacts) -> tuple[str, ...]:
    """Return what of all this was read off the records, with the settings that make it public."""
    inferred = [feature.name for feature in told.features if feature.categories and not feature.is_given]
    if not inferred:
        return read_off_classes(told.listed)
    categories = f"the categories of {_some(inferred)} (data.category.{inferred[0]}=A+B lists public ones)"
    return (*read_off_classes(told.listed), categories)


def _check_alike(first: TableReader, other: TableReader, roles: Roles) -> None:
    """Raise UserError for a column whose cells mean another thing in ``other`` than in ``first``."""
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
                f"{other.where}: the codes of column {name!r} stand for {_names(codes[1])}, and in {first.where} for "
                f"{_names(codes[0])}: write both with the same names, or names in place of codes"
            )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(map(shortened, names[:10]))}{more}"


def _fill(rows: Rows, plan: TablePlan) -> NDArray[np.bool_]:
    """Write what the tables hold into ``rows``, all zeros so far; return which of them are kept."""
    kept, first = np.ones(len(rows.labels), dtype=bool), 0
    for number, table in enumerate(plan.tables):
        for batch in table.batches(plan.roles.columns):
            some = slice(first, first + len(batch[plan.roles.label]))
            for feature in plan.features:
                feature.put_into(rows.inputs[some], batch[feature.name])
            labels = batch[plan.roles.label]
            rows.labels[some] = _codes(labels, plan.classes)
            if plan.roles.client:
                rows.clients[some] = _codes(batch[plan.roles.client], plan.clients)
            rows.is_test[some] = _is_test(batch[plan.roles.split]) if plan.roles.split else number == 1
            if plan.drops:
                is_class = pyarrow().compute.is_in(texts_of(labels), value_set=_texts(plan.classes))
                kept[some] = np.all([np.asarray(cells.is_valid()) for cells in batch.values()], axis=0)
                kept[some] &= np.asarray(is_class)
            first = some.stop
    return kept


def _check_parts(rows: Rows, plan: TablePlan) -> None:
    labels, is_test = rows.labels, rows.is_test
    where = f"{plan.tables[0].where}, column {plan.roles.label!r}"
    if not len(labels) or is_test.all() or not is_test.any():
        part = "training" if is_test.all() else "test"
        raise UserError(f"{plan.tables[0].where}: no records in the {part} part; take other records")
    if not plan.listed:
        check_classes(labels[~is_test], labels[is_test], plan.classes, where)


def _choice(own: OwnName, key: str, valid: Sequence[str]) -> str:
    chosen = own.option(key) or valid[0]
    if chosen not in valid:
        raise UserError(f"data.{key} = {chosen!r}{guess(chosen, valid)}; valid: {', '.join(valid)}")
    return chosen


def _codes(cells: Any, values: Sequence[str]) -> NDArray[np.int64]:
    """Return the place of each cell among ``values``, 0 where it is empty (such a record is left out)."""
    found = pyarrow().compute.index_in(texts_of(cells), value_set=_texts(tuple(values)))
    return np.asarray(found.fill_null(0)).astype(np.int64)


@lru_cache(maxsize=2)  # labels and clients, of which there may be a million, for every part of a file
def _texts(values: tuple[str, ...]) -> Any:
    return pyarrow().array(values, pyarrow().string())


def _is_test(cells: Any) -> NDArray[np.bool_]:
    lower = pyarrow().compute.utf8_lower(texts_of(cells))
    return np.asarray(pyarrow().compute.equal(lower, "test").fill_null(fill_value=False))


def _check_finite(inputs: NDArray[np.float32], plan: TablePlan) -> None:
    for feature in plan.features:
        if feature.width == 1 and not np.isfinite(inputs[:, feature.first]).all():
            raise UserError(
                f"{plan.tables[0].where}: column {feature.name!r} holds numbers beyond 3.4e38, the largest of 32 bits; "
                f"scale it by data.range.{feature.name}=LOW..HIGH"
            )


def _constants(
    rows: Rows, features: Sequence[Feature], *, from_records: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    train = rows.inputs[~rows.is_test]
    width = train.shape[1]
    mean, std = np.zeros(width), np.ones(width)
    for feature in features if from_records else ():
        if not feature.categories and feature.bounds is None:
            column = train[:, feature.first].astype(np.float64)
            mean[feature.first], std[feature.first] = column.mean(), column.std() or 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def _order(classes: tuple[str, ...]) -> str:
    return "the order of their numbers" if all(name.lstrip("-").isdigit() for name in classes) else "alphabetical order"


def _oddities(told: TableFacts) -> list[str]:
    """Say what looks like a mistake in the file, and is read as it stands."""
    found = [similar_spellings("classes", told.classes), similar_spellings("clients", told.clients, with_names=False)]
    found += [
        similar_spellings(f"categories of {one.name}", one.categories) for one in told.features if not one.is_given
    ]
    found += [f"column {name!r} numbers the rows: leave it out by data.drop={name}" for name in told.counting if name]
    if any(not one.name for one in told.features):
        rows = " and numbers the rows" if "" in told.counting else ""
        found.append(
            f"a column has no name{rows}, as the index that spreadsheets and DataFrame.to_csv write: leave it out by "
            "data.drop= with nothing behind, or give it a name"
        )
    return [one for one in found if one]


def _lacking(told: TableFacts) -> str:
    return "with an empty cell or a class that is not listed" if told.listed else "with an empty cell"


def _some(names: Iterable[str]) -> str:
    found = [name or "''" for name in names]
    more = f" and {len(found) - _FEW} more" if len(found) > _FEW + 1 else ""
    return ", ".join(found if not more else found[:_FEW]) + more
