"""Grouping of runs for figures and pages. The runs of a group differ only in the seed. A panel has several groups.

The groups of a panel are drawn on the same axes, with labels that distinguish the groups.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fl_sim.report.measures import Reached, reached
from fl_sim.report.runs import Problem, SavedRun

_CENTRALIZED = "centralized"
# Runs of one group may differ in these settings. Except the seed, these settings do not change the result.
_NOT_COMPARED = {"seed", "engine", "round_timeout", "keep_every"}
_NOT_OF_CENTRALIZED = {
    "clients", "sampler", "aggregator", "partition", "preprocess", "attack", "calibrate", "compress",
}  # fmt: skip
_IN_THE_NAME = {("algorithm", ""), ("preprocess", ""), ("server", "")}
_DEFAULT_SERVER = "synchronous"  # the default server, which is left out of a method's name
_UNUSED = {"validation": 0, "test": "rounds", "patience": 0, "target_accuracy": 0}
"""Default values of settings in the section ``evaluate``. A setting with its default value does not separate groups.

Runs of older versions have no section ``evaluate``. An older run belongs to the same group as newer runs with the
default values.
"""
_UNKNOWN_NOTE = "no finished run says whether these are the full data"

Place: TypeAlias = tuple[str, str]
"""A setting, and the kinds of the sections that contain it: (dotted name of the setting, kinds).

For example, ("algorithm.mu", " algorithm=fedprox") is the parameter ``mu`` of FedProx. Its values are compared only
between two runs of FedProx, not with another algorithm's parameter ``mu``.
"""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in the seed, one run per seed.

    ``note``: text that says that the records are stand-in data (synthetic); empty for the real data set.
    """

    method: str
    data: str
    note: str
    partition: str
    runs: tuple[SavedRun, ...]

    @property
    def finished(self) -> tuple[SavedRun, ...]:
        """Return the finished runs of the group."""
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def drawn(self) -> tuple[SavedRun, ...]:
        """Return the runs from which curves are drawn: the finished runs, or all runs if none is finished."""
        return self.finished or self.runs

    @property
    def is_bound(self) -> bool:
        """Return True for centralized training, which is an upper bound (no federation).

        It has no partition, and is shown with every partition of the same data set.
        """
        return any(split_of(run) == _CENTRALIZED for run in self.runs)

    @property
    def compared(self) -> dict[str, Any]:
        """Return the settings that all runs of the group share, and by which runs are grouped.

        No two groups have equal settings.
        """
        return _compared_of(self.runs[0])

    def reached(self, accuracy: float) -> list[Reached]:
        """Return the costs (bytes, seconds) of each finished run until it first reaches the test accuracy ``accuracy``.

        ``accuracy`` is in [0, 1]. A run that does not reach this accuracy is left out.
        """
        found = (reached(run.rounds, accuracy, run.spent_beforehand) for run in self.finished)
        return [one for one in found if one is not None]


@dataclass(frozen=True)
class Panel:
    """The groups of one data set and one partition. Their curves are drawn on the same axes.

    ``note``: text that says that the records are stand-in data; else empty. ``lines``: (label, group) pairs.
    """

    data: str
    note: str
    partition: str
    lines: tuple[tuple[str, SeedGroup], ...]

    @property
    def title(self) -> str:
        """Return the title of the panel: the name of its column in a table, or else "data, partition"."""
        return where([one for _, one in self.lines], self.data, self.partition)


def where(groups: Iterable[SeedGroup], data: str, partition: str) -> str:
    """Return the name of the table column to which all runs of ``groups`` belong.

    If the runs belong to several columns or to none, "data, partition" is returned. Centralized training is ignored.
    """
    columns = {run.column for one in groups if not one.is_bound for run in one.runs}
    return (columns.pop() if len(columns) == 1 else "") or f"{data}, {partition}"


