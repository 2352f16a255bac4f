"""Which runs are one line (the same but for the seed), which lines share axes, and what each line is called."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fl_sim.report.runs import Problem, Run

_CENTRALIZED = "centralized"
_NOT_COMPARED = {"seed", "engine", "round_timeout"}  # engines agree bit for bit
_NOT_OF_CENTRALIZED = {
    "clients", "sampler", "aggregator", "partition", "preprocess", "attack", "calibrate", "compress",
}  # fmt: skip
_IN_THE_NAME = {("algorithm", ""), ("preprocess", ""), ("server", "")}
_WAITS = "synchronous"  # the server that a method's name does not mention
_UNUSED = {"validation": 0, "test": "rounds", "patience": 0, "target_accuracy": 0}  # of ``evaluate``, which came later
_UNKNOWN_NOTE = "no finished run says whether these are the full data"

Place: TypeAlias = tuple[str, str]
"""A setting's name and the kinds of the tables around it: only values of one kind are compared."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, one a seed. ``note``: what the data stand in for, else empty."""

    method: str
    data: str
    note: str
    partition: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        """Return the finished runs."""
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def drawn(self) -> tuple[Run, ...]:
        """Return the runs of the curve: the finished ones, else all."""
        return self.finished or self.runs

    @property
    def is_bound(self) -> bool:
        """Return whether this is the upper bound, which belongs to every split of its data."""
        return any(split_of(run) == _CENTRALIZED for run in self.runs)

    @property
    def compared(self) -> dict[str, Any]:
        """Return the settings that make it this group and no other, but for ``note``."""
        return _compared_of(self.runs[0])


@dataclass(frozen=True)
class Panel:
    """Lines that share axes: one data set and one split. ``lines``: (label, group)."""

    data: str
    note: str
    partition: str
    lines: tuple[tuple[str, Group], ...]

    @property
    def title(self) -> str:
        """Return what the panel shows: as the table calls it that all its lines come from, if there is one."""
        return where([one for _, one in self.lines], self.data, self.partition)


def where(groups: Iterable[Group], data: str, partition: str) -> str:
    """Return on what ``groups`` were run: as the table calls it that all come from, else ``data, partition``."""
    columns = {run.column for one in groups if not one.is_bound for run in one.runs}
    return (columns.pop() if len(columns) == 1 else "") or f"{data}, {partition}"


def group(runs: Sequence[Run]) -> tuple[list[Group], list[Problem]]:
    """Sort ``runs`` into groups; of runs with the same settings and seed one stays (a finished one where there is)."""
    notes: dict[str, set[str]] = {}
    titles: dict[str, str] = {}
    for run in runs:
        titles |= _titles(run)
        notes.setdefault(run.config.data, set()).update({run.outcome.data_note} if run.outcome else ())
    members: dict[str, dict[int, Run]] = {}
    doubles = []
    for run in sorted(runs, key=lambda run: run.status != "finished"):
        settings = _compared_of(run)
        key = json.dumps([settings, _note(run, notes)], sort_keys=True, default=str)
        kept = members.setdefault(key, {}).setdefault(run.config.seed, run)
        if kept is not run:
            doubles.append(Problem(run.path, f"left out: the same experiment and seed as {kept.path}"))
    position = {id(run): number for number, run in enumerate(runs)}
    groups = []
    for by_seed in members.values():
        same = tuple(sorted(by_seed.values(), key=lambda run: run.config.seed))
        first = same[0]
        groups.append(Group(_method(first, titles), first.config.data, _note(first, notes), split_of(first), same))
    groups.sort(key=lambda one: min(position[id(run)] for run in one.runs))
    return groups, doubles


def panels(groups: Sequence[Group]) -> list[Panel]:
    """Return one panel for each data set and split; the upper bound stands in all panels of its data, at the end."""
    bounds = [one for one in groups if one.is_bound]
    lines: dict[tuple[str, str, str], list[Group]] = {}
    for one in groups:
        if not one.is_bound:
            lines.setdefault((one.data, one.note, one.partition), []).append(one)
    for bound in bounds:
        own = [key for key in lines if key[:2] == (bound.data, bound.note)]
        for key in own or [(bound.data, bound.note, bound.partition)]:
            lines.setdefault(key, []).append(bound)
    return [Panel(*key, tuple(zip(labels(some), some, strict=True))) for key, some in lines.items()]


