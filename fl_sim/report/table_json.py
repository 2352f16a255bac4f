"""``table.json``: a table for programs, in percent where a name does not say otherwise."""

from dataclasses import asdict
from typing import Any

from fl_sim.report.measures import mean_and_deviation
from fl_sim.report.table import Lead, SeedResult, Table, lead, notes, percentages

VERSION = 2
"""Of ``table.json``. Version 1 has no ``version``, no ``measures`` and no ``difference``, and is read all the same."""


def as_json(table: Table) -> dict[str, Any]:
    """Return the table for programs: means, deviations and values in percent; lists in the order of ``seeds``.

    Where a row and a column have no run together, there is no cell.
    """
    leads = {column: lead(table, column, "last") for column in table.columns}
    places = [(row, column) for row in table.rows for column in table.columns if table.at(row, column)]
    cells = [_cell_json(table, row, column, leads[column]) for row, column in places]
    return {
        "version": VERSION,
        "unit": "percent",
        "rows": list(table.rows),
        "columns": list(table.columns),
        "upper_bounds": [row for row in table.rows if row in table.upper_bounds],
        "cells": cells,
        "caption": notes(table),
        "bill": None if table.bill is None else list(table.bill),
        "settings": dict(table.settings),
        **({"tuning": list(table.tuning)} if table.tuning else {}),
    }


def _cell_json(table: Table, row: str, column: str, ahead: Lead) -> dict[str, Any]:
    results = table.at(row, column)
    mean, deviation = mean_and_deviation(percentages(results, "last"))
    best_mean, best_deviation = mean_and_deviation(percentages(results, "best"))
    found = ahead.others.get(row)
    states = {result.status for result in results}
    return {
        "row": row, "column": column,
        "mean": mean, "std": deviation, "best_mean": best_mean, "best_std": best_deviation,
        "seeds": [result.seed for result in results],
        "values": [result.accuracy("last") for result in results],
        "best_values": [result.accuracy("best") for result in results],
        "status": next(state for state in ("failed", "missing", "finished") if state in states or state == "finished"),
        "statuses": [result.status for result in results],
        "errors": [result.error for result in results if result.error],
        "guarantee": bool(results) and all(result.guarantee for result in results),
        "dir": [result.directory for result in results],
        "difference": {"to": ahead.row, **asdict(found)} if found else None,
        "measures": _measures(results),
    }  # fmt: skip


def _measures(results: list[SeedResult]) -> dict[str, list[float | None]]:
    """Return {measure: a value a seed}, but for times: the same runs give the same table. ``table.csv`` has those."""
    names = dict.fromkeys(name for one in results for name in one.measures if "seconds" not in name.split("."))
    return {name: [one.measures.get(name) for one in results] for name in names}