def group(runs: Sequence[SavedRun]) -> tuple[list[SeedGroup], list[Problem]]:
    """Return (groups of runs that differ only in the seed, an error message for each duplicate run).

    Runs with equal settings and the same seed are duplicates. Only one of several duplicates is kept. A finished run is
    preferred.
    """
    notes: dict[str, set[str]] = {}
    titles: dict[str, str] = {}
    for run in runs:
        titles |= _titles(run)
        notes.setdefault(run.config.data, set()).update({run.result.data_note} if run.result else ())
    members: dict[str, dict[int, SavedRun]] = {}
    doubles = []
    for run in sorted(runs, key=lambda run: run.status != "finished"):
        settings = _compared_of(run)
        key = json.dumps([settings, _note(run, notes)], sort_keys=True, default=str)
        kept = members.setdefault(key, {}).setdefault(run.config.seed, run)
        if kept is not run:
            doubles.append(Problem(run.path, f"left out: it has the same experiment and seed as {kept.path}"))
    position = {id(run): number for number, run in enumerate(runs)}
    groups = []
    for by_seed in members.values():
        same = tuple(sorted(by_seed.values(), key=lambda run: run.config.seed))
        first = same[0]
        groups.append(SeedGroup(_method(first, titles), first.config.data, _note(first, notes), split_of(first), same))
    groups.sort(key=lambda one: min(position[id(run)] for run in one.runs))
    return groups, doubles


def panels(groups: Sequence[SeedGroup]) -> list[Panel]:
    """Return one panel for each data set and partition.

    Centralized training is the last curve in every panel of its data set.
    """
    bounds = [one for one in groups if one.is_bound]
    lines: dict[tuple[str, str, str], list[SeedGroup]] = {}
    for one in groups:
        if not one.is_bound:
            lines.setdefault((one.data, one.note, one.partition), []).append(one)
    for bound in bounds:
        own = [key for key in lines if key[:2] == (bound.data, bound.note)]
        for key in own or [(bound.data, bound.note, bound.partition)]:
            lines.setdefault(key, []).append(bound)
    return [Panel(*key, tuple(zip(labels(some), some, strict=True))) for key, some in lines.items()]


def labels(groups: Sequence[SeedGroup], left_out: str = "") -> list[str]:
    """Return a label for each group: the label of its row in a table, or else its method and some settings.

    A label states only the settings whose values differ between the ``groups``. ``left_out``: a setting that no label
    may state, such as ``preprocess.epsilon``. If ``left_out`` is given, the labels of table rows are not used, because
    these labels may state the setting.
    """
    rows = [names.pop() if len(names := {run.label or run.row for run in one.runs}) == 1 else "" for one in groups]
    if all(rows) and len(set(rows)) == len(rows) and not left_out:
        return rows
    flat = []
    for one in groups:
        ignored = {"data"} | (_NOT_OF_CENTRALIZED if one.is_bound else set())
        flat.append(dict(_flat({key: value for key, value in one.compared.items() if key not in ignored})))
    of_clients = [own for one, own in zip(groups, flat, strict=True) if not one.is_bound]
    named = []
    for one, own in zip(groups, flat, strict=True):
        shown = [
            f"{place[0].removeprefix('algorithm.').removeprefix('preprocess.')}={_text(value)}"
            for place, value in sorted(own.items(), key=lambda item: not item[0][0].startswith("algorithm."))
            if place not in _IN_THE_NAME
            and place[0] != left_out
            and _differs(place, of_clients if place[0].split(".")[0] in _NOT_OF_CENTRALIZED else flat)
        ]
        named.append(", ".join([one.method, *shown]))
    return named


def parameters(one: SeedGroup) -> str:
    """Return the parameters of a group's preprocessing and algorithm as text, such as ``mu=0.01``."""
    before, own = one.runs[0].preprocess, one.runs[0].settings["algorithm"]
    flat = [*(_flat(before) if before else ()), *_flat(own)]
    return ", ".join(f"{name}={_text(value)}" for (name, _), value in flat if not isinstance(value, list) or value)


