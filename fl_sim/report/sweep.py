"""Runs that differ in epsilon alone, or in gamma alone, and the best method without synthetic records beside them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fl_sim.report.groups import Group, labels, where
from fl_sim.report.page_words import percent
from fl_sim.report.release import limits

Setting: TypeAlias = Literal["epsilon", "gamma"]
SETTINGS: tuple[Setting, Setting] = ("epsilon", "gamma")


@dataclass(frozen=True)
class Point:
    """A value of the setting and the final accuracies there in percent, {seed: accuracy}.

    ``released``: whether any of the runs had a synthetic record.
    """

    value: float
    by_seed: Mapping[int, float]
    released: bool = True

    @property
    def mean(self) -> float:
        """Return the mean over the seeds."""
        return statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class Line:
    """Groups that differ in one setting alone; ``points`` ascend, inf is the last."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Sweep:
    """Lines that share axes: one data set, one split, one protocol. ``where``: both in words.

    ``baseline``: (label, point) of the best method without preprocessing under the same protocol, by final accuracy;
    its value means nothing. ``others``: how many it was picked from.
    """

    setting: Setting
    data: str
    note: str
    partition: str
    where: str
    deltas: tuple[float, ...]
    epsilons: tuple[float, ...]
    lines: tuple[Line, ...]
    baseline: tuple[str, Point] | None
    others: int
    limits: tuple[str, ...]


def sweeps(groups: Sequence[Group]) -> list[Sweep]:
    """Find what varies in epsilon alone, or in gamma alone, among finished runs."""
    found = []
    done = [one for one in groups if _accuracies(one) and not one.is_bound]
    for setting in SETTINGS:
        protocols: dict[str, dict[str, list[Group]]] = {}
        for one in done:
            before = one.runs[0].preprocess
            if before is not None and not (setting == "gamma" and before.get("client_gammas")):
                line = _key({**_settings(one), "preprocess": {**before, setting: None}})
                protocols.setdefault(_protocol(one), {}).setdefault(line, []).append(one)
        for protocol, lines in protocols.items():
            varied = [some for some in lines.values() if len(some) > 1]
            if varied:
                plain_ones = [one for one in done if one.runs[0].preprocess is None and _protocol(one) == protocol]
                found.append(_sweep(setting, varied, plain_ones))
    return found


def _sweep(setting: Setting, varied: Sequence[Sequence[Group]], plain_ones: Sequence[Group]) -> Sweep:
    first = varied[0][0]
    every = [one for some in varied for one in some]
    names = labels([some[0] for some in varied], left_out=f"preprocess.{setting}")
    lines = []
    for name, some in zip(names, varied, strict=True):
        points = [Point(float(_before(one)[setting]), _accuracies(one), _released(one)) for one in some]
        lines.append(Line(name, tuple(sorted(points, key=lambda point: point.value))))
    baselines = [(name, Point(0.0, _accuracies(one))) for name, one in zip(labels(plain_ones), plain_ones, strict=True)]
    return Sweep(
        setting, first.data, first.note, first.partition, where(every, first.data, first.partition),
        deltas=tuple(dict.fromkeys(_before(one)["delta"] for one in every)),
        epsilons=tuple(dict.fromkeys(_before(one)["epsilon"] for one in every)),
        lines=tuple(lines),
        baseline=max(baselines, key=lambda named: named[1].mean, default=None),
        others=len(baselines),
        limits=_limits(every),
    )  # fmt: skip


def _limits(groups: Sequence[Group]) -> tuple[str, ...]:
    """Return what the results' own statements say the pools' epsilon covers and does not."""
    releases = [release for one in groups for run in one.finished if run.outcome for release in run.outcome.privacy]
    return tuple(
        dict.fromkeys(
            f"Epsilon per {release.unit}. {limits(release)}"
            for release in releases
            if release.protects and release.unit == "record"
        )
    )


def _before(one: Group) -> Mapping[str, Any]:
    before = one.runs[0].preprocess
    assert before is not None
    return before


def _accuracies(one: Group) -> dict[int, float]:
    """Return {seed: final accuracy in percent} of the finished runs."""
    accuracies = {run.config.seed: percent(run.outcome.final_accuracy) for run in one.finished if run.outcome}
    return {seed: accuracy for seed, accuracy in accuracies.items() if accuracy is not None}


def _released(one: Group) -> bool:
    return any(sum(client.counts) for run in one.finished if run.outcome for client in run.outcome.preprocess.clients)


def _settings(one: Group) -> dict[str, Any]:
    return {"note": one.note, **one.compared}


def _protocol(one: Group) -> str:
    """Return all that must be equal for two methods to be compared."""
    return _key({name: value for name, value in _settings(one).items() if name not in {"algorithm", "preprocess"}})


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
