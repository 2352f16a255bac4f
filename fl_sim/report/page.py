"""One self-contained HTML page on finished runs: tables, figures, privacy, data, failures, versions.

Its tables and pictures need no script. Where there is one, it draws curves, final accuracies, targets, clients
and confusion matrices from a block of JSON. Style and scripts are the files in ``web``: the page allows these alone, by
their digests.
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
from fl_sim.report.figures.curves import HEADINGS, OVER_TIME, curve, x_label
from fl_sim.report.groups import Group, Panel
from fl_sim.report.measures import LADDER, Spent, mean_and_deviation, spent_by
from fl_sim.report.page_sections import (
    all_runs,
    bill,
    comparison,
    data_notes,
    failures,
    privacy,
    section,
    table_section,
    to_target,
    versions,
)
from fl_sim.report.page_words import groups_of, percent, short_names, spent_beforehand, spread, summary, taken, title_of
from fl_sim.report.picture import Picture
from fl_sim.report.runs import Found, Run

_WEB: Final = Path(__file__).parent / "web"
_SCRIPTS: Final = ("elements.js", "scales.js", "curves.js", "rows.js", "confusion.js", "tables.js", "page.js")
"""In this order; together they are one script."""

_MOST_PAGE_BYTES: Final = 2_700_000
"""Of a page with its pictures, which are left out where there is no room: it is to be sent, and to open at once."""

_DRAWN_BY_SCRIPT: Final = {*HEADINGS.values(), OVER_TIME}

_MOST_POINTS: Final = 20_000
_FEWEST_POINTS: Final = 40
"""Points of all curves together, and of a curve at least: what is between them is not drawn."""

_MOST_CELLS: Final = 200_000
"""Cells of all confusion matrices together."""

_MOST_BYTES: Final = 2**63
_LARGEST: Final = 1e15
"""Beyond these a file is damaged."""


def page(
    found: Found,
    panels: Sequence[Panel],
    pictures: Sequence[Picture],
    costs: Sequence[str],
    aim: float | None = None,
) -> str:
    """Return the page as HTML. It refers to nothing outside itself.

    ``costs``: what all runs together cost, in words. ``aim``: a test accuracy in [0, 1]; the page tells what it took.
    """
    groups = groups_of(panels)
    title, told = escape(title_of(panels)), escape(summary(groups))
    style, script = _web()
    data = page_data(panels, aim)
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
        f'<meta name="color-scheme" content="light dark"><meta name="description" content="{told}">'
        f"<title>{title}</title><style>{style}</style>"
    )
    body = "\n".join([*before, *figures, *after])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n'
        '<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header><h1>{title}</h1><p>{told}</p></header>\n"
        f'<main id="main">\n{body}\n</main>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def page_data(panels: Sequence[Panel], target: float | None) -> str:
    """Return the data as JSON without a character that HTML could take for a tag. Accuracies are in percent.

    ``target``: a further accuracy in [0, 1] beside those of ``LADDER``.
    """
    methods = _Methods()
    drawn = sum(len(one.drawn[0].rounds) for panel in panels for _, one in panel.lines)
    most = max(_FEWEST_POINTS, _MOST_POINTS // max(1, sum(len(panel.lines) for panel in panels)))
    steps = sorted({*LADDER, *(() if target is None else (target,))})
    matrices = _Matrices()
    told = {
        "targets": [round(100 * step, 4) for step in steps],
        "aim": None if target is None else steps.index(target),
        "thinned": most if drawn > _MOST_POINTS else 0,
        "panels": [_panel(panel, steps, most, methods, matrices) for panel in panels],
        "methods": methods.told,
        "untold": matrices.left_out,
    }
    text = json.dumps(told, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


@cache
def _web() -> tuple[str, str]:
    """Return the style and the script. The script sees nothing of other pages and leaves no name behind."""
    style = (_WEB / "page.css").read_text(encoding="utf-8")
    parts = "\n".join((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return style, f'"use strict";\n(() => {{\n{parts}}})();\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(pictures: Sequence[Picture], room: int) -> set[str]:
    """Return the names of the pictures that fit into ``room`` bytes; those that the script draws, too, come last."""
    names = set()
    for picture in sorted(pictures, key=lambda one: one.heading in _DRAWN_BY_SCRIPT):
        size = 4 * len(picture.png) // 3
        if size <= room:
            names.add(picture.name)
            room -= size
    return names


def _figures(heading: str, pictures: Sequence[Picture], shown: set[str]) -> str:
    """Return a section of pictures; what has no room on the page is told by the name of its file."""
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


class _Methods:
    """Numbers methods by their names, which are the same in all panels; ``told``: all of them."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def number(self, name: str, label: str, *, is_bound: bool) -> int:
        """Return the number of the method called ``name``, whose settings ``label`` tells; style -1: a bound's."""
        for at, one in enumerate(self.told):
            if (one["name"], one["bound"]) == (name, is_bound):
                one["label"] = one["label"] if label in one["label"].split(" | ") else f"{one['label']} | {label}"
                return at
        style = -1 if is_bound else sum(not one["bound"] for one in self.told)
        self.told.append({"name": name, "label": label, "bound": is_bound, "style": style})
        return len(self.told) - 1


class _Matrices:
    """Adds confusion matrices over seeds, as long as there is room; ``left_out`` counts those without."""

    def __init__(self) -> None:
        self._room = _MOST_CELLS
        self.left_out = 0

    def summed(self, runs: Iterable[Run]) -> list[list[int]]:
        """Return the sum of the runs' matrices that are as large as the first; empty where there is none."""
        found = [run.outcome.measures.confusion for run in runs if run.outcome and run.outcome.measures.confusion]
        if not found:
            return []
        if len(found[0]) ** 2 > self._room:
            self.left_out += 1
            return []
        self._room -= len(found[0]) ** 2
        total = np.sum([one for one in found if len(one) == len(found[0])], axis=0, dtype=object)
        return [[int(count) for count in row] for row in total]


