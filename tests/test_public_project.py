"""What a public project promises: its public names, its tested versions, its workflow files, its release script."""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
OURS = ("fl_sim", "strategies", "clients", "partitions")
PUBLIC = set(re.findall(r"^ +- `([\w.]+)`$", (PROJECT / "docs/public-api.md").read_text(), re.MULTILINE))


def imports_in(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{one.name}" for one in node.names} & PUBLIC  # from fl_sim.engines import wire
            found |= inside or {node.module}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


def test_every_public_module_can_be_imported() -> None:
    assert len(PUBLIC) > 20
    for name in PUBLIC:
        importlib.import_module(name)


def test_plug_ins_of_the_examples_and_of_the_recipes_need_public_modules_alone() -> None:
    codes = [path.read_text() for path in (PROJECT / "examples").rglob("*.py")]
    recipes = "\n".join(path.read_text() for path in sorted((PROJECT / "docs/adding").glob("*.md")))
    codes += [block for block in re.findall(r"```python\n(.*?)```", recipes, re.DOTALL) if "..." not in block]
    used = {name for code in codes for name in imports_in(code)} - {"fl_sim"}
    of_algorithms = {name for name in used if name.split(".")[0] == "strategies"}
    assert used - of_algorithms - PUBLIC == set()
    assert {"strategies.algorithm", "fl_sim.types", "clients.client_task"} <= used


def test_every_dependency_has_a_tested_version_that_its_limits_allow() -> None:
    lines = (PROJECT / ".ci/constraints.txt").read_text().splitlines()
    tested = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    wanted = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["project"]["optional-dependencies"]["dev"]]
    for text in wanted:
        needed = Requirement(text)
        version = tested.get(needed.name.lower().replace("_", "-"))
        assert version is not None, f"{needed.name}: write .ci/constraints.txt anew (pip freeze)"
        assert version in needed.specifier, text


def test_workflows_run_what_ci_runs_on_the_pythons_that_the_page_names() -> None:
    workflow = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    for wanted in (".ci/check", ".ci/release --dry-run", "(cluster or long) and not slow", "fl-sim doctor"):
        assert any(wanted in command for command in commands), wanted
    pythons = workflow["jobs"]["fast"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
    assert "Python 3.12 to 3.14" in (PROJECT / "docs/public-api.md").read_text()
    for path in (PROJECT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(path.read_text()), path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what the release script looks at first."""
    for name in (".ci/release", "fl_sim/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROJECT / name, tmp_path / name)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *command: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *settings, *command], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "all")


def test_a_release_is_refused_with_changes_without_notes_and_twice(checkout: Path) -> None:
    def refused() -> str:
        done = subprocess.run([".ci/release"], cwd=checkout, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        return done.stderr

    version = importlib.import_module("fl_sim").__version__
    (checkout / "CHANGELOG.md").write_text(f"# Changes\n\n## {version} (not released yet)\n")
    assert "the checkout has changes: commit them first" in refused()
    commit(checkout)
    assert f"CHANGELOG.md has no heading '## {version} (DATE)'" in refused()
    (checkout / "CHANGELOG.md").write_text(f"# Changes\n\n## {version} (2030-01-02)\n")
    commit(checkout)
    git(checkout, "tag", f"v{version}")
    assert f"the tag v{version} is there already" in refused()


def test_the_release_script_looks_for_no_modules_on_the_path_of_its_caller(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin/python"
    stub.write_text('#!/bin/sh\necho "PYTHONPATH ${PYTHONPATH-is not set}" >&2\nexit 1\n')
    stub.chmod(0o755)
    searched = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "PYTHONPATH": "/another/checkout"}
    command = [".ci/release", "--dry-run"]
    done = subprocess.run(command, cwd=checkout, env=searched, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "PYTHONPATH is not set\n")


def test_a_wrong_option_of_the_release_script_is_named(checkout: Path) -> None:
    done = subprocess.run([".ci/release", "--dry"], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: .ci/release [--dry-run]\n")


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="not a checkout of git")
def test_a_clone_without_the_history_is_as_small_as_contributing_says(tmp_path: Path) -> None:
    said = re.search(r"`git clone --depth 1` downloads (\d+) MB", (PROJECT / "CONTRIBUTING.md").read_text())
    subprocess.run(["git", "clone", "-q", "--bare", "--depth", "1", PROJECT.as_uri(), tmp_path / "clone"], check=True)
    size = sum(path.stat().st_size for path in (tmp_path / "clone").rglob("*") if path.is_file())
    assert said is not None
    assert size < 1e6 * (int(said[1]) + 0.5)