def labels(groups: Sequence[Group], left_out: str = "") -> list[str]:
    """Name each group as its table's row, else by its method and the settings in which ``groups`` differ.

    ``left_out``: a setting that is not named, so that a table's row, which may name it, is not taken.
    """
    rows = [_row(one) for one in groups]
    if all(rows) and len(set(rows)) == len(rows) and not left_out:
        return rows
    flat = [dict(_flat(_compared(one))) for one in groups]
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


def _compared_of(run: Run) -> dict[str, Any]:
    """Return the settings that tell a run from others; what is not used of ``evaluate`` is as if it was not there."""
    settings = {key: value for key, value in run.settings.items() if key not in _NOT_COMPARED}
    given = {key: value for key, value in settings.pop("evaluate", {}).items() if key != "test_is_public"}
    used = {key: value for key, value in given.items() if key not in _UNUSED or value != _UNUSED[key]}
    told = {"code": run.identity.get("code"), "records": run.identity.get("records")}
    if str(told["records"]).startswith("keyed-"):  # of private records no two runs say the same
        del told["records"]
    settings |= {f"identity.{name}": _short(value) for name, value in told.items() if value}
    return {**settings, "evaluate": used} if used else settings


def _short(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _row(one: Group) -> str:
    rows = {run.row for run in one.runs}
    return rows.pop() if len(rows) == 1 else ""


def parameters(one: Group) -> str:
    """Return the method's own parameters, such as ``mu=0.01``, after those of its preprocessing."""
    before, own = one.runs[0].preprocess, one.runs[0].settings["algorithm"]
    flat = [*(_flat(before) if before else ()), *_flat(own)]
    return ", ".join(f"{name}={_text(value)}" for (name, _), value in flat if not isinstance(value, list) or value)


def _titles(run: Run) -> dict[str, str]:
    """Return {kind: title} as far as ``run`` says how its kinds are written."""
    told = run.outcome.titles if run.outcome else {}
    config = run.config
    kinds = {"algorithm": config.algorithm.kind, "preprocess": config.preprocess.kind, "server": config.server.kind}
    return {kinds[part]: title for part, title in told.items()}


def _method(run: Run, titles: Mapping[str, str]) -> str:
    """Return how a run's method is written; by the names of its kinds where no run says better."""
    kind, before, server = run.config.algorithm.kind, run.config.preprocess.kind, run.config.server.kind
    name = titles.get(kind, kind.rpartition(":")[2])
    if server != _WAITS:
        name = f"{name}, {titles.get(server, server)}"
    return f"{titles.get(before, before)} + {name}" if run.preprocess else name


def _differs(place: Place, flat: Sequence[Mapping[Place, Any]]) -> bool:
    """Return whether those that can have a setting there differ in it."""
    kinds = place[1]
    outer = [settings for settings in flat if not kinds or kinds in {inner for _, inner in settings}]
    return len({_text(settings.get(place)) for settings in outer}) > 1


def _compared(one: Group) -> dict[str, Any]:
    left_out = {"data"} | (_NOT_OF_CENTRALIZED if one.is_bound else set())
    return {key: value for key, value in one.compared.items() if key not in left_out}


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


def _note(run: Run, notes: Mapping[str, set[str]]) -> str:
    if run.outcome:
        return run.outcome.data_note
    known = notes[run.config.data]
    return next(iter(known)) if len(known) == 1 else _UNKNOWN_NOTE


def split_of(run: Run) -> str:
    """Return the short form of a run's split, such as ``label-1`` or ``dirichlet:0.05``."""
    kind = run.config.partition.kind
    if run.outcome or run.config.algorithm.kind == _CENTRALIZED:
        return run.outcome.partition if run.outcome else _CENTRALIZED
    first = next((value for name, value in run.settings["partition"].items() if name != "kind"), None)
    if first is None:
        return kind
    return f"{kind.removesuffix('-k')}-{first}" if kind.endswith("-k") else f"{kind}:{first}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return "none" if value is None else str(value)