def _panel(panel: Panel, steps: Sequence[float], most: int, methods: _Methods, matrices: _Matrices) -> dict[str, Any]:
    names = short_names(label for label, _ in panel.lines)
    numbers = [methods.number(names[label], label, is_bound=one.is_bound) for label, one in panel.lines]
    lines = [
        {"method": at, **_line(label, one, steps, most, matrices)}
        for at, (label, one) in zip(numbers, panel.lines, strict=True)
    ]
    return {"title": panel.title, "note": panel.note, "x": x_label(panel), "lines": lines}


def _line(label: str, one: Group, steps: Sequence[float], most: int, matrices: _Matrices) -> dict[str, Any]:
    done = [run.outcome for run in one.finished if run.outcome]
    return {
        "seeds": len(one.drawn),
        "finished": bool(one.finished),
        "final": _accuracy([outcome.final_accuracy for outcome in done]),
        "best": _accuracy([outcome.best_accuracy for outcome in done]),
        "reached": [_reached(label, one, step) for step in steps],
        "clients": _clients(one),
        "confusion": matrices.summed(one.finished),
        **_curve(one, most),
    }


def _curve(one: Group, most: int) -> dict[str, Any]:
    """Return mean and deviation in each round, and what stands on the other horizontal axes; null: not known."""
    accuracy, loss = curve(one, "accuracy"), curve(one, "loss")
    rounds = _thinned(sorted({*accuracy.rounds, *loss.rounds}), most)
    measures = {
        name: {
            "mean": [_short(mean.get(number)) for number in rounds],
            "deviation": [_short(deviation.get(number)) for number in rounds] if len(one.drawn) > 1 else [],
        }
        for name, mean, deviation in (
            ("accuracy", dict(zip(accuracy.rounds, accuracy.mean, strict=True)),
             dict(zip(accuracy.rounds, accuracy.deviation, strict=True))),
            ("loss", dict(zip(loss.rounds, loss.mean, strict=True)),
             dict(zip(loss.rounds, loss.deviation, strict=True))),
        )
    }  # fmt: skip
    spent = [_spent(run) for run in one.drawn]
    epsilons = [{record.round: record.epsilon for record in run.rounds} for run in one.drawn]
    return {
        "round": rounds,
        "mb": [_mean(_megabytes(seed[number].bytes) for seed in spent) for number in rounds],
        "seconds": [_mean(seed[number].seconds for seed in spent) for number in rounds],
        "epsilon": [_largest(seed[number] for seed in epsilons) for number in rounds],
        **_where_known("virtual_seconds", [_mean(seed[number].virtual_seconds for seed in spent) for number in rounds]),
        **measures,
    }


def _where_known(name: str, values: list[float | None]) -> dict[str, Any]:
    """Return what most runs have nothing of, where there is something."""
    return {name: values} if any(value is not None for value in values) else {}


def _spent(run: Run) -> dict[int, Spent]:
    """Return {round: what was spent by its end}."""
    beforehand = spent_beforehand(run.outcome) if run.outcome else Spent()
    told = spent_by(run.rounds, beforehand)
    return {record.round: spent for record, spent in zip(run.rounds, told, strict=True)}


def _megabytes(count: int | None) -> float | None:
    return None if count is None or count >= _MOST_BYTES else count / 1e6


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    told = [value for value in known if value is not None]
    return _short(sum(told) / len(told)) if len(told) == len(known) else None


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest epsilon, rounded up, None where one seed tells none."""
    known = list(values)
    told = [value for value in known if value is not None]
    largest = float(rounded_up(max(told))) if told and len(told) == len(known) else math.inf
    return largest if math.isfinite(largest) else None


def _reached(label: str, one: Group, step: float) -> dict[str, Any]:
    (found,) = taken({"": [(label, one)]}, step)
    there = found.reached
    virtual = _spread([run.virtual_seconds for run in there], 2)
    return {
        "there": len(there),
        "of": found.runs,
        "round": _spread([float(run.round) for run in there], 2),
        "mb": _spread([_megabytes(run.bytes) for run in there], 2),
        "seconds": _spread([run.seconds for run in there], 2),
        **({"virtual_seconds": virtual} if virtual[0] is not None else {}),
    }


def _clients(one: Group) -> dict[str, Any] | None:
    """Return the means over the seeds of what is said of clients' accuracies; None where nothing is."""
    told = [run.outcome.measures for run in one.finished if run.outcome]
    known = [own for own in told if own.client_accuracy is not None and own.client_worst_tenth is not None]
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
    """Return mean and deviation in percent, and how tables write them."""
    told = [percent(value) for value in values]
    return [*_spread(told, 4), spread(told)]


def _spread(values: Iterable[float | None], digits: int) -> list[float | None]:
    """Return mean and sample standard deviation, None where there is none."""
    found = mean_and_deviation([value for value in values if value is not None and abs(value) < _LARGEST])
    return [None if value is None else round(value, digits) for value in found]


def _thinned(rounds: Sequence[int], most: int) -> list[int]:
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[at] for at in sorted({round(step * (len(rounds) - 1) / (most - 1)) for step in range(most)})]


def _short(value: float | None) -> float | None:
    """Return ``value`` with five digits, which is more than anybody sees."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
