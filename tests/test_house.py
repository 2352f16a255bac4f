"""Who knows which feature, and plain words: the counts only go down."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def house(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The script that counts, once for all tests: it parses every module."""
    return load_benchmark("house")


def test_no_more_files_know_a_feature_that_is_not_theirs(house: ModuleType) -> None:
    found = {feature: len(files) for feature, files in house.foreign(PROJECT).items()}
    most = {"DA-FL": 1, "Global DP": 5, "compression": 1, "CCVR, AFL": 1, "private start": 0, "devices": 0,
            "BatchNorm": 0, "PATE": 1, "TSTR": 0, "attacks": 0}  # fmt: skip
    assert {feature: count for feature, count in found.items() if count > most[feature]} == {}


def test_general_code_asks_for_no_concrete_kind(house: ModuleType) -> None:
    assert house.asked_by_kind(PROJECT) == []


def test_docstrings_name_a_thing_and_no_clause(house: ModuleType) -> None:
    found, clauses = 0, []
    for name, tree in house.modules(PROJECT):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += 1
                if re.match(r"(Return|Say|Yield|Give)s? (of )?(what|who|how|whether|which|where|when|why)\b", text):
                    clauses.append(f"{name}: {text.splitlines()[0]}")
    assert found > 3000
    assert len(clauses) <= 0.03 * found, clauses


def test_a_class_name_has_one_meaning(house: ModuleType) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in house.modules(PROJECT):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_docs_have_at_most_45_000_words() -> None:
    assert sum(len(page.read_text().split()) for page in (PROJECT / "docs").rglob("*.md")) <= 45_000


@pytest.mark.parametrize(
    ("text", "pairs", "asked"),
    [
        ("import numpy\n", 0, 0),
        ("from strategies.global_dp import GlobalDP\n", 1, 0),
        ("from strategies.global_dp import GlobalDP\n\n\ndef f(x):\n    return isinstance(x, GlobalDP | int)\n", 1, 1),
        ("import clients.dafl.settings\n", 1, 0),
    ],
)
def test_a_module_that_knows_a_feature_is_counted(
    house: ModuleType, tmp_path: Path, text: str, pairs: int, asked: int
) -> None:
    for package in house.TOPS:
        (tmp_path / package).mkdir()
    (tmp_path / "fl_sim" / "new.py").write_text(text)
    assert sum(map(len, house.foreign(tmp_path).values())) == pairs
    assert len(house.asked_by_kind(tmp_path)) == asked
    assert house.size(tmp_path)[0] == 1


def test_reports_name_no_measure_of_a_stage() -> None:
    """Titles and comparisons of such measures are the stage's own (Stage.titles, Stage.compared)."""
    found = [
        f"{path.name}:{node.lineno}"
        for room in ("report", "tracking")
        for path in (PROJECT / "fl_sim" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "personal." in node.value
    ]
    assert found == []
