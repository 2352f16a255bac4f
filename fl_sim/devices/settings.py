"""Settings of the simulated devices: speed, bandwidth and availability of each client's device.

All devices are equal, drawn at random, or listed in a CSV file. The file has one row for each client, in the order of
clients, or one row for each class of devices. One column is ``seconds_per_step`` or ``records_per_second``. The columns
``download_mbps``, ``upload_mbps`` and ``availability`` are optional. Without ``download_mbps`` and ``upload_mbps``,
transfers take no time. Without ``availability``, clients are always available. If each row is a class of devices, the
column ``clients`` contains the number of clients in this class.
"""

import csv
import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.kinds import Choices, kind_of, off
from fl_sim.mistakes import guess, shortened
from fl_sim.seeding import rng
from fl_sim.settings import Settings
from fl_sim.store.files import explain, read_whole

Seconds: TypeAlias = Annotated[float, Field(ge=1e-9, le=1e9)]
Mbps: TypeAlias = Annotated[float, Field(ge=1e-6, le=1e9)]
Jitter: TypeAlias = Annotated[float, Field(ge=0, le=3)]


BYTES_PER_MEGABIT = 125_000


@dataclass(frozen=True, eq=False)
class Fleet:
    """The devices of all clients; all arrays have the shape (clients,).

    The computing time of a client is proportional to its steps or to its records. ``step_seconds``: seconds per local
    step; 0 if the time depends on records. ``record_seconds``: seconds per record that is processed in training; 0 if
    the time depends on steps. ``download`` and ``upload``: bytes per second to and from the client. ``availability``:
    the probability, in (0, 1], that the client is available when the server looks for clients. ``jitter``: each
    duration is multiplied by exp(jitter * z), where z is a standard normal number; 0 for no jitter.
    """

    step_seconds: NDArray[np.float64]
    record_seconds: NDArray[np.float64]
    download: NDArray[np.float64]
    upload: NDArray[np.float64]
    availability: NDArray[np.float64]
    jitter: float = 0.0

    def wrong(self, num_clients: int) -> str:
        """Describe the first error in the arrays and the jitter, for an error message; return "" if all are valid.

        ``num_clients``: the number of clients, which is the required length of the arrays.
        """
        computing = self.step_seconds + self.record_seconds
        for name, numbers, is_good in (
            ("step_seconds and record_seconds", computing, (computing > 0) & np.isfinite(computing)),
            ("step_seconds", self.step_seconds, self.step_seconds >= 0),
            ("record_seconds", self.record_seconds, self.record_seconds >= 0),
            ("download", self.download, self.download > 0),
            ("upload", self.upload, self.upload > 0),
            ("availability", self.availability, (self.availability >= 1e-3) & (self.availability <= 1)),
        ):
            if numbers.shape != (num_clients,):
                return f"{name} have the shape {numbers.shape}, but there are {num_clients} clients"
            if not is_good.all():
                return f"{name} of client {int(np.argmin(is_good))} is {numbers[np.argmin(is_good)]:g}"
        return "" if 0 <= self.jitter <= 3 else f"jitter is {self.jitter:g}: it must be from 0 to 3"


@runtime_checkable
class Devices(Protocol):
    """The protocol for settings of devices. Every class with a method ``fleet`` can be used, also a user's class."""

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return the devices of ``num_clients`` clients. ``seed``: the seed of all random numbers, such as speeds.

        Raises UserError if the settings describe another number of clients.
        """
        ...


class NoDevices(Settings):
    """No simulated devices: all clients are always available, and no virtual time is computed."""

    kind: Literal["none"] = "none"


class _Typical(Settings):
    """The typical device. The device of each client is slower or faster than the typical device by random factors.

    ``seconds_per_step``: the time of a local step on the typical device. ``records_per_second``: if above 0, the number
    of records per second that the typical device trains, in place of ``seconds_per_step``. ``download_mbps`` and
    ``upload_mbps``: megabits per second to and from the typical device. ``availability``: the probability that a client
    is available when the server looks for clients. ``jitter``: the time of a client in a round (download, training,
    upload) is multiplied by exp(jitter * z). z is a standard normal number.
    """

    seconds_per_step: Seconds = 0.1
    records_per_second: float = Field(0.0, ge=0, le=1e12)
    download_mbps: Mbps = 20.0
    upload_mbps: Mbps = 5.0
    availability: float = Field(1.0, ge=1e-3, le=1)
    jitter: Jitter = 0.0

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return the devices of all clients, with independent random factors for computing, download and upload."""
        slow, down, up = (self._slowness(rng(seed, f"device {part}"), num_clients) for part in ("speed", "down", "up"))
        by_record = 1 / self.records_per_second if self.records_per_second else 0.0
        return Fleet(
            slow * (0.0 if by_record else self.seconds_per_step),
            slow * by_record,
            self.download_mbps * BYTES_PER_MEGABIT / down,
            self.upload_mbps * BYTES_PER_MEGABIT / up,
            np.full(num_clients, self.availability),
            self.jitter,
        )

    @abstractmethod
    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        """Return the time of each client's device in multiples of the typical device's time, shape (clients,)."""


