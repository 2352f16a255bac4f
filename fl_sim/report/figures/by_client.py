"""Figures that compare two models of each client: trained by a federated method, and without federation.

A figure shows one column of a table. It has a panel for each row (method). A panel has a point for each client and
seed. The accuracies are computed by stages, code that runs before the first or after the last round of a run (see
``fl_sim.simulation.stage.Stage.titles``).
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from fl_sim.report.picture import PAGE, Layout, Picture, drawn, file_names, plain, with_grid
from fl_sim.report.row_names import short_names
from fl_sim.report.runs import Found, SavedRun
from fl_sim.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADING: Final = "Clients, compared with training alone"

_MOST_PANELS: Final = 20
"""Largest number of panels in one figure. Further rows are drawn in another figure."""
_INCHES: Final = 1.05
"""Smallest width of a panel in inches, so that its axis and its title are legible."""
_NARROW: Final = 1.5
"""Width in inches. A narrower panel has fewer ticks and a shorter text."""
_MOST_ACROSS: Final = 4
_FEW: Final = 200
"""If a panel has more points than this, the points are small."""
_MANY: Final = 2_000
"""If a panel has more points than this, PDF and SVG files contain them as an image, which opens faster."""

_BELOW, _ABOVE, _LEVEL = ("#d55e00", "v"), ("#0072b2", "o"), ("0.45", "o")
"""Colour and marker of the points below, above and on the diagonal."""

Pair: TypeAlias = tuple[float, float]
"""Accuracies of two models of one client, in percent: (trained without federation, trained by the row's method)."""


@dataclass(frozen=True)
class ClientPanel:
    """One panel of a figure: the accuracies of all clients and seeds in one row of a table."""

    label: str
    pairs: tuple[Pair, ...]

    @property
    def below(self) -> float:
        """Return the percentage of clients for which this row's model is worse than the model without federation."""
        return 100 * sum(own < alone for alone, own in self.pairs) / len(self.pairs)


@dataclass(frozen=True)
class ClientFigure:
    """The data of one figure: ``panels`` for the rows of one column of a table.

    ``share``: the title of the compared measure, such as "accuracy of the client's own model". ``where``: the name of
    the table's column. ``notes``: a text about each data set that is stand-in data (synthetic records in place of the
    real ones).
    """

    share: str
    where: str
    panels: tuple[ClientPanel, ...]
    notes: tuple[str, ...] = ()


def client_figures(found: Found) -> list[ClientFigure]:
    """Return the data of all figures of the tables.

    A table has figures only if one of its rows is local-only training, with which the other rows are compared.
    """
    runs = {run.path: run for run in found.runs}
    figures = []
    for place, table in found.tables.items():
        for name, share in (table.titles or {}).items():
            for column in table.columns if table.alone else ():
                figures += _of_column(place, table, column, name, share, runs)
    return figures


def _of_column(
    place: Path, table: Table, column: str, name: str, share: str, runs: Mapping[Path, SavedRun]
) -> list[ClientFigure]:
    """Return the data of the figures of one column of a table.

    ``name``: the name of the measure in ``result.json``.
    """
    lists: dict[str, dict[int, Sequence[float | None]]] = {}
    notes: dict[str, None] = {}
    for row in table.rows:
        for one in table.at(row, column):
            run = runs.get(place / one.directory)
            if run is not None and run.result and name in run.result.by_client and not run.result.is_private:
                lists.setdefault(row, {})[one.seed] = run.result.by_client[name]
                if run.result.data_note:
                    notes[f"{run.config.data}: {run.result.data_note}"] = None
    alone = {seed: values for row in table.rows if row in table.alone for seed, values in lists.pop(row, {}).items()}
    names = short_names(table.label(row) for row in lists)
    panels = [
        ClientPanel(names[table.label(row)], pairs)
        for row, by_seed in lists.items()
        if (pairs := tuple(_pairs(alone, by_seed)))
    ]
    parts = [panels[first : first + _MOST_PANELS] for first in range(0, len(panels), _MOST_PANELS)]
    return [ClientFigure(share, column, tuple(part), tuple(notes)) for part in parts]


def _pairs(
    alone: Mapping[int, Sequence[float | None]], by_seed: Mapping[int, Sequence[float | None]]
) -> Iterable[Pair]:
    for seed, values in by_seed.items():
        for before, own in zip(alone.get(seed, ()), values, strict=False):
            if before is not None and own is not None:
                yield 100 * before, 100 * own


def draw_clients(found: Sequence[ClientFigure]) -> list[Picture]:
    """Draw the figures, and return each as a ``Picture`` with its caption."""
    pictures = []
    for name, one in zip(file_names([f"clients-{one.where}" for one in found]), found, strict=True):
        drawn_as = (
            f"One point for each client and seed. Horizontal axis: the {one.share}, trained without federation. "
            f"Vertical axis: the {one.share} in this row. For clients below the line, the row's model is worse than "
            "the model without federation; each panel states the share of these clients."
        )
        caption = (f"{HEADING}: {one.where}. {drawn_as}", *(f"Data {note}" for note in one.notes))
        drawing = partial(draw, one)
        pictures.append(Picture(f"{name}.png", HEADING, caption, drawn(drawing, PAGE), draw=drawing))
    return pictures


def draw(one: ClientFigure, layout: Layout = PAGE) -> "Figure":
    """Return a figure with a panel for each row. All panels have the same axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    across = min(len(one.panels), _MOST_ACROSS, int(layout.width / _INCHES))
    down = math.ceil(len(one.panels) / across)
    side = min(layout.width / max(across, 2), layout.highest / down)
    figure = Figure(figsize=(layout.width, min(down * side + 0.06 * layout.text, layout.highest)), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    own = replace(layout, width=layout.width / across)
    for number, axes in enumerate(grid.flatten()):
        if number < len(one.panels):
            _draw_panel(axes, one.panels[number], own)
        else:
            axes.set_axis_off()
    values = [value for panel in one.panels for pair in panel.pairs for value in pair]
    _scale(grid[0, 0], values, 2 if own.width < _NARROW else 4)
    for number in range(max(0, len(one.panels) - across), len(one.panels)):
        grid.flatten()[number].tick_params(labelbottom=True)
    figure.suptitle(plain(textwrap.fill(one.where, layout.characters(layout.title))), fontsize=layout.title)
    room = layout.characters(layout.text, 1.0)
    figure.supxlabel(plain(textwrap.fill(f"{one.share}, trained without federation (%)", room)), fontsize=layout.text)
    figure.supylabel(plain(textwrap.fill(f"{one.share} (%)", room)), fontsize=layout.text)
    return figure


def _draw_panel(axes: "Axes", panel: ClientPanel, layout: Layout) -> None:
    groups: dict[tuple[str, str], list[Pair]] = {_BELOW: [], _ABOVE: [], _LEVEL: []}
    for alone, own in panel.pairs:
        groups[_BELOW if own < alone else _ABOVE if own > alone else _LEVEL].append((alone, own))
    axes.axline((0, 0), slope=1, color="0.3", linewidth=0.7 * layout.line)
    size = (2.2 if len(panel.pairs) <= _FEW else 1.2) * layout.line
    for (color, marker), pairs in groups.items():
        if pairs:
            axes.plot(
                *zip(*pairs, strict=True), marker, color=color, markersize=size, markeredgewidth=0, alpha=0.6,
                clip_on=False, rasterized=len(panel.pairs) > _MANY,
            )  # fmt: skip
    with_grid(axes, layout)
    axes.set_aspect("equal", adjustable="box")
    title = textwrap.fill(panel.label, layout.characters(layout.small, 0.8))
    axes.set_title(plain(title), fontsize=layout.small, loc="left", pad=3)
    share = f"{panel.below:.0f} %{'' if layout.width < _NARROW else ' below'}"
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6}
    axes.text(0.97, 0.04, share, transform=axes.transAxes, ha="right", va="bottom", fontsize=layout.small, bbox=box)


def _scale(axes: "Axes", values: Sequence[float], most: int) -> None:
    """Set the same range in percent on both axes, so that all ``values`` are visible.

    ``most``: the largest number of intervals between ticks.
    """
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    ticks = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(min(values), max(values))
    shown = [float(tick) for tick in ticks if 0 <= tick <= 100]
    axes.set(xlim=(shown[0], shown[-1]), ylim=(shown[0], shown[-1]), xticks=shown, yticks=shown)
