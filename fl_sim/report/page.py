"""The HTML page of a report about runs: tables, figures, privacy, data, failures and versions, all in one file.

Tables and pictures are visible without JavaScript. The page's script draws curves, final accuracies, costs until a
target accuracy, client accuracies and confusion matrices. The script reads its data from a block of JSON in the page.
Style sheet and script come from the files in the folder ``web``. The content security policy of the page allows only
this style sheet and this script, by their SHA-256 digests.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from fl_sim.privacy.terms import rounded_up
from fl_sim.report.figures.curves import HEADINGS, MEASURES, OVER_TIME, curve, x_label
from fl_sim.report.groups import Panel, SeedGroup
from fl_sim.report.measures import LADDER, as_percent, mean_and_deviation, mean_text, spent_by
from fl_sim.report.page_sections import (
    all_runs,
    bill,
    comparison,
    data_notes,
    failures,
    groups_of,
    privacy,
    section,
    summary,
    table_section,
    title_of,
    to_target,
    versions,
)
from fl_sim.report.picture import Picture
from fl_sim.report.row_names import short_names
from fl_sim.report.runs import Found, SavedRun

_WEB: Final = Path(__file__).parent / "web"
_SCRIPTS: Final = ("elements.js", "scales.js", "curves.js", "rows.js", "confusion.js", "tables.js", "page.js")
"""The files in ``web`` from which the page's script is joined, in this order."""

_MOST_PAGE_BYTES: Final = 2_700_000
"""Largest size in bytes of a page with its pictures, so that the page opens fast.

Pictures that would make the page larger are left out.
"""

_DRAWN_BY_SCRIPT: Final = {*HEADINGS.values(), OVER_TIME}
"""Headings of the pictures whose curves the page's script draws, too."""

_MOST_POINTS: Final = 20_000
_FEWEST_POINTS: Final = 40
"""``_MOST_POINTS``: the largest total number of points of all curves of a page.

Each curve may have an equal share of these points. ``_FEWEST_POINTS``: the smallest limit for the points of one curve.
If a curve has more points, some of its points are left out.
"""

_MOST_CELLS: Final = 200_000
"""Largest total number of cells of the confusion matrices on a page."""

_MOST_BYTES: Final = 2**63
_LARGEST: Final = 1e15
"""Two limits for the numbers in a result file: one for numbers of bytes, and one for all other numbers.

A larger number is a sign of a damaged file, and is ignored.
"""


