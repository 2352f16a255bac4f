"""The sections of a report's page that are text and tables: failures, comparison, privacy, all runs.

What all rows of a table share is said once, below it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fl_sim.report.files import Outcome
from fl_sim.report.groups import Group, Panel, parameters
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
from fl_sim.report.table import MEASURES, Grid, Table, differences, further, targets, texts

_LONGEST_NOTE = 60

_BILL = (
    "Whoever sees all of these runs sees all of their releases, so whoever's records they are about pays for each of "
    "them: every epsilon and every seed. A release that several runs use is paid for once. Both figures hold; deltas "
    "add up with the plain sum."
)

_NUMBERS = ("Final %", "Best %", "Seconds", "of them training")


@dataclass(frozen=True)
class Cell:
    """A table's cell. ``note``: a line below it, in small letters. ``kind``: n (a number), k (one line) or path."""

    text: str
    note: str = ""
    kind: str = ""
    best: bool = False

    @property
    def html(self) -> str:
        """Return the cell; a long note is folded."""
        text = f"<b>{escape(self.text)}</b>" if self.best else escape(self.text)
        return f"<td{_class(self.kind)}>{text}{_note(self.note)}</td>"


@dataclass(frozen=True)
class Column:
    """A column: its head, and a cell for each row. ``common``: what it is called where all cells say the same.

    ``is_split``: it tells how records are split, of which an upper bound has none.
    """

    head: str
    cells: Sequence[Cell]
    common: str = ""
    is_split: bool = False


def columns_table(columns: Sequence[Column], bounds: Sequence[bool]) -> str:
    """Return the columns as a table, and below it in a line what is the same in all rows, which has no column.

    ``bounds``: for each row whether it is an upper bound.
    """
    shown, told = [], []
    for column in columns:
        is_left_out = [is_bound and column.is_split for is_bound in bounds]
        cells = [cell for cell, without in zip(column.cells, is_left_out, strict=True) if not without]
        same = len({(cell.text, cell.note) for cell in cells}) == 1
        if column.common and same and len(column.cells) > 1:
            but = " (but for the upper bound)" if column.is_split and any(bounds) else ""
            told.append(f"{column.common} {cells[0].text}{but}")
        else:
            shown.append(column)
    rows = [
        f"{_start(is_bound=is_bound)}{''.join(cell.html for cell in cells)}</tr>"
        for is_bound, *cells in zip(bounds, *(column.cells for column in shown), strict=True)
    ]
    heads = "".join(_head(column.head, column.cells[0].kind if column.cells else "") for column in shown)
    below = f'<p class="small common">In all rows: {escape("; ".join(told))}.</p>' if told else ""
    return f"{_table(f'<tr>{heads}</tr>', ''.join(rows))}{below}"


def table_section(place: Path, table: Table) -> str:
    """Return a table that was found at ``place``, what it tells besides accuracies, and its caption."""
    heads = "".join(f'<th scope="colgroup" colspan="2" class="n">{escape(column)}</th>' for column in table.columns)
    measures = "".join(_head(measure, "n") for _ in table.columns for measure in MEASURES)
    rows = "".join(_row(row, cells, is_bound=row in table.upper_bounds) for row, cells in texts(table))
    below = "<br>".join(escape(line) for line in table.caption)
    more = "".join(_grid(grid) for grid in (differences(table), targets(table), *further(table)) if grid)
    head = f"<tr><td></td>{heads}</tr><tr>{_head('Method')}{measures}</tr>"
    return (
        f'<section><h2>Table <span class="small path">{escape(str(place))}</span></h2>'
        f'{_table(head, rows)}{more}<p class="small">{below}</p></section>'
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


def _row(row: str, cells: Sequence[tuple[str, bool]], *, is_bound: bool) -> str:
    shown = "".join(Cell(text, kind="n", best=best).html for text, best in cells)
    return f"{_start(is_bound=is_bound)}{Cell(row).html}{shown}</tr>"


def _grid(grid: Grid) -> str:
    heads = "".join(_head(head, "n") for head in grid.heads)
    rows = "".join(_row(row, [(cell, False) for cell in cells], is_bound=False) for row, cells in grid.rows)
    body = _table(f"<tr>{_head('Method')}{heads}</tr>", rows)
    return f"<details><summary>{escape(grid.title)}</summary>{body}</details>"


def _table(head: str, body: str) -> str:
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _head(text: str, kind: str = "") -> str:
    return f'<th scope="col"{_class(kind)}>{escape(text)}</th>'


def _start(*, is_bound: bool) -> str:
    """Return the tag that begins a row: a line separates upper bounds, which do not compete, from methods."""
    return '<tr class="bound">' if is_bound else "<tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _note(note: str) -> str:
    if not note:
        return ""
    if len(note) <= _LONGEST_NOTE:
        return f'<br><span class="small">{escape(note)}</span>'
    return f'<details class="small"><summary>settings</summary>{escape(note)}</details>'


def _virtual_time(done: Sequence[Sequence[Outcome]]) -> list[Column]:
    """Return a column of virtual seconds, none where no run has any."""
    if all(own.virtual_seconds is None for some in done for own in some):
        return []
    return [Column("Virtual seconds", [Cell(spread(own.virtual_seconds for own in some), kind="n") for some in done])]


def _status(one: Group) -> str:
    states = dict.fromkeys(run.status for run in one.runs)
    count = {state: sum(run.status == state for run in one.runs) for state in states}
    return "finished" if list(states) == ["finished"] else ", ".join(f"{n} {state}" for state, n in count.items())


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
