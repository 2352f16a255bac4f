"""The sections of a report page that are text or tables: failures, comparison, privacy, all runs, versions.

If all rows of a table have the same value in a column, the column is left out. A line below the table then states the
value.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

from fl_sim.report.groups import Panel, SeedGroup, parameters
from fl_sim.report.measures import Reached, as_percent, mean_text
from fl_sim.report.row_names import further_settings, short_names
from fl_sim.report.runs import Found, SavedRun
from fl_sim.report.table import MEASURES, Grid, Table, differences, further, mapped, targets, texts

Groups: TypeAlias = Mapping[str, Sequence[tuple[str, SeedGroup]]]
"""{data set and partition: [(label, group)]}. A group consists of runs that differ only in the seed."""

NO_GUARANTEE = "No privacy guarantee: updates leave the clients without noise"

_LONGEST_NOTE = 60
"""Largest number of characters of a note that is always visible in a table cell.

A longer note is hidden until the reader opens it.
"""

_PICKED = {
    "test": "picked on the test set and therefore optimistic",
    "validation": "picked on records held out for validation",
    "last": "the last round, the only one that was tested",
    "nothing": "nothing was measured",
}

_BILL = (
    "A person who sees all of these runs sees all of their releases. So each run has a privacy cost, even if it "
    "differs only in epsilon or seed. A release that several runs use is counted once. Both epsilons (by composition "
    "and as a plain sum) are valid; the delta of the plain sum is the sum of all deltas."
)


def groups_of(panels: Iterable[Panel]) -> Groups:
    """Return the groups of runs of all ``panels``, each group once.

    The group of centralized training can be in several panels.
    """
    seen: set[int] = set()
    groups: dict[str, list[tuple[str, SeedGroup]]] = {}
    for panel in panels:
        for label, one in panel.lines:
            if id(one) not in seen:
                seen.add(id(one))
                groups.setdefault(f"{one.data}, {one.partition}", []).append((label, one))
    return groups


def runs_of(groups: Groups) -> list[SavedRun]:
    """Return the runs of all groups in one list."""
    return [run for some in groups.values() for _, one in some for run in one.runs]


def title_of(panels: Sequence[Panel]) -> str:
    """Return the title of the page: its methods, data sets and partitions."""
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
    """Return a sentence about the runs: their number, clients, rounds, models and seeds."""
    runs = runs_of(groups)
    federated = [run for run in runs if run.config.algorithm.kind != "centralized"] or runs
    done = sum(run.status == "finished" for run in runs)
    facts: dict[str, Sequence[int] | Sequence[str]] = {
        "clients": sorted({run.config.clients for run in federated}),
        "rounds": sorted({run.config.rounds for run in runs}),
        "model": sorted({run.config.model for run in runs}),
        "seeds": sorted({run.config.seed for run in runs}),
    }
    words = (f"{name} {', '.join(map(str, values))}" for name, values in facts.items())
    return f"{len(runs)} runs, {done} finished; {'; '.join(words)}."


@dataclass(frozen=True)
class TargetRow:
    """The costs of one method until a target accuracy, as one row of a table.

    ``where``: data set and partition. ``runs``: number of finished runs. ``reached``: the costs of the runs that
    reached the target accuracy.
    """

    method: str
    where: str
    runs: int
    reached: tuple[Reached, ...]

    @property
    def cells(self) -> dict[str, str]:
        """Return the cells of the row, {column heading: text}.

        Each text is the mean ± standard deviation over the runs that reached the target.
        """
        return {
            "Rounds": mean_text(one.round for one in self.reached),
            "MB": mean_text((None if one.bytes is None else one.bytes / 1e6 for one in self.reached), digits=2),
            "Seconds": mean_text(one.seconds for one in self.reached),
            "Virtual seconds": mean_text(one.virtual_seconds for one in self.reached),
            "Runs that reached it": f"{len(self.reached)} of {self.runs}",
        }

    @property
    def in_words(self) -> str:
        """Return a line of text with the costs of the method until it reaches the target accuracy."""
        rounds, megabytes, seconds, virtual, count = self.cells.values()
        costs = f"rounds {rounds}, MB {megabytes}, seconds {seconds}" if self.reached else "-"
        costs += f", virtual seconds {virtual}" if virtual != "-" else ""
        return f"{self.method} on {self.where}: {costs} ({count} runs reached it)"


def target_rows(groups: Groups, accuracy: float) -> list[TargetRow]:
    """Return the costs of each group of runs until its test accuracy is at least ``accuracy``, in [0, 1]."""
    return [
        TargetRow(label, where, len(one.finished), tuple(one.reached(accuracy)))
        for where, some in groups.items()
        for label, one in some
    ]


@dataclass(frozen=True)
class HtmlCell:
    """A cell of an HTML table. ``note``: small text below ``text``. ``best``: True prints the text in bold.

    ``kind``: the CSS class: "n" for a number, "k" for text without line breaks, "small path" for a path.
    """

    text: str
    note: str = ""
    kind: str = ""
    best: bool = False

    @property
    def html(self) -> str:
        """Return the cell as HTML. A long note is hidden until the reader opens it."""
        text = f"<b>{escape(self.text)}</b>" if self.best else escape(self.text)
        note = ""
        if self.note:
            note = f'<br><span class="small">{escape(self.note)}</span>'
        if len(self.note) > _LONGEST_NOTE:
            note = f'<details class="small"><summary>settings</summary>{escape(self.note)}</details>'
        return f"<td{_class(self.kind)}>{text}{note}</td>"


@dataclass(frozen=True)
class HtmlColumn:
    """A column of an HTML table: its heading, and one cell for each row.

    If all cells are equal, a line below the table, such as "In all rows: clients 10", replaces the column. ``common``:
    the name of the column in this line; if it is empty, the column is never replaced. ``is_split``: True if the column
    describes the partition. The row of centralized training has no partition, so its cell is then not compared.
    """

    head: str
    cells: Sequence[HtmlCell]
    common: str = ""
    is_split: bool = False


def columns_table(columns: Sequence[HtmlColumn], bounds: Sequence[bool]) -> str:
    """Return an HTML table of ``columns``. A line below it states the values of columns whose cells are all equal.

    ``bounds``: for each row, True if the row is centralized training.
    """
    shown, common = [], []
    for column in columns:
        is_left_out = [is_bound and column.is_split for is_bound in bounds]
        cells = [cell for cell, without in zip(column.cells, is_left_out, strict=True) if not without]
        same = len({(cell.text, cell.note) for cell in cells}) == 1
        if column.common and same and len(column.cells) > 1:
            but = " (except the upper bound)" if column.is_split and any(bounds) else ""
            common.append(f"{column.common} {cells[0].text}{but}")
        else:
            shown.append(column)
    cells_by_row = zip(*(column.cells for column in shown), strict=True)
    rows = [_row(cells, is_bound=is_bound) for is_bound, cells in zip(bounds, cells_by_row, strict=True)]
    heads = "".join(_head(column.head, column.cells[0].kind) for column in shown)
    below = f'<p class="small common">In all rows: {escape("; ".join(common))}.</p>' if common else ""
    return f"{_table(f'<tr>{heads}</tr>', rows)}{below}"


def table_section(place: Path, table: Table) -> str:
    """Return the page section of the ``table`` in the folder ``place``: accuracies, further tables and caption."""
    heads = "".join(f'<th scope="colgroup" colspan="2" class="n">{escape(column)}</th>' for column in table.columns)
    measures = "".join(_head(measure, "n") for _ in table.columns for measure in MEASURES)
    rows = [
        _row(
            [HtmlCell(table.label(row)), *(HtmlCell(text, "", "n", best) for text, best in cells)],
            is_bound=row in table.upper_bounds,
        )
        for row, cells in texts(table)
    ]
    below = "<br>".join(escape(line) for line in table.caption)
    more = "".join(_grid(grid) for grid in (differences(table), targets(table), *further(table)) if grid)
    head = f"<tr><td></td>{heads}</tr><tr>{_head('Method')}{measures}</tr>"
    first = "".join(map(_grid, mapped(table))) or _table(head, rows)
    return (
        f'<section><h2>Table <span class="small path">{escape(str(place))}</span></h2>'
        f'{first}{more}<p class="small">{below}</p></section>'
    )


def section(heading: str, content: str) -> str:
    """Return an HTML section with the given heading and content."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def data_notes(panels: Sequence[Panel]) -> list[str]:
    """Return an HTML paragraph for each data set that is stand-in data: synthetic records in place of real ones."""
    notes = dict.fromkeys((panel.data, panel.note) for panel in panels if panel.note)
    return [f'<p class="note"><b>{escape(data)}</b>: {escape(note)}</p>' for data, note in notes]


