"""The gallery: tables that were run, beside what was published, as one page of Markdown that is made from files.

A folder for each table: ``about.toml`` (``About``), written by hand, and ``table.json`` (and ``table.csv``, if it is
there) as ``fl-sim table`` wrote them. A folder without ``table.json`` is a table that is still to be run.
"""

import csv
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_sim.errors import UserError
from fl_sim.mistakes import guess
from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.runs import TABLE, read_json_table
from fl_sim.report.table import MEASURES, Measure, Table, best_rows, cell_text, percentages
from fl_sim.report.table_files import further_paragraphs

ABOUT, RUNS = "about.toml", "table.csv"
PAGE = "README.md"
_DEVIATIONS, _POINTS = 3, 3
_FURTHER: Final = f"Further than {_DEVIATIONS} of our deviations from"
_SECONDS: Final = ("seconds.total", "seconds.train")

_HEAD = """# Published tables, run here

Made by `fl-sim report --gallery docs/results` from the files in this folder; do not edit it. Each table has a folder:
the `table.json` that its command wrote, and `about.toml`, what must be known besides.

Accuracies are in percent, after the last round where nothing else is said; ± is the sample standard deviation over
seeds. Below a method stands what was published for it: *read* was read in the source itself, *recalled* was quoted from
memory and is to be checked there before it is printed as fact. Bold is what is significantly the best (see
[tables](../tables.md)).
"""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Published(_Facts):
    """Accuracies in percent from one source: {column: {row: accuracy}}, named as the table names them.

    ``measure``: whether they are of the last round, or of the best one.
    """

    source: str
    confidence: Literal["read", "recalled"]
    measure: Measure = "last"
    note: str = ""
    accuracies: dict[str, dict[str, Annotated[float, Field(ge=0, le=100)]]]


class About(_Facts):
    """What a reader must know of a table besides its ``table.json``.

    ``file``: the table's file, from the repository's root. ``hours``: of all its runs together, where no
    ``table.csv`` has them; ``hours_at_most``: since times of private runs are rounded up. ``differs``: differences to
    the published settings and their reasons, in Markdown.
    """

    title: str
    file: str
    command: str
    hardware: str = ""
    hours: float | None = Field(None, ge=0)
    hours_at_most: bool = False
    differs: str = ""
    published: list[Published] = []


@dataclass(frozen=True)
class Entry:
    """A table of the gallery; ``table`` None: it is still to be run. ``hours``: in words, empty where nobody knows."""

    name: str
    about: About
    table: Table | None
    hours: str


def read_gallery(directory: Path) -> list[Entry]:
    """Read every folder of ``directory`` with an ``about.toml``, by name.

    Raises UserError for a directory without any, and one that names the file that is damaged or that speaks of rows or
    columns which its table does not have.
    """
    places = sorted(path.parent for path in directory.glob(f"*/{ABOUT}"))
    if not places:
        raise UserError(
            f"no gallery in {directory}: no folder in it holds an {ABOUT}; docs/results shows how they look"
        )
    return [_entry(place) for place in places]


def gallery_text(entries: Sequence[Entry], root: str) -> str:
    """Return the page. ``root``: the way from the page's folder to the folder that ``About.file`` starts in."""
    lines = [_HEAD, *_contents(entries)]
    for entry in entries:
        lines += _section(entry, root)
    return "\n".join(lines)


def page_of(entry: Entry, root: str) -> str:
    """Return one table's page in Markdown, with all that its files say. ``root``: as for ``gallery_text``."""
    heading, *rest = _section(entry, root)
    return "\n".join([heading.removeprefix("#"), *rest]) + "\n"


def _entry(place: Path) -> Entry:
    try:
        about = About.model_validate(tomllib.loads((place / ABOUT).read_text(encoding="utf-8")))
        table = read_json_table(place) if (place / TABLE).exists() else None
        at_most = "at most " if about.hours_at_most else ""
        told = "" if about.hours is None else f"{at_most}{about.hours:.1f}"
        hours = _hours(place / RUNS) if about.hours is None and (place / RUNS).exists() else told
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{place / ABOUT}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: {error}") from error
    if table is not None:
        _check_names(place, about, table)
    return Entry(place.name, about, table, hours)


