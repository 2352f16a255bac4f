"""What a report says in words: its title, what the runs have in common, what each promises about privacy."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from fl_sim.report.groups import Group, Panel
from fl_sim.report.release import in_short, in_words
from fl_sim.report.runs import Run
from fl_sim.report.spread import mean_and_deviation

_PICKED = {
    "test": "picked on the test set and so optimistic",
    "validation": "picked on records held out for validation",
    "last": "the last, which alone was tested",
}

NO_GUARANTEE = "No privacy guarantee: updates leave the clients without noise"

Groups: TypeAlias = Mapping[str, Sequence[tuple[str, Group]]]
"""{data and split: [(label, group)]}, each group once."""


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
    return "; ".join(in_short(release) for release in run.outcome.privacy) or "none"


def percent(accuracy: float | None) -> float | None:
    """Return an accuracy in percent."""
    return None if accuracy is None else 100 * accuracy


def _order(value: int | str) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, value)
