"""The lines of text below a table: its caption, the meaning of bold print, privacy, warnings and failures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fl_sim.privacy.terms import Adjacency, rounded_up
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.heat_map import row_groups
from fl_sim.report.measures import ENOUGH, FEWEST
from fl_sim.report.table import Table, most_seeds

_SEEDS: Final = "Seeds:"
_MOST_WARNINGS: Final = 8
_MOST_NAMES: Final = 4
"""Largest number of rows without a privacy guarantee that a line about privacy names.

If there are more rows, the line says "all other methods" in place of their names.
"""

_CHANGES: Final[Mapping[str, str]] = {
    Adjacency.ADD_OR_REMOVE_ONE: "adding or removing one",
    Adjacency.REPLACE_ONE: "replacing one",
}
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def notes(table: Table) -> list[str]:
    """Return the lines of text below a table: caption, meaning of bold print, privacy, warnings and failed runs."""
    statements: dict[str, list[tuple[PrivacyStatement, ...]]] = {}
    groups = row_groups(table.heat_maps)
    names = {row: groups.get(row, table.label(row)) for row in table.rows}
    for one in (one for row in table.rows for column in table.columns for one in table.at(row, column)):
        if one.status == "finished":
            statements.setdefault(names[one.row], []).append(one.statements)
    failures = [one for one in table.results if one.status == "failed"]
    bill = [str(bill["in_words"]) for bill in table.bill or ()]
    if table.bill is None and any(result.guarantee for result in table.results):
        bill = ["The privacy cost of all runs together is stated once the table is complete."]
    bold = _bold(table)
    caption = [f"{line} {bold}" if bold and line.startswith(_SEEDS) else line for line in table.caption]
    return [
        *caption,
        *([bold] if bold and caption == [*table.caption] else []),
        *privacy_notes(statements, are_all=len(statements) == len(set(names.values()))),
        *bill,
        *_warnings(table),
        *(f"Failed: {table.label(one.row)}, {one.column}, seed {one.seed}: {one.error}" for one in failures),
    ]


def privacy_notes(rows: Mapping[str, Sequence[Sequence[PrivacyStatement]]], *, are_all: bool = True) -> list[str]:
    """Return the lines about privacy: the guarantees of each row, their limits, and the rows without a guarantee.

    ``rows``: {row: for each run of the row, its privacy statements}. ``are_all``: True if ``rows`` are all rows of the
    table. The epsilon of a row is the largest epsilon of any single run. The lines do not state the total privacy cost
    of all runs.
    """
    promises: dict[str, dict[str, tuple[float, tuple[float, float]]]] = {}
    limits: dict[str, dict[str, dict[str, None]]] = {"Covered": {}, "Not covered": {}}
    for row, runs in rows.items():
        for one in (one for statements in runs for one in statements if one.protects):
            of_row = promises.setdefault(_where(one), {})
            own, (whole, delta) = one.epsilon or 0.0, one.of_run
            largest, largest_whole = of_row.get(row, (0.0, (0.0, 0.0)))
            of_row[row] = max(largest, own), max(largest_whole, (whole or 0.0, delta))
            for what, text in ("Covered", one.covers), ("Not covered", one.does_not_cover):
                for sentence in _sentences(text):
                    limits[what].setdefault(sentence, {})[f"{row} ({one.unit})"] = None
    lines = []
    if promises:
        found = "; ".join(f"{where}: {', '.join(_epsilons(of_row))}" for where, of_row in promises.items())
        lines = [f"Privacy of each single run (terms: docs/privacy.md), {found}."]
        owners = {f"{row} ({unit})" for row, runs in rows.items() for some in runs for unit in _units(some)}
        lines += [f"{what}: {_by_owner(said, owners)}" for what, said in limits.items() if said]
    protected = {row: [any(one.protects for one in statements) for statements in runs] for row, runs in rows.items()}
    bare = {row: some for row, some in protected.items() if not all(some)}
    names = ", ".join(f"{row} (in some runs)" if any(some) else row for row, some in bare.items())
    if not any(map(any, bare.values())):
        if len(bare) == len(rows):
            names = "all methods"
        elif len(bare) > _MOST_NAMES and are_all:
            names = "all other methods"
    return [*lines, *([f"No privacy guarantee: {names}."] if bare else [])]


def _where(one: PrivacyStatement) -> str:
    change = _CHANGES.get(one.adjacency, one.adjacency)
    return f"of a {one.unit} ({change}), delta {one.delta or 0:g}"


def _units(statements: Iterable[PrivacyStatement]) -> list[str]:
    return [one.unit for one in statements if one.protects]


def _epsilons(of_row: Mapping[str, tuple[float, tuple[float, float]]]) -> Iterable[str]:
    for row, (epsilon, (whole, delta)) in of_row.items():
        more = f" (the whole run {rounded_up(whole, 3)} at delta {delta:.4g})" if whole > epsilon else ""
        yield f"{row} epsilon {rounded_up(epsilon, 3)}{more}"


def _sentences(text: str) -> list[str]:
    whole = f"{text.rstrip().rstrip('.')}." if text.strip() else ""
    return [one for one in _SENTENCE_END.split(whole) if one]


def _by_owner(said: Mapping[str, Mapping[str, None]], everyone: set[str]) -> str:
    """Return the sentences in ``said`` as one text.

    If a sentence holds only for some rows, the names of these rows precede it, in square brackets.

    ``said``: {sentence: names of the rows for which it holds}. ``everyone``: the names of all rows.
    """
    of_owners: dict[tuple[str, ...], list[str]] = {}
    for sentence, owners in said.items():
        of_owners.setdefault(tuple(owners), []).append(sentence)
    parts = []
    for some, sentences in of_owners.items():
        parts += [*([] if set(some) == everyone else [f"[{', '.join(some)}]"]), *sentences]
    return " ".join(parts)


def _warnings(table: Table) -> list[str]:
    """Return lines of text with the warnings of the finished runs, the most frequent warning first.

    Each line names one run that has the warning, and the number of further runs. Warnings that are already in the
    caption are left out.
    """
    runs: dict[str, list[str]] = {}
    for one in table.results:
        for warning in dict.fromkeys(one.warnings):
            if one.status == "finished" and not any(f"{warning}." in line for line in table.caption):
                place = f"{table.label(one.row)}, {one.column}, seed {one.seed}"
                runs.setdefault(warning, []).append(place)
    lines = []
    for warning, (first, *others) in sorted(runs.items(), key=lambda item: -len(item[1])):
        also = f" and {len(others)} other {'run' if len(others) == 1 else 'runs'}" if others else ""
        lines.append(f"{first}{also}: {warning.rstrip('.')}.")
    left = len(lines) - _MOST_WARNINGS
    lines = [
        *lines[:_MOST_WARNINGS],
        *([f"{left} more warnings: see warnings and stopped in result.json of the runs."] * (left > 0)),
    ]
    return [f"Warnings: {lines[0]}", *lines[1:]] if lines else []


def _bold(table: Table) -> str:
    """Return the sentence that explains bold print in the table; empty if fewer than two rows can be compared."""
    seeds = most_seeds(table)
    if len(set(table.rows) - table.upper_bounds) < 2 or not seeds:
        return ""
    if seeds < FEWEST:
        return f"Bold: the highest mean, without a test, because a confidence interval needs at least {FEWEST} seeds."
    interval = f"Student's t, from {ENOUGH} seeds on BCa bootstrap; not corrected for the number of rows"
    condition = "the 95 % confidence interval of its difference to every other row, paired by seed, excludes 0"
    return f"Bold: the highest mean, if {condition} ({interval})."
