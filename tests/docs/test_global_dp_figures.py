"""The figures of the tutorial on Global DP are those of the gallery's tables."""

import json
import statistics
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def _figures(table: str) -> list[str]:
    """Return mean and deviation over seeds of each row, MNIST's column, as the tutorial writes them."""
    cells = json.loads((DOCS / "results" / table / "table.json").read_text(encoding="utf-8"))["cells"]
    values = [cell["values"] for cell in cells if cell["column"].startswith("MNIST")]
    assert all(len(one) == 3 for one in values)
    return [f"{statistics.mean(one):.1f} ± {statistics.stdev(one):.1f}" for one in values]


@pytest.mark.parametrize(("table", "number"), [("global-dp-pixels", 4), ("global-dp-features", 2)])
def test_every_row_of_the_table_is_told_as_it_is(table: str, number: int) -> None:
    page, figures = " ".join((DOCS / "tutorials" / "global-dp.md").read_text(encoding="utf-8").split()), _figures(table)
    assert len(figures) == number
    assert [figure for figure in figures if figure not in page] == []
