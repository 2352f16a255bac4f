"""The gallery page, which compares finished tables with published accuracies, and the leaderboard page, in Markdown.

The gallery has a folder for each table. A person writes the file ``about.toml`` in this folder (class ``About``). The
files ``table.json`` and ``table.csv`` are copies of the files that ``fl-sim table`` wrote; ``table.csv`` is optional.
If a folder has no ``table.json``, the runs of its table are still missing. The file ``leaderboard.toml`` defines the
leaderboard page: a list of questions that tables of the gallery answer.
"""

import csv
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.runs import TABLE, read_json_table
from fl_sim.report.table import MEASURES, Measure, Table, best_rows, cell_text, mapped, percentages
from fl_sim.report.table_files import further_paragraphs

ABOUT, RUNS, LEADERBOARD = "about.toml", "table.csv", "leaderboard.toml"
PAGE = "README.md"
_DEVIATIONS, _POINTS = 3, 3
_FURTHER: Final = f"More than {_DEVIATIONS} of our standard deviations from"
_SECONDS: Final = ("seconds.total", "seconds.train")

_HEAD = """# Published tables, run here

Made by `fl-sim report --gallery docs/results` from the files in this folder; do not edit it. Each table has a folder
with the `table.json` that its command wrote, and with `about.toml`, which has further facts about the table.

Accuracies are in percent, after the last round unless stated otherwise; ± is the sample standard deviation over seeds.
Below a method is its published accuracy. *read*: the number was read in the source; *recalled*: it was quoted from
memory, and must be checked in the source. Bold marks the significantly best method (see [tables](../tables.md)).
"""


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PublishedFigures(_FileModel):
    """Published accuracies from one source, such as a paper.

    ``confidence``: "read" if the accuracies were read in the source, "recalled" if they were quoted from memory.
    ``measure``: "last" for accuracies after the last round, "best" for accuracies in the best round. ``accuracies``:
    {column: {row: accuracy in percent}}, with the names of columns and rows in the table.
    """

    source: str
    confidence: Literal["read", "recalled"]
    measure: Measure = "last"
    note: str = ""
    accuracies: dict[str, dict[str, Annotated[float, Field(ge=0, le=100)]]]


class About(_FileModel):
    """The content of ``about.toml``: facts about a table that are not in its ``table.json``.

    ``file``: path of the TOML file that defines the table, relative to the root of the repository. ``command``: the
    command that ran the table. ``hours``: the total time of all runs, for a table without ``table.csv``.
    ``hours_at_most``: True if the true time may be smaller than ``hours``, because times of private runs are rounded
    up. ``differs``: deviations from the published experiment and their reasons, in Markdown.
    """

    title: str
    file: str
    command: str
    hardware: str = ""
    hours: float | None = Field(None, ge=0)
    hours_at_most: bool = False
    differs: str = ""
    published: list[PublishedFigures] = []


@dataclass(frozen=True)
class Entry:
    """One table of the gallery, with its results if its runs are finished.

    ``name``: name of the table's folder. ``table``: None if the runs of the table are missing. ``hours``: the total
    time of all runs in hours, as text; empty if the time is unknown.
    """

    name: str
    about: About
    table: Table | None
    hours: str


class Question(_FileModel):
    """One question of the leaderboard, and the rows and columns of a table in the gallery that answer the question.

    ``title``: the question. ``folder``: the folder of the table in the gallery. ``text``: the answer in words, in
    Markdown. ``columns``: {column of the table: heading on the page}. ``rows``: {row of the table: label on the page}.
    ``best``: the number of top rows to show before ``rows``. Top rows have the highest means in the first column.
    ``published``: True adds the published accuracies of the shown rows. ``heat_map``: the title of a heat map of the
    table. ``columns`` and ``rows`` are then labels on the axes of this map, and no cell is bold.
    """

    title: str
    folder: str
    text: str
    columns: Annotated[dict[str, str], Field(min_length=1)]
    rows: dict[str, str] = {}
    best: Annotated[int, Field(ge=0)] = 0
    published: bool = False
    heat_map: str = ""

    @model_validator(mode="after")
    def _check_heat_map(self) -> Self:
        if self.heat_map and (self.best or self.published or not self.rows):
            raise ValueError("a question with heat_map needs rows, and must not have best or published")
        return self


