"""The content of the user's own code: the modules that import paths name, and what these import of the user's own.

Neither installed packages nor fl-sim itself are the user's own. A module counts as this process imported it.
"""

import ast
import hashlib
import importlib.machinery
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

MAIN: Final = "__main__"
"""The module of a script or notebook itself, whose code changes from one line to the next: its digest is empty."""

_OURS: Final = frozenset({"fl_sim", "strategies", "clients", "partitions"})
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

_imported: dict[str, tuple[Any, str]] = {}  # {module: (its spec, which a reload replaces; digest of what was imported)}


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return {module: SHA-256 of its source} of ``modules`` that are the user's own, and of what they import of these.

    A module that this process has imported has the digest that it had then.
    """
    return {name: _as_imported(name, path) if path else "" for name, path in _with_imports(modules)}


def edited(modules: Iterable[str]) -> list[str]:
    """Return the files, of those that ``digests`` is about, that have changed since this process imported them."""
    return [str(path) for name, path in _with_imports(modules) if path and _as_imported(name, path) != _digest(path)]


def remember(module: str) -> None:
    """Note what was imported just now, before anybody edits it."""
    known = _imported.get(module)
    if known is None or known[0] is not _spec(module):
        digests([module])


def _with_imports(modules: Iterable[str]) -> Iterator[tuple[str, Path | None]]:
    """Give the user's own modules among ``modules``, and among what these import, with their files; each once."""
    waiting, seen = sorted(set(modules)), set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name == MAIN:
            yield name, None
        elif path := _file_of(name):
            yield name, path
            waiting += _imports(name, path)


def _imports(name: str, path: Path) -> list[str]:
    parents = [name.rsplit(".", up)[0] for up in range(1, name.count(".") + 1)]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    return [*parents, *_imported_in(path.read_bytes(), package)] if path.suffix == ".py" else parents


def _as_imported(name: str, path: Path) -> str:
    spec = _spec(name)
    if spec is None:  # not imported yet
        return _digest(path)
    known = _imported.get(name)
    if known is None or known[0] is not spec:
        known = _imported[name] = (spec, _digest(path))
    return known[1]


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1024)
def _imported_in(source: bytes, package: str) -> tuple[str, ...]:
    """Return the modules that ``source`` may import, wherever in it, and the names that may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _base(module or "", package, level)
                found += [base, *(f"{base}.{name.name}" for name in names)]
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _is_import(node.func):
                found.append(name)
    return tuple(dict.fromkeys(name for name in found if all(part.isidentifier() for part in name.split("."))))


def _base(module: str, package: str, level: int) -> str:
    """Return what ``from`` and ``level`` dots speak of in a module of ``package``."""
    if not level:
        return module
    above = package.split(".")[: package.count(".") + 2 - level]
    return ".".join([*above, *([module] if module else [])])


def _is_import(called: ast.expr) -> bool:
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in {"import_module", "__import__"}


def _file_of(name: str) -> Path | None:
    """Return the file of a module of the user's own; None for all others, and for what is no module."""
    top = name.partition(".")[0]
    if top in _OURS or top in sys.stdlib_module_names:
        return None
    origin = getattr(sys.modules.get(name), "__file__", None)
    found = [Path(origin)] if origin else _candidates(name)
    path = next((one for one in found if one.is_file()), None)
    return None if path is None or _is_installed(path) else path


def _candidates(name: str) -> Iterator[Path]:
    parts = name.split(".")
    for folder in dict.fromkeys(sys.path):
        base = Path(folder or ".", *parts)
        yield base / "__init__.py"
        yield from (base.parent / f"{parts[-1]}{suffix}" for suffix in _SUFFIXES)


_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)


def _is_installed(path: Path) -> bool:
    libraries = (sysconfig.get_path(which) for which in ("stdlib", "platstdlib"))
    return not _INSTALLED.isdisjoint(path.parts) or any(path.is_relative_to(library) for library in libraries)
