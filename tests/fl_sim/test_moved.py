"""Old import paths: they lead to what has moved, and say where it is."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

from fl_sim.moved import MOVED, MOVED_NAMES


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_leads_to_the_new_module_and_names_it(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (old, old.rpartition(".")[0]):
        if name in MOVED:
            monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert any(str(one.message).startswith(f"{old} has moved to {MOVED[old]}: import {MOVED[old]}") for one in told)
    assert {one.category for one in told} == {DeprecationWarning}
    assert found is importlib.import_module(MOVED[old])
    assert found.__name__ == MOVED[old]
    assert found.__spec__ is not None
    assert found.__spec__.name == MOVED[old]


def test_nothing_is_at_an_old_path_any_more() -> None:
    top = Path(__file__).resolve().parents[2]
    for old in MOVED:
        path = top / old.replace(".", "/")
        assert not path.with_suffix(".py").exists()
        assert not (path / "__init__.py").exists()


def test_what_is_nowhere_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fl_sim\.nowhere"):
        importlib.import_module("fl_sim.nowhere")


@pytest.mark.parametrize(("old", "name"), [(old, name) for old, names in MOVED_NAMES.items() for name in names])
def test_a_name_that_has_moved_is_found_with_a_warning(old: str, name: str) -> None:
    module, new = importlib.import_module(old), MOVED_NAMES[old][name]
    assert name not in vars(module), "it would be found without a warning"
    with pytest.warns(DeprecationWarning, match=rf"^{old}\.{name} has moved: from {new} import {name},"):
        found = getattr(module, name)
    assert found.__name__ == name
    assert found.__module__ == new


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_a_name_that_was_never_there_is_not_found(old: str) -> None:
    with pytest.raises(AttributeError, match=rf"module '{old}' has no attribute 'nothing'"):
        importlib.import_module(old).nothing  # noqa: B018
