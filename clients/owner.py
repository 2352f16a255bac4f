"""A node whose owner has records of its own: ``--node-config 'data="npz:/data/ours.npz" state="/var/lib/fl-sim"'``.

It trains on all training records of that data set, which nobody else reads, in place of a part of the server's; what it
keeps between rounds lies on its own disk. The server learns the place of neither.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flwr.app import Context, Message

from fl_sim.engines.batching import CLIENT_RAISED, failure
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError, UserError
from fl_sim.store.files import user_folder

_RUN: Final = re.compile(r"\w[\w-]{0,99}", re.ASCII)
"""What a run may be called in an order: a name, never a path out of the owner's folder."""

_PLACE: Final = re.compile(r"""(?:[A-Za-z]:)?[/\\~][^\s'",;()]*""")


@dataclass(frozen=True)
class Owner:
    """What a node's configuration says is its own. ``data``: as in ``data=NAME``. ``state``: a folder."""

    data: str
    state: Path

    def order(self, order: TaskConfig) -> TaskConfig:
        """Return ``order`` with this node's folder, one for every run, in place of the server's.

        Raises RunError where the run has no plain name, which would lead out of the folder.
        """
        if not _RUN.fullmatch(order.run):
            raise RunError(
                "the order calls its run something else than letters, digits, _ and -, which would lead out of this "
                "node's folder: see that the server runs the same version of fl-sim"
            )
        return replace(order, data_root="", state_dir=str(self.state / order.run))


def client_of(context: Context) -> int:
    """Return which client a node plays."""
    return int(str(context.node_config["partition-id"]))


def owner_of(context: Context) -> Owner | None:
    """Return the owner of a node whose configuration has ``data``, else None."""
    data, state = (str(context.node_config.get(name, "")) for name in ("data", "state"))
    if not data:
        return None
    default = user_folder("FL_SIM_STATES", "XDG_STATE_HOME", "~/.local/state", "states")
    return Owner(data, (Path(state).expanduser().absolute() if state else default) / f"client-{client_of(context)}")


def discreet(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Answer for a node with an owner so that no error tells of its places or its records; others as they are."""
    if owner_of(context) is None:
        return call_next(message, context)
    try:
        return call_next(message, context)
    except Exception as error:
        logging.getLogger("fl_sim").exception("this node could not do what it was asked")
        return failure(message, CLIENT_RAISED, _without_places(error, context))


def _without_places(error: Exception, context: Context) -> str:
    """Return what may be said of an error: our own words, with no path and nothing of the node's configuration."""
    if not isinstance(error, RunError | UserError):
        return f"{type(error).__name__}, whose words may quote records; they are in the log of the node"
    said = str(error)
    for value in sorted(map(str, context.node_config.values()), key=len, reverse=True):
        said = said.replace(value, "...") if len(value) > len("mnist") else said
    return _PLACE.sub("...", said)
