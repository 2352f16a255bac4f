"""Modules of the user's own on workers that do not have them: imported from sources that were sent along."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def importable(sources: Mapping[str, bytes]) -> None:
    """Let modules be imported from ``sources``, {path on the import path: content}, where there are no others.

    They stay in memory: nothing is written.
    """
    if sources:
        sys.meta_path.append(_Sent(sources))


class _Sent(MetaPathFinder, InspectLoader):
    """Finds and loads modules in a dictionary; behind all other finders."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that was sent along."""
        del path, target
        name = self._file(fullname)
        if name is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=f"<sent along: {name}>")

    def get_source(self, fullname: str) -> str:
        """Return a module's source."""
        name = self._file(fullname)
        if name is None:
            raise ImportError(f"{fullname} was not sent along")
        return importlib.util.decode_source(self._sources[name])

    def is_package(self, fullname: str) -> bool:
        """Say whether a module is a package."""
        return (self._file(fullname) or "").endswith("/__init__.py")

    def _file(self, fullname: str) -> str | None:
        stem = fullname.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self._sources), None)
