"""Where what clients release once is kept for all runs that need the same."""

from pathlib import Path

from fl_sim.store.files import user_folder


def pools_root() -> Path:
    """Return where pools are kept: $FL_SIM_POOLS, else the user's cache."""
    return user_folder("FL_SIM_POOLS", "XDG_CACHE_HOME", "~/.cache", "pools")
