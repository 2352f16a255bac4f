"""The devices of clients: their settings, and the speeds and availability of each client's device.

Devices are all equal, randomly drawn, or listed in a CSV file. The file has one row for each client, in order, or one
row for each class of devices. Its columns: ``seconds_per_step`` or ``records_per_second``; ``download_mbps``,
``upload_mbps`` and ``availability``, which may be left out (sending then takes no time, and clients are always
available); ``clients``, the number of clients, if a row is a class of devices.
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
    """One device for each client; all arrays have the shape (clients,).

    ``step_seconds``: seconds for a step, 0 if the time depends on records. ``record_seconds``: seconds for a record,
    0 if the time depends on steps. ``download`` and ``upload``: bytes in a second to and from the client.
    ``availability``: the probability, in (0, 1], that the client is available when the server looks for it. ``jitter``:
    the standard deviation of the logarithm of a random factor on the time of each turn; 0: no jitter.
    """

    step_seconds: NDArray[np.float64]
    record_seconds: NDArray[np.float64]
    download: NDArray[np.float64]
    upload: NDArray[np.float64]
    availability: NDArray[np.float64]
    jitter: float = 0.0

    def wrong(self, num_clients: int) -> str:
        """Return a description of the first error in these arrays for ``num_clients`` clients; empty without one."""
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
                return f"{name} have the shape {numbers.shape}, and there are {num_clients} clients"
            if not is_good.all():
                return f"{name} of client {int(np.argmin(is_good))} is {numbers[np.argmin(is_good)]:g}"
        return "" if 0 <= self.jitter <= 3 else f"jitter is {self.jitter:g}: it must be from 0 to 3"


@runtime_checkable
class Devices(Protocol):
    """The interface of settings classes for devices; a user may write such a class."""

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return one device for each client. Raises UserError if the settings describe another number of clients."""
        ...


class NoDevices(Settings):
    """No virtual clock: the time of clients is not simulated."""

    kind: Literal["none"] = "none"


class _Typical(Settings):
    """Devices that differ from a typical device by random factors of their times.

    ``seconds_per_step``: time of a local step on a typical device. ``records_per_second``: its speed in records instead
    (0: ``seconds_per_step`` counts). ``download_mbps`` and ``upload_mbps``: megabits in a second to and from the
    device. ``availability``: the probability that a client is available when the server looks for it. ``jitter``: each
    turn of a client takes exp(``jitter`` * z) times as long, z from the normal distribution.
    """

    seconds_per_step: Seconds = 0.1
    records_per_second: float = Field(0.0, ge=0, le=1e12)
    download_mbps: Mbps = 20.0
    upload_mbps: Mbps = 5.0
    availability: float = Field(1.0, ge=1e-3, le=1)
    jitter: Jitter = 0.0

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return a device for each client; speed, download and upload are drawn independently of each other."""
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
        """Return the factor of each client's time, relative to a typical device."""


class ConstantDevices(_Typical):
    """All devices are equally fast."""

    kind: Literal["constant"] = "constant"

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        del generator
        return np.ones(num_clients)


class Uniform(_Typical):
    """A device takes between 1 - ``spread`` and 1 + ``spread`` times as long as a typical one, all equally likely.

    ``spread``: at 0 all devices are alike; the factors of computing, download and upload are drawn independently.
    """

    kind: Literal["uniform"] = "uniform"
    spread: float = Field(0.5, ge=0, le=0.99)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if these settings make all devices equally fast; an empty list otherwise."""
        del experiment
        return [] if self.spread else [off("devices.spread=0", "all devices are alike")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return generator.uniform(1 - self.spread, 1 + self.spread, num_clients)


class LogNormal(_Typical):
    """A device takes exp(``sigma`` * z) times as long as a typical (median) device; z has the normal distribution.

    ``sigma``: at 0 all devices are alike; at 0.5 the slowest of a hundred takes about ten times as long as the fastest.
    The factors of computing, download and upload are drawn independently.
    """

    kind: Literal["log-normal"] = "log-normal"
    sigma: float = Field(0.5, ge=0, le=3)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning if these settings make all devices equally fast; an empty list otherwise."""
        del experiment
        return [] if self.sigma else [off("devices.sigma=0", "all devices are alike")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return np.exp(self.sigma * generator.standard_normal(num_clients))


class Profile(Settings):
    """Devices from a CSV file (docs/heterogeneity.md): a row for each client, or for each class of devices.

    ``path``: the CSV file. ``jitter``: each turn of a client takes exp(``jitter`` * z) times as long, z from the normal
    distribution. ``digest``: SHA-256 of the file, filled in at the start, so that a later change of the file is found.
    """

    kind: Literal["profile"] = "profile"
    path: str = Field(min_length=1)
    jitter: Jitter = 0.0
    digest: str = Field("", pattern="^([0-9a-f]{64})?$")

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return one device for each client. If the file lists classes, they are assigned to clients at random.

        Raises UserError for a file that is missing, has changed, or is malformed.
        """
        rows = read_profile(self.path, self.digest)
        return fleet_of(rows, self.path, num_clients, rng(seed, "device class"), self.jitter)

    def sealed(self) -> Self:
        """Return these settings with the digest of the file. Raises UserError if the file cannot be read."""
        if self.digest:
            return self
        return self.model_validate({**self.model_dump(), "digest": digest_of(self.path)})


def check_public(experiment: Choices) -> None:
    """Raise ValueError if the run promises privacy and the times of clients' devices would reveal private facts."""
    if experiment.hides_time:
        raise ValueError(
            f"devices={kind_of(experiment.devices)} has no place in a run that promises privacy: how long a client "
            "takes tells how many records it holds, how long a round takes who was in it, and a client that is too "
            "late makes the model depend on both, which no epsilon here covers; leave devices out"
        )


def fleet_of_clients(devices: Devices, num_clients: int, seed: int) -> Fleet:
    """Return one device for each client. Raises UserError for invalid numbers, which the user's own class may give."""
    fleet = devices.fleet(num_clients, seed)
    if told := fleet.wrong(num_clients):
        raise UserError(f"devices {kind_of(devices)} gave a fleet whose {told}")
    return fleet


Row = Mapping[str, float]

_SPEEDS: Final = ("seconds_per_step", "records_per_second")
_DEFAULTS: Final = {"download_mbps": math.inf, "upload_mbps": math.inf, "availability": 1.0}
_COLUMNS: Final = (*_SPEEDS, *_DEFAULTS, "clients")
_LARGEST: Final = 2**28  # bytes
_LEAST, _MOST = 1e-9, 1e12
_WAY_ON: Final = "docs/heterogeneity.md shows what the file looks like"


def digest_of(path: str) -> str:
    """Return the SHA-256 of the file ``path``, in hexadecimal digits. Raises UserError if it cannot be read."""
    return hashlib.sha256(_content(path)).hexdigest()


def read_profile(path: str, digest: str = "") -> list[Row]:
    """Return the rows of the CSV file ``path``, each as {column: number}.

    ``digest``: the expected SHA-256 of the file; empty if any file is accepted. Raises UserError for a changed or
    invalid file; the message names the line and column of an invalid cell.
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
    """Return one device for each client, from the rows of the CSV file ``path``.

    Raises UserError if the rows describe another number of clients than ``num_clients``.
    """
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
