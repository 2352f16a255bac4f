"""Figures of PATE (Papernot et al. 2017): teacher agreement, label accuracy over noise, student accuracy over epsilon.

The label of an epsilon axis says whether the epsilon is the cost of one query or of all queries. The figure of teacher
agreement is computed from the raw votes. A run stores the raw votes only on request.

The raw votes and the figure of teacher agreement have no privacy guarantee, and must not be published. The caption of
this figure says so.
"""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.report.files import PateFacts
from fl_sim.report.groups import SeedGroup
from fl_sim.report.measures import as_percent, mean_and_deviation
from fl_sim.report.picture import PAGE, Layout, Picture, draw_points, drawn, file_names, one_panel, styled, with_legend
from fl_sim.report.runs import Problem, SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOTES = "votes.npy"
"""File in the run directory with the raw votes of the teachers."""
_MOST_TICKS = 8


@dataclass(frozen=True)
class PateRun:
    """One finished run of PATE.

    ``accuracy``: test accuracy of the student model in percent. ``epsilon``, ``delta``: the joint privacy cost of all
    queries, for one training record of a teacher; None without a guarantee.
    """

    run: SavedRun
    facts: PateFacts
    accuracy: float
    epsilon: float | None
    delta: float | None

    @property
    def gamma(self) -> float | None:
        """Return gamma, the inverse scale of the Laplace noise on vote counts; None for other mechanisms."""
        return self.facts.mechanism.gamma if self.facts.mechanism.kind == "lnmax" else None


Axis: TypeAlias = Callable[[PateRun], float | None]
"""A function that returns the position of a run on an axis; None if the run has no value for the axis."""
Points: TypeAlias = Mapping[float, Sequence[float]]
"""{x value: y values of the runs with this x value}."""


@dataclass(frozen=True)
class Plot:
    """The definition of a figure.

    ``stem``: part of the file name. ``x_value``, ``y_value``, ``line``: functions that return a run's x value, y value,
    and name of its line, respectively.
    """

    stem: str
    heading: str
    x_label: str
    x_value: Axis
    y_label: str
    y_value: Axis
    line: Callable[[PateRun], str]


def _noise(case: PateRun) -> str:
    given = case.facts.mechanism
    if given.kind == "lnmax":
        return f"lnmax 1/gamma {1 / given.gamma:g}" if given.gamma else "lnmax"
    if given.kind == "confident":
        return f"confident T {given.threshold:g}, sigma {given.sigma_threshold:g} / {given.sigma:g}"
    return f"{given.kind} sigma {given.sigma:g}" if given.sigma else given.kind


def _teachers(case: PateRun) -> str:
    asked = ", asked about representatives" if case.facts.asking == "representative" else ""
    return f"{case.facts.teachers} teachers{asked}"


_PLOTS = (
    Plot("labels-by-noise", "Noisy labels over 1/gamma", "1/gamma, scale of the Laplace noise in votes (log scale)",
         lambda case: 1 / case.gamma if case.gamma else None, "share of right noisy labels (%)",
         lambda case: as_percent(case.facts.label_accuracy),
         lambda case: f"{_teachers(case)}, {case.facts.queries_asked} queries"),
    Plot("student-by-queries", "Student accuracy over queries", "queries answered (log scale)",
         lambda case: float(case.facts.queries_answered), "student's test accuracy (%)", lambda case: case.accuracy,
         lambda case: f"{case.facts.student}, {_teachers(case)}, {_noise(case)}"),
    Plot("student-by-total-epsilon", "Student accuracy over epsilon of all queries",
         "epsilon of ALL queries together, data-independent (log scale)",
         lambda case: case.epsilon, "student's test accuracy (%)", lambda case: case.accuracy,
         lambda case: f"{case.facts.student}, {_teachers(case)}, {case.facts.mechanism.kind}"),
    Plot("student-by-query-epsilon", "Student accuracy over epsilon of one query",
         "epsilon of ONE query = 2 gamma; the privacy cost of the student is the epsilon of ALL queries together "
         "(log scale)",
         lambda case: 2 * case.gamma if case.gamma else None, "student's test accuracy (%)",
         lambda case: case.accuracy,
         lambda case: f"{case.facts.student}, {_teachers(case)}, {case.facts.queries_answered} queries"),
)  # fmt: skip


def pate_pictures(groups: Sequence[SeedGroup]) -> tuple[list[Picture], list[Problem]]:
    """Return (figures of all runs of PATE, an error message for each damaged file with votes).

    A figure with fewer than two points is left out.
    """
    places: dict[tuple[str, str, str], list[PateRun]] = {}
    for one in groups:
        for run in one.finished:
            if (case := _case_of(run)) is not None:
                places.setdefault((one.data, one.partition, one.note), []).append(case)
    pictures, problems = [], []
    names = file_names([f"{data}-{partition}" for data, partition, _ in places])
    for name, ((data, partition, note), cases) in zip(names, places.items(), strict=True):
        where = f"{data}, {partition}{f' - data: {note}' if note else ''}"
        pictures += [found for plot in _PLOTS if (found := _picture(plot, name, where, cases)) is not None]
        agreement, damaged = _agreement(name, where, cases)
        pictures += agreement
        problems += damaged
    return pictures, problems


