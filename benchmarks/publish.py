"""Write a small copy of a finished table into the gallery: its accuracies, and only the named further measures.

    python benchmarks/publish.py results/fashion_mnist docs/results/robust-fashion-mnist
        [--measures backdoor.success_rate_percent]

The copy is ``table.json`` without the other measures. A table of 1,776 runs then takes a quarter of its size. The
command prints the hours of all runs for ``about.toml``, which is written by hand.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import Any

TABLE = "table.json"


def smaller(table: dict[str, Any], measures: set[str]) -> dict[str, Any]:
    """Return the content of ``table.json`` with only the named ``measures``. Raises ValueError for an unknown one."""
    known = sorted({name for cell in table["cells"] for name in cell["measures"]})
    if unknown := sorted(measures.difference(known)):
        raise ValueError(f"no run has the measure {', '.join(unknown)}: give some of {', '.join(known)}")
    cells = [
        {**cell, "measures": {name: values for name, values in cell["measures"].items() if name in measures}}
        for cell in table["cells"]
    ]
    return {**table, "cells": cells}


def as_text(table: dict[str, Any]) -> str:
    """Return ``table`` as JSON with a line for each cell of the table."""
    return json.dumps(table, separators=(",", ":")).replace('{"row"', '\n{"row"') + "\n"


def hours(directory: Path) -> float:
    """Return the sum of the times of all runs in hours, from ``table.csv``.

    Private runs tell their times rounded up, so the sum is an upper bound if a table has such runs.
    """
    with (directory / "table.csv").open(encoding="utf-8", newline="") as file:
        return sum(float(line["seconds.total"] or 0) for line in csv.DictReader(file)) / 3600


def main() -> None:
    """Write the copy, and print its size and the hours of its runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measures", default="", help="names of measures, separated by commas")
    given = parser.parse_args()
    table = json.loads((given.table / TABLE).read_text(encoding="utf-8"))
    text = as_text(smaller(table, set(filter(None, given.measures.split(",")))))
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / TABLE).write_text(text, encoding="utf-8")
    print(f"{given.folder / TABLE}: {len(text) / 1e6:.2f} MB; all runs took at most {hours(given.table):.1f} hours")


if __name__ == "__main__":
    main()