class Leaderboard(_FileModel):
    """The content of ``leaderboard.toml``: the title of the page, its introduction in Markdown, and its questions."""

    title: str
    introduction: str
    questions: Annotated[list[Question], Field(min_length=1)]


_Model = TypeVar("_Model", bound=BaseModel)


def read_gallery(directory: Path) -> list[Entry]:
    """Return the tables of the gallery in ``directory``: its folders that have an ``about.toml``, sorted by name.

    Raises UserError if there is no such folder, if a file is damaged, or if a published row or column is not in the
    table.
    """
    places = sorted(path.parent for path in directory.glob(f"*/{ABOUT}"))
    if not places:
        raise UserError(
            f"no gallery in {directory}: none of its folders has a file {ABOUT}; see docs/results for an example"
        )
    return [_entry(place) for place in places]


def read_leaderboard(directory: Path) -> Leaderboard | None:
    """Return the content of ``leaderboard.toml`` in the gallery ``directory``; None if the file is missing.

    Raises UserError if the file is damaged.
    """
    path = directory / LEADERBOARD
    return _read_toml(path, Leaderboard) if path.exists() else None


def gallery_text(entries: Sequence[Entry], root: str) -> str:
    """Return the gallery page in Markdown.

    ``root``: the path from the folder of the page to the root of the repository, for links.
    """
    lines = [_HEAD, "| table | file | folder | runs |", "|---|---|---|---|"]
    lines += [f"| {one.about.title} | `{one.about.file}` | `{one.name}` | {_progress(one.table)} |" for one in entries]
    lines.append("")
    for entry in entries:
        lines += _section(entry, root)
    return "\n".join(lines)


def page_of(entry: Entry, root: str) -> str:
    """Return the page of one table of the gallery in Markdown.

    ``root``: the path from the folder of the page to the root of the repository, for links.
    """
    heading, *rest = _section(entry, root)
    return "\n".join([heading.removeprefix("#"), *rest]) + "\n"


def leaderboard_text(leaderboard: Leaderboard, entries: Sequence[Entry]) -> str:
    """Return the leaderboard page in Markdown.

    Raises UserError if a question names a folder, row or column that is not in the gallery.
    """
    by_name = {entry.name: entry for entry in entries if entry.table is not None}
    lines = [f"# {leaderboard.title}\n", f"{leaderboard.introduction.strip()}\n"]
    for question in leaderboard.questions:
        _check([question.folder], list(by_name), "folder", question.title)
        lines += _answer(question, by_name[question.folder])
    lines.append("## All tables, and their numbers of runs\n")
    lines += [f"- [{one.about.title}]({one.name}/{TABLE}): {_progress(one.table)}" for one in entries]
    return "\n".join(lines) + "\n"


def _read_toml(path: Path, model: type[_Model]) -> _Model:
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _entry(place: Path) -> Entry:
    about = _read_toml(place / ABOUT, About)
    try:
        table = read_json_table(place) if (place / TABLE).exists() else None
        at_most = "at most " if about.hours_at_most else ""
        stated = "" if about.hours is None else f"{at_most}{about.hours:.1f}"
        hours = _hours(place / RUNS) if about.hours is None and (place / RUNS).exists() else stated
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error
    if table is not None:
        _check_names(place, about, table)
    return Entry(place.name, about, table, hours)


