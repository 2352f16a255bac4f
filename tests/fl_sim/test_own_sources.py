"""The content of the user's own code: a module and what it imports of the user's own, as it was imported."""

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_sim.own_sources import digests, edited


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; what a test imports from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("own_")]:
        del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "line",
    [
        "import own_helper",
        "from own_helper import factor",
        "def later():\n    import own_helper",
        "import importlib\ndef later():\n    return importlib.import_module('own_helper')",
        "from own_middle import *",
        "from own_package import part",
        "import own_package.part",
    ],
)
def test_what_a_module_imports_of_the_users_own_counts_wherever_it_does_so(code: Path, line: str) -> None:
    write(code, own_mine=line, own_helper="factor = 1", own_middle="from own_helper import factor")
    (code / "own_package").mkdir()
    (code / "own_package" / "__init__.py").write_text("")
    (code / "own_package" / "part.py").write_text("from ..own_none import x\nfrom . import deeper\nimport own_helper")
    (code / "own_package" / "deeper.py").write_text("")
    before = digests(["own_mine"])
    assert before["own_mine"] == sha(code / "own_mine.py")
    assert before["own_helper"] == sha(code / "own_helper.py")
    assert ("own_package.deeper" in before) == ("own_package" in line)
    write(code, own_helper="factor = 2")
    assert {name for name in before if digests(["own_mine"])[name] != before[name]} == {"own_helper"}


def test_installed_packages_and_fl_sim_are_nobodys_own(code: Path) -> None:
    write(
        code, own_mine="import json, numpy, torch\nfrom fl_sim.params import add\nfrom strategies.fedavg import FedAvg"
    )
    assert set(digests(["own_mine", "torch", "fl_sim.params", "no_such_module"])) == {"own_mine"}


def test_code_counts_as_it_was_imported_and_an_edit_since_is_known(code: Path) -> None:
    write(code, own_mine="import own_helper", own_helper="factor = 1")
    importlib.import_module("own_mine")
    before = digests(["own_mine"])
    assert edited(["own_mine"]) == []
    write(code, own_helper="factor = 2")
    assert digests(["own_mine"]) == before
    assert edited(["own_mine"]) == [str(code / "own_helper.py")]
    importlib.invalidate_caches()
    importlib.reload(sys.modules["own_helper"])
    assert digests(["own_mine"])["own_helper"] == sha(code / "own_helper.py")
    assert edited(["own_mine"]) == []


def test_a_script_has_no_digest(code: Path) -> None:
    assert digests(["__main__"]) == {"__main__": ""}
