"""The settings of clients' devices: all alike, drawn from a distribution, or as a profile lists them."""

from abc import abstractmethod
from typing import Annotated, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.devices.fleet import BYTES_PER_MEGABIT, Fleet
from fl_sim.devices.profile import digest_of, fleet_of, read_profile
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, kind_of, off
from fl_sim.seeding import rng
from fl_sim.settings import Settings

Seconds: TypeAlias = Annotated[float, Field(ge=1e-9, le=1e9)]
Mbps: TypeAlias = Annotated[float, Field(ge=1e-6, le=1e9)]
Jitter: TypeAlias = Annotated[float, Field(ge=0, le=3)]


@runtime_checkable
class Devices(Protocol):
    """What clients' devices are like: frozen settings of ours or of the user's own."""

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return a device for each client. Raises UserError where there is none for so many."""
        ...


class NoDevices(Settings):
    """There is no virtual clock: how long clients would take is not simulated."""

    kind: Literal["none"] = "none"


class _Typical(Settings):
    """Devices of one kind, of which each client's is so many times as slow.

    ``seconds_per_step``: how long a typical device computes for a local step. ``records_per_second``: how many records
    it trains on in a second instead (0: it goes by ``seconds_per_step``). ``download_mbps`` and ``upload_mbps``:
    megabits in a second to and from it. ``availability``: how often a client is there when the server looks for it.
    ``jitter``: each turn of a client takes exp(``jitter`` * z) times as long, z from the normal distribution.
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
        """Return how many times as long as a typical device each client's takes."""


class Constant(_Typical):
    """All devices are alike."""

    kind: Literal["constant"] = "constant"

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        del generator
        return np.ones(num_clients)


class Uniform(_Typical):
    """A device takes between 1 - ``spread`` and 1 + ``spread`` times as long as a typical one, all equally likely.

    ``spread``: at 0 all are alike; it is drawn for computing, for the way down and for the way up by itself.
    """

    kind: Literal["uniform"] = "uniform"
    spread: float = Field(0.5, ge=0, le=0.99)

    def remarks(self, experiment: Choices) -> list[str]:
        """Say where all devices are alike."""
        del experiment
        return [] if self.spread else [off("devices.spread=0", "all devices are alike")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return generator.uniform(1 - self.spread, 1 + self.spread, num_clients)


class LogNormal(_Typical):
    """A device takes exp(``sigma`` * z) times as long as the typical one, the median, with z from the normal one.

    ``sigma``: at 0 all are alike; at 0.5 the slowest of a hundred takes about ten times as long as the fastest. It is
    drawn for computing, for the way down and for the way up by itself.
    """

    kind: Literal["log-normal"] = "log-normal"
    sigma: float = Field(0.5, ge=0, le=3)

    def remarks(self, experiment: Choices) -> list[str]:
        """Say where all devices are alike."""
        del experiment
        return [] if self.sigma else [off("devices.sigma=0", "all devices are alike")]

    def _slowness(self, generator: np.random.Generator, num_clients: int) -> NDArray[np.float64]:
        return np.exp(self.sigma * generator.standard_normal(num_clients))


class Profile(Settings):
    """Devices as a file lists them (docs/heterogeneity.md): a row for each client, or for each class of devices.

    ``path``: the CSV file. ``jitter``: each turn of a client takes exp(``jitter`` * z) times as long, z from the normal
    distribution. ``digest``: SHA-256 of the file, filled in at the start, by which a changed one is noticed.
    """

    kind: Literal["profile"] = "profile"
    path: str = Field(min_length=1)
    jitter: Jitter = 0.0
    digest: str = Field("", pattern="^([0-9a-f]{64})?$")

    def fleet(self, num_clients: int, seed: int) -> Fleet:
        """Return a device for each client; which client has one of a class is drawn.

        Raises UserError for a file that is not there, has changed, or is malformed.
        """
        rows = read_profile(self.path, self.digest)
        return fleet_of(rows, self.path, num_clients, rng(seed, "device class"), self.jitter)

    def sealed(self) -> Self:
        """Return these settings with the file's digest. Raises UserError where the file cannot be read."""
        if self.digest:
            return self
        return self.model_validate({**self.model_dump(), "digest": digest_of(self.path)})


def check_public(experiment: Choices) -> None:
    """Raise ValueError where the time that clients' devices take would tell what is private."""
    if experiment.hides_time:
        raise ValueError(
            f"devices={kind_of(experiment.devices)} has no place in a run that promises privacy: how long a client "
            "takes tells how many records it holds, how long a round takes who was in it, and a client that is too "
            "late makes the model depend on both, which no epsilon here covers; leave devices out"
        )


def fleet_of_clients(devices: Devices, num_clients: int, seed: int) -> Fleet:
    """Return a device for each client. Raises UserError for devices that nobody can have, as the user's own may be."""
    fleet = devices.fleet(num_clients, seed)
    if told := fleet.wrong(num_clients):
        raise UserError(f"devices {kind_of(devices)} gave a fleet whose {told}")
    return fleet
