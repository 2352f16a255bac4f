"""Whose records are whose in an npz file: client_train (or groups) and client_test, whole numbers or texts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.types import Examples

CLIENTS: Final = ("client_train", "groups")
"""Two names for the same array."""


def with_clients(
    path: Path, arrays: Mapping[str, NDArray[np.generic]], train: Examples, test: Examples
) -> tuple[Examples, Examples]:
    """Return both parts with where each record comes from, where the file says that."""
    given = [name for name in CLIENTS if name in arrays]
    if len(given) > 1:
        raise UserError(f"{path} holds {' and '.join(given)}, two names for the same; leave one of them out")
    if not given and "client_test" in arrays:
        raise UserError(f"{path} holds client_test and no client_train, whose records are then tested; add it")
    if not given:
        return train, test
    of_train = _clients(path, given[0], arrays[given[0]], len(train))
    if "client_test" not in arrays:
        return replace(train, groups=_numbers(of_train)), test
    of_test = _clients(path, "client_test", arrays["client_test"], len(test))
    if of_train.dtype.kind != of_test.dtype.kind:
        raise UserError(
            f"{path}: {given[0]} is {of_train.dtype} and client_test {of_test.dtype}; both must be whole numbers, or "
            "both texts"
        )
    numbers = _numbers(np.concatenate([of_train, of_test]))
    return replace(train, groups=numbers[: len(train)]), replace(test, groups=numbers[len(train) :])


def client_names(arrays: Mapping[str, NDArray[np.generic]]) -> list[str]:
    """Return the names of all clients, where the file has texts for them."""
    given = [arrays[name] for name in (*CLIENTS, "client_test") if name in arrays]
    return sorted({str(name) for one in given if one.dtype.kind == "U" for name in np.unique(one)})


def _clients(path: Path, name: str, clients: NDArray[np.generic], num_records: int) -> NDArray[np.generic]:
    if clients.dtype.kind not in "iuU" or clients.shape != (num_records,):
        raise UserError(
            f"{path}: {name} is {clients.dtype} of shape {clients.shape}; wanted is a whole number or a text for each "
            f"of {num_records} records"
        )
    return clients if clients.dtype.kind == "U" else clients.astype(np.int64)


def _numbers(clients: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return whole numbers as they are, and a number for each text."""
    if clients.dtype.kind != "U":
        return clients.astype(np.int64)
    numbers: NDArray[np.int64] = np.unique(clients, return_inverse=True)[1].astype(np.int64)
    return numbers