def failures(found: Found, groups: Groups) -> list[str]:
    """Return an HTML list of the failed, unfinished and omitted runs, with the reason for each run.

    The text is empty if there are no such runs.
    """
    lines = [
        (f"{run.status}: {label}, {where}, seed {run.config.seed}", run.error, run.path)
        for where, some in groups.items()
        for label, one in some
        for run in one.runs
        if run.status != "finished"
    ]
    lines += [("", problem.error, problem.path) for problem in found.problems]
    listed = {path for *_, path in lines}
    for place, table in found.tables.items():
        for one in table.results:
            if one.status != "finished" and (path := place / one.directory) not in listed:
                listed.add(path)  # runs of centralized training may be in several columns, but are listed once
                lines.append((f"{one.status}: {table.label(one.row)}, {one.column}, seed {one.seed}", one.error, path))
    if not lines:
        return []
    items = "".join(
        f"<li>{': '.join(escape(text) for text in (what, why) if text)} "
        f'<span class="small path">({escape(str(path))})</span></li>'
        for what, why, path in lines
    )
    return [f'<div class="bad"><b>Failed, unfinished or left out</b><ul>{items}</ul></div>']


def comparison(groups: Groups) -> str:
    """Return the section "Comparison": a table with one row for each method, data set and partition."""
    methods = []
    for some in groups.values():
        names = short_names(label for label, _ in some)
        notes = [further_settings(one.runs[0].row or label, names[label], parameters(one)) for label, one in some]
        methods += [HtmlCell(names[label], note) for (label, _), note in zip(some, notes, strict=True)]
    every = [one for some in groups.values() for _, one in some]
    first = [one.runs[0] for one in every]
    done = [[run.result for run in one.finished if run.result] for one in every]
    virtual = [mean_text(own.virtual_seconds for own in some) for some in done]
    data = ["see the data note above" if one.note else "" for one in every]
    privacy = [", ".join(dict.fromkeys(run.privacy_in_short for run in one.runs)) for one in every]
    columns = [
        HtmlColumn("Method", methods),
        HtmlColumn("Data", [HtmlCell(one.data, note) for one, note in zip(every, data, strict=True)], "data"),
        _column("Partition", [one.partition for one in every], "k", "partition", is_split=True),
        _column("Clients", [run.config.clients for run in first], "k", "clients", is_split=True),
        _column("Model", [run.config.model for run in first], "k", "model"),
        _column("Seeds", [", ".join(str(run.config.seed) for run in one.runs) for one in every], "", "seeds"),
        _column("Final %", [mean_text(as_percent(own.final_accuracy) for own in some) for some in done], "n"),
        _column("Best %", [mean_text(as_percent(own.best_accuracy) for own in some) for some in done], "n"),
        _column("Seconds", [mean_text(own.seconds.total for own in some) for some in done], "n"),
        *([_column("Virtual seconds", virtual, "n")] if set(virtual) != {"-"} else []),
        _column("Privacy (limits: below)", privacy, "", "privacy (limits: below)"),
        _column("Status", [_status(one) for one in every], "", "status"),
    ]
    chosen = dict.fromkeys(run.result.best_chosen_on for run in runs_of(groups) if run.result)
    return section(
        "Comparison",
        f"{columns_table(columns, [one.is_bound for one in every])}"
        '<p class="small">Test accuracy after the last round, and in the best evaluated round '
        f"({' or '.join(_PICKED[how] for how in chosen)}); wall-clock seconds of a run, and virtual seconds of "
        "simulated devices if there are any. Mean ± sample standard deviation over the finished seeds.</p>",
    )


