"""The secret token of a run's own Ray: chosen before Ray is imported, which is when Ray reads it."""

import os
import secrets
import sys

from fl_sim.errors import UserError

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""What Ray reads: whether its servers ask for a token, and which."""


def choose_token() -> None:
    """Have the Ray that this process will start ask for a random token; one that the user has set up stays.

    Raises UserError where Ray is imported already, so that it would ask for none.
    """
    if MODE in os.environ:
        return
    if "ray" in sys.modules:
        raise UserError(
            "Ray was imported before it could be given a secret token, without which other users of this machine can "
            "run code in the run: start the run in a fresh Python that has not imported ray"
        )
    os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
    _chosen.add(os.environ[TOKEN])


def is_own_token() -> bool:
    """Say whether Ray's token is one that this process chose, which no other Ray knows."""
    return os.environ.get(TOKEN) in _chosen


_chosen: set[str] = set()