def _hours(runs: Path) -> str:
    """Return the total time of all finished runs in hours, as text; empty if the time of any run is unknown.

    ``runs``: the path of ``table.csv``. The time of a run is the larger of ``seconds.total`` and ``seconds.train``. In
    older files, ``seconds.total`` of a resumed run covers only the time since the last resume. ``seconds.train`` covers
    all rounds. If any run is private, the text says "at most", because times of private runs are rounded up.
    """
    with runs.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line.get("status") == "finished"]
    seconds = [max((float(line[name]) for name in _SECONDS if line.get(name)), default=None) for line in lines]
    known = [one for one in seconds if one is not None]
    if not seconds or len(known) < len(seconds):
        return ""
    is_private = any(value for line in lines for name, value in line.items() if name.startswith("epsilon."))
    return f"{'at most ' if is_private else ''}{sum(known) / 3600:.1f}"


def _check_names(place: Path, about: About, table: Table) -> None:
    for column, accuracies in ((column, some) for one in about.published for column, some in one.accuracies.items()):
        for name, known in ((column, table.columns), *((row, table.rows) for row in accuracies)):
            if name not in known:
                raise UserError(
                    f"{place / ABOUT} has a published accuracy for {name!r}, which is not in {TABLE}"
                    f"{guess(name, known)}; {TABLE} has {', '.join(known)}"
                )