def draw(plot: Plot, title: str, lines: Mapping[str, Points], layout: Layout = PAGE) -> "Figure":
    """Return a figure of the given ``lines``. Each point is the mean of its runs.

    ``lines``: {name of a line: its points}. A point with several runs has error bars of one standard deviation.
    """
    figure, axes = one_panel(layout, len(lines), title)
    for (label, points), style in zip(lines.items(), styled(list(lines)), strict=True):
        found = [mean_and_deviation(list(values)) for values in points.values()]
        means, bars = [mean or 0.0 for mean, _ in found], [deviation or 0.0 for _, deviation in found]
        axes.plot(list(points), means, color=style[0], linewidth=layout.line, dashes=style[1] or (1, 0))
        draw_points(axes, list(points), means, bars if any(bars) else None, style, layout, label)
    axes.set_xscale("log")
    ticks = sorted({x for points in lines.values() for x in points})
    if len(ticks) <= _MOST_TICKS:
        axes.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 1000 else f"{tick:.3g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    else:
        # tick labels such as 0.01, because the exponent in 10^x would be too small to read
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel=textwrap.fill(plot.x_label, layout.characters(layout.text)), ylabel=plot.y_label)
    axes.margins(x=0.06)
    return with_legend(figure)


def _case_of(run: SavedRun) -> PateRun | None:
    result = run.result
    if result is None or result.pate is None or result.final_accuracy is None:
        return None
    first = next((one for one in result.privacy if one.unit == "record"), None)
    epsilon, delta = (first.epsilon, first.delta) if first else (None, None)
    return PateRun(run, result.pate, 100 * result.final_accuracy, epsilon, delta)


def _picture(plot: Plot, name: str, where: str, cases: Sequence[PateRun]) -> Picture | None:
    lines: dict[str, dict[float, list[float]]] = {}
    for case in cases:
        x, y = plot.x_value(case), plot.y_value(case)
        if x is not None and x > 0 and y is not None:
            values = lines.setdefault(plot.line(case), {}).setdefault(x, [])
            values.append(y)
    lines = {label: dict(sorted(lines[label].items())) for label in sorted(lines, key=_by_numbers)}
    if len({x for points in lines.values() for x in points}) < 2:
        return None
    deltas = ", ".join(dict.fromkeys(f"{case.delta:g}" for case in cases if case.delta))
    measured = ", ".join(dict.fromkeys(str(case.facts.evaluation_records) for case in cases))
    terms = (
        f"Epsilon is per record of the teachers, at delta {deltas or 'none'}; accuracies of students on {measured} "
        "records that are neither a teacher's nor in the public pool. Each point is a separate release: if somebody "
        "sees several points, their epsilons add up."
    )
    caption = (f"{plot.heading}: {where}. Points: mean over seeds; bars: ± sample standard deviation.", terms)
    drawing = partial(draw, plot, where, lines)
    return Picture(f"pate-{plot.stem}-{name}.png", plot.heading, caption, drawn(drawing, PAGE), draw=drawing)


def _by_numbers(label: str) -> list[tuple[int, str]]:
    """Return a sort key for labels. It orders numbers in labels by value, so that 50 comes before 100."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", label)]


def _agreement(name: str, where: str, cases: Sequence[PateRun]) -> tuple[list[Picture], list[Problem]]:
    """Return ([figure of the teachers' agreement], error messages about damaged files).

    The list is empty if no run has stored votes. The agreement on a query is the difference between the two largest
    vote counts, divided by the number of teachers. The figure shows its distribution over all queries. The figure is
    PRIVATE, because it is computed from the raw votes without noise.
    """
    gaps: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    problems = []
    for case in cases:
        path = case.run.path / VOTES
        label = _teachers(case)
        if not case.facts.private_kept or label in gaps or not path.exists():
            continue
        try:
            counts = np.sort(_votes(path), axis=1)
        except (OSError, ValueError) as error:
            problems.append(Problem(case.run.path, f"its votes cannot be shown: {error}"))
            continue
        gaps[label] = (counts[:, -1] - counts[:, -2]) / case.facts.teachers
    if not gaps:
        return [], problems
    heading = "Agreement of the teachers (PRIVATE)"
    caption = (
        f"{heading}: {where}. The data-dependent epsilon of a query is small if the teachers agree.",
        "This figure is computed from the raw votes, which are as private as the teachers' records: do not publish it.",
    )
    return [Picture(f"pate-agreement-{name}.png", heading, caption, drawn(partial(_ecdf, gaps, where), PAGE))], problems


def _ecdf(gaps: Mapping[str, NDArray[np.float64]], where: str, layout: Layout) -> "Figure":
    figure, axes = one_panel(layout, len(gaps), f"{where}\nPRIVATE: computed from the votes, do not publish")
    for label, (color, dashes, _) in zip(sorted(gaps, key=_by_numbers), styled(list(gaps)), strict=True):
        gap = gaps[label]
        shown = f"{label}, {len(gap)} queries, mean {100 * gap.mean():.0f} %"
        axes.ecdf(100 * gap, color=color, linewidth=1.6, dashes=dashes or (1, 0), label=shown)
    axes.set(
        xlabel="votes for the leading class minus votes for the second (% of the teachers)",
        ylabel="share of queries with at most this difference", xlim=(0, 100), ylim=(0, 1),
    )  # fmt: skip
    return with_legend(figure)


def _votes(path: Path) -> NDArray[np.int64]:
    """Return the numbers of votes, shape (queries, classes). Raise OSError or ValueError if the file is damaged."""
    try:
        # as a memory map, so that NumPy refuses a file that is shorter than its header states
        votes = np.load(path, mmap_mode="r", allow_pickle=False)
    # NumPy parses the header as Python code. If the header is damaged, it may raise one of these errors.
    except (SyntaxError, TokenError) as error:
        raise ValueError(f"{path.name} has a damaged header") from error
    if (
        not isinstance(votes, np.ndarray)
        or votes.ndim != 2
        or not len(votes)
        or votes.shape[1] < 2
        or votes.dtype.kind not in "iu"
    ):
        raise ValueError(f"{path.name} does not contain vote counts of shape (queries, classes)")
    return votes.astype(np.int64)
