"""The class of all Ray actors. Before an actor imports this project, it reports the versions on its node.

Ray sends this file's code by value, to nodes that may have another version of the project. Therefore the file imports
the standard library and Ray only.
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
    """A Ray actor that first reports the versions of the software on its node.

    If the driver (the process that runs the server) accepts these versions, the actor then answers messages.
    """

    def versions(self, modules: list[str]) -> dict[str, str]:
        """Return the versions of the software on this actor's node, {name: version}, by the function ``versions``."""
        return versions(modules)

    def start(self, key: bytes, arguments: list[Any]) -> None:
        """Import the project and create the message handler.

        ``key``: the encryption key. ``arguments``: the further arguments of ``MessageHandler``.
        """
        from fl_sim.engines.ray_actor import MessageHandler  # noqa: PLC0415 (not before the versions are known)
        from fl_sim.engines.remote import Encryption  # noqa: PLC0415

        self._handler = MessageHandler(Encryption(key), *arguments)

    def answer(self, requests: Any, contents: dict[int, Any], files: dict[str, Any]) -> Any:
        """Answer messages of the server by the method ``MessageHandler.answer``."""
        return self._handler.answer(requests, contents, files)

    @ray.method(concurrency_group="progress")
    def replies_so_far(self) -> Any:
        """Return the encrypted replies that the running call has made so far. A second thread executes this method."""
        return self._handler.replies_so_far()


def versions(modules: list[str]) -> dict[str, str]:
    """Return the versions of all software that can change a run's numbers: Python, libraries and this project.

    The result is {name: version}. ``modules``: names of the user's own modules. A module may be missing on a node,
    because the driver sends the source of these modules.
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
    """Return the source files of a module or of a whole package, as {path relative to the import path: file}.

    The result is empty if the module cannot be found.
    """
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
    """Return a digest (12 hexadecimal digits of SHA-256) of the names and contents of files."""
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
    """Return a digest of the compiled C++ trainer for this processor.

    Return "PyTorch's" if this trainer is not installed. All nodes must have the same trainer: two trainers, such as the
    compiled trainer and PyTorch, round differently, so their results differ in the last bits.
    """
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
