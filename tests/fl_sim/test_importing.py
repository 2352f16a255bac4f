"""What Python need not search for garbage, and that nobody counts it."""

import gc
import sys
from pathlib import Path
from threading import Event

import pytest

from fl_sim import importing


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is asked of the garbage collector, in a process that has left nothing out."""
    asked: list[str] = []
    for name in ("freeze", "unfreeze", "get_freeze_count"):
        monkeypatch.setattr(gc, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(importing, "_EXCLUDED", Event())
    return asked


def test_what_there_is_before_a_run_is_searched_again_after_it(searched: list[str]) -> None:
    with importing.settled():
        assert searched == ["freeze"]
    assert searched == ["freeze", "unfreeze"]


def test_what_was_imported_for_good_stays_left_out_and_is_not_counted(searched: list[str]) -> None:
    importing.leave_out()
    with importing.settled():
        pass
    assert searched == ["freeze"]  # counting a million objects takes a tenth of a second, in every run


def test_a_lazy_module_is_imported_at_the_first_use_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("NUMBER = 3")
    monkeypatch.syspath_prepend(tmp_path)
    late = importing.LazyModule("imported_late")
    assert "imported_late" not in sys.modules
    assert late.NUMBER == 3
    assert sys.modules.pop("imported_late").NUMBER == 3