def page(
    found: Found,
    panels: Sequence[Panel],
    pictures: Sequence[Picture],
    costs: Sequence[str],
    aim: float | None = None,
    *,
    full_axis: bool = False,
) -> str:
    """Return the HTML page of a report. The page does not load any other file.

    ``found``: the runs and tables of the report. ``panels``: the runs, grouped for the curves. ``pictures``: the
    figures. ``costs``: sentences about the total privacy cost of all runs. ``aim``: a target test accuracy in [0, 1].
    If ``aim`` is given, the page shows the costs of a run until it reaches this accuracy. ``full_axis``: True if the
    accuracy axis goes from 0 to 100 % when the page opens.
    """
    groups = groups_of(panels)
    title, description = escape(title_of(panels)), escape(summary(groups))
    style, script = _web()
    data = page_data(panels, aim, full_axis=full_axis)
    headings = dict.fromkeys(one.heading for one in pictures)
    before = [
        *data_notes(panels),
        *failures(found, groups),
        *(table_section(place, table) for place, table in found.tables.items()),
        comparison(groups),
        *([] if aim is None else [to_target(groups, aim)]),
        '<div id="live"></div>',
    ]
    after = [privacy(groups), *bill(costs), all_runs(groups), versions(groups)]
    shown = _shown(pictures, _MOST_PAGE_BYTES - sum(map(len, (style, script, data, *before, *after))))
    figures = [_figures(heading, [one for one in pictures if one.heading == heading], shown) for heading in headings]
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="color-scheme" content="light dark"><meta name="description" content="{description}">'
        f"<title>{title}</title><style>{style}</style>"
    )
    body = "\n".join([*before, *figures, *after])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n'
        '<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header><h1>{title}</h1><p>{description}</p></header>\n"
        f'<main id="main">\n{body}\n</main>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def page_data(panels: Sequence[Panel], target: float | None, *, full_axis: bool = False) -> str:
    """Return the data for the page's script as JSON, with accuracies in percent.

    The characters ``<``, ``>`` and ``&`` are escaped for HTML. ``target``: a target accuracy in [0, 1], which the page
    shows in addition to those in ``LADDER``. ``full_axis``: True if the accuracy axis goes from 0 to 100 % when the
    page opens.
    """
    methods: list[dict[str, Any]] = []
    drawn = sum(len(one.drawn[0].rounds) for panel in panels for _, one in panel.lines)
    most = max(_FEWEST_POINTS, _MOST_POINTS // max(1, sum(len(panel.lines) for panel in panels)))
    steps = sorted({*LADDER, *(() if target is None else (target,))})
    matrices = _Matrices()
    data = {
        "targets": [round(100 * step, 4) for step in steps],
        "aim": None if target is None else steps.index(target),
        "thinned": most if drawn > _MOST_POINTS else 0,
        "panels": [_panel(panel, steps, most, methods, matrices) for panel in panels],
        "methods": methods,
        "full": full_axis,
        "untold": matrices.left_out,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


@cache
def _web() -> tuple[str, str]:
    """Return (style sheet, script) of the page. The script is inside a function, so that it defines no global names."""
    style = (_WEB / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return style, f'"use strict";\n(() => {{\n{parts}}})();\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(pictures: Sequence[Picture], room: int) -> set[str]:
    """Return the names of the pictures that fit into the page, if ``room`` bytes are left for pictures.

    Pictures of curves that the page's script draws, too, are added last, because readers see these curves anyway.
    """
    names = set()
    for picture in sorted(pictures, key=lambda one: one.heading in _DRAWN_BY_SCRIPT):
        size = 4 * len(picture.png) // 3
        if size <= room:
            names.add(picture.name)
            room -= size
    return names


def _figures(heading: str, pictures: Sequence[Picture], shown: set[str]) -> str:
    """Return the page section with the figures ``pictures``. A figure that is not in ``shown`` is named, not shown."""
    figures = []
    for picture in pictures:
        details = "".join(f"<li>{escape(line)}</li>" for line in picture.details)
        image = f"<p>{escape(picture.name)} is in the folder of this page.</p>"
        if picture.name in shown:
            source = base64.b64encode(picture.png).decode()
            image = f'<img loading="lazy" alt="{escape(picture.caption[0])}" src="data:image/png;base64,{source}">'
        figures.append(
            f"<figure>{image}<figcaption>{'<br>'.join(map(escape, picture.caption))}"
            f"{f'<ul>{details}</ul>' if details else ''}</figcaption></figure>"
        )
    content = section(heading, "".join(figures))
    return content.replace("<section>", '<section class="still">', 1) if heading in _DRAWN_BY_SCRIPT else content


class _Matrices:
    """The sums of confusion matrices over seeds, one for each method. A page has at most ``_MOST_CELLS`` matrix cells.

    ``left_out``: the number of sums that this limit has left out.
    """

    def __init__(self) -> None:
        self._room = _MOST_CELLS
        self.left_out = 0

    def summed(self, runs: Iterable[SavedRun]) -> list[list[int]]:
        """Return the sum of the runs' confusion matrices.

        The list is empty if the runs have no matrices, or if the page has no room for their sum.

        A matrix is left out if its size differs from the size of the first matrix.
        """
        found = [run.result.measures.confusion for run in runs if run.result and run.result.measures.confusion]
        if not found:
            return []
        if len(found[0]) ** 2 > self._room:
            self.left_out += 1
            return []
        self._room -= len(found[0]) ** 2
        total = np.sum([one for one in found if len(one) == len(found[0])], axis=0, dtype=object)
        return [[int(count) for count in row] for row in total]


def _number(methods: list[dict[str, Any]], name: str, label: str, *, is_bound: bool) -> int:
    """Return the index of the method ``name`` in the list ``methods``.

    If the list lacks this method, the method is first added with its ``label``.
    """
    for at, one in enumerate(methods):
        if (one["name"], one["bound"]) == (name, is_bound):
            one["label"] = one["label"] if label in one["label"].split(" | ") else f"{one['label']} | {label}"
            return at
    style = -1 if is_bound else sum(not one["bound"] for one in methods)
    methods.append({"name": name, "label": label, "bound": is_bound, "style": style})
    return len(methods) - 1


def _panel(
    panel: Panel, steps: Sequence[float], most: int, methods: list[dict[str, Any]], matrices: _Matrices
) -> dict[str, Any]:
    names = short_names(label for label, _ in panel.lines)
    numbers = [_number(methods, names[label], label, is_bound=one.is_bound) for label, one in panel.lines]
    lines = [
        {"method": at, **_line(one, steps, most, matrices)} for at, (_, one) in zip(numbers, panel.lines, strict=True)
    ]
    return {"data": panel.data, "title": panel.title, "note": panel.note, "x": x_label(panel), "lines": lines}


def _line(one: SeedGroup, steps: Sequence[float], most: int, matrices: _Matrices) -> dict[str, Any]:
    done = [run.result for run in one.finished if run.result]
    return {
        "seeds": len(one.drawn),
        "finished": bool(one.finished),
        "final": _accuracy([result.final_accuracy for result in done]),
        "best": _accuracy([result.best_accuracy for result in done]),
        "reached": [_reached(one, step) for step in steps],
        "clients": _clients(one),
        "confusion": matrices.summed(one.finished),
        **_curve(one, most),
    }


def _curve(one: SeedGroup, most: int) -> dict[str, Any]:
    """Return the curve of a method: for each measure, its mean and standard deviation over seeds in each round.

    The result also has the positions of the points on each horizontal axis: round, MB, seconds, epsilon. ``most``:
    largest number of points of a curve. None stands for an unknown value.
    """
    curves = {name: curve(one, name) for name in MEASURES}
    rounds = sorted({number for drawn in curves.values() for number in drawn.rounds})
    if len(rounds) > most:
        steps = sorted({round(step * (len(rounds) - 1) / (most - 1)) for step in range(most)})
        rounds = [rounds[at] for at in steps]
    measures: dict[str, Any] = {}
    for name, drawn in curves.items():
        mean, deviation = (dict(zip(drawn.rounds, some, strict=True)) for some in (drawn.mean, drawn.deviation))
        measures[name] = {
            "mean": [_short(mean.get(number)) for number in rounds],
            "deviation": [_short(deviation.get(number)) for number in rounds] if len(one.drawn) > 1 else [],
        }
    spent = [
        {record.round: own for record, own in zip(run.rounds, spent_by(run.rounds, run.spent_beforehand), strict=True)}
        for run in one.drawn
    ]
    epsilons = [{record.round: record.epsilon for record in run.rounds} for run in one.drawn]
    virtual = [_mean(seed[number].virtual_seconds for seed in spent) for number in rounds]
    return {
        "round": rounds,
        "mb": [_mean(_megabytes(seed[number].bytes) for seed in spent) for number in rounds],
        "seconds": [_mean(seed[number].seconds for seed in spent) for number in rounds],
        "epsilon": [_largest(seed[number] for seed in epsilons) for number in rounds],
        **({"virtual_seconds": virtual} if any(value is not None for value in virtual) else {}),
        **measures,
    }


def _megabytes(count: int | None) -> float | None:
    return None if count is None or count >= _MOST_BYTES else count / 1e6


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the ``values``; None if any of them is None (unknown)."""
    every = list(values)
    known = [value for value in every if value is not None]
    return _short(sum(known) / len(known)) if len(known) == len(every) else None


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest epsilon of several runs, rounded up; None if any run has no epsilon."""
    every = list(values)
    known = [value for value in every if value is not None]
    largest = float(rounded_up(max(known))) if known and len(known) == len(every) else math.inf
    return largest if math.isfinite(largest) else None


def _reached(one: SeedGroup, step: float) -> dict[str, Any]:
    there = one.reached(step)
    virtual = _mean_deviation([run.virtual_seconds for run in there], 2)
    return {
        "there": len(there),
        "of": len(one.finished),
        "round": _mean_deviation([float(run.round) for run in there], 2),
        "mb": _mean_deviation([_megabytes(run.bytes) for run in there], 2),
        "seconds": _mean_deviation([run.seconds for run in there], 2),
        **({"virtual_seconds": virtual} if virtual[0] is not None else {}),
    }


def _clients(one: SeedGroup) -> dict[str, Any] | None:
    """Return client accuracies in percent, averaged over seeds: mean, mean of the lowest tenth, and quantiles.

    The result is None if the client accuracies are unknown.
    """
    measures = [run.result.measures for run in one.finished if run.result]
    known = [own for own in measures if own.client_accuracy is not None and own.client_worst_tenth is not None]
    if not known:
        return None
    lengths = {len(own.client_quantiles) for own in known}
    quantiles = np.mean([own.client_quantiles for own in known], axis=0) if len(lengths) == 1 else np.zeros(0)
    return {
        "mean": _short(100 * float(np.mean([own.client_accuracy for own in known]))),
        "worst": _short(100 * float(np.mean([own.client_worst_tenth for own in known]))),
        "quantiles": [_short(100 * float(value)) for value in quantiles],
    }


def _accuracy(values: Sequence[float | None]) -> list[float | str | None]:
    """Return a list for the page's script: mean and standard deviation in percent, and the text "mean ± deviation".

    ``values``: accuracies in [0, 1].
    """
    shares = [as_percent(value) for value in values]
    return [*_mean_deviation(shares, 4), mean_text(shares)]


def _mean_deviation(values: Iterable[float | None], digits: int) -> list[float | None]:
    found = mean_and_deviation([value for value in values if value is not None and abs(value) < _LARGEST])
    return [None if value is None else round(value, digits) for value in found]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