class ConstantDevices(_Typical):
    """All devices are equal to the typical device."""

    kind: Literal["constant"] = "constant"

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        del generator
        return np.ones(num_clients)


class Uniform(_Typical):
    """A device takes f times as long as the typical device. f is drawn uniformly from 1 - ``spread`` to 1 + ``spread``.

    ``spread``: at 0 all devices are equal. The factors of computing, download and upload are drawn independently.
    """

    kind: Literal["uniform"] = "uniform"
    spread: float = Field(0.5, ge=0, le=0.99)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning for the user if ``spread`` is 0, because then all devices are equal; else an empty list."""
        del experiment
        return [] if self.spread else [off("devices.spread=0", "all devices are equal")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return generator.uniform(1 - self.spread, 1 + self.spread, num_clients)


class LogNormal(_Typical):
    """A device takes exp(``sigma`` * z) times as long as the typical (median) device. z is a standard normal number.

    ``sigma``: at 0 all devices are equal; at 0.5 the slowest of a hundred takes about ten times as long as the fastest.
    The factors of computing, download and upload are drawn independently.
    """

    kind: Literal["log-normal"] = "log-normal"
    sigma: float = Field(0.5, ge=0, le=3)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning for the user if ``sigma`` is 0, because then all devices are equal; else an empty list."""
        del experiment
        return [] if self.sigma else [off("devices.sigma=0", "all devices are equal")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return np.exp(self.sigma * generator.standard_normal(num_clients))


class Profile(Settings):
    """Devices from a CSV file (docs/heterogeneity.md), with one row for each client or for each class of devices.

    ``path``: the CSV file. ``jitter``: the time of a client in a round (download, training, upload) is multiplied by
    exp(jitter * z). z is a standard normal number. ``digest``: the SHA-256 of the file. A run stores the digest at its
    start, to detect a later change of the file.
    """

    kind: Literal["profile"] = "profile"
    path: str = Field(min_length=1)
    jitter: Jitter = 0.0
    digest: str = Field("", pattern="^([0-9a-f]{64})?$")

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return the devices of all clients. If the file lists classes of devices, clients get their class at random.

        Raises UserError if the file is missing, has changed, is malformed, or is for another number of clients.
        """
        rows = read_profile(self.path, self.digest)
        return fleet_of(rows, self.path, num_clients, rng(seed, "device class"), self.jitter)

    def sealed(self) -> Self:
        """Return a copy of these settings with the digest of the file. Raises UserError if the file is unreadable."""
        if self.digest:
            return self
        return self.model_validate({**self.model_dump(), "digest": digest_of(self.path)})


def check_public(experiment: Choices) -> None:
    """Raise ValueError if devices are simulated in a run with a privacy guarantee.

    The simulated times are visible in the results. The time of a client reveals its number of records, and the time
    of a round reveals the cohort.
    """
    if experiment.hides_time:
        raise ValueError(
            f"devices={kind_of(experiment.devices)} does not work with a privacy guarantee: the time of a client "
            "reveals its number of records, the time of a round reveals the cohort, and clients that miss a deadline "
            "make the model depend on both. No epsilon here covers this; leave devices out"
        )


def fleet_of_clients(devices: Devices, num_clients: int, seed: int) -> Fleet:
    """Return the devices of all clients. Raises UserError if they contain an invalid number.

    The check is needed because ``devices`` may be an object of a user's own class.
    """
    fleet = devices.fleet(num_clients, seed)
    if error := fleet.wrong(num_clients):
        raise UserError(
            f"the method fleet of devices {kind_of(devices)} returned wrong devices: {error}; correct the method"
        )
    return fleet


Row = Mapping[str, float]

_SPEEDS: Final = ("seconds_per_step", "records_per_second")
_DEFAULTS: Final = {"download_mbps": math.inf, "upload_mbps": math.inf, "availability": 1.0}
_COLUMNS: Final = (*_SPEEDS, *_DEFAULTS, "clients")
_LARGEST: Final = 2**28  # bytes
_LEAST, _MOST = 1e-9, 1e12
_CURE: Final = "docs/heterogeneity.md shows an example of the file"


def digest_of(path: str) -> str:
    """Return the SHA-256 of the file ``path`` in hexadecimal digits. Raises UserError if the file cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def read_profile(path: str, digest: str = "") -> list[Row]:
    """Read the CSV file of devices ``path``; return its rows, each as {column: number}.

    ``digest``: the expected SHA-256 of the file; empty to accept any content. Raises UserError for a changed or invalid
    file, with the line and column of an invalid cell.
    """
    content = _content(path)
    if digest and hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"devices.path: {path} has changed since the run began (its SHA-256 is not devices.digest): restore the "
            "file, or leave devices.digest out and choose another --out"
        )
    try:
        lines = list(csv.reader(content.decode("utf-8-sig").splitlines(), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"devices.path: {path} is no CSV file in UTF-8 ({error}); {_CURE}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if any(cell.strip() for cell in line)]
    if len(numbered) < 2:
        raise UserError(f"devices.path: {path} has no rows below a line of column names; {_CURE}")
    names = _names(path, numbered[0][1])
    return [_row(path, number, names, line) for number, line in numbered[1:]]


def fleet_of(rows: Sequence[Row], path: str, num_clients: int, generator: np.random.Generator, jitter: float) -> Fleet:
    """Convert the rows of the CSV file ``path`` to the devices of all clients.

    ``generator``: a random generator, which assigns classes of devices to clients. Raises UserError if the rows
    describe another number of clients than ``num_clients``.
    """
    counts = [int(row["clients"]) if "clients" in row else 1 for row in rows]
    if sum(counts) != num_clients:
        raise UserError(
            f"devices.path: {path} is for {sum(counts)} clients, but this run has {num_clients}: give one row per "
            f"client, or let the numbers in the column 'clients' add up to {num_clients}"
        )
    places = np.repeat(np.arange(len(rows)), counts)
    # classes of devices are assigned at random, because clients with neighbouring IDs may have similar data
    if "clients" in rows[0]:
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
        raise UserError(f"devices.path: no such file: {path}; {_CURE}") from error
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
            raise UserError(f"devices.path: {path} has the column {name!r} twice: remove one of the two")
    if len([name for name in names if name in _SPEEDS]) != 1:
        raise UserError(f"devices.path: {path} must have one of the columns {' and '.join(_SPEEDS)}, and not both")
    return names


def _row(path: str, number: int, names: Sequence[str], cells: Sequence[str]) -> Row:
    where = f"devices.path: {path}, line {number}"
    if len(cells) != len(names):
        raise UserError(f"{where} has {len(cells)} cells, but there are {len(names)} columns: {', '.join(names)}")
    return {name: _number(f"{where}, {name}", name, cell.strip()) for name, cell in zip(names, cells, strict=True)}


def _number(where: str, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise UserError(f"{where} is {shortened(repr(cell))}; it must be a number") from None
    if name == "clients":
        if not (value >= 1 and value == math.floor(value) and value <= 10**6):
            raise UserError(f"{where} is {cell}: it must be a whole number of clients, at least 1")
    elif name == "availability":
        if not 1e-3 <= value <= 1:
            raise UserError(f"{where} is {cell}: a probability must be from 0.001 to 1")
    elif not _LEAST <= value <= _MOST:
        raise UserError(f"{where} is {cell}: it must be from {_LEAST:g} to {_MOST:g}")
    return value
