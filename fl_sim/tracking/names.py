"""The trackers that there are, and what a user who names them must have installed."""

import importlib.util
from collections.abc import Iterable
from typing import Final

from fl_sim.errors import UserError
from fl_sim.mistakes import guess

TRACKERS: Final = ("tensorboard", "mlflow", "wandb", "trackio")
"""Each is the name of a file here, of the library that it needs, and of the extra that installs it."""


def chosen_trackers(typed: str | Iterable[str]) -> tuple[str, ...]:
    """Return the trackers, and the import paths of observers, in ``typed``, a list or text with commas; each once.

    Raises UserError for a tracker that is unknown or not installed.
    """
    names = typed.split(",") if isinstance(typed, str) else typed
    chosen = tuple(dict.fromkeys(name.strip() for name in names if name))
    for name in (one for one in chosen if ":" not in one):
        if name not in TRACKERS:
            raise UserError(
                f"unknown tracker {name!r}{guess(name, TRACKERS)}; there are {', '.join(TRACKERS)}, and MODULE:NAME "
                "for an observer of your own"
            )
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracker {name!r} is not installed: pip install {name}")
    return chosen
