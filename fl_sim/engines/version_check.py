"""The actor that is sent to a node first: it reports the versions there, before anything of ours is imported.

This file travels by value, to nodes that may have another version of it: it imports Python's own modules, and ray.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import ray

PACKAGES = ("fl_sim", "strategies", "clients", "partitions")
LIBRARIES = ("torch", "numpy", "flwr")


class CheckedActor:
    """Lives in a process of Ray: first reports its versions, then handles the messages of a run that they fit."""

    def versions(self, modules: list[str]) -> dict[str, str]:
        """Return the versions on this node: see ``versions``."""
        return versions(modules)

    def start(self, key: bytes, arguments: list[Any]) -> None:
        """Import the program and make the message handler. ``arguments``: references to its own arguments."""
        from fl_sim.engines.ray_actor import MessageHandler  # noqa: PLC0415 (not before the versions are known)
        from fl_sim.engines.remote import Encryption  # noqa: PLC0415

        self._handler = MessageHandler(Encryption(key), *arguments)

    def answer(self, requests: Any, contents: dict[int, Any], files: dict[str, Any]) -> Any:
        """Answer messages: see ``MessageHandler.answer``."""
        return self._handler.answer(requests, contents, files)

    @ray.method(concurrency_group="progress")
    def replies_so_far(self) -> Any:
        """Return the replies of the running call so far; answered while it runs."""
        return self._handler.replies_so_far()


def versions(modules: list[str]) -> dict[str, str]:
    """Return {name: version} of all that may differ from machine to machine and changes numbers.

    ``modules``: those of the user's own, which may be missing: they are sent along.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "fl-sim": _own_version(), "trainer": _trainer()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = "none"
    for module in modules:
        files = source_files(module)
        found[f"module {module}"] = digest_of(files) if files else "none"
    return found


def source_files(module: str) -> dict[str, Path]:
    """Return {path in the import path: file} of a module, of a package all of its sources; empty without one."""
    spec = _spec(module)
    if spec is None:
        return {}
    if spec.submodule_search_locations:
        folders = [Path(folder) for folder in spec.submodule_search_locations]
        return {
            f"{module}/{file.relative_to(folder).as_posix()}": file
            for folder in folders
            for file in sorted(folder.rglob("*.py"))
        }
    return {f"{module}.py": Path(spec.origin)} if spec.origin and spec.origin.endswith(".py") else {}


def digest_of(files: dict[str, Path]) -> str:
    """Return a digest of files and their names."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _own_version() -> str:
    files = {name: file for package in PACKAGES for name, file in source_files(package).items()}
    if not files:
        return "none"
    beginning = files.get("fl_sim/__init__.py")
    number = re.search(r'__version__ = "(.+)"', beginning.read_text()) if beginning else None
    return f"{number[1] if number else 'unknown'} (digest {digest_of(files)})"


def _trainer() -> str:
    """Return a digest of the compiled trainer for this processor: without it PyTorch trains, with other last bits."""
    spec = _spec("fl_sim")
    folders = [Path(folder) / "native" for folder in spec.submodule_search_locations or []] if spec else []
    libraries = [file for folder in folders for file in sorted(folder.glob(f"libkernel-{platform.machine()}.*"))]
    return f"native, digest {digest_of({file.name: file for file in libraries})}" if libraries else "PyTorch's"


def _spec(module: str) -> Any:
    if module in sys.modules and getattr(sys.modules[module], "__spec__", None) is None:
        return None
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
