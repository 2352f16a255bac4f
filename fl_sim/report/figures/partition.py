"""Figure of a partition: the number of records of each class on each client.

Partitions with few clients are drawn as bubbles, as in NIID-Bench (Li et al. 2022). Other partitions are drawn as a
heat map.
"""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.report.picture import PAGE, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_MOST_BUBBLES = 30
_CELL, _MARGIN = 0.45, 0.75
"""Two sizes in inches: the width of a cell (one class on one client), and the width of the figure's margins."""
_POINTS, _TITLE = 72, 11
_INK = "#1f4e79"


def draw_partition(label_counts: NDArray[np.int64], path: Path, title: str) -> None:
    """Write a figure of a partition to ``path``, a .png, .svg or .pdf file. Create the folder of the file if needed.

    ``label_counts``: numbers of records, shape (clients, classes). Up to 30 clients and classes are drawn as bubbles.
    The area of a bubble is proportional to the number of records, which is written inside the bubble. Larger partitions
    are drawn as a heat map, below a bar chart of the clients' numbers of records. The colour scale of the heat map is a
    square root, so that small numbers stay visible. Raises UserError for another type of file.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot draw to {path}: give a file name that ends in {', '.join(SUFFIXES)}")
    drawing = _bubbles if max(label_counts.shape) <= _MOST_BUBBLES else _heat_map
    figure = drawing(label_counts, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path, path.suffix.lower().removeprefix("."))


def _bubbles(counts: NDArray[np.int64], title: str) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    num_clients, num_classes = counts.shape
    width = max(num_clients * _CELL + 2 * _MARGIN, 4.5)
    title = _wrapped(title, width)
    height = num_classes * _CELL + 2 * _MARGIN + title.count("\n") * 1.2 * _TITLE / _POINTS
    wide, high = num_clients * _CELL / width, num_classes * _CELL / height
    figure = Figure(figsize=(width, height))
    figure.suptitle(title, fontsize=_TITLE, y=1 - 0.1 / height)
    axes = figure.add_axes(((1 - wide) / 2, 0.9 * _MARGIN / height, wide, high))
    clients, classes = np.nonzero(counts)
    share = counts[clients, classes] / counts.max()
    diameter = 0.94 * _CELL * _POINTS * np.sqrt(share)
    axes.scatter(clients, classes, s=diameter**2, c=_INK, linewidths=0, alpha=0.3 + 0.6 * np.sqrt(share), zorder=2)
    axes.set(xlim=(-0.5, num_clients - 0.5), ylim=(-0.5, num_classes - 0.5), xlabel="client", ylabel="class")
    axes.set_xticks(range(num_clients))
    axes.set_yticks(range(num_classes))
    # Grid lines are drawn between the cells: lines through the cells' centres would hide the numbers.
    axes.set_xticks(np.arange(num_clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(num_classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.7)
    axes.tick_params(which="both", labelsize=8, length=0)
    axes.spines[:].set_visible(False)
    _write_numbers(axes, counts)
    return figure


def _wrapped(title: str, width: float) -> str:
    return textwrap.fill(title, replace(PAGE, width=width).characters(_TITLE))


def _write_numbers(axes: "Axes", counts: NDArray[np.int64]) -> None:
    from matplotlib.patheffects import withStroke  # noqa: PLC0415

    halo = [withStroke(linewidth=1.2, foreground="white", alpha=0.8)]
    for client, label in np.argwhere(counts).tolist():
        number, dark = counts[client, label], counts[client, label] > 0.3 * counts.max()
        text = axes.text(client, label, str(number), ha="center", va="center", fontsize=7, zorder=3)
        text.set(color="white" if dark else "black", path_effects=[] if dark else halo)
    above = counts.shape[1] - 0.4
    for client, size in enumerate(counts.sum(axis=1).tolist()):
        axes.text(client, above, str(size), ha="center", va="bottom", fontsize=7, color="0.35")
    axes.text(-0.6, above, "records", ha="right", va="bottom", fontsize=7, color="0.35")


def _heat_map(counts: NDArray[np.int64], title: str) -> "Figure":
    from matplotlib.colors import PowerNorm  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    num_clients, num_classes = counts.shape
    figure = Figure(
        figsize=(float(np.clip(0.1 * num_clients + 2, 7, 13)), float(np.clip(0.28 * num_classes + 2.2, 4, 9))),
        layout="constrained",
    )
    figure.suptitle(_wrapped(title, figure.get_figwidth()), fontsize=_TITLE)
    sizes, cells = figure.subplots(2, 1, sharex=True, height_ratios=(1, min(max(4, 0.28 * num_classes), 8)))
    _draw_sizes(sizes, counts.sum(axis=1))
    image = cells.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        origin="lower",
        interpolation="nearest",  # the cells get sharp edges
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0, vmax=int(counts.max())),
    )
    cells.set(xlabel="client", ylabel="class")
    cells.xaxis.set_major_locator(MaxNLocator(integer=True))
    cells.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    if num_classes <= 20:
        for border in np.arange(1, num_classes) - 0.5:
            cells.axhline(border, color="0.85", linewidth=0.5)
    cells.tick_params(labelsize=8)
    figure.colorbar(image, ax=cells, label="records (square-root scale)", pad=0.01)
    return figure


def _draw_sizes(axes: "Axes", sizes: NDArray[np.int64]) -> None:
    axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=_INK)
    axes.set(ylabel="records", xlim=(-0.5, len(sizes) - 0.5), ylim=(0, None))
    axes.tick_params(labelsize=8, labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
