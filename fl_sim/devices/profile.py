"""A CSV file of devices: a row for each client, in order, or for each class of devices with the number of its clients.

Columns: ``seconds_per_step`` or ``records_per_second``; ``download_mbps``, ``upload_mbps`` and ``availability``, which
may be left out (sending takes no time then, and clients are always there); ``clients`` where a row is a class.
"""

import csv
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.devices.fleet import BYTES_PER_MEGABIT, Fleet
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.store.files import explain, read_whole

Row = Mapping[str, float]

_SPEEDS: Final = ("seconds_per_step", "records_per_second")
_DEFAULTS: Final = {"download_mbps": math.inf, "upload_mbps": math.inf, "availability": 1.0}
_COLUMNS: Final = (*_SPEEDS, *_DEFAULTS, "clients")
_LARGEST: Final = 2**28  # bytes
_LEAST, _MOST = 1e-9, 1e12
_WAY_ON: Final = "docs/heterogeneity.md shows what the file looks like"


def digest_of(path: str) -> str:
    """Return the SHA-256 of the file. Raises UserError where it cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def read_profile(path: str, digest: str = "") -> list[Row]:
    """Return the rows of the file. Raises UserError that names line and column of what cannot be used.

    ``digest``: what the file must be, empty for anything.
    """
    content = _content(path)
    if digest and hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"devices.path: {path} is not what it was when the run began (devices.digest): put it back as it was, or "
            "leave devices.digest out and choose another --out"
        )
    try:
        lines = list(csv.reader(content.decode("utf-8-sig").splitlines(), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"devices.path: {path} is no CSV file in UTF-8 ({error}); {_WAY_ON}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if any(cell.strip() for cell in line)]
    if len(numbered) < 2:
        raise UserError(f"devices.path: {path} has no rows below a line of column names; {_WAY_ON}")
    names = _names(path, numbered[0][1])
    return [_row(path, number, names, line) for number, line in numbered[1:]]


def fleet_of(rows: Sequence[Row], path: str, num_clients: int, generator: np.random.Generator, jitter: float) -> Fleet:
    """Return a device for each client. Raises UserError where the rows are for another number of clients."""
    counts = [int(row["clients"]) if "clients" in row else 1 for row in rows]
    if sum(counts) != num_clients:
        raise UserError(
            f"devices.path: {path} is for {sum(counts)} clients, and this run has {num_clients}: give as many rows as "
            "there are clients, or numbers in the column 'clients' that add up to them"
        )
    places = np.repeat(np.arange(len(rows)), counts)
    if "clients" in rows[0]:  # neighbours may hold the same class: their devices must not go with it
        places = generator.permutation(places)

    def column(name: str, missing: float) -> NDArray[np.float64]:
        return np.array([row.get(name, missing) for row in rows])[places]

    speed = column("records_per_second", math.inf)
    return Fleet(
        column("seconds_per_step", 0.0),
        1 / speed,
        column("download_mbps", math.inf) * BYTES_PER_MEGABIT,
        column("upload_mbps", math.inf) * BYTES_PER_MEGABIT,
        column("availability", 1.0),
        jitter,
    )


def _content(path: str) -> bytes:
    try:
        return read_whole(Path(path).expanduser(), _LARGEST)
    except FileNotFoundError as error:
        raise UserError(f"devices.path: no such file: {path}; {_WAY_ON}") from error
    except OSError as error:
        raise UserError(f"devices.path: {explain(error)}") from error


def _names(path: str, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if name not in _COLUMNS:
            raise UserError(
                f"devices.path: {path} has a column {shortened(repr(name))}{guess(name, _COLUMNS)}; valid: "
                f"{', '.join(_COLUMNS)}"
            )
        if names.count(name) > 1:
            raise UserError(f"devices.path: {path} has the column {name!r} twice: take one of them out")
    if len([name for name in names if name in _SPEEDS]) != 1:
        raise UserError(f"devices.path: {path} must have one of the columns {' and '.join(_SPEEDS)}, and not both")
    return names


def _row(path: str, number: int, names: Sequence[str], cells: Sequence[str]) -> Row:
    where = f"devices.path: {path}, line {number}"
    if len(cells) != len(names):
        raise UserError(f"{where} has {len(cells)} cells for {len(names)} columns: {', '.join(names)}")
    return {name: _number(f"{where}, {name}", name, cell.strip()) for name, cell in zip(names, cells, strict=True)}


def _number(where: str, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise UserError(f"{where} is {shortened(repr(cell))}, not a number") from None
    if name == "clients":
        if not (value >= 1 and value == math.floor(value) and value <= 10**6):
            raise UserError(f"{where} is {cell}: it must be a whole number of clients, at least 1")
    elif name == "availability":
        if not 1e-3 <= value <= 1:
            raise UserError(f"{where} is {cell}: how often a device is there must be from 0.001 to 1")
    elif not _LEAST <= value <= _MOST:
        raise UserError(f"{where} is {cell}: it must be above 0, from {_LEAST:g} to {_MOST:g}")
    return value