def to_target(groups: Groups, target: float) -> str:
    """Return the section with the costs of each method until a test accuracy of ``target``, in [0, 1]."""
    rows = target_rows(groups, target)
    cells = [one.cells for one in rows]
    heads = [head for head in cells[0] if head != "Virtual seconds" or {own[head] for own in cells} != {"-"}]
    columns = [
        _column("Method", [one.method for one in rows]),
        _column("Data", [one.where for one in rows], "", "data"),
        *(_column(head, [own[head] for own in cells], "n") for head in heads),
    ]
    return section(
        f"To a test accuracy of {100 * target:g} %",
        f"{columns_table(columns, [False] * len(rows))}"
        '<p class="small">Costs until the end of the first evaluated round with this accuracy, including the work '
        "before the first round; MB: a million bytes of arrays to and from all clients. Mean ± sample standard "
        "deviation over the finished runs that reached this accuracy.</p>",
    )


def privacy(groups: Groups) -> str:
    """Return the section "Privacy": each distinct privacy statement once, with the names of its runs."""
    who: dict[str, list[str]] = {}
    for where, some in groups.items():
        for label, one in some:
            for run in one.runs:
                who.setdefault(privacy_in_words(run), []).append(f"{label}, {where}, seed {run.config.seed}")
    items = []
    for words, runs in who.items():
        names = escape("; ".join(runs))
        if len(who) == 1:
            names = f"All {len(runs)} runs" if len(runs) > 1 else "The run"
        elif len(runs) > 4:
            names = f"<details><summary>{len(runs)} runs</summary>{names}</details>"
        items.append(f'<li>{escape(words)} <span class="small">{names}</span></li>')
    return section("Privacy", f"<ul>{''.join(items)}</ul>")


