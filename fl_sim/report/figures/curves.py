"""Accuracy and loss over rounds: a panel for each data set and split, a line for each method, a band over seeds.

Accuracy is drawn over virtual time, too, where runs have a virtual clock.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from fl_sim.report.groups import Panel, SeedGroup
from fl_sim.report.measures import mean_and_deviation, spent_by
from fl_sim.report.picture import (
    PAGE,
    WIDE_PAGE,
    Layout,
    Picture,
    Style,
    drawn,
    file_names,
    plain,
    styled,
    with_grid,
)
from fl_sim.store.run_directory import RoundRecord

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measure: TypeAlias = Literal["accuracy", "loss"]
MEASURES: tuple[Measure, Measure] = ("accuracy", "loss")
_WHAT = {"accuracy": "test accuracy (%)", "loss": "test loss (mean cross-entropy, nats)"}
HEADINGS = {"accuracy": "Accuracy over rounds", "loss": "Test loss over rounds"}
OVER_TIME = "Accuracy over virtual time"

_BOUND = ("black", (2.5, 1.2), "")
_MOST_IN_ONE = 4
_UNFINISHED = " (unfinished)"
_MARKS_A_LINE = 8
_SKEWED = 20
"""Losses with a larger ratio are drawn on a logarithmic axis, so that a diverging one does not flatten the others."""


@dataclass(frozen=True)
class Curve:
    """Mean and sample standard deviation over the seeds in each round that all of them evaluated (0 for one seed).

    ``times``: the mean virtual time, in seconds, at the end of each of these rounds; empty if unknown.
    """

    rounds: list[int]
    mean: list[float]
    deviation: list[float]
    times: list[float] = field(default_factory=list)

    @property
    def low(self) -> list[float]:
        """Return the lower edge of the band."""
        return [mean - deviation for mean, deviation in zip(self.mean, self.deviation, strict=True)]

    @property
    def high(self) -> list[float]:
        """Return the upper edge of the band."""
        return [mean + deviation for mean, deviation in zip(self.mean, self.deviation, strict=True)]


def draw_all(panels: Sequence[Panel]) -> list[Picture]:
    """Draw accuracy and loss: one figure each up to four panels, else a figure for each panel."""
    styles, timed = styles_of(panels), _timed(panels)
    pictures = []
    drawn_over: list[tuple[Measure, Sequence[Panel], bool]] = [
        ("accuracy", panels, False), ("loss", panels, False), ("accuracy", timed, True),
    ]  # fmt: skip
    for measure, some, over_time in drawn_over:
        stem = "virtual-time" if over_time else measure
        if len(panels) > _MOST_IN_ONE:
            parts = zip(file_names([panel.title for panel in some]), ([panel] for panel in some), strict=True)
            figures = [(f"{stem}-{name}.png", part) for name, part in parts]
        else:
            figures = [(f"{stem}.png", list(some))] if some else []
        pictures += [_picture(name, measure, part, styles, over_time=over_time) for name, part in figures]
    return pictures


def _timed(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels and methods with virtual times."""
    kept = []
    for panel in panels:
        timed = tuple(line for line in panel.lines if not line[1].is_bound and curve(line[1], "accuracy").times)
        if timed:
            kept.append(replace(panel, lines=timed))
    return kept


def styles_of(panels: Iterable[Panel]) -> dict[str, Style]:
    """Return {label: style}, the same in every figure."""
    names = dict.fromkeys(label for panel in panels for label, one in panel.lines if not one.is_bound)
    return dict(zip(names, styled(names), strict=True))


def curve(group: SeedGroup, measure: Measure) -> Curve:
    """Return the group's curve; accuracy in percent. Values that are not finite are left out."""
    seeds = [
        {record.round: value for record in run.rounds if (value := _value(record, measure)) is not None}
        for run in group.drawn
    ]
    rounds = sorted(set.intersection(*map(set, seeds)))
    spread = [mean_and_deviation([seed[number] for seed in seeds]) for number in rounds]
    means, deviations = [mean or 0.0 for mean, _ in spread], [deviation or 0.0 for _, deviation in spread]
    return Curve(rounds, means, deviations, _times(group, rounds))


def _times(group: SeedGroup, rounds: Sequence[int]) -> list[float]:
    clocks = [
        {record.round: spent.virtual_seconds for record, spent in zip(run.rounds, spent_by(run.rounds), strict=True)}
        for run in group.drawn
    ]
    means = [[seconds for clock in clocks if (seconds := clock[number]) is not None] for number in rounds]
    if any(len(known) < len(clocks) for known in means):
        return []
    return [sum(known) / len(known) for known in means]


