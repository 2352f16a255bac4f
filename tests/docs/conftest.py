"""What the tests of the documentation share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_sim.store.files import folder_lock

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def build_site() -> Callable[[Path, Path], "subprocess.CompletedProcess[str]"]:
    """Build the site of a project, (project, out), and return what the command answered."""

    def build(project: Path, out: Path) -> "subprocess.CompletedProcess[str]":
        settings = str(project / "docs/site/mkdocs.yml")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", settings, "-d", str(out)]
        return subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
                              timeout=120, check=False)  # fmt: skip

    return build


@pytest.fixture(scope="session")
def site(
    build_site: Callable[[Path, Path], "subprocess.CompletedProcess[str]"], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The site of this checkout, built once for all workers of a run of tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site of the docs"
    folder.mkdir(exist_ok=True)
    with folder_lock(folder):
        if not (folder / "out").exists():
            done = build_site(PROJECT, folder / "being built")
            assert done.returncode == 0, done.stderr
            (folder / "being built").rename(folder / "out")
    return folder / "out"
