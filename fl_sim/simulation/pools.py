"""Where what clients release once is kept for all runs that need the same."""

from pathlib import Path

from fl_sim.store.files import folder_of


def pools_root() -> Path:
    """Return where pools are kept: $FL_SIM_POOLS, else the user's cache."""
    return folder_of("FL_SIM_POOLS", "XDG_CACHE_HOME", "~/.cache", "pools")