def draw(
    panels: Sequence[Panel],
    measure: Measure,
    styles: Mapping[str, Style],
    layout: Layout = PAGE,
    *,
    over_time: bool = False,
) -> "Figure":
    """Draw ``panels`` side by side where there is room, the legend below; over rounds, or over virtual time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    across = min(len(panels), layout.across)
    down = math.ceil(len(panels) / across)
    num_labels = len({label for panel in panels for label, _ in panel.lines})
    longest = max(len(label) + (0 if one.finished else 13) for panel in panels for label, one in panel.lines)
    columns = max(1, min(num_labels, layout.characters(layout.text, 1.0) // (longest + 8)))
    height = min(layout.height * down, layout.highest) + 0.027 * layout.text * math.ceil(num_labels / columns)
    figure = Figure(figsize=(layout.width, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    handles: dict[str, Artist] = {}
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, measure, styles, replace(layout, width=layout.width / across), over_time=over_time)
        handles |= {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if handles:
        # The upper bound is no method, so it comes last.
        bounds = {plain(label) for panel in panels for label, one in panel.lines if one.is_bound}
        ordered = sorted(handles, key=lambda text: text.removesuffix(_UNFINISHED) in bounds)
        figure.legend(
            handles=[handles[text] for text in ordered], labels=ordered, loc="outside lower center", ncols=columns,
            frameon=False, handlelength=4.2, columnspacing=1.5,
        )  # fmt: skip
    return figure


def _picture(
    name: str, measure: Measure, panels: Sequence[Panel], styles: Mapping[str, Style], *, over_time: bool = False
) -> Picture:
    heading = OVER_TIME if over_time else HEADINGS[measure]
    what = "; ".join(panel.title for panel in panels)
    data = "; ".join(dict.fromkeys(f"{panel.data}: {panel.note}" for panel in panels if panel.note))
    caption = [f"{heading}: {what}. Lines: mean over seeds; bands: ± sample standard deviation."]
    caption += [f"Data {data}"] if data else []
    drawing = partial(draw, panels, measure, styles, over_time=over_time)
    png = drawn(drawing, WIDE_PAGE if len(panels) > 1 else PAGE)
    return Picture(name, heading, tuple(caption), png, draw=drawing)


def _draw_panel(
    axes: "Axes", panel: Panel, measure: Measure, styles: Mapping[str, Style], layout: Layout, *, over_time: bool
) -> None:
    curves = [(label, one, curve(one, measure)) for label, one in panel.lines]
    nothing: list[str] = []
    for number, (label, one, line) in enumerate(curves):
        color, dashes, marker = _BOUND if one.is_bound else styles[label]
        shown = plain(label if one.finished else f"{label}{_UNFINISHED}")
        if not line.rounds:
            nothing.append(shown)
            continue
        every, places = max(1, math.ceil(len(line.rounds) / _MARKS_A_LINE)), line.times if over_time else line.rounds
        axes.plot(
            places, line.mean, label=shown, color=color, linewidth=layout.line,
            dashes=dashes or (1, 0), marker=marker or ("o" if len(line.rounds) == 1 else ""),
            markersize=3 * layout.line, markerfacecolor="white" if number % 2 else color,
            # Lines that coincide show their markers one after the other.
            markevery=(number % every, every),
        )  # fmt: skip
        if len(one.drawn) > 1:
            axes.fill_between(
                places, line.low, line.high, color=color, alpha=0.13 if len(curves) < 6 else 0.07, linewidth=0
            )
    axes.set(xlabel="virtual seconds (simulated devices)" if over_time else x_label(panel), ylabel=_WHAT[measure])
    with_grid(axes, layout)
    _title(axes, panel, layout)
    _scale(axes, measure, [value for _, _, line in curves for value in line.mean])
    if nothing:
        note = f"no finite value in a round of all seeds: {'; '.join(nothing)}"
        text = textwrap.fill(note, layout.characters(layout.small))
        axes.text(0.02, 0.98, text, transform=axes.transAxes, ha="left", va="top", fontsize=layout.small, color="0.35")


def x_label(panel: Panel) -> str:
    """Return the label of the axis of rounds."""
    voted = [any(run.voted for run in one.runs) for _, one in panel.lines]
    if all(voted):
        return "epoch of the student"
    return "communication round (PATE: epoch of the student)" if any(voted) else "communication round"


def _scale(axes: "Axes", measure: Measure, values: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if measure == "accuracy":
        axes.set_ylim(0, 100)
        axes.set_yticks(range(0, 101, 10))
    elif values and min(values) > 0 and max(values) > _SKEWED * min(values):
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.5, 1.5 * max(values))  # a band may reach down to 0, which is infinitely far away
        axes.yaxis.set_major_formatter("{x:g}")
        if max(values) < 1000 * min(values):
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_ylabel(f"{_WHAT[measure]}, log scale")
    elif values:
        axes.set_ylim(0, max(1.08 * max(values), 0.1))


def _title(axes: "Axes", panel: Panel, layout: Layout) -> None:
    title = textwrap.fill(panel.title, layout.characters(layout.title))
    note = textwrap.fill(f"data: {panel.note}", layout.characters(layout.small)) if panel.note else ""
    pad = (10 + 1.4 * layout.small * (note.count("\n") + 1) if note else 8) * layout.title / 11
    axes.set_title(plain(title), fontsize=layout.title, loc="left", pad=pad)
    if note:
        axes.annotate(
            plain(note), (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points",
            fontsize=layout.small, color="#8a3b00", va="bottom",
        )  # fmt: skip


def _value(record: RoundRecord, measure: Measure) -> float | None:
    accuracy = record.test_accuracy
    value = record.test_loss if measure == "loss" else None if accuracy is None else 100 * accuracy
    return value if value is not None and math.isfinite(value) else None
