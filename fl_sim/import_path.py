"""What a user names by its import path, ``package.module:name``, from the Python path or the current folder."""

import importlib
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from fl_sim import own_sources
from fl_sim.errors import UserError

IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What looks like ``package.module:name``."""

_MOST_LETTERS = 300  # of another's error message, which may be a page long


def load_object(path: str, what: str) -> Any:
    """Return what ``path`` names; ``what`` it is to be ("model", "algorithm") begins each message.

    The module may lie in the current folder, which joins the import path of this process and of the workers that it
    starts, behind all that is installed. Raises UserError, in one line, for a path of another form, a module that does
    not exist or fails while it is imported, and a name that is not in it.
    """
    module_name, _, name = path.partition(":")
    if len(path) > _MOST_LETTERS or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        said = in_one_line(repr(path))
        raise UserError(f"{what} {said} is no import path: write package.module:name, for example mine:{what}")
    folder = make_current_folder_importable()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(path, what, error) from error
        raise UserError(
            f"{what} {path!r} cannot be imported: there is no module {error.name!r}, neither in the current folder "
            f"({folder}) nor on the Python path; start in the folder that holds it, or install it"
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
    own_sources.remember(module_name)
    return getattr(module, name)


def make_current_folder_importable() -> str:
    """Put the current folder behind everything else on the import path, unless it is there; return it."""
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    return folder


def in_one_line(said: BaseException | str) -> str:
    """Return an error's type and text, or a text, without line breaks, and without what goes on for a page."""
    text = said if isinstance(said, str) else f"{type(said).__name__}: {said}"
    line = " ".join(text.split()).removesuffix(":")
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}..."


def _failed(path: str, what: str, error: BaseException) -> UserError:
    return UserError(
        f"{what} {path!r} cannot be imported: its module failed with {in_one_line(error)}; mend the module"
    )
