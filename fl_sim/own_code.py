"""The user's own code: import by path, detection of changes by digests, and file and line of errors in this code."""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from fl_sim.errors import RunError, UserError

IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""The pattern of ``package.module:name``."""

PACKAGES: Final = frozenset({"fl_sim", "strategies", "clients", "partitions"})
"""The top-level packages of fl-sim. All other modules that are not installed are the user's own code."""

MAIN: Final = "__main__"
"""The module of a script or notebook. A notebook's code has no file, so the digest of this module is empty."""

_MOST_LETTERS: Final = 300
"""The maximum length, in characters, of an error message from the user's code."""

_PROJECT: Final = Path(__file__).parent.parent
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)

# {module: (import spec, digest of its file)}; a new import spec shows that the module was imported again
_imported: dict[str, tuple[Any, str]] = {}


def load_object(path: str, what: str) -> Any:
    """Return the object at the import path ``path``, such as "my_package.my_module:MyModel".

    ``what``: the setting, such as "model", for error messages. The module may be in the current folder, which is added
    to Python's search path after all installed packages. Raises UserError, in one line, for an invalid path, for an
    unknown name, and for a module that does not exist or fails during its import.
    """
    module_name, _, name = path.partition(":")
    if len(path) > _MOST_LETTERS or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        said = in_one_line(repr(path))
        raise UserError(f"{what} {said} is not an import path: write package.module:name, for example mine:{what}")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(path, what, error) from error
        raise UserError(
            f"{what} {path!r} cannot be imported: there is no module {error.name!r}, neither in the current folder "
            f"({folder}) nor on the Python path; start in the folder of this module, or install it"
        ) from error
    except (Exception, SystemExit) as error:
        raise _failed(path, what, error) from error
    if not hasattr(module, name):
        there = [known for known in vars(module) if not known.startswith("_")]
        guess = get_close_matches(name, there, n=1)
        meant = f"did you mean {guess[0]!r}?" if guess else f"its names are {', '.join(there) or 'none'}"
        raise UserError(
            f"{what} {path!r} cannot be imported: module {module_name!r} ({getattr(module, '__file__', 'built in')}) "
            f"has no {name!r}; {in_one_line(meant)}"
        )
    remember(module_name)
    return getattr(module, name)


def package_folders(name: str) -> list[Path]:
    """Return the folders of the package ``name`` without importing it; empty if it is not installed."""
    if not name.isidentifier():
        return []
    found = importlib.util.find_spec(name)
    return [] if found is None else [*map(Path, found.submodule_search_locations or ())]


def in_one_line(said: BaseException | str) -> str:
    """Return the text ``said``, or the type and message of the error ``said``, in one line.

    The line is cut after about 300 characters.
    """
    text = said if isinstance(said, str) else f"{type(said).__name__}: {said}"
    line = " ".join(text.split()).removesuffix(":")
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}..."


def _failed(path: str, what: str, error: BaseException) -> UserError:
    return UserError(
        f"{what} {path!r} cannot be imported: its module failed with {in_one_line(error)}; correct the module"
    )


def place_of(error: BaseException) -> str:
    """Return file, line and function of the last place in the user's code in the traceback of ``error``, or ""."""
    for frame in reversed(extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_ours = path.is_relative_to(_PROJECT) and path.relative_to(_PROJECT).parts[0] in PACKAGES
        if not (is_ours or frame.filename.startswith("<frozen") or _is_installed(path)):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return ""


def with_place(error: BaseException) -> str:
    """Return in one line the type and message of ``error``, and the file and line of the user's code that raised it."""
    place = place_of(error)
    return in_one_line(error) + (f" ({place})" if place else "")


def name_of(method: Callable[..., Any]) -> str:
    """Return the name of a function or method, followed by its file and line."""
    name = getattr(method, "__qualname__", type(method).__qualname__)
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def check_returned(value: object, kind: type, method: Callable[..., Any]) -> None:
    """Raise RunError if ``value``, which the user's ``method`` returned, is not of type ``kind``.

    The message does not quote ``value``, which may contain private records.
    """
    if not isinstance(value, kind):
        raise RunError(
            f"{name_of(method)} returned an object of type {type(value).__name__}, not a {kind.__name__}: correct it, "
            "and start the same command again"
        )


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Convert an exception of the user's own code in this block into a RunError that names file and line.

    ``what``: the code in the block, such as "merge of FedMine", for the message. RunError, UserError and OSError pass
    unchanged, because their messages are written for users.
    """
    try:
        yield
    except (RunError, UserError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"{what} failed with {with_place(error)}: correct it, and start the same command again"
        ) from error


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return {module: SHA-256 of its file} for the user's own ``modules`` and for the user's modules that they import.

    If this process has imported a module, the digest is that of the module's file at the time of the import.
    """
    return {name: _as_imported(name, path) if path else "" for name, path in _with_imports(modules)}


def edited(modules: Iterable[str]) -> list[str]:
    """Return the Python files of the user that have changed since this process imported them.

    Only files of the user's own ``modules``, and of the user's modules that they import, are compared.
    """
    return [str(path) for name, path in _with_imports(modules) if path and _as_imported(name, path) != _digest(path)]


def remember(module: str) -> None:
    """Store the digest of a module's file just after its import, so that a later change of the file is detected."""
    known = _imported.get(module)
    if known is None or known[0] is not _spec(module):
        digests([module])


def _with_imports(modules: Iterable[str]) -> Iterator[tuple[str, Path | None]]:
    """Yield (name, file) of the user's modules in ``modules``, and of the user's modules that they import."""
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
    if spec is None:  # a module that is not imported yet: the digest of its present file
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
    """Return the names of all modules that the Python code ``source`` may import.

    The result may also contain names of imported functions and classes.

    ``package``: the package of the source's module, for relative imports.
    """
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
                above = package.split(".")[: package.count(".") + 2 - level] if level else []
                base = ".".join([*above, *([module] if module else [])])
                found += [base, *(f"{base}.{name.name}" for name in names)]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.append(name)
    return tuple(dict.fromkeys(name for name in found if all(part.isidentifier() for part in name.split("."))))


def _file_of(name: str) -> Path | None:
    """Return the file of the module ``name`` if it is the user's own; None for any other module."""
    top = name.partition(".")[0]
    if top in PACKAGES or top in sys.stdlib_module_names:
        return None
    origin = getattr(sys.modules.get(name), "__file__", None)
    found = [Path(origin)] if origin else []
    for folder in [] if origin else dict.fromkeys(sys.path):
        base = Path(folder or ".", *name.split("."))
        found += [base / "__init__.py", *(base.with_name(base.name + suffix) for suffix in _SUFFIXES)]
    path = next((one for one in found if one.is_file()), None)
    return None if path is None or _is_installed(path) else path


def _is_installed(path: Path) -> bool:
    in_packages = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return in_packages or any(path.is_relative_to(folder) for folder in _LIBRARIES)
