"""Where code of the user's went wrong, in words: which method, which file, which line."""

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from fl_sim.errors import RunError, UserError
from fl_sim.import_path import in_one_line

_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS: Final = Path(__file__).parent.parent
_PACKAGES: Final = ("fl_sim", "strategies", "clients", "partitions")


def place_of(error: BaseException) -> str:
    """Return the last file and line of the user's own from which ``error`` came, empty where there is none."""
    own = [frame for frame in extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""


def with_place(error: BaseException) -> str:
    """Return an error's type and words, in one line, and where it came from."""
    place = place_of(error)
    return in_one_line(error) + (f" ({place})" if place else "")


def name_of(method: Callable[..., Any]) -> str:
    """Return what a function or method is called, and where it is written."""
    name = getattr(method, "__qualname__", type(method).__qualname__)
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Turn whatever code of the user's raises in this block into a RunError that names its file and line.

    ``what``: which code it is, such as "merge of FedMine". What is in words for the user already stays as it is.
    """
    try:
        yield
    except (RunError, UserError, OSError):
        raise
    except Exception as error:
        raise RunError(f"{what} failed with {with_place(error)}: mend it, and start the same command again") from error


def _is_users(file: str) -> bool:
    """Say whether a file is neither a library's nor one of this project's packages."""
    path = Path(file)
    if path.is_relative_to(_OURS) and path.relative_to(_OURS).parts[0] in _PACKAGES:
        return False
    return not file.startswith("<frozen") and not any(path.is_relative_to(folder) for folder in _LIBRARIES)
