"""Figures of accuracy and loss over rounds, with a panel for each data set and partition.

Each method has a line in a panel. Bands or error bars show the standard deviation over seeds. Runs that simulate
devices have a virtual clock, and an additional figure of accuracy over virtual time.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fl_sim.report.groups import Panel, SeedGroup
from fl_sim.report.measures import mean_and_deviation, spent_by
from fl_sim.report.picture import (
    PAGE,
    WIDE_PAGE,
    Draw,
    Layout,
    Picture,
    Style,
    drawn,
    file_names,
    percent_axis,
    plain,
    styled,
    with_grid,
)
from fl_sim.report.row_names import further_settings, short_names
from fl_sim.store.run_directory import RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measure: TypeAlias = Literal["accuracy", "loss"]
MEASURES: tuple[Measure, Measure] = ("accuracy", "loss")
_WHAT = {"accuracy": "test accuracy (%)", "loss": "test loss (nats)"}
_MEANING = {"accuracy": "", "loss": " Loss: mean cross-entropy, in nats."}
HEADINGS = {"accuracy": "Accuracy over rounds", "loss": "Test loss over rounds"}
OVER_TIME = "Accuracy over virtual time"

_BOUND = ("black", (2.5, 1.2), "")
_MOST_IN_ONE = 4
"""Largest number of panels in one figure."""
_UNFINISHED = " (unfinished)"
_MARKS_A_LINE = 8
"""Approximate number of markers on a line."""
_MOST_BANDS = 4
"""Largest number of bands in a panel. If there would be more, error bars replace all bands of the panel.

Many bands would hide each other. The error bars are to the right of the last round.
"""
_SKEWED = 20
"""Largest ratio of the highest to the lowest loss on a linear axis. The axis for a larger ratio is logarithmic."""


@dataclass(frozen=True)
class Curve:
    """The line of one method: mean and standard deviation over seeds, for each round that was evaluated with all seeds.

    ``deviation``: sample standard deviations; 0 for a single seed. ``times``: for each of these rounds, the mean
    virtual time in seconds at the end of the round; empty if the times are unknown.
    """

    rounds: list[int]
    mean: list[float]
    deviation: list[float]
    times: list[float] = field(default_factory=list)

    @property
    def low(self) -> list[float]:
        """Return the lower edge of the band around the curve: mean minus standard deviation."""
        return [mean - deviation for mean, deviation in zip(self.mean, self.deviation, strict=True)]

    @property
    def high(self) -> list[float]:
        """Return the upper edge of the band around the curve: mean plus standard deviation."""
        return [mean + deviation for mean, deviation in zip(self.mean, self.deviation, strict=True)]


def draw_all(panels: Sequence[Panel], *, full_axis: bool = False) -> list[Picture]:
    """Return the figures of accuracy over rounds, loss over rounds, and accuracy over virtual time.

    Up to four panels share one figure. If there are more, each panel has its own figure. Panels of the same data set
    have the same vertical axis. ``full_axis``: True if the accuracy axis goes from 0 to 100 %.
    """
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
        for name, part in figures:
            alike = [panel for panel in some if panel.data in {own.data for own in part}]
            drawing = partial(draw, part, measure, styles, over_time=over_time, full_axis=full_axis, scaled_for=alike)
            pictures.append(_picture(name, measure, part, styles, drawing, over_time=over_time))
    return pictures


def _timed(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels of the figure over virtual time.

    These panels show only methods whose runs have virtual times. Panels without such methods are left out.
    """
    kept = []
    for panel in panels:
        timed = tuple(line for line in panel.lines if not line[1].is_bound and curve(line[1], "accuracy").times)
        if timed:
            kept.append(replace(panel, lines=timed))
    return kept


def styles_of(panels: Iterable[Panel]) -> dict[str, Style]:
    """Return {label of a method: line style}, so that each method has the same line style in every figure."""
    names = dict.fromkeys(label for panel in panels for label, one in panel.lines if not one.is_bound)
    return dict(zip(names, styled(names), strict=True))