def _hours(runs: Path) -> str:
    """Return how many hours all runs took one after another, in words; nothing where one does not say.

    A run that was stopped and went on once had the time of its last part alone as ``total``; ``train`` has all rounds'.
    Of private runs it is known only at most.
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
    """Raise UserError for a figure that would be dropped, because no cell of the table has its place."""
    for column, accuracies in ((column, some) for one in about.published for column, some in one.accuracies.items()):
        for name, known in ((column, table.columns), *((row, table.rows) for row in accuracies)):
            if name not in known:
                raise UserError(
                    f"{place / ABOUT} tells a published figure of {name!r}, which {TABLE} does not have"
                    f"{guess(name, known)}; it has {', '.join(known)}"
                )


def _contents(entries: Sequence[Entry]) -> Iterator[str]:
    yield "| table | file | folder | runs |"
    yield "|---|---|---|---|"
    for entry in entries:
        yield f"| {entry.about.title} | `{entry.about.file}` | `{entry.name}` | {progress(entry.table)} |"
    yield ""


def progress(table: Table | None) -> str:
    """Return the number of finished runs, of all, and of failed ones, in words."""
    if table is None:
        return "to be run"
    runs = {one.directory: one.status for one in table.results}
    done, failed = (sum(status == wanted for status in runs.values()) for wanted in ("finished", "failed"))
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
        yield from _rows(about, table)
        yield ""
        yield from _missed(about, table)
    yield from [f"{about.differs.strip()}\n"] if about.differs.strip() else []
    yield from (f"{one.source} ({one.confidence}): {one.note}\n" for one in about.published if one.note)
    if table is not None:
        yield "<details><summary>What the table says besides</summary>\n"
        yield from (f"{paragraph}\n" for paragraph in further_paragraphs(table))
        yield from (f"- {line}" for line in table.caption)
        yield "\n</details>\n"


def _rows(about: About, table: Table) -> Iterator[str]:
    """Tell each row of ours, and below it the figures of each source; their best rounds below our best round."""
    yield f"| | {' | '.join(table.columns)} |"
    yield f"|---|{'---|' * len(table.columns)}"
    measures: tuple[Measure, ...] = MEASURES if any(one.measure == "best" for one in about.published) else ("last",)
    best = {(column, measure): best_rows(table, column, measure) for column in table.columns for measure in measures}
    for row in table.rows:
        for measure in measures:
            cells = [
                f"**{text}**" if row in best[column, measure] else text
                for column in table.columns
                for text in [cell_text(table.at(row, column), measure)]
            ]
            yield _line(row if measure == "last" else f"{row}, best round", cells)
            for one in about.published:
                figures = {column: some[row] for column, some in one.accuracies.items() if row in some}
                if figures and one.measure == measure:
                    shown = [f"*{figures[column]:g}*" if column in figures else "" for column in table.columns]
                    yield _line(f"*{one.source}, {one.confidence}*", shown)


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _missed(about: About, table: Table) -> Iterator[str]:
    """Tell the published figures that ours are far from: by deviations over seeds, by points where a seed is alone."""
    for one in about.published:
        far: dict[str, list[str]] = {}
        for column, accuracies in one.accuracies.items():
            for row, published in accuracies.items():
                mean, deviation = mean_and_deviation(percentages(table.at(row, column), one.measure))
                if mean is not None and abs(mean - published) > (
                    _POINTS if deviation is None else _DEVIATIONS * deviation
                ):
                    which = f"One seed, and further than {_POINTS} points from" if deviation is None else _FURTHER
                    far.setdefault(which, []).append(f"{row}, {column}: {mean:.1f} and {published:g}")
        yield from (f"{which} {one.source}: {'; '.join(cells)}.\n" for which, cells in far.items())
