"""Reads csv and parquet files: the texts of one column become sequences of tokens; other tables become vectors.

``data.text=COLUMN`` names the column of texts. Then only this column and the columns label, client and split are used.
These three columns have the same meaning as in fl_sim.data.table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.data import table, table_columns
from fl_sim.data.dataset import most_bytes, own_dataset, read_off_classes
from fl_sim.data.naming import OwnName
from fl_sim.data.table import Rows, TablePlan, TestPart, planned, rows_of, test_part_by_setting
from fl_sim.data.table_columns import ColumnContent, listed_columns, roles_of
from fl_sim.data.table_file import TableReader, open_table
from fl_sim.data.tokens import Tokenizer, Tokens, tokenizer_by
from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples

MOST: Final = 256
"""The default of ``data.max_length``: the number of tokens after which a text is cut."""

_LONGEST: Final = 100_000
_OF_TEXTS: Final = ("tokenizer", "max_length", "alphabet")
_OF_VECTORS: Final = ("drop", "range", "category", "fill", "scale")
_NO_LABELS: Final = "the texts have no labels, and a model predicts their next tokens"
_LENGTH_READ_OFF: Final = "the length of the longest text (set data.max_length=NUMBER to make it public)"


def read(name: str, own: OwnName, path: Path) -> Dataset:
    """Read the csv or parquet file ``path``, and the file ``data.test_file`` if it is set, as a data set.

    Raises UserError if the files do not contain classification data. Most messages state the row and the column.
    """
    test_part, delimiter = test_part_by_setting(own), own.option("delimiter")
    tables = [open_table(path, own.kind, delimiter)]
    if test_part.other:
        tables.append(open_table(Path(own.option("test_file")).expanduser().absolute(), own.kind, delimiter))
    return dataset_of(name, own, tables, test_part)


def dataset_of(name: str, own: OwnName, tables: Sequence[TableReader], test_part: TestPart) -> Dataset:
    """Convert one table, or a training and a test table, to a data set of texts or of vectors.

    ``test_part``: the rule for test records. Raises UserError for settings that do not fit the columns, for blank texts
    and for texts without tokens.
    """
    column = text_column(own, tables)
    if not column:
        return table.dataset_of(name, own, tables, test_part)
    for key in _OF_VECTORS:
        if key in own.options or key in own.columns:
            raise UserError(
                f"data.{key} is for columns of numbers or categories, but with data.text={column} the records are "
                f"texts; leave data.{key} out"
            )
    if table.choice_of(own, "missing", ("refuse", "drop", "middle")) == "middle":
        raise UserError("data.missing=middle is for numbers; for texts, data.missing=drop leaves records out")
    most, tokenizer = _max_length(own), tokenizer_by(own.option("tokenizer"), own.option("alphabet"))
    tables = [replace(one, texts=(column,)) for one in tables]
    plan = planned(own, tables, roles_of(own, tables[0], with_features=False, text=column), test_part)
    rows = rows_of(plan)
    made = tokenizer.tokens([*_texts(plan, rows)], most)
    tokens = _of_length(made.rows, most if own.option("max_length") else made.rows.shape[1], plan)
    records = Examples(tokens, rows.labels, rows.clients if plan.roles.client else None)
    train, test = (records.take(np.flatnonzero(mask)) for mask in (~rows.is_test, rows.is_test))
    listed = plan.classes if plan.listed else ()
    return replace(
        own_dataset(name, train, test, (0.0,), (1.0,), plan.where, listed=listed, labelled=bool(plan.roles.label)),
        note=_note(plan, tokenizer, most),
        classes=plan.classes,
        sources=plan.clients,
        counted=_counted(plan, rows, made, most),
        shown=_shown(plan, tokenizer),
        read_off=(
            *read_off_classes(plan.listed or not plan.roles.label),
            *([] if own.option("max_length") else [_LENGTH_READ_OFF]),
        ),
        inferred=(
            f"column {column!r} contains texts: {tokenizer.name}",
            *(
                []
                if plan.roles.label
                else [f"no column is called label: {_NO_LABELS}; data.label=COLUMN sets a label column"]
            ),
            *table.found_by_name(plan, own),
        ),
        vocabulary=tokenizer.size,
        text_of=tokenizer.text,
    )


def text_column(own: OwnName, tables: Sequence[TableReader]) -> str:
    """Return the name of the column of texts that become tokens; "" if the records are vectors of numbers.

    The setting ``data.text`` has two uses: a column of texts, or columns of names such as postal codes. A column of
    texts must be the only column in the setting, and must contain words. In addition, one of three conditions must
    hold. (1) ``data.tokenizer``, ``data.max_length`` or ``data.alphabet`` is set. (2) The column contains no numbers.
    (3) The column has over 200 different texts. Raises UserError if a setting of (1) is set without a column of texts.
    """
    listed, first = listed_columns(own, "text", tables[0]), tables[0]
    settings = [key for key in _OF_TEXTS if own.option(key)]
    if settings and len(listed) != 1:
        raise UserError(
            f"data.{settings[0]} is for a column of texts, and data.text names {len(listed)}: set data.text=COLUMN, or "
            f"leave data.{settings[0]} out"
        )
    if len(listed) != 1 or listed[0] not in first.names or (listed[0] in own.of_columns("category")):
        return ""
    declared = dict(zip(first.names, first.declared, strict=True))[listed[0]]
    seen = ColumnContent(listed[0], declared, table_columns.MOST_CATEGORIES, as_text=False)
    table_columns.survey(tables[:1], {listed[0]: seen})
    if seen.word and (settings or seen.number is None or seen.texts is None):
        return listed[0]
    if settings:
        what = "numbers" if seen.number or seen.text else "no texts"
        raise UserError(
            f"{first.where}: column {listed[0]!r} holds {what}, but data.{settings[0]} is for texts: set data.text to "
            f"a column of texts, or leave data.{settings[0]} out to use the numbers as names"
        )
    return ""


def _max_length(own: OwnName) -> int:
    given = own.option("max_length")
    if given and not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= _LONGEST):
        raise UserError(f"data.max_length = {given!r}: it must be a whole number of tokens, 1 to {_LONGEST:,}")
    return int(given or MOST)


def _texts(plan: TablePlan, rows: Rows) -> Iterator[str]:
    """Yield the texts of all records, unchanged."""
    column, place = plan.roles.text, 0
    for one in plan.tables:
        for batch in one.batches([column]):
            for text in batch[column].to_pylist():  # ``survey`` has checked that texts are UTF-8
                if rows.kept[place]:
                    yield text
                place += 1


def _of_length(rows: NDArray[np.float32], length: int, plan: TablePlan) -> NDArray[np.float32]:
    """Pad the tokens of each text with zeros up to ``length``. Raises UserError for a text without a token.

    Also raises UserError if the padded tokens need more than half of the machine's memory.
    """
    if not rows.shape[1] or not rows[:, 0].all():
        number = int((rows[:, 0] == 0).argmax()) + 1 if rows.shape[1] else 1
        raise UserError(
            f"{plan.where}: record {number}, column {plan.roles.text!r}: the tokenizer finds no token in the text; "
            "remove the record, or set another data.tokenizer"
        )
    if 2 * 4 * len(rows) * length > most_bytes():
        raise UserError(
            f"{plan.where}: {len(rows):,} texts of {length:,} tokens need more than half of this machine's memory; set "
            "a smaller data.max_length"
        )
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1]))) if length > rows.shape[1] else rows


def _note(plan: TablePlan, tokenizer: Tokenizer, most: int) -> str:
    parts = [
        f"texts {plan.roles.text}: {tokenizer.name}, cut after {most:,} tokens",
        f"label {plan.roles.label}: {', '.join(plan.classes) if plan.listed else f'{len(plan.classes)} classes'}"
        if plan.roles.label
        else _NO_LABELS,
        f"{len(plan.clients):,} clients by {plan.roles.client}" if plan.clients else "",
        plan.test_records,
        f"records {table.lacking(plan)} are left out" if plan.drops else "",
    ]
    return "; ".join(filter(None, parts))


def _counted(plan: TablePlan, rows: Rows, made: Tokens, most: int) -> tuple[str, ...]:
    left_out = len(rows.kept) - len(rows.labels)
    cut = f"{made.num_cut:,} of {len(made.rows):,} texts are longer than {most:,} tokens and are cut there"
    return (
        *([f"{left_out:,} records {table.lacking(plan)} are left out"] if left_out else []),
        *([f"{cut} (data.max_length)"] if made.num_cut else []),
    )


def _shown(plan: TablePlan, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    roles = plan.roles
    lines = [(roles.text, f"texts: {tokenizer.name}")]
    if roles.label:
        lines.append((roles.label, f"label: {', '.join(plan.classes)}"))
    if plan.clients:
        lines.append((roles.client, f"client: {len(plan.clients):,} clients"))
    if roles.split:
        lines.append((roles.split, "split: train or test"))
    unused = [name for name in plan.tables[0].names if name not in roles.columns]
    return (*lines, *((name, "left out: only the texts are records") for name in unused))
