"""The leaderboard: the best rows of a gallery's tables, one question a table, made from ``leaderboard.toml``."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.report.gallery import Entry, progress
from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.table import Table, best_rows, cell_text, percentages

LEADERBOARD = "leaderboard.toml"


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Question(_Plain):
    """One table of the leaderboard.

    ``folder``: the gallery's table. ``columns``: {its column: the heading here}. ``rows``: {its row: the label here},
    shown in this order. ``best``: also that many rows with the highest means in the first column, by the table's own
    names. ``published``: adds the published figures of these rows.
    """

    title: str
    folder: str
    text: str
    columns: Annotated[dict[str, str], Field(min_length=1)]
    rows: dict[str, str] = {}
    best: Annotated[int, Field(ge=0)] = 0
    published: bool = False


class Leaderboard(_Plain):
    """The page: ``title``, ``introduction`` in Markdown, and its questions."""

    title: str
    introduction: str
    questions: Annotated[list[Question], Field(min_length=1)]


def read_leaderboard(directory: Path) -> Leaderboard | None:
    """Read ``leaderboard.toml`` of a gallery, None without one. Raises UserError for a damaged file."""
    path = directory / LEADERBOARD
    if not path.exists():
        return None
    try:
        return Leaderboard.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def leaderboard_text(leaderboard: Leaderboard, entries: Sequence[Entry]) -> str:
    """Return the page in Markdown. Raises UserError for a folder, row or column that the gallery does not have."""
    by_name = {entry.name: entry for entry in entries if entry.table is not None}
    lines = [f"# {leaderboard.title}\n", f"{leaderboard.introduction.strip()}\n"]
    for question in leaderboard.questions:
        _check(question.folder, list(by_name), "folder", question.title)
        lines += _section(question, by_name[question.folder])
    lines += ["## All tables\n", "| table | runs | whole table |", "|---|---|---|"]
    lines += [f"| {one.about.title} | {progress(one.table)} | {_link(one.name)} |" for one in entries]
    return "\n".join(lines) + "\n"


def _section(question: Question, entry: Entry) -> Iterator[str]:
    table = entry.table
    assert table is not None  # others are left out above
    for column in question.columns:
        _check(column, table.columns, "column", question.title)
    for row in question.rows:
        _check(row, table.rows, "row", question.title)
    first = next(iter(question.columns))
    means = {row: mean_and_deviation(percentages(table.at(row, first), "last"))[0] for row in table.rows}
    ranked = sorted((row for row in table.rows if means[row] is not None), key=lambda row: -(means[row] or 0.0))
    labels = {row: question.rows.get(row, row) for row in [*ranked[: question.best], *question.rows]}
    yield f"## {question.title}\n"
    yield f"| | {' | '.join(question.columns.values())} |"
    yield f"|---|{'---|' * len(question.columns)}"
    best = {column: best_rows(table, column, "last") for column in question.columns}
    for row, label in labels.items():
        cells = [_cell(table, row, column, bold=row in best[column]) for column in question.columns]
        yield f"| {' | '.join([label, *cells])} |"
        if question.published:
            yield from _published(entry, row, question.columns)
    yield f"\n{question.text.strip()} {_link(entry.name, 'The whole table')}.\n"


def _cell(table: Table, row: str, column: str, *, bold: bool) -> str:
    text = cell_text(table.at(row, column), "last")
    return f"**{text}**" if bold else text


def _published(entry: Entry, row: str, columns: Mapping[str, str]) -> Iterator[str]:
    for source in entry.about.published:
        figures = [source.accuracies.get(column, {}).get(row) for column in columns]
        if any(figure is not None for figure in figures):
            shown = ["" if figure is None else f"*{figure:g}*" for figure in figures]
            what = "best round, " if source.measure == "best" else ""
            yield f"| {' | '.join([f'*{source.source} ({what}{source.confidence})*', *shown])} |"


def _link(name: str, text: str = "") -> str:
    return f"[{text or name}]({name}/table.json)"


def _check(name: str, known: Sequence[str], what: str, question: str) -> None:
    if name not in known:
        raise UserError(
            f"{LEADERBOARD}: {question!r} names the {what} {name!r}, which is not there{guess(name, known)}; "
            f"known are {', '.join(known)}"
        )
