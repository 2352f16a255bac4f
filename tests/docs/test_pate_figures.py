"""The accuracies of PATE-G in the docs are those of the gallery's table."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["tutorials/pate.md", "faq.md"])
def test_pate_g_is_told_as_it_is(page: str) -> None:
    cells = json.loads((DOCS / "results/pate-mnist-pate-g/table.json").read_text(encoding="utf-8"))["cells"]
    told = ", ".join(f"{accuracy:.1f}" for cell in cells for accuracy in cell["values"])
    assert len(cells) == 3
    assert f"{told} %" in " ".join((DOCS / page).read_text(encoding="utf-8").split())
