"""What a table tells besides accuracies: what it took to get somewhere, and further measures after the last round."""

from typing import Final

from fl_sim.report.measures import LADDER, mean_and_deviation
from fl_sim.report.table import Grid, Table, spread_text

_MEGABYTE: Final = 1e6
_FURTHER: Final = {
    "accuracy_of_last_ten_percent": "Mean accuracy of the last ten rounds, in percent",
    "balanced_accuracy_percent": "Balanced accuracy after the last round, in percent",
    "macro_f1_percent": "Macro-F1 after the last round, in percent",
    "auc_percent": "AUC after the last round, in percent",
    "client_worst_tenth_percent": "Accuracy of the worst tenth of the clients after the last round, in percent",
}


def targets(table: Table) -> Grid | None:
    """Return rounds, MB and virtual seconds to an accuracy: for each column the highest that all of some row reached.

    A row that not all of its runs got there with tells the mean of those that did, and how many they were.
    """
    chosen = {column: _highest(table, column) for column in table.columns}
    columns = [column for column, accuracy in chosen.items() if accuracy is not None]
    if not columns:
        return None
    heads = [f"{column}, {chosen[column]} %" for column in columns]
    rows = [(row, [_taken(table, row, column, chosen[column]) for column in columns]) for row in table.rows]
    timed = any(name.endswith(".virtual_seconds") for one in table.results for name in one.measures)
    clock = ", virtual seconds" if timed else ""
    return Grid(f"Rounds to a test accuracy{clock}, and MB from and to all clients until then", heads, rows)


def further(table: Table) -> list[Grid]:
    """Return a grid for each further measure that any run has."""
    return [
        Grid(title, table.columns, [(row, _cells(table, row, name)) for row in table.rows])
        for name, title in _FURTHER.items()
        if any(name in one.measures for one in table.results)
    ]


def _cells(table: Table, row: str, name: str) -> list[str]:
    places = [table.at(row, column) for column in table.columns]
    return [
        spread_text([one.measures[name] for one in results if name in one.measures], len(results)) for results in places
    ]


def _highest(table: Table, column: str) -> str | None:
    """Return the highest accuracy that all runs of a row that competes reached, as its name has it."""
    for accuracy in (f"{100 * step:g}" for step in reversed(LADDER)):
        for row in table.rows:
            results = table.at(row, column)
            if row not in table.upper_bounds and results and all(_round(accuracy) in one.measures for one in results):
                return accuracy
    return None


def _taken(table: Table, row: str, column: str, accuracy: str | None) -> str:
    results = table.at(row, column)
    there = [one.measures for one in results if accuracy and _round(accuracy) in one.measures]
    if not there or accuracy is None:
        return f"- (0 of {len(results)})"
    rounds, _ = mean_and_deviation([one[_round(accuracy)] for one in there])
    sent, _ = mean_and_deviation([one[_bytes(accuracy)] / _MEGABYTE for one in there if _bytes(accuracy) in one])
    virtual = [one[name] for one in there if (name := f"reached.{accuracy}.virtual_seconds") in one]
    text = f"{rounds:g}" if len(there) == 1 else f"{rounds:.1f}"
    text += f", {mean_and_deviation(virtual)[0]:.4g} s" if virtual else ""
    megabytes = "" if sent is None else f", {sent:.3g} MB"
    return text + megabytes + ("" if len(there) == len(results) else f" ({len(there)} of {len(results)})")


def _round(accuracy: str) -> str:
    return f"reached.{accuracy}.round"


def _bytes(accuracy: str) -> str:
    return f"reached.{accuracy}.bytes"
