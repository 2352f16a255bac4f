"""The files of a table: for people (Markdown, LaTeX) and for programs (JSON, tidy CSV)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_sim.report.table import Table
from fl_sim.report.table_json import as_json
from fl_sim.report.table_markdown import markdown
from fl_sim.report.tex import latex
from fl_sim.report.tidy import csv_text, rounds_text
from fl_sim.store.files import remove_partial
from fl_sim.store.run_directory import RoundRecord, write_text


def write_table(out: Path, table: Table) -> None:
    """Write ``table.md``, ``table.csv``, ``table.tex`` and ``table.json``, each whole or not at all."""
    remove_partial(out)  # of a table whose process was killed
    write_text(out / "table.md", markdown(table) + "\n")
    write_text(out / "table.csv", csv_text(table))
    write_text(out / "table.tex", latex(table, out.resolve().name) + "\n")
    write_text(out / "table.json", json.dumps(as_json(table), indent=2) + "\n")


def write_rounds(out: Path, table: Table, rounds: Mapping[str, Sequence[RoundRecord]]) -> None:
    """Write ``rounds.csv``. ``rounds``: {directory of a run, as the table has it: its rounds}."""
    write_text(out / "rounds.csv", rounds_text(table, rounds))