def _check(names: Iterable[str], known: Sequence[str], what: str, question: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(
                f"{LEADERBOARD}: {question!r} names the {what} {name!r}, which does not exist{guess(name, known)}; "
                f"give one of {', '.join(known)}"
            )


def _progress(table: Table | None) -> str:
    """Return the numbers of finished, planned and failed runs as text: "6" if all 6 finished, or "5 of 6, 1 failed"."""
    if table is None:
        return "to be run"
    runs = {one.directory: one.status for one in table.results}
    done, failed = (sum(status == wanted for status in runs.values()) for wanted in ("finished", "failed"))
    if done == len(runs):
        return str(done)
    return f"{done} of {len(runs)}" + (f", {failed} failed" if failed else "")


def _section(entry: Entry, root: str) -> Iterator[str]:
    about, table = entry.about, entry.table
    yield f"## {about.title}\n"
    yield f"[{about.file}]({root}/{about.file}): `{about.command}`\n"
    if table is None:
        yield "Still to be run.\n"
    else:
        hours = f"{entry.hours}, all runs one after another" if entry.hours else "not recorded"
        yield f"Machine: {about.hardware or 'not recorded'}. Hours: {hours}.\n"
        yield from _maps(table) if table.heat_maps else _rows(about, table)
        yield ""
        yield from _missed(about, table)
    yield from [f"{about.differs.strip()}\n"] if about.differs.strip() else []
    yield from (f"{one.source} ({one.confidence}): {one.note}\n" for one in about.published if one.note)
    if table is not None:
        yield "<details><summary>Further measures and notes</summary>\n"
        yield from (f"{paragraph}\n" for paragraph in further_paragraphs(table))
        yield from (f"- {line}" for line in table.caption)
        yield "\n</details>\n"


def _maps(table: Table) -> Iterator[str]:
    """Yield Markdown lines with the heat maps of ``table``: for each map its title, then its cells as a table."""
    for grid in mapped(table):
        yield f"{grid.title}:\n"
        yield from _head(grid.heads, grid.corner)
        yield from (_line(label, cells) for label, cells in grid.rows)
        yield ""


def _rows(about: About, table: Table) -> Iterator[str]:
    """Yield the Markdown lines of the table: for each method our accuracies, then the published accuracies."""
    yield from _head(table.columns)
    measures: tuple[Measure, ...] = MEASURES if any(one.measure == "best" for one in about.published) else ("last",)
    best = {(column, measure): best_rows(table, column, measure) for column in table.columns for measure in measures}
    for row in table.rows:
        for measure in measures:
            cells = [_cell(table, row, column, measure, best[column, measure]) for column in table.columns]
            label = table.label(row)
            yield _line(label if measure == "last" else f"{label}, best round", cells)
            for one in about.published:
                figures = _figures(one, row, table.columns)
                if any(figures) and one.measure == measure:
                    yield _line(f"*{one.source}, {one.confidence}*", figures)


def _answer(question: Question, entry: Entry) -> Iterator[str]:
    """Yield the Markdown lines of a question: a table with some rows and columns of ``entry``, and the answer."""
    table = entry.table
    assert table is not None, "leaderboard_text refuses a question about a table without runs"
    if question.heat_map:
        yield from _answer_from_map(question, entry.name, table)
        return
    _check(question.columns, table.columns, "column", question.title)
    _check(question.rows, table.rows, "row", question.title)
    first = next(iter(question.columns))
    means = {row: mean_and_deviation(percentages(table.at(row, first), "last"))[0] for row in table.rows}
    ranked = sorted((row for row in table.rows if means[row] is not None), key=lambda row: -(means[row] or 0.0))
    labels = {row: question.rows.get(row, row) for row in [*ranked[: question.best], *question.rows]}
    yield f"## {question.title}\n"
    yield from _head(list(question.columns.values()))
    best = {column: best_rows(table, column, "last") for column in question.columns}
    for row, label in labels.items():
        yield _line(label, [_cell(table, row, column, "last", best[column]) for column in question.columns])
        for one in entry.about.published if question.published else ():
            figures = _figures(one, row, question.columns)
            if any(figures):
                what = "best round, " if one.measure == "best" else ""
                yield _line(f"*{one.source} ({what}{one.confidence})*", figures)
    yield _words(question, entry.name)


def _answer_from_map(question: Question, name: str, table: Table) -> Iterator[str]:
    """Yield the Markdown lines of a question: a part of one heat map of ``table``, and the answer."""
    grids = dict(zip((one.title for one in table.heat_maps), mapped(table), strict=True))
    _check([question.heat_map], list(grids), "heat map", question.title)
    shown = grids[question.heat_map]
    rows = {row: dict(zip(shown.heads, cells, strict=True)) for row, cells in shown.rows}
    _check(question.columns, shown.heads, "column", question.title)
    _check(question.rows, list(rows), "row", question.title)
    yield f"## {question.title}\n"
    yield from _head(list(question.columns.values()))
    for row, label in question.rows.items():
        yield _line(label, [rows[row][column] for column in question.columns])
    yield _words(question, name)


def _words(question: Question, name: str) -> str:
    return f"\n{question.text.strip()} [Whole table]({name}/{TABLE}).\n"


def _head(columns: Sequence[str], corner: str = "") -> list[str]:
    return [f"| {f'{corner} ' if corner else ''}| {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _cell(table: Table, row: str, column: str, measure: Measure, best: set[str]) -> str:
    text = cell_text(table.at(row, column), measure)
    return f"**{text}**" if row in best else text


def _figures(source: PublishedFigures, row: str, columns: Iterable[str]) -> list[str]:
    figures = [source.accuracies.get(column, {}).get(row) for column in columns]
    return ["" if figure is None else f"*{figure:g}*" for figure in figures]


def _missed(about: About, table: Table) -> Iterator[str]:
    """Yield Markdown lines that list the published accuracies that are far from the mean accuracies of our runs.

    "Far" means more than three standard deviations over seeds. With one seed, "far" means more than three percentage
    points.
    """
    for one in about.published:
        far: dict[str, list[str]] = {}
        for column, accuracies in one.accuracies.items():
            for row, published in accuracies.items():
                mean, deviation = mean_and_deviation(percentages(table.at(row, column), one.measure))
                if mean is not None and abs(mean - published) > (
                    _POINTS if deviation is None else _DEVIATIONS * deviation
                ):
                    which = (
                        f"One seed, and more than {_POINTS} percentage points from" if deviation is None else _FURTHER
                    )
                    far.setdefault(which, []).append(f"{row}, {column}: {mean:.1f} and {published:g}")
        yield from (f"{which} {one.source}: {'; '.join(cells)}.\n" for which, cells in far.items())
