"""What the default selection of tests leaves out is run by CI, or said to be left out."""

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
LEFT_OUT = {"slow"}
"""Marked tests that CI does not run."""


def test_ci_runs_whatever_is_not_selected_by_default() -> None:
    options = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    [selected] = re.findall(r"-m '(.*?)'", options)
    deselected = set(re.findall(r"not (\w+)", selected))
    assert selected == " and ".join(f"not {marker}" for marker in re.findall(r"not (\w+)", selected))
    commands = (PROJECT / ".ci/run").read_text()
    [chosen] = re.findall(r'^\S*python -m pytest -m "\((.*)\) and not slow"$', commands, re.MULTILINE)
    assert set(chosen.split(" or ")) == deselected - LEFT_OUT == {"cluster", "long"}


def test_each_file_that_conftest_lists_is_there(request: pytest.FixtureRequest) -> None:
    [lists] = [plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "LONGEST")]
    listed = *lists.LONG, *lists.LONGEST, *lists.COVERED_ELSEWHERE
    assert [name for name in listed if not (PROJECT / "tests" / name).exists()] == []


def test_ci_installs_the_browser_that_the_tests_of_the_page_need_before_it_runs_them() -> None:
    commands = (PROJECT / ".ci/run").read_text()
    [asked] = re.finditer(r"^command -v chromium .*\|\| (\w+)\+=\(chromium\)$", commands, re.MULTILINE)
    [installed] = re.finditer(rf'apt-get .*install -y "\$\{{{asked[1]}\[@\]\}}"', commands)
    [waited] = re.finditer(r"^wait$", commands, re.MULTILINE)
    used = commands.index('python -m pytest -m "(cluster or long) and not slow"')
    assert asked.end() < installed.start() < waited.start() < used
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(one.startswith("playwright") for one in extras["dev"])
