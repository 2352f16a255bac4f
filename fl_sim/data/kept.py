"""A cache of arrays that are computed from records, such as features of images and tokens of texts.

The cache is in $FL_SIM_FEATURES, or in the user's cache folder if the variable is not set. A file contains a checksum,
and a digest of the records and of the computation. If the file is damaged, or its digest differs, the arrays are
recomputed.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fl_sim.errors import UserError
from fl_sim.store.files import folder_lock, readable_os_errors, user_folder, write_whole

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""{name: array}."""


def cache_root() -> Path:
    """Return the cache folder: $FL_SIM_FEATURES if it is set, else a folder in the user's cache folder."""
    return user_folder("FL_SIM_FEATURES", "XDG_CACHE_HOME", "~/.cache", "features")


def kept_arrays(
    path: Path,
    names: Sequence[str],
    identity: str,
    make: Callable[[], Arrays],
    fits: Callable[[Arrays], bool],
    what: str,
    *,
    private: bool,
) -> Arrays:
    """Return the arrays in the cache file ``path``, or compute and write them if the file is missing or damaged.

    ``names``: the names of the arrays, in the order of the checksum. ``identity``: a digest of the records and of the
    computation. ``make``: a function that computes the arrays. ``fits``: a function that returns True if arrays have
    the expected types and shapes. ``what``: a phrase for the arrays in messages. ``private``: True if only the user may
    read the file, because the arrays are as private as the records. Raises RunError for a file that cannot be written.
    """
    folder = path.parent
    with readable_os_errors():
        folder.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        with folder_lock(folder):
            # An old version of fl-sim may have made this file readable for all users: correct its permissions.
            for place, mode in ((folder, 0o700), (path, 0o600)) if private else ():
                if place.exists() and place.stat().st_mode & 0o077 and place.stat().st_uid == os.getuid():
                    place.chmod(mode)
            damaged = ""
            try:
                return _read(path, names, identity, fits)
            except FileNotFoundError:
                pass
            except (SafetensorError, UserError, ValueError, KeyError) as error:
                damaged = f"{path} cannot be used ({error}), and will be replaced; "
            sys.stderr.write(f"fl-sim: {damaged}computing {what}; later runs read them from {folder}\n")
            made = make()
            said = {"identity": identity, "sha256": _digest(made, names)}
            write_whole(path, save(dict(made), said), mode=0o600 if private else 0o666)
            return made


def _read(path: Path, names: Sequence[str], identity: str, fits: Callable[[Arrays], bool]) -> Arrays:
    """Return the arrays in the cache file ``path``.

    Raises FileNotFoundError if the file is missing. Raises another error, such as ValueError, if the file is damaged or
    has the arrays of other records.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    with safe_open(path, "np") as file:
        said = file.metadata() or {}
        found = {name: file.get_tensor(name) for name in names}
    if said.get("identity") != identity:
        raise ValueError("it holds the arrays of other records")
    if not fits(found) or said.get("sha256") != _digest(found, names):
        raise ValueError("its content does not have the stored checksum")
    return found


def _digest(parts: Arrays, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(np.ascontiguousarray(parts[name]).data)
    return digest.hexdigest()