def privacy_in_words(run: SavedRun) -> str:
    """Return the privacy statements of a run as text.

    A run without privacy statements has no privacy guarantee. The text for such a run must never look like epsilon 0.
    """
    if run.result is None:
        return "Privacy not stated: the run has no result"
    statements = [f"{one.promise} {one.limits if one.protects else ''}".strip() for one in run.result.privacy]
    return " ".join(statements) or NO_GUARANTEE


def bill(lines: Sequence[str]) -> list[str]:
    """Return the section about the total privacy cost of all runs, with the text ``lines``; [] without ``lines``."""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    content = f'{paragraphs}<p class="small">{_BILL}</p>'
    return [section("Privacy cost of all runs together", content)] if lines else []


def all_runs(groups: Groups) -> str:
    """Return the section "Runs": a table with one row for each run, hidden until the reader opens it."""
    several = len(groups) > 1
    lines = [
        (f"{label}, {where}" if several else label, run)
        for where, some in groups.items()
        for label, one in some
        for run in one.runs
    ]
    runs = [run for _, run in lines]
    results = [run.result for run in runs]
    above = _above([run.path for run in runs])
    final = [mean_text([as_percent(own.final_accuracy)], digits=2) if own else "-" for own in results]
    best = [mean_text([as_percent(own.best_accuracy)], digits=2) if own else "-" for own in results]
    columns = [
        _column("Run", [label for label, _ in lines]),
        _column("Seed", [run.config.seed for run in runs]),
        _column("Engine", [own.engine if own else "-" for own in results], "", "engine"),
        _column("Rounds", [f"{len(run.rounds)} of {run.config.rounds}" for run in runs], "n", "rounds"),
        _column("Final %", final, "n"),
        _column("Best %", best, "n"),
        _column("Seconds", [mean_text([own.seconds.total]) if own else "-" for own in results], "n"),
        _column("of them training", [mean_text([own.seconds.train]) if own else "-" for own in results], "n"),
        _column("Status", [run.status for run in runs], "", "status"),
        _column("Directory", [run.path.relative_to(above) if above else run.path for run in runs], "small path"),
    ]
    note = f'<p class="small path">Directories are below {escape(str(above))}.</p>' if above else ""
    table = columns_table(columns, [False] * len(runs))
    return section("Runs", f"<details><summary>All {len(runs)} runs</summary>{table}{note}</details>")


def versions(groups: Groups) -> str:
    """Return the section "Versions": the versions of the packages with which the runs were made."""
    words = [
        ", ".join(f"{name} {version}" for name, version in run.result.versions.items())
        for run in runs_of(groups)
        if run.result
    ]
    counts = {one: words.count(one) for one in words}
    lines = [one if len(counts) == 1 else f"{one} ({number} runs)" for one, number in counts.items()]
    content = "<br>".join(map(escape, lines)) or "not recorded: no run has a result"
    return section("Versions", f"<p>{content}</p>")


def _column(
    head: str, cells: Sequence[object], kind: str = "", common: str = "", *, is_split: bool = False
) -> HtmlColumn:
    return HtmlColumn(head, [HtmlCell(str(cell), kind=kind) for cell in cells], common, is_split)


def _grid(grid: Grid) -> str:
    heads = "".join(_head(head, "n") for head in grid.heads)
    rows = [_row([HtmlCell(row), *(HtmlCell(cell, kind="n") for cell in cells)]) for row, cells in grid.rows]
    body = _table(f"<tr>{_head(grid.corner)}{heads}</tr>", rows)
    return f"<details><summary>{escape(grid.title)}</summary>{body}</details>"


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _head(text: str, kind: str = "") -> str:
    return f'<th scope="col"{_class(kind)}>{escape(text)}</th>'


def _row(cells: Sequence[HtmlCell], *, is_bound: bool = False) -> str:
    """Return a table row as HTML. The style sheet draws a line between the methods and the centralized training."""
    return f"<tr{_class('bound' if is_bound else '')}>{''.join(cell.html for cell in cells)}</tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _status(one: SeedGroup) -> str:
    states = dict.fromkeys(run.status for run in one.runs)
    count = {state: sum(run.status == state for run in one.runs) for state in states}
    return "finished" if list(states) == ["finished"] else ", ".join(f"{n} {state}" for state, n in count.items())


def _above(paths: Sequence[Path]) -> Path | None:
    """Return the common parent folder of several paths; None for a single path or without a common folder."""
    try:
        common = os.path.commonpath([path.parent for path in paths]) if len(paths) > 1 else ""
    except ValueError:  # ``commonpath`` raises it if some paths are relative and some absolute
        return None
    return Path(common) if common else None
