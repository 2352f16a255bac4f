"""The sections of a report's page that are text and tables: failures, comparison, privacy, all runs."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fl_sim.report.files import Outcome
from fl_sim.report.groups import Group, Panel, parameters
from fl_sim.report.page_tables import Cell, Column, columns_table
from fl_sim.report.page_words import (
    HEADS,
    Groups,
    further_settings,
    how_picked,
    percent,
    privacy_in_short,
    privacy_in_words,
    runs_of,
    short_names,
    spread,
    taken,
)
from fl_sim.report.runs import Found, Run

_BILL = (
    "Whoever sees all of these runs sees all of their releases, so whoever's records they are about pays for each of "
    "them: every epsilon and every seed. A release that several runs use is paid for once. Both figures hold; deltas "
    "add up with the plain sum."
)


def section(heading: str, content: str) -> str:
    """Return a section with its heading."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def data_notes(panels: Sequence[Panel]) -> list[str]:
    """Return what the data stand in for."""
    told = dict.fromkeys((panel.data, panel.note) for panel in panels if panel.note)
    return [f'<p class="note"><b>{escape(data)}</b>: {escape(note)}</p>' for data, note in told]


def failures(found: Found, groups: Groups) -> list[str]:
    """Return what is not in the report as it should be, with the reasons."""
    lines = [
        (f"{run.status}: {label}, {where}, seed {run.config.seed}", run.error, run.path)
        for where, some in groups.items()
        for label, one in some
        for run in one.runs
        if run.status != "finished"
    ]
    lines += [("", problem.error, problem.path) for problem in found.problems]
    told = {path for *_, path in lines}
    for place, table in found.tables.items():
        for one in table.results:
            if one.status != "finished" and (path := place / one.directory) not in told:
                told.add(path)  # the upper bound stands in several columns
                lines.append((f"{one.status}: {one.row}, {one.column}, seed {one.seed}", one.error, path))
    if not lines:
        return []
    items = "".join(
        f"<li>{': '.join(escape(text) for text in (what, why) if text)} "
        f'<span class="small path">({escape(str(path))})</span></li>'
        for what, why, path in lines
    )
    return [f'<div class="bad"><b>Failed, unfinished or left out</b><ul>{items}</ul></div>']


def comparison(groups: Groups) -> str:
    """Return a row for each method, data set and split."""
    named = {place: short_names(label for label, _ in some) for place, some in groups.items()}
    methods = [
        Cell(named[place][label], further_settings(label, named[place][label], parameters(one)))
        for place, some in groups.items()
        for label, one in some
    ]
    lines = [line for some in groups.values() for line in some]
    first = [one.runs[0] for _, one in lines]
    done = [[run.outcome for run in one.finished if run.outcome] for _, one in lines]
    columns = [
        Column("Method", methods),
        Column("Data", [Cell(one.data, "see the data note above" if one.note else "") for _, one in lines], "data"),
        Column("Partition", [Cell(one.partition, kind="k") for _, one in lines], "partition", is_split=True),
        Column("Clients", [Cell(str(run.config.clients), kind="k") for run in first], "clients", is_split=True),
        Column("Model", [Cell(run.config.model, kind="k") for run in first], "model"),
        Column("Seeds", [Cell(", ".join(str(run.config.seed) for run in one.runs)) for _, one in lines], "seeds"),
        Column("Final %", [Cell(spread(percent(own.final_accuracy) for own in some), kind="n") for some in done]),
        Column("Best %", [Cell(spread(percent(own.best_accuracy) for own in some), kind="n") for some in done]),
        Column("Seconds", [Cell(spread(own.seconds.total for own in some), kind="n") for some in done]),
        *_virtual_time(done),
        Column(
            "Privacy (limits: below)",
            [Cell(", ".join(dict.fromkeys(privacy_in_short(run) for run in one.runs))) for _, one in lines],
            "privacy (limits: below)",
        ),
        Column("Status", [Cell(_status(one)) for _, one in lines], "status"),
    ]
    return section(
        "Comparison",
        f"{columns_table(columns, [one.is_bound for _, one in lines])}"
        f'<p class="small">Test accuracy after the last round, and in the best evaluated round ({how_picked(groups)}); '
        "wall-clock seconds of a run, and those of the virtual clock where there is one. Mean ± sample standard "
        "deviation over the finished seeds.</p>",
    )


def _virtual_time(done: Sequence[Sequence[Outcome]]) -> list[Column]:
    """Return a column of virtual seconds, none where no run has any."""
    if all(own.virtual_seconds is None for some in done for own in some):
        return []
    return [Column("Virtual seconds", [Cell(spread(own.virtual_seconds for own in some), kind="n") for some in done])]


