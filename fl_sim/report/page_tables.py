"""The tables of a report's page as HTML: means and deviations, and below them all that they tell besides."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from fl_sim.report.further import further, targets
from fl_sim.report.table import MEASURES, Grid, Table, differences, texts


def table_section(place: Path, table: Table) -> str:
    """Return a table that was found at ``place``, what it tells besides accuracies, and its caption."""
    heads = "".join(f'<th colspan="2" class="n">{escape(column)}</th>' for column in table.columns)
    measures = "".join(f'<th class="n">{measure}</th>' for _ in table.columns for measure in MEASURES)
    rows = "".join(_row(row, cells, is_bound=row in table.upper_bounds) for row, cells in texts(table))
    below = "<br>".join(escape(line) for line in table.caption)
    more = "".join(_grid(grid) for grid in (differences(table), targets(table), *further(table)) if grid)
    return (
        f'<h2>Table <span class="small path">{escape(str(place))}</span></h2>'
        f'<div class="wide"><table><tr><th></th>{heads}</tr><tr><th>Method</th>{measures}</tr>{rows}</table></div>'
        f'{more}<p class="small">{below}</p>'
    )


def row_start(*, is_bound: bool) -> str:
    """Return the tag that begins a row: a line separates upper bounds, which do not compete, from methods."""
    return '<tr class="bound">' if is_bound else "<tr>"


def _row(row: str, cells: Sequence[tuple[str, bool]], *, is_bound: bool) -> str:
    shown = (f"<b>{escape(text)}</b>" if best else escape(text) for text, best in cells)
    start = row_start(is_bound=is_bound)
    return f"{start}<td>{escape(row)}</td>{''.join(f'<td class=n>{cell}</td>' for cell in shown)}</tr>"


def _grid(grid: Grid) -> str:
    heads = "".join(f'<th class="n">{escape(head)}</th>' for head in grid.heads)
    rows = "".join(_row(row, [(cell, False) for cell in cells], is_bound=False) for row, cells in grid.rows)
    body = f'<div class="wide"><table><tr><th>Method</th>{heads}</tr>{rows}</table></div>'
    return f"<details><summary>{escape(grid.title)}</summary>{body}</details>"
