"""Modules that are sent along are imported from memory, behind those that are there."""

import importlib
import sys

import pytest

from fl_sim.engines.own_modules import importable

SOURCES = {
    "sent_alone.py": b"from sent_package.inner import NUMBER\n",
    "sent_package/__init__.py": b"",
    "sent_package/inner.py": b"NUMBER = 7\n",
    "json.py": b"raise RuntimeError('this shadows what is there')\n",
}


def test_a_file_and_a_package_are_imported_from_memory_and_shadow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("json", "sent_alone", "sent_package", "sent_package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importable(SOURCES)
    assert importlib.import_module("sent_alone").NUMBER == 7
    assert importlib.import_module("json").dumps(1) == "1"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sent_package.absent")


def test_without_sources_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    importable({})
    assert sys.meta_path == before
