"""Tables of a report's page as HTML; what all rows share is said once, below the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fl_sim.report.table import MEASURES, Grid, Table, differences, further, targets, texts


@dataclass(frozen=True)
class Cell:
    """A table's cell. ``note``: a line below it, in small letters. ``kind``: n (a number), k (one line) or path."""

    text: str
    note: str = ""
    kind: str = ""
    best: bool = False

    @property
    def html(self) -> str:
        """Return the cell; a long note is folded."""
        text = f"<b>{escape(self.text)}</b>" if self.best else escape(self.text)
        return f"<td{_class(self.kind)}>{text}{_note(self.note)}</td>"


@dataclass(frozen=True)
class Column:
    """A column: its head, and a cell for each row. ``common``: what it is called where all cells say the same.

    ``is_split``: it tells how records are split, of which an upper bound has none.
    """

    head: str
    cells: Sequence[Cell]
    common: str = ""
    is_split: bool = False


def columns_table(columns: Sequence[Column], bounds: Sequence[bool]) -> str:
    """Return the columns as a table, and below it in a line what is the same in all rows, which has no column.

    ``bounds``: for each row whether it is an upper bound.
    """
    shown, told = [], []
    for column in columns:
        is_left_out = [is_bound and column.is_split for is_bound in bounds]
        cells = [cell for cell, without in zip(column.cells, is_left_out, strict=True) if not without]
        same = len({(cell.text, cell.note) for cell in cells}) == 1
        if column.common and same and len(column.cells) > 1:
            but = " (but for the upper bound)" if column.is_split and any(bounds) else ""
            told.append(f"{column.common} {cells[0].text}{but}")
        else:
            shown.append(column)
    rows = [
        f"{_start(is_bound=is_bound)}{''.join(cell.html for cell in cells)}</tr>"
        for is_bound, *cells in zip(bounds, *(column.cells for column in shown), strict=True)
    ]
    heads = "".join(_head(column.head, column.cells[0].kind if column.cells else "") for column in shown)
    below = f'<p class="small common">In all rows: {escape("; ".join(told))}.</p>' if told else ""
    return f"{_table(f'<tr>{heads}</tr>', ''.join(rows))}{below}"


def table_section(place: Path, table: Table) -> str:
    """Return a table that was found at ``place``, what it tells besides accuracies, and its caption."""
    heads = "".join(f'<th scope="colgroup" colspan="2" class="n">{escape(column)}</th>' for column in table.columns)
    measures = "".join(_head(measure, "n") for _ in table.columns for measure in MEASURES)
    rows = "".join(_row(row, cells, is_bound=row in table.upper_bounds) for row, cells in texts(table))
    below = "<br>".join(escape(line) for line in table.caption)
    more = "".join(_grid(grid) for grid in (differences(table), targets(table), *further(table)) if grid)
    head = f"<tr><td></td>{heads}</tr><tr>{_head('Method')}{measures}</tr>"
    return (
        f'<section><h2>Table <span class="small path">{escape(str(place))}</span></h2>'
        f'{_table(head, rows)}{more}<p class="small">{below}</p></section>'
    )


def _row(row: str, cells: Sequence[tuple[str, bool]], *, is_bound: bool) -> str:
    shown = "".join(Cell(text, kind="n", best=best).html for text, best in cells)
    return f"{_start(is_bound=is_bound)}{Cell(row).html}{shown}</tr>"


def _grid(grid: Grid) -> str:
    heads = "".join(_head(head, "n") for head in grid.heads)
    rows = "".join(_row(row, [(cell, False) for cell in cells], is_bound=False) for row, cells in grid.rows)
    body = _table(f"<tr>{_head('Method')}{heads}</tr>", rows)
    return f"<details><summary>{escape(grid.title)}</summary>{body}</details>"


def _table(head: str, body: str) -> str:
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _head(text: str, kind: str = "") -> str:
    return f'<th scope="col"{_class(kind)}>{escape(text)}</th>'


def _start(*, is_bound: bool) -> str:
    """Return the tag that begins a row: a line separates upper bounds, which do not compete, from methods."""
    return '<tr class="bound">' if is_bound else "<tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _note(note: str) -> str:
    if not note:
        return ""
    if len(note) <= _LONGEST_NOTE:
        return f'<br><span class="small">{escape(note)}</span>'
    return f'<details class="small"><summary>settings</summary>{escape(note)}</details>'


_LONGEST_NOTE = 60