def _compared_of(run: SavedRun) -> dict[str, Any]:
    """Return the settings in which the runs of one group must be equal.

    The settings in ``_NOT_COMPARED``, such as the seed, are left out. Of the section ``evaluate``, default values and
    ``test_is_public`` are left out. The result also has digests of the user's own code and records. Runs with different
    digests are in different groups.
    """
    settings = {key: value for key, value in run.settings.items() if key not in _NOT_COMPARED}
    given = {key: value for key, value in settings.pop("evaluate", {}).items() if key != "test_is_public"}
    used = {key: value for key, value in given.items() if key not in _UNUSED or value != _UNUSED[key]}
    for name in ("code", "records"):
        own = run.identity.get(name)
        # A keyed digest of private records differs between runs, because each run has a new salt. So it is left out.
        if own and not str(own).startswith("keyed-"):
            digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
            settings[f"identity.{name}"] = digest[:8]
    return {**settings, "evaluate": used} if used else settings


def _titles(run: SavedRun) -> dict[str, str]:
    """Return the titles of the run's algorithm, preprocessing and server, such as {"fedavg": "FedAvg"}."""
    config = run.config
    kinds = {"algorithm": config.algorithm.kind, "preprocess": config.preprocess.kind, "server": config.server.kind}
    return {kinds[part]: title for part, title in (run.result.titles if run.result else {}).items()}


def _method(run: SavedRun, titles: Mapping[str, str]) -> str:
    """Return the name of a run's method: the titles of its preprocessing, algorithm and server.

    ``titles``: {name in the settings: title}, such as {"fedavg": "FedAvg"}. Without a title, the name in the settings
    is used. The default server is left out.
    """
    kind, before, server = run.config.algorithm.kind, run.config.preprocess.kind, run.config.server.kind
    name = titles.get(kind, kind.rpartition(":")[2])
    if server != _DEFAULT_SERVER:
        name = f"{name}, {titles.get(server, server)}"
    return f"{titles.get(before, before)} + {name}" if run.preprocess else name


def _differs(place: Place, flat: Sequence[Mapping[Place, Any]]) -> bool:
    """Return True if the setting ``place`` has different values in different groups, so that labels must state it.

    Only groups with the same section, such as the same algorithm, are compared. ``flat``: for each group {setting:
    value}.
    """
    kinds = place[1]
    outer = [settings for settings in flat if not kinds or kinds in {inner for _, inner in settings}]
    return len({_text(settings.get(place)) for settings in outer}) > 1


def _flat(table: Mapping[str, Any], prefix: str = "", kinds: str = "") -> Iterator[tuple[Place, Any]]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            if key != "kind":
                yield (prefix + key, kinds), value
        elif "kind" in value:
            yield (prefix + key, kinds), value["kind"]
            yield from _flat(value, f"{prefix}{key}.", f"{kinds} {prefix}{key}={value['kind']}")
        else:
            yield from _flat(value, f"{prefix}{key}.", kinds)


def _note(run: SavedRun, notes: Mapping[str, set[str]]) -> str:
    if run.result:
        return run.result.data_note
    known = notes[run.config.data]
    return next(iter(known)) if len(known) == 1 else _UNKNOWN_NOTE


def split_of(run: SavedRun) -> str:
    """Return the partition of a run as short text, such as ``label-1`` or ``dirichlet:0.05``."""
    if run.result or run.config.algorithm.kind == _CENTRALIZED:
        return run.result.partition if run.result else _CENTRALIZED
    return _short_split(run.settings["partition"])


def _short_split(partition: Mapping[str, Any]) -> str:
    kind, over = str(partition["kind"]), partition.get("over")
    first = next((value for name, value in partition.items() if name != "kind"), None)
    if first is None:
        return kind
    short = f"{kind.removesuffix('-k')}-{first}" if kind.endswith("-k") else f"{kind}:{first}"
    return f"{short} {_short_split(over)}" if isinstance(over, Mapping) and over["kind"] != "iid" else short


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "none" if value is None else str(value)
