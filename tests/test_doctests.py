"""Examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT)
    for package in ("fl_sim", "strategies", "clients", "partitions")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_in_docstrings_are_true(path: Path, tmp_path: Path) -> None:
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    outcome = doctest.testmod(module, extraglobs={"folder": tmp_path / "run"})
    assert outcome.attempted > 0
    assert outcome.failed == 0