def curve(group: SeedGroup, measure: Measure) -> Curve:
    """Return the curve of a ``measure`` over rounds: its mean over the runs in ``group``. Accuracies are in percent.

    A round is left out if any seed has no finite value in this round.
    """
    seeds = [
        {record.round: value for record in run.rounds if (value := _value(record, measure)) is not None}
        for run in group.drawn
    ]
    rounds = sorted(set.intersection(*map(set, seeds)))
    found = [mean_and_deviation([seed[number] for seed in seeds]) for number in rounds]
    means, deviations = [mean or 0.0 for mean, _ in found], [deviation or 0.0 for _, deviation in found]
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
    full_axis: bool = False,
    scaled_for: Sequence[Panel] = (),
) -> "Figure":
    """Return a figure of a ``measure`` in all ``panels``, with the legend below.

    ``styles``: {label of a method: line style}. ``over_time``: True if the horizontal axis shows virtual time in place
    of rounds. ``full_axis``: True if the accuracy axis goes from 0 to 100 %. ``scaled_for``: the panels that determine
    the range of the vertical axis; if empty, ``panels``. Figures with the same ``scaled_for`` have the same vertical
    axis.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (a second to import)

    across = min(len(panels), layout.across)
    down = math.ceil(len(panels) / across)
    num_labels = len({label for panel in panels for label, _ in panel.lines})
    names = _names(panels, styles)
    longest = max(len(names[label]) + (0 if one.finished else 13) for panel in panels for label, one in panel.lines)
    columns = max(1, min(num_labels, layout.characters(layout.text, 1.0) // (longest + 12)))
    height = min(layout.height * down, layout.highest) + 0.027 * layout.text * math.ceil(num_labels / columns)
    figure = Figure(figsize=(layout.width, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    spanned = [curve(one, measure) for panel in scaled_for or panels for _, one in panel.lines]
    for axes, panel in zip(grid, panels, strict=False):
        own = replace(layout, width=layout.width / across)
        _draw_panel(axes, panel, measure, styles, names, own, over_time=over_time)
        _scale(axes, measure, spanned, full_axis=full_axis)
        entries = {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        if entries:  # for error bars, the axis may extend beyond the last round, but has no ticks there
            last = max(float(line.get_xdata()[-1]) for line in entries.values())
            axes.set_xticks([tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= last])
        handles |= entries
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if handles:
        # The legend names the upper bound (centralized training) after all methods.
        bounds = {plain(names[label]) for panel in panels for label, one in panel.lines if one.is_bound}
        ordered = sorted(handles, key=lambda text: text.removesuffix(_UNFINISHED) in bounds)
        figure.legend(
            handles=[handles[text] for text in ordered],
            labels=[textwrap.fill(text, layout.characters(layout.text)) for text in ordered],
            loc="outside lower center", ncols=columns,
            frameon=False, handlelength=4.2, columnspacing=1.5,
        )  # fmt: skip
    return figure


def _names(panels: Sequence[Panel], styles: Mapping[str, Style]) -> dict[str, str]:
    """Return {label of a method: its short name in the legend}. The names are the same in all figures of a report."""
    bounds = [label for panel in panels for label, one in panel.lines if one.is_bound]
    return {**short_names(bounds), **short_names(styles)}


def _has_bars(panel: Panel) -> bool:
    return sum(len(one.drawn) > 1 for _, one in panel.lines) > _MOST_BANDS


def _picture(
    name: str, measure: Measure, panels: Sequence[Panel], styles: Mapping[str, Style], drawing: Draw, *,
    over_time: bool,
) -> Picture:  # fmt: skip
    heading = OVER_TIME if over_time else HEADINGS[measure]
    what = "; ".join(panel.title for panel in panels)
    data = "; ".join(dict.fromkeys(f"{panel.data}: {panel.note}" for panel in panels if panel.note))
    marks = {True: "bars beside the last round", False: "bands"}
    shown = " or ".join(marks[has_bars] for has_bars in sorted({_has_bars(panel) for panel in panels}))
    drawn_as = f"Lines: mean over seeds; {shown}: ± sample standard deviation.{_MEANING[measure]}"
    caption = [f"{heading}: {what}. {drawn_as}"]
    caption += [f"Data {data}"] if data else []
    names = _names(panels, styles)
    whole = {label: one.runs[0].row or label for panel in panels for label, one in panel.lines if not one.is_bound}
    settings: dict[str, list[str]] = {}
    for label, row in whole.items():
        settings.setdefault(further_settings(row, names[label], ""), []).append(names[label])
    details = [f"{'; '.join(own)}: {more}" for more, own in settings.items() if more]
    png = drawn(drawing, WIDE_PAGE if len(panels) > 1 else PAGE)
    return Picture(name, heading, tuple(caption), png, tuple(details), drawing)


def _draw_panel(
    axes: "Axes", panel: Panel, measure: Measure, styles: Mapping[str, Style], names: Mapping[str, str],
    layout: Layout, *, over_time: bool,
) -> None:  # fmt: skip
    curves = [(label, one, curve(one, measure)) for label, one in panel.lines]
    nothing: list[str] = []
    ends = [(line.times if over_time else line.rounds) for _, _, line in curves]
    places_known = [place for own in ends for place in own]
    step = (max(places_known) - min(places_known) or 1) / 50 if places_known else 0
    num_bars = 0
    for number, (label, one, line) in enumerate(curves):
        color, dashes, marker = _BOUND if one.is_bound else styles[label]
        shown = plain(names[label] if one.finished else f"{names[label]}{_UNFINISHED}")
        if not line.rounds:
            nothing.append(shown)
            continue
        every, places = max(1, math.ceil(len(line.rounds) / _MARKS_A_LINE)), line.times if over_time else line.rounds
        axes.plot(
            places, line.mean, label=shown, color=color, linewidth=layout.line,
            dashes=dashes or (1, 0), marker=marker or ("o" if len(line.rounds) == 1 else ""),
            markersize=3 * layout.line, markerfacecolor="white" if number % 2 else color,
            # Each line has its first marker at a different round. So if two lines are equal, the markers of both lines
            # stay visible.
            markevery=(number % every, every),
        )  # fmt: skip
        if len(one.drawn) > 1 and _has_bars(panel):
            num_bars += 1
            beside = max(place for place in places_known) + num_bars * step
            axes.errorbar(
                beside, line.mean[-1], yerr=line.deviation[-1], color=color, fmt=marker or "_",
                markersize=2.5 * layout.line, capsize=1.5 * layout.line, linewidth=0.8 * layout.line,
            )  # fmt: skip
        elif len(one.drawn) > 1:
            axes.fill_between(places, line.low, line.high, color=color, alpha=0.13, linewidth=0)
    axes.set(xlabel="virtual seconds (simulated devices)" if over_time else x_label(panel), ylabel=_WHAT[measure])
    with_grid(axes, layout)
    _title(axes, panel, layout)
    if nothing:
        note = f"no round with finite values for all seeds: {'; '.join(nothing)}"
        text = textwrap.fill(note, layout.characters(layout.small))
        axes.text(0.02, 0.98, text, transform=axes.transAxes, ha="left", va="top", fontsize=layout.small, color="0.35")


def x_label(panel: Panel) -> str:
    """Return the label of the horizontal axis: communication rounds, or training epochs of the student in PATE."""
    voted = [any(run.voted for run in one.runs) for _, one in panel.lines]
    if all(voted):
        return "epoch of the student"
    return "communication round (PATE: epoch of the student)" if any(voted) else "communication round"


def _scale(axes: "Axes", measure: Measure, curves: Sequence[Curve], *, full_axis: bool) -> None:
    """Set the limits of the vertical axis so that all ``curves`` and their deviations are visible."""
    from matplotlib.ticker import LogLocator, MaxNLocator  # noqa: PLC0415

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    values = [value for line in curves for value in line.mean]
    lows, highs = [value for line in curves for value in line.low], [value for line in curves for value in line.high]
    if measure == "accuracy":
        percent_axis(axes, lows, highs, full=full_axis)
    elif values and min(values) > 0 and max(values) > _SKEWED * min(values):
        axes.set_yscale("log")
        # A logarithmic axis cannot show numbers of 0 or less, and the mean minus the deviation may be such a number.
        axes.set_ylim(max(min(lows), min(values) / 3) / 1.5, 1.5 * max(highs))
        axes.yaxis.set_major_formatter("{x:g}")
        if max(values) < 1000 * min(values):
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_ylabel(f"{_WHAT[measure].removesuffix(')')}, log)")
    elif values:
        axes.set_ylim(0, max(1.08 * max(highs), 0.1))


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
