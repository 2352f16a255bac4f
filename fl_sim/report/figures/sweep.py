"""Figures of final accuracy over a setting of DA-FL (epsilon or gamma), with a baseline without synthetic records.

Gamma is the number of synthetic records per private record. A figure varies epsilon or gamma, on a logarithmic
horizontal axis. The runs of a line differ only in this setting and in the seed. The baseline is the best method without
preprocessing.
"""

import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fl_sim.report.figures.by_epsilon import EPSILON
from fl_sim.report.groups import SeedGroup, labels, where
from fl_sim.report.measures import as_percent, mean_and_deviation
from fl_sim.report.picture import (
    PAGE,
    Layout,
    Picture,
    Style,
    draw_points,
    drawn,
    file_names,
    one_panel,
    percent_axis,
    plain,
    styled,
    with_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Setting: TypeAlias = Literal["epsilon", "gamma"]
SETTINGS: tuple[Setting, Setting] = ("epsilon", "gamma")

_HEADINGS = {"epsilon": "Final accuracy over epsilon", "gamma": "Final accuracy over gamma"}
_BASELINE = "best without preprocessing"
_GAMMA = "the number of synthetic records of a client, divided by its number of private records"


@dataclass(frozen=True)
class Point:
    """A point of a line: the runs with one value of the varied setting.

    ``by_seed``: {seed: final accuracy in percent}. ``released``: True if at least one synthetic record was published in
    these runs.
    """

    value: float
    by_seed: Mapping[int, float]
    released: bool = True

    @property
    def mean(self) -> float:
        """Return the final accuracy in percent, as the mean over all seeds."""
        return statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class SweepLine:
    """One line of a figure. ``points``: one point for each value of the varied setting, in ascending order."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Sweep:
    """The data of one figure: lines for one data set and partition. The lines differ only in settings of their methods.

    ``setting``: the varied setting. ``note``: text that says that the records are stand-in data. ``where``: data set
    and partition as text. ``deltas``, ``epsilons``: the privacy budgets of the runs. ``baseline``: (label, point) of
    the best method without preprocessing; the ``value`` of this point has no meaning. ``others``: the number of methods
    without preprocessing. ``limits``: sentences about the outputs that the privacy guarantees cover and do not cover.
    """

    setting: Setting
    data: str
    note: str
    partition: str
    where: str
    deltas: tuple[float, ...]
    epsilons: tuple[float, ...]
    lines: tuple[SweepLine, ...]
    baseline: tuple[str, Point] | None
    others: int
    limits: tuple[str, ...]


def sweeps(groups: Sequence[SeedGroup]) -> list[Sweep]:
    """Return the data of the figures. Each figure shows finished runs that differ only in epsilon or only in gamma."""
    found = []
    done = [one for one in groups if _accuracies(one) and not one.is_bound]
    for setting in SETTINGS:
        protocols: dict[str, dict[str, list[SeedGroup]]] = {}
        for one in done:
            before = one.runs[0].preprocess
            if before is not None and not (setting == "gamma" and before.get("client_gammas")):
                line = _key({"note": one.note, **one.compared, "preprocess": {**before, setting: None}})
                protocols.setdefault(_protocol(one), {}).setdefault(line, []).append(one)
        for protocol, lines in protocols.items():
            varied = [some for some in lines.values() if len(some) > 1]
            if varied:
                plain_ones = [one for one in done if one.runs[0].preprocess is None and _protocol(one) == protocol]
                found.append(_sweep(setting, varied, plain_ones))
    return found


def draw_sweeps(found: Sequence[Sweep], *, full_axis: bool = False) -> list[Picture]:
    """Return a figure for each sweep in ``found``. ``full_axis``: True if the accuracy axis goes from 0 to 100 %."""
    names = file_names([f"{one.setting}-{one.data}-{one.partition}" for one in found])
    pictures = []
    for name, one in zip(names, found, strict=True):
        drawing = partial(draw, one, full_axis=full_axis)
        png = drawn(drawing, PAGE)
        pictures.append(Picture(f"sweep-{name}.png", _HEADINGS[one.setting], _caption(one), png, one.limits, drawing))
    return pictures


def draw(sweep: Sweep, layout: Layout = PAGE, *, full_axis: bool = False) -> "Figure":
    """Return the figure of a sweep: means and standard deviations over seeds, on a logarithmic horizontal axis.

    An infinite epsilon is drawn as the last point, after a gap. ``full_axis``: True if the accuracy axis goes from 0 to
    100 %.
    """
    meaning = textwrap.wrap(_meaning(sweep), layout.characters(layout.text))
    note = f" - data: {sweep.note}" if sweep.note else ""
    figure, axes = one_panel(layout, len(sweep.lines) + len(meaning), f"{sweep.where}{note}")
    values = sorted({point.value for line in sweep.lines for point in line.points if math.isfinite(point.value)})
    finite = [_place(value) for value in values]
    infinity = finite[-1] * (finite[-1] / finite[0]) ** 0.2 * 2 if finite else 1.0
    for line, style in zip(sweep.lines, styled([line.label for line in sweep.lines]), strict=True):
        _draw_line(axes, line, style, infinity, layout)
    if sweep.baseline:
        label, point = sweep.baseline
        shown = f"{_BASELINE}: {label}, {point.mean:.1f} % ({_seeds(point)})"
        shown = textwrap.fill(shown, layout.characters(layout.text))
        axes.axhline(point.mean, color="black", linestyle=(0, (2.5, 1.2)), linewidth=layout.line, label=plain(shown))
    axes.set_xscale("log")
    places, texts = list(finite), [f"{value:g}" for value in values]
    if any(math.isinf(point.value) for line in sweep.lines for point in line.points):
        places.append(infinity)
        texts.append("inf\n(no noise,\nno guarantee)")
        if finite:
            axes.axvline(math.sqrt(finite[-1] * infinity), color="0.8", linewidth=0.8)
    axes.set_xticks(places, texts)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("\n".join([f"{sweep.setting} (log scale)", *meaning]))
    axes.set_ylabel("final test accuracy (%)")
    drawn_at = [mean_and_deviation(list(point.by_seed.values())) for line in sweep.lines for point in line.points]
    lows, highs = ([(mean or 0.0) + sign * (own or 0.0) for mean, own in drawn_at] for sign in (-1, 1))
    best = [sweep.baseline[1].mean] if sweep.baseline else []
    percent_axis(axes, [*lows, *best], [*highs, *best], full=full_axis)
    return with_legend(figure, last=_BASELINE)


def _sweep(setting: Setting, varied: Sequence[Sequence[SeedGroup]], plain_ones: Sequence[SeedGroup]) -> Sweep:
    first = varied[0][0]
    every = [one for some in varied for one in some]
    names = labels([some[0] for some in varied], left_out=f"preprocess.{setting}")
    lines = []
    for name, some in zip(names, varied, strict=True):
        points = [Point(float(_before(one)[setting]), _accuracies(one), _released(one)) for one in some]
        lines.append(SweepLine(name, tuple(sorted(points, key=lambda point: point.value))))
    baselines = [(name, Point(0.0, _accuracies(one))) for name, one in zip(labels(plain_ones), plain_ones, strict=True)]
    statements = [statement for one in every for run in one.finished if run.result for statement in run.result.privacy]
    limits = [f"Epsilon per record. {one.limits}" for one in statements if one.protects and one.unit == "record"]
    return Sweep(
        setting, first.data, first.note, first.partition, where(every, first.data, first.partition),
        deltas=tuple(dict.fromkeys(_before(one)["delta"] for one in every)),
        epsilons=tuple(dict.fromkeys(_before(one)["epsilon"] for one in every)),
        lines=tuple(lines),
        baseline=max(baselines, key=lambda named: named[1].mean, default=None),
        others=len(baselines),
        limits=tuple(dict.fromkeys(limits)),
    )  # fmt: skip


def _before(one: SeedGroup) -> Mapping[str, Any]:
    before = one.runs[0].preprocess
    assert before is not None
    return before


def _accuracies(one: SeedGroup) -> dict[int, float]:
    """Return {seed: final accuracy in percent} of the finished runs in a group of runs that differ only in the seed."""
    accuracies = {run.config.seed: as_percent(run.result.final_accuracy) for run in one.finished if run.result}
    return {seed: accuracy for seed, accuracy in accuracies.items() if accuracy is not None}


def _released(one: SeedGroup) -> bool:
    return any(sum(client.counts) for run in one.finished if run.result for client in run.result.preprocess.clients)


def _protocol(one: SeedGroup) -> str:
    """Return the settings that all lines of a figure share, as text: all except the algorithm and the preprocessing.

    Groups of runs are shown in one figure only if these texts are equal.
    """
    settings = {name: value for name, value in one.compared.items() if name not in {"algorithm", "preprocess"}}
    return _key({"note": one.note, **settings})


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _draw_line(axes: "Axes", line: SweepLine, style: Style, infinity: float, layout: Layout) -> None:
    color, dashes, _ = style
    places = [_place(point.value) if math.isfinite(point.value) else infinity for point in line.points]
    means = [point.mean for point in line.points]
    last = len(places) - math.isinf(line.points[-1].value)
    axes.plot(places[:last], means[:last], color=color, linewidth=layout.line, dashes=dashes or (1, 0))
    # The line to the point of an infinite epsilon is dotted, because the axis has no position for infinity.
    axes.plot(places[last - 1 :], means[last - 1 :], color=color, linewidth=0.6 * layout.line, linestyle=":", alpha=0.7)
    bars = [mean_and_deviation(list(point.by_seed.values()))[1] or 0.0 for point in line.points]
    draw_points(axes, places, means, bars, style, layout, line.label)


def _place(value: float) -> float:
    """Return the horizontal position of a point: the setting's value, limited to numbers that matplotlib can draw."""
    return min(max(value, 1e-100), 1e100)


def _meaning(sweep: Sweep) -> str:
    epsilon = f"{EPSILON}, at delta {_values(sweep.deltas)}"
    if sweep.setting == "gamma":
        return f"gamma: {_GAMMA}; at epsilon {_values(sweep.epsilons)}: {epsilon}"
    return f"epsilon: {epsilon}"


def _caption(sweep: Sweep) -> tuple[str, ...]:
    meaning = _meaning(sweep)
    points = [(line.label, point) for line in sweep.lines for point in line.points]
    seeds = {_seeds(point) for _, point in points}
    listed = "; ".join(f"{label}, {sweep.setting} {point.value:g}: {_seeds(point)}" for label, point in points)
    lines = [
        f"{_HEADINGS[sweep.setting]}: {sweep.where}. Points: mean over seeds; bars: ± sample standard deviation.",
        f"{meaning[0].upper()}{meaning[1:]}.",
        f"All points: {seeds.pop()}." if len(seeds) == 1 else f"The points do not have the same seeds: {listed}.",
    ]
    if empty := sorted({point.value for _, point in points if not point.released}):
        lines.append(f"With {sweep.setting} {_values(empty)}, no client released a synthetic record.")
    if sweep.baseline:
        lines.append(
            f"The horizontal line is the best of {sweep.others} methods without preprocessing, with the same settings. "
            "This method was selected by its final test accuracy."
        )
    return (*lines, *([f"Data: {sweep.note}"] if sweep.note else []))


def _seeds(point: Point) -> str:
    return f"seed{'s' if len(point.by_seed) > 1 else ''} {', '.join(map(str, point.by_seed))}"


def _values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
