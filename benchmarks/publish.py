"""Write a small copy of a finished table into the gallery: its accuracies, and only the named further measures.

    python benchmarks/publish.py results/fashion_mnist docs/results/robust-fashion-mnist
        [--measures backdoor.success_rate_percent]

The copy is ``table.json`` without the other measures. A table of 1,776 runs then takes a quarter of its size. The
command prints the hours of all runs for ``about.toml``, which is written by hand.
"""

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path

from fl_sim.report.runs import TABLE, read_json_table
from fl_sim.report.table import Table
from fl_sim.report.table_files import as_json


def smaller(table: Table, measures: tuple[str, ...]) -> Table:
    """Return ``table`` with only the named ``measures`` of its runs. Raises ValueError for one that no run has."""
    known = sorted({name for one in table.results for name in one.measures})
    if unknown := sorted(set(measures) - set(known)):
        raise ValueError(f"no run has the measure {', '.join(unknown)}: give some of {', '.join(known)}")
    runs = (
        replace(one, measures={name: one.measures[name] for name in measures if name in one.measures})
        for one in table.results
    )
    return replace(table, results=tuple(runs))


def write(table: Table, folder: Path) -> int:
    """Write ``table`` as ``table.json`` into ``folder``, and return the number of bytes."""
    content = {**as_json(table), "caption": list(table.caption)}  # of an older version, as that version wrote it
    text = json.dumps(content, separators=(",", ":")).replace('{"row"', '\n{"row"') + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / TABLE).write_text(text, encoding="utf-8")


def hours(directory: Path) -> float:
    """Return the sum of the times of all runs in hours, from ``table.csv``."""
    with (directory / "table.csv").open(encoding="utf-8", newline="") as file:
        return sum(float(line["seconds.total"] or 0) for line in csv.DictReader(file)) / 3600


def main() -> None:
    """Write the copy, and print its size and the hours of its runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measures", default="", help="names of measures, separated by commas")
    given = parser.parse_args()
    table = smaller(read_json_table(given.table), tuple(filter(None, given.measures.split(","))))
    size = write(table, given.folder)
    print(f"{given.folder / TABLE}: {size / 1e6:.2f} MB, {len(table.results):,} runs, {hours(given.table):.1f} hours")


if __name__ == "__main__":
    main()
