"""What is installed: a wheel that needs no compiler, a source distribution, and Flower's app bundle."""

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fl_sim.native.compiling import LIBRARY, SOURCES_DIGEST, lanes_of, processor, sources_digest
from fl_sim.native.kernel import load_kernel

PROJECT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
ROOMS = ("fl_sim", "strategies", "clients", "partitions")
NEWEST_GLIBC = 34
"""Of manylinux_2_34: Debian 12, Ubuntu 22.04, RHEL 9, and all that came later."""

PLAIN = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "CXX"}} | {
    "SOURCE_DATE_EPOCH": "1700000000"
}

MODULES = {"Flower": "flwr", "PyTorch": "torch", "Opacus": "opacus", "Ray": "ray"}


def test_what_the_readme_says_we_build_on_is_a_dependency_and_is_imported() -> None:
    readme = " ".join((PROJECT / "README.md").read_text().split())
    [named] = re.findall(r"[Bb]uilt on ([^.]*)\.", readme)
    names = re.split(r", | and ", named)
    assert len(names) >= 4
    needed = {re.split(r"[\[<>=]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    sources = [path.read_text() for room in ROOMS for path in (PROJECT / room).rglob("*.py")]
    for module in (MODULES[name] for name in names):
        assert module in needed
        assert any(re.search(rf"^\s*(from|import) {module}\b", text, re.MULTILINE) for text in sources), module


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower with a newer pathspec
def test_flowers_app_bundle_holds_what_runs_and_nothing_else(tmp_path: Path) -> None:
    for name in ("README.md", "LICENSE", "pyproject.toml", ".gitignore"):
        shutil.copy(PROJECT / name, tmp_path)
    for room in (*ROOMS, "examples"):
        shutil.copytree(PROJECT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "results/run").mkdir(parents=True)
    for left in ("results/run/config.toml", "tests.py", "fl_sim/test_one.py", "results/page.md"):
        (tmp_path / left).write_text("")
    bundle = build_fab_from_disk(tmp_path)
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    code = {path.relative_to(PROJECT).as_posix() for room in ROOMS for path in (PROJECT / room).rglob("*.py")}
    tables = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "fl_sim").rglob("*.toml")}
    assert names == {"pyproject.toml", ".info/CONTENT", "LICENSE", "README.md", *code, *tables}
    assert PYPROJECT["tool"]["flwr"]["app"]["fab-format-version"] == 1
    with zipfile.ZipFile(io.BytesIO(bundle)) as file:
        project = tomllib.loads(file.read("pyproject.toml").decode())["project"]
    assert project["entry-points"] == PYPROJECT["project"]["entry-points"]  # the names of kinds, where it runs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution of the checkout, and in ``one`` and ``two`` the wheels made from it."""
    pytest.importorskip("hatchling")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("built")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], PROJECT)
    [archive] = folder.glob("*.tar.gz")
    for name in ("one", "two"):
        (folder / f"from-{name}").mkdir()
        run(["tar", "-xzf", str(archive), "-C", str(folder / f"from-{name}")], folder)
        [source] = (folder / f"from-{name}").iterdir()
        environment = PLAIN if name == "one" else {**PLAIN, **compiler_that_takes_the_installed_kernel(folder)}
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / name)], source, environment)
    return folder


def compiler_that_takes_the_installed_kernel(folder: Path) -> dict[str, str]:
    """Return the environment variable of a stand-in compiler, which copies the kernel of this checkout's installation.

    That kernel was compiled in another folder and at another time, so it counts as the second compilation, and a minute
    is saved. The result is empty, and the kernel is compiled again, if the checkout's kernel is missing, is from other
    sources, or may be from another compiler.
    """
    is_current = LIBRARY.exists() and load_kernel()[0] is not None and sources_digest() == SOURCES_DIGEST
    if not is_current or "CXX" in os.environ:
        return {}
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && cp '{LIBRARY}' \"$2\"; shift; done; true\n")
    compiler.chmod(0o755)
    return {"CXX": str(compiler)}


def run(command: list[str], folder: Path, environment: Mapping[str, str] = PLAIN) -> str:
    """Run ``command`` in ``folder``, and return what it printed."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.cluster
def test_two_builds_give_the_same_bytes_and_hold_the_compiled_trainer(built: Path) -> None:
    one, two = ([*(built / name).iterdir()] for name in ("one", "two"))
    assert [path.name for path in one] == [
        f"fl_sim-{PYPROJECT['project']['version']}-py3-none-linux_{platform.machine()}.whl"
    ]
    assert [digest(path) for path in one] == [digest(path) for path in two]
    names = zipfile.ZipFile(one[0]).namelist()
    assert f"fl_sim/native/{LIBRARY.name}" in names
    assert [name for name in names if name.endswith(".so")] == [f"fl_sim/native/{LIBRARY.name}"]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(ROOMS)


@pytest.mark.cluster
def test_auditwheel_finds_the_wheel_fit_for_other_linuxes(built: Path) -> None:
    pytest.importorskip("auditwheel")
    [wheel] = (built / "one").iterdir()
    said = " ".join(run([sys.executable, "-m", "auditwheel", "show", str(wheel)], built).split())
    [version] = re.findall(
        r'consistent with the following platform tag: "manylinux_2_(\d+)_' + platform.machine() + '"', said
    )
    assert int(version) <= NEWEST_GLIBC, said


@pytest.mark.cluster
def test_where_there_is_no_compiler_the_installed_wheel_trains_natively(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, into which nothing is installed but the wheel; dependencies are this one's."""
    if not lanes_of(processor()):
        pytest.skip("a processor without AVX2")
    [wheel] = (built / "one").iterdir()
    run([sys.executable, "-m", "venv", str(tmp_path / "venv")], tmp_path)
    python = tmp_path / "venv/bin/python"
    run([str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], tmp_path)
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # behind the wheel's own folder
    without_compiler = {"PATH": str(tmp_path / "venv/bin"), "HOME": str(tmp_path), "FL_SIM_OFFLINE": "1"}
    assert all(
        shutil.which(name, path=without_compiler["PATH"]) is None for name in ("cc", "gcc", "g++", "c++", "clang++")
    )
    found = run([str(python), "-c", "import fl_sim; print(fl_sim.__file__)"], tmp_path, without_compiler)
    assert Path(found.strip()).is_relative_to(site)
    said = run(["fl-sim", "run", "data=digits", "rounds=1", "device=cpu"], tmp_path, without_compiler)
    assert "native trainer" in said
    assert "PyTorch trains" not in said
    assert "accuracy" in said


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
