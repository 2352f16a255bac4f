"""All that is public says what it is: modules, classes, functions, methods, and the fields on the interface's page."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import fl_sim

PROJECT = Path(__file__).parents[2]
PACKAGES = ("fl_sim", "strategies", "clients", "partitions", "examples")
NAMES = re.findall(r"^::: ([\w.]+)$", (PROJECT / "docs/api.md").read_text(), re.MULTILINE)


def public(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, node) of a module or class and of all that is public in it."""
    yield where, node
    for inner in getattr(node, "body", []):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
            name = f"{where}.{inner.name}"
            if isinstance(inner, ast.ClassDef):
                yield from public(inner, name)
            else:
                yield name, inner


def test_everything_public_has_a_docstring() -> None:
    found = [
        (name, ast.get_docstring(node))
        for package in PACKAGES
        for path in sorted((PROJECT / package).rglob("*.py"))
        for name, node in public(ast.parse(path.read_text()), path.relative_to(PROJECT).as_posix())
    ]
    assert len(found) > 1000
    assert [name for name, text in found if not text] == []


def test_lint_asks_for_docstrings_everywhere_but_in_tests() -> None:
    lint = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "D" in lint["select"]
    assert {rule for rule in lint["ignore"] if rule.startswith("D")} <= {"D105", "D107", "D203", "D213"}
    assert [path for path, rules in lint["per-file-ignores"].items() if "D" in rules] == ["tests/**"]


def test_the_page_has_every_public_name() -> None:
    assert {f"fl_sim.{name}" for name in fl_sim.__all__ if not name.startswith("_")} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_the_page_explains_itself(name: str) -> None:
    module, _, last = name.rpartition(".")
    found: Any = getattr(importlib.import_module(module), last)
    text = found.__doc__
    assert text
    if is_dataclass(found) and isinstance(found, type):
        silent = [field.name for field in fields(found) if not re.search(rf"``{field.name}\b", text)]
        assert silent == []
