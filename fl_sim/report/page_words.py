"""What a report says in words: title, what the runs have in common, promises of privacy, what an accuracy took."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fl_sim.report.files import Outcome
from fl_sim.report.groups import Group, Panel
from fl_sim.report.measures import Reached, Spent, mean_and_deviation, reached
from fl_sim.report.release import in_short, in_words
from fl_sim.report.runs import Run

_PICKED = {
    "test": "picked on the test set and so optimistic",
    "validation": "picked on records held out for validation",
    "last": "the last, which alone was tested",
    "nothing": "nothing was measured",
}

_ALWAYS, _NEVER = re.compile("aggregator="), "aggregator=mean"

NO_GUARANTEE = "No privacy guarantee: updates leave the clients without noise"

Groups: TypeAlias = Mapping[str, Sequence[tuple[str, Group]]]
"""{data and split: [(label, group)]}, each group once."""

HEADS = ("Rounds", "MB", "Seconds", "Virtual seconds", "Runs that got there")


def groups_of(panels: Iterable[Panel]) -> Groups:
    """Return what ``panels`` show; the upper bound, which stands in several, once."""
    seen: set[int] = set()
    groups: dict[str, list[tuple[str, Group]]] = {}
    for panel in panels:
        for label, one in panel.lines:
            if id(one) not in seen:
                seen.add(id(one))
                groups.setdefault(f"{one.data}, {one.partition}", []).append((label, one))
    return groups


def how_picked(groups: Groups) -> str:
    """Say by which records the best rounds of the runs were picked."""
    chosen = dict.fromkeys(run.outcome.best_chosen_on for run in runs_of(groups) if run.outcome)
    return " or ".join(_PICKED[how] for how in chosen)


def runs_of(groups: Groups) -> list[Run]:
    """Return all runs."""
    return [run for some in groups.values() for _, one in some for run in one.runs]


def title_of(panels: Sequence[Panel]) -> str:
    """Return what was compared, in a line."""
    names = list(dict.fromkeys(label for panel in panels for label, one in panel.lines if not one.is_bound))
    bound = any(one.is_bound for panel in panels for _, one in panel.lines)
    splits: dict[str, list[str]] = {}
    for panel in panels:
        splits.setdefault(panel.data, []).append(panel.partition)
    where = "; ".join(f"{data} ({', '.join(dict.fromkeys(some))})" for data, some in splits.items())
    kinds = list(dict.fromkeys(one.method for panel in panels for _, one in panel.lines if not one.is_bound))
    if len(names) <= 3:
        methods = ", ".join(names)
    else:
        methods = f"{len(kinds)} methods" if len(kinds) > 1 else f"{kinds[0]} with {len(names)} settings"
    methods = f"{methods} and Centralized" if names and bound else methods or "Centralized"
    return f"{methods} on {where}"


def summary(groups: Groups) -> str:
    """Return how many runs there are, and what they have in common."""
    runs = runs_of(groups)
    federated = [run for run in runs if run.config.algorithm.kind != "centralized"] or runs
    done = sum(run.status == "finished" for run in runs)
    facts: dict[str, set[int] | set[str]] = {
        "clients": {run.config.clients for run in federated},
        "rounds": {run.config.rounds for run in runs},
        "model": {run.config.model for run in runs},
        "seeds": {run.config.seed for run in runs},
    }
    words = (f"{name} {', '.join(map(str, sorted(values, key=_order)))}" for name, values in facts.items())
    return f"{len(runs)} runs, {done} finished; {'; '.join(words)}."


def privacy_in_words(run: Run) -> str:
    """Return what the run promises about privacy. An epsilon of zero is never claimed."""
    if run.outcome is None:
        return "Privacy not stated: the run has no result"
    return " ".join(in_words(release) for release in run.outcome.privacy) or NO_GUARANTEE


def spread(values: Iterable[float | None], unit: str = "", digits: int = 1) -> str:
    """Return ``93.1``, ``93.1 ± 0.4`` (sample standard deviation) or ``-``."""
    mean, deviation = mean_and_deviation([value for value in values if value is not None])
    if mean is None:
        return "-"
    return f"{mean:.{digits}f}{'' if deviation is None else f' ± {deviation:.{digits}f}'}{unit}"


def privacy_in_short(run: Run) -> str:
    """Return the privacy column's text, such as ``epsilon 3.2 per client`` or ``none``."""
    if run.outcome is None:
        return "not stated"
    return "; ".join(dict.fromkeys(in_short(release) for release in run.outcome.privacy)) or "none"


