"""Figure of the privacy of runs: for each epsilon, the joint delta of all planned releases of a run.

The curve is computed by PLD from the privacy events in the run's privacy statement. A marked point shows the pair
(epsilon, delta) that the statement contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from dp_accounting import dp_event

from fl_sim.errors import RunError, UserError
from fl_sim.privacy.accounting import bounds, delta_profile
from fl_sim.privacy.terms import rounded_up
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.payments import counted
from fl_sim.report.picture import PAGE, Layout, Picture, drawn, one_panel, styled, with_legend
from fl_sim.report.runs import SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADING: Final = "Delta over epsilon"
_CAPTION: Final = (
    "The delta for each epsilon, for all planned releases of a run together. The guarantee holds for every point of a "
    "curve; the marked point is the pair in the run's privacy statement."
)
_MOST_LINES: Final = 6
_POINTS: Final = 25
_FARTHEST: Final = 1.5
"""The largest epsilon of a curve, as a multiple of the statement's epsilon."""


@dataclass(frozen=True)
class DeltaCurve:
    """The curve of one privacy statement: a delta for each value in ``epsilons``.

    ``epsilon``, ``delta``: the values in the privacy statement.
    """

    unit: str
    epsilon: float
    delta: float
    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]


def delta_pictures(runs: Sequence[SavedRun]) -> list[Picture]:
    """Return a list with one figure, which has a curve for each distinct privacy statement of the runs.

    The list is empty if there are no curves.
    """
    statements = {
        repr((one.unit, one.epsilon, one.planned_events)): one
        for run in runs
        if run.result
        for one in run.result.privacy
    }
    found = [curve for one in list(statements.values())[:_MOST_LINES] if (curve := curve_of(one)) is not None]
    if not found:
        return []
    caption = [_CAPTION]
    if len(statements) > _MOST_LINES:
        caption.append(f"Of {len(statements)} different statements, the first {_MOST_LINES} are shown.")
    drawing = partial(_draw, found)
    return [Picture("delta-over-epsilon.png", HEADING, tuple(caption), drawn(drawing, PAGE), draw=drawing)]


def curve_of(statement: PrivacyStatement) -> DeltaCurve | None:
    """Return the curve of a privacy statement; None if it has no planned events, or if PLD cannot compute their cost.

    The result is also None if the statement's epsilon is its budget: a budget can stop the run before all planned
    events.
    """
    epsilon, delta = statement.epsilon, statement.delta
    if not epsilon or not delta or not statement.planned_events or epsilon == statement.budget:
        return None
    try:
        counts = counted(statement.planned_events)
        is_known = bounds(counts, delta).pld is not None
    # a damaged statement gets no message here, because the privacy bill of all runs reports it
    except (RunError, UserError, KeyError, TypeError, ValueError):
        return None
    if not is_known:
        return None
    epsilons = np.linspace(0.0, _FARTHEST * epsilon, _POINTS).tolist()
    repeated = [dp_event.SelfComposedDpEvent(event, times) for event, times in counts.items()]
    deltas = tuple(min(1.0, one) for one in delta_profile(repeated, epsilons))
    return DeltaCurve(statement.unit, epsilon, delta, tuple(epsilons), deltas)


def _draw(curves: Sequence[DeltaCurve], layout: Layout) -> "Figure":
    figure, axes = one_panel(layout, len(curves), HEADING)
    styles = styled([f"{number}" for number, _ in enumerate(curves)])
    for curve, (color, dashes, marker) in zip(curves, styles, strict=True):
        label = f"per {curve.unit}: epsilon {rounded_up(curve.epsilon)} at delta {curve.delta:g}"
        axes.plot(
            curve.epsilons, curve.deltas, color=color, linewidth=layout.line, dashes=dashes or (1, 0), label=label
        )
        axes.plot([curve.epsilon], [curve.delta], color=color, marker=marker)
    axes.set(xlabel="epsilon", ylabel="delta", yscale="log")
    # tick labels such as 0.001, because the exponent in 10^x would be too small to read
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    return with_legend(figure)
