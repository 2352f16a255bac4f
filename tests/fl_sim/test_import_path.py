"""Import paths: the current folder serves, and every mistake is one line that says which and what is wanted."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_sim.errors import UserError
from fl_sim.import_path import load_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a user's modules in it; what a test imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name, text in {
        "users_fine.py": "def build(): return 7\nnumber = 3\n",
        "users_empty.py": "",
        "users_needy.py": "import users_absent\n",
        "users_raising.py": "raise ValueError('first line\\nsecond line ' + 1000 * 'x')\n",
        "users_leaving.py": "import sys; sys.exit(3)\n",
        "users_broken.py": "def build(:\n",
    }.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


def test_a_module_in_the_current_folder_serves_and_hides_nothing_that_is_installed(here: Path) -> None:
    assert load_object("users_fine:build", "model")() == 7
    assert load_object("users_fine:number", "model") == 3
    assert sys.path.count(str(here)) == 1
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_fine", "is no import path: write package.module:name, for example mine:model"),
        (":build", "is no import path"),
        ("users_fine:", "is no import path"),
        ("..up:build", "is no import path"),
        ("users_fine.py:build", "there is no module 'users_fine.py', neither in the current folder"),
        ("users_nowhere:build", "there is no module 'users_nowhere', neither in the current folder"),
        ("users_fine:bild", r"module 'users_fine' \(.*users_fine.py\) has no 'bild'; did you mean 'build'\?"),
        ("users_fine:zzz", "has no 'zzz'; its names are build, number"),
        ("users_empty:build", "has no 'build'; its names are none"),
        ("users_needy:build", "ModuleNotFoundError: No module named 'users_absent'; mend the module"),
        ("users_raising:build", "ValueError: first line second line xxx"),
        ("users_leaving:build", "SystemExit: 3"),
        ("users_broken:build", "SyntaxError: "),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line(here: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_object(path, "model")
    assert str(caught.value).startswith(f"model {path!r} ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
