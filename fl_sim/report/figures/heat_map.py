"""Heat maps of tables: the mean over seeds of the table's measure, for all pairs of values of two settings."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from fl_sim.report.heat_map import HeatMap
from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.picture import WIDE_PAGE, Layout, Picture, drawn, file_names, plain
from fl_sim.report.table import SeedResult, Table, percentages, title_of_measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADING = "Heat maps"
_COLORS = "viridis"  # a colour map of steadily rising lightness, for print in grey and for colour-blind readers
_DARK = 0.55
"""Cells below this share of the colour scale are dark, so their numbers are white."""

_SMALLEST = 7.0
"""Smallest text size in points. A map that is too narrow for numbers of this size shows only colours."""

_ROW, _LETTER = 2.3, 0.6
"""Height of a row in multiples of the text size, and the assumed width of a letter in the same unit."""


def draw_heat_maps(tables: Iterable[Table]) -> list[Picture]:
    """Return a figure for each heat map of each table. All maps of a table have the same colour scale."""
    pictures = []
    each = [(table, one) for table in tables for one in table.heat_maps]
    names = file_names([one.title for _, one in each])
    for name, (table, one) in zip(names, each, strict=True):
        drawing = partial(draw, table, one)
        png = drawn(drawing, WIDE_PAGE)
        pictures.append(Picture(f"heat-map-{name}.png", _HEADING, _caption(table, one), png, (), drawing))
    return pictures


def draw(table: Table, one: HeatMap, layout: Layout = WIDE_PAGE) -> "Figure":
    """Return the figure of a heat map, with the mean in each cell if the map is wide enough for the numbers."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    rows, columns = one.row_labels, one.column_labels
    widest = max(map(len, rows))
    # a number in a cell, with its margins, is 6 letters wide
    room = 72 * layout.width / (_LETTER * (widest + 6 * len(columns) + 8))
    size = max(_SMALLEST, min(layout.text, room))
    inch = _LETTER * size / 72
    below = max(map(len, columns)) * inch
    height = _ROW * size / 72 * len(rows) + below + 0.9
    figure = Figure(figsize=(layout.width, height), layout="constrained")
    axes = figure.subplots()
    values = [[_mean(_results(table, one, row, column)) for column in columns] for row in rows]
    low, high = _range(table)
    nothing = float("nan")
    shown = [[nothing if value is None else value for value in line] for line in values]
    image = axes.imshow(shown, cmap=_COLORS, vmin=low, vmax=high, aspect="auto")
    for place, line in enumerate(values):
        for number, value in enumerate(line if room >= _SMALLEST else ()):
            cell = _text(_results(table, one, rows[place], columns[number]), value)
            share = 1.0 if value is None else (value - low) / (high - low)
            color = "black" if share > _DARK else "white"
            axes.text(number, place, cell, ha="center", va="center", fontsize=size, color=color)
    axes.set_facecolor("0.92")
    axes.set_xticks(range(len(columns)), map(plain, columns), rotation=90, fontsize=size)
    axes.set_yticks(range(len(rows)), map(plain, rows), fontsize=size)
    axes.set_xlabel(one.columns)
    axes.set_ylabel(one.rows)
    axes.set_title(plain(one.title), fontsize=layout.title, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label=_measure(table), fraction=0.03, pad=0.01)
    return figure


def _results(table: Table, one: HeatMap, row: str, column: str) -> list[SeedResult]:
    """Return the results of one cell of the heat map, one per seed; empty if the table has no runs for this cell."""
    name = one.places.get((row, column))
    return [] if name is None else table.at(name, one.column)


def _mean(results: list[SeedResult]) -> float | None:
    return mean_and_deviation(percentages(results, "last"))[0]


def _text(results: list[SeedResult], mean: float | None) -> str:
    """Return the text of a cell: its mean, with a star if some of the seeds have no result."""
    if mean is None:
        return "failed" if any(one.status == "failed" for one in results) else "-"
    return f"{mean:.1f}{'' if len(percentages(results, 'last')) == len(results) else '*'}"


def _range(table: Table) -> tuple[float, float]:
    """Return the two ends of the colour scale: the lowest and the highest mean in all heat maps of the table."""
    means = [
        mean
        for one in table.heat_maps
        for name in one.places.values()
        if (mean := _mean(table.at(name, one.column))) is not None
    ]
    low, high = min(means, default=0.0), max(means, default=100.0)
    return (low, high) if high > low else (low - 1, high + 1)


def _measure(table: Table) -> str:
    measure = str(table.settings.get("measure", ""))
    return f"{title_of_measure(measure, table.titles or {}) if measure else 'Test accuracy'}, percent"


def _caption(table: Table, one: HeatMap) -> tuple[str, ...]:
    """Return the lines of text below the figure. If a number in the map has a star, the last line explains it."""
    cells = [table.at(name, one.column) for name in one.places.values()]
    seeds = sorted({result.seed for results in cells for result in results})
    partial_ones = any(0 < len(percentages(results, "last")) < len(results) for results in cells)
    mean = f"Mean over seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    return (
        f"{_measure(table)}, after the last round, {one.rows} by {one.columns}: {one.title}.",
        f"{mean} All heat maps of the table have the same colours.",
        *(["* The mean is over a part of these seeds, because runs failed or are missing."] if partial_ones else []),
    )