def percent(accuracy: float | None) -> float | None:
    """Return an accuracy in percent."""
    return None if accuracy is None else 100 * accuracy


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Return {label: its method alone}, with those of its settings in which labels of the same method differ.

    An aggregator is told unless it is the mean: it may be what makes a run private.

    >>> list(short_names(["A, b=1, c=2", "A, b=2, c=2", "B (d=1) + C, c=2"]).values())
    ['A, b=1', 'A, b=2', 'B + C']
    """
    every = list(dict.fromkeys(labels))
    parts = {label: _taken_apart(label) for label in every}
    short = {}
    for label, (method, settings) in parts.items():
        same = [others for name, others in parts.values() if name == method]
        own = [one for one in settings if _ALWAYS.match(one) or not all(one in others for others in same)]
        own = [one for one in own if one != _NEVER]
        short[label] = ", ".join([method, *own])
    return {label: name if list(short.values()).count(name) == 1 else label for label, name in short.items()}


def further_settings(label: str, name: str, parameters: str) -> str:
    """Return the settings of a row that its ``name``, short for ``label``, does not tell; ``parameters`` first."""
    told = _taken_apart(name)[1]
    every = dict.fromkeys([*parameters.split(", "), *_taken_apart(label)[1]])
    return ", ".join(one for one in every if one and one not in told)


@dataclass(frozen=True)
class Taken:
    """What a line's finished runs, ``runs`` of them, took to the target; ``reached`` has those that got there."""

    method: str
    where: str
    runs: int
    reached: tuple[Reached, ...]

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Return rounds, megabytes, seconds, virtual seconds, of those that got there ("-" without any); their number.

        The same in the order of ``HEADS``.
        """
        return (
            spread(float(one.round) for one in self.reached),
            spread((None if one.bytes is None else one.bytes / 1e6 for one in self.reached), digits=2),
            spread(one.seconds for one in self.reached),
            spread(one.virtual_seconds for one in self.reached),
            f"{len(self.reached)} of {self.runs}",
        )

    @property
    def in_words(self) -> str:
        """Return all of it as a line."""
        rounds, megabytes, seconds, virtual, count = self.cells
        taken = f"rounds {rounds}, MB {megabytes}, seconds {seconds}" if self.reached else "-"
        taken += f", virtual seconds {virtual}" if virtual != "-" else ""
        return f"{self.method} on {self.where}: {taken} ({count} runs got there)"


def taken(groups: Groups, accuracy: float) -> list[Taken]:
    """Return what every line of ``groups`` took to a test accuracy of at least ``accuracy``, in [0, 1]."""
    return [
        Taken(label, where, len(one.finished), tuple(_reached(one.finished, accuracy)))
        for where, some in groups.items()
        for label, one in some
    ]


def spent_beforehand(outcome: Outcome) -> Spent:
    """Return what a run had spent before its first round."""
    before = [one for one in outcome.bytes.before.values() if one is not None]
    known = len(before) == len(outcome.bytes.before)
    return Spent(sum(one.down + one.up for one in before) if known else None, outcome.seconds.preprocess)


def _order(value: int | str) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, value)


def _taken_apart(label: str) -> tuple[str, list[str]]:
    """Return a label's method, and its settings: those in the method's brackets, and those after the first comma.

    >>> _taken_apart("A (b=1, c=d (e=2)) + F, g (h=3), i=4")
    ('A + F', ['b=1', 'c=d (e=2)', 'g (h=3)', 'i=4'])
    """
    first, *behind = _outside_brackets(label, ", ")
    words = _outside_brackets(first, " ")
    inside = [one for word in words if word.startswith("(") for one in _outside_brackets(word[1:-1], ", ")]
    return " ".join(word for word in words if not word.startswith("(")), [*inside, *behind]


def _outside_brackets(text: str, separator: str) -> list[str]:
    """Return the parts of ``text`` between those separators that stand in no brackets."""
    parts: list[str] = []
    for piece in text.split(separator):
        is_open = bool(parts) and parts[-1].count("(") > parts[-1].count(")")
        parts[len(parts) - is_open :] = [parts[-1] + separator + piece] if is_open else [piece]
    return parts


def _reached(runs: tuple[Run, ...], accuracy: float) -> Iterator[Reached]:
    for run in runs:
        if run.outcome is None:
            continue
        if (found := reached(run.rounds, accuracy, spent_beforehand(run.outcome))) is not None:
            yield found
