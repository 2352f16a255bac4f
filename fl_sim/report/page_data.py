"""What the page's script draws, as JSON: curves, final accuracies, what targets took, clients, confusion matrices."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from fl_sim.privacy.rounding import rounded_up
from fl_sim.report.figures.curves import curve, x_label
from fl_sim.report.groups import Group, Panel
from fl_sim.report.measures import LADDER, Spent, mean_and_deviation, spent_by
from fl_sim.report.page_words import percent, short_names, spent_beforehand, spread, taken
from fl_sim.report.runs import Run

_MOST_POINTS: Final = 20_000
_FEWEST_POINTS: Final = 40
"""Points of all curves together, and of a curve at least: what is between them is not drawn."""

_MOST_CELLS: Final = 200_000
"""Cells of all confusion matrices together."""

_MOST_BYTES: Final = 2**63
_LARGEST: Final = 1e15
"""Beyond these a file is damaged."""


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