def _status(one: Group) -> str:
    states = dict.fromkeys(run.status for run in one.runs)
    count = {state: sum(run.status == state for run in one.runs) for state in states}
    return "finished" if list(states) == ["finished"] else ", ".join(f"{n} {state}" for state, n in count.items())


def to_target(groups: Groups, target: float) -> str:
    """Return what runs took to a test accuracy of ``target``, in [0, 1]."""
    rows = taken(groups, target)
    cells = list(zip(*(one.cells for one in rows), strict=True))
    columns = [
        Column("Method", [Cell(one.method) for one in rows]),
        Column("Data", [Cell(one.where) for one in rows], "data"),
        *(
            Column(head, [Cell(text, kind="n") for text in some])
            for head, some in zip(HEADS, cells, strict=True)
            if head != "Virtual seconds" or set(some) != {"-"}
        ),
    ]
    return section(
        f"To a test accuracy of {100 * target:g} %",
        f"{columns_table(columns, [False] * len(rows))}"
        '<p class="small">Up to the first evaluated round with that accuracy, and with what was done before the first '
        "round; MB: a million bytes of arrays to and from all clients. Mean ± sample standard deviation over the "
        "finished runs that got there.</p>",
    )


def privacy(groups: Groups) -> str:
    """Return every different promise, and which runs give it."""
    who: dict[str, list[str]] = {}
    for where, some in groups.items():
        for label, one in some:
            for run in one.runs:
                who.setdefault(privacy_in_words(run), []).append(f"{label}, {where}, seed {run.config.seed}")
    items = []
    for words, runs in who.items():
        names = escape("; ".join(runs))
        if len(who) == 1:
            told = f"All {len(runs)} runs" if len(runs) > 1 else "The run"
        else:
            told = names if len(runs) <= 4 else f"<details><summary>{len(runs)} runs</summary>{names}</details>"
        items.append(f'<li>{escape(words)} <span class="small">{told}</span></li>')
    return section("Privacy", f"<ul>{''.join(items)}</ul>")


def bill(lines: Sequence[str]) -> list[str]:
    """Return what all runs together cost."""
    told = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return [section("What all of this costs together", f'{told}<p class="small">{_BILL}</p>')] if lines else []


def all_runs(groups: Groups) -> str:
    """Return a row for each run, folded."""
    several = len(groups) > 1
    lines = [
        (f"{label}, {where}" if several else label, run)
        for where, some in groups.items()
        for label, one in some
        for run in one.runs
    ]
    runs = [run for _, run in lines]
    above = _above([run.path for run in runs])
    columns = [
        Column("Run", [Cell(label) for label, _ in lines]),
        Column("Seed", [Cell(str(run.config.seed)) for run in runs]),
        Column("Engine", [Cell(run.outcome.engine if run.outcome else "-") for run in runs], "engine"),
        Column("Rounds", [Cell(f"{len(run.rounds)} of {run.config.rounds}", kind="n") for run in runs], "rounds"),
        *(Column(head, [_number(run, place) for run in runs]) for place, head in enumerate(_NUMBERS)),
        Column("Status", [Cell(run.status) for run in runs], "status"),
        Column(
            "Directory",
            [Cell(str(run.path.relative_to(above) if above else run.path), kind="small path") for run in runs],
        ),
    ]
    told = f'<p class="small path">Directories are below {escape(str(above))}.</p>' if above else ""
    table = columns_table(columns, [False] * len(runs))
    return section("Runs", f"<details><summary>All {len(runs)} runs</summary>{table}{told}</details>")


_NUMBERS = ("Final %", "Best %", "Seconds", "of them training")


def _number(run: Run, place: int) -> Cell:
    done = run.outcome
    if done is None:
        return Cell("-", kind="n")
    values = (percent(done.final_accuracy), percent(done.best_accuracy), done.seconds.total, done.seconds.train)
    return Cell(spread([values[place]], digits=2 if place < 2 else 1), kind="n")


def _above(paths: Sequence[Path]) -> Path | None:
    """Return the folder that all of several paths lie in, None where there is none."""
    try:
        common = os.path.commonpath([path.parent for path in paths]) if len(paths) > 1 else ""
    except ValueError:  # relative and absolute ones
        return None
    return Path(common) if common else None


def versions(groups: Groups) -> str:
    """Return what the runs were made with."""
    told: dict[str, int] = {}
    for run in runs_of(groups):
        if run.outcome:
            words = ", ".join(f"{name} {version}" for name, version in run.outcome.versions.items())
            told[words] = told.get(words, 0) + 1
    lines = [words if len(told) == 1 else f"{words} ({number} runs)" for words, number in told.items()]
    said = "<br>".join(map(escape, lines)) or "not recorded: no run has a result"
    return section("Versions", f"<p>{said}</p>")
