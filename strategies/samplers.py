"""Samplers: the cohort of a round is everyone, a fixed number, each client by its own coin flip, or groups in turn.

The coins come from outside: from the experiment's seed where cohorts are public, from the noise's secret key under
privacy, where amplification by sampling holds only against somebody who cannot draw the cohorts again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from fl_sim.errors import UserError
from fl_sim.kinds import Choices, off
from fl_sim.privacy.mechanisms import takes_part
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

Coins: TypeAlias = Callable[[int], NDArray[np.float64]]
"""(count) -> that many independent multiples of 2^-53 in [0, 1), others at every call."""


def _somebody_takes_part(sampling_rate: float) -> float:
    if sampling_rate < 2.0**-53:
        raise ValueError("coins have 53 bits, so at a rate below 1.2e-16 nobody ever takes part: choose a larger one")
    return sampling_rate


SamplingRate: TypeAlias = Annotated[float, Field(gt=0, le=1), AfterValidator(_somebody_takes_part)]


def in_random_order(num_clients: int, coins: Coins) -> NDArray[np.int64]:
    """Return all clients, those with the smallest coins first."""
    return np.argsort(_distinct(num_clients, coins))


def _distinct(num_clients: int, coins: Coins) -> NDArray[np.float64]:
    """Return a coin for each client, no two the same: equal coins have no order, and any rule would favour somebody."""
    drawn = coins(num_clients)
    while ((ordered := np.sort(drawn))[1:] == ordered[:-1]).any():
        drawn = coins(num_clients)
    return drawn


@runtime_checkable
class Sampler(Protocol):
    """A way to draw cohorts: frozen settings of ours or of the user's own."""

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the clients of a round (1, 2, ...), ascending: distinct numbers in 0..num_clients-1, possibly none."""
        ...

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, a public number."""
        ...


class Everyone(Settings):
    """All clients, every round."""

    kind: Literal["full"] = "full"
    rounds_apart: ClassVar[int] = 1

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's clients, ascending."""
        del coins, server_round
        return np.arange(num_clients)

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the event of ``event`` under this sampling: unchanged, as everybody takes part."""
        del num_clients
        return event

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, a public number."""
        return float(num_clients)


class FixedSize(Settings):
    """``cohort_size`` clients drawn uniformly without replacement, afresh every round."""

    kind: Literal["fixed-size"] = "fixed-size"
    cohort_size: int = Field(10, ge=1)
    rounds_apart: ClassVar[int] = 1

    def check(self, experiment: Choices) -> None:
        """Raise UserError where there are fewer clients than ``cohort_size``."""
        self._check(experiment.clients)

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's clients, ascending: those with the smallest coins.

        Raises UserError where there are fewer than ``cohort_size``.
        """
        del server_round
        self._check(num_clients)
        drawn = _distinct(num_clients, coins)
        return np.flatnonzero(drawn <= np.sort(drawn)[self.cohort_size - 1])

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the event of ``event`` under this sampling and replacement of one client."""
        from fl_sim.privacy.events import amplify_fixed_size  # noqa: PLC0415 (the accountants load slowly)

        return amplify_fixed_size(event, self.cohort_size, num_clients)

    def expected_size(self, num_clients: int) -> float:
        """Return the cohort size."""
        del num_clients
        return float(self.cohort_size)

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        if self.cohort_size < experiment.clients:
            return []
        return [off(f"sampler.cohort_size={self.cohort_size}", f"all {experiment.clients} clients are in every round")]

    def _check(self, num_clients: int) -> None:
        if self.cohort_size > num_clients:
            raise UserError(
                f"sampler fixed-size:{self.cohort_size} wants more clients than the {num_clients} there are"
            )


class Poisson(Settings):
    """Every client takes part with probability ``sampling_rate``, independently; a round may be empty."""

    kind: Literal["poisson"] = "poisson"
    sampling_rate: SamplingRate = 0.1
    rounds_apart: ClassVar[int] = 1

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's clients, ascending, possibly none."""
        del server_round
        return np.flatnonzero(takes_part(coins(num_clients), self.sampling_rate))

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the event of ``event`` under this sampling and adding or removing one client."""
        from fl_sim.privacy.events import amplify_poisson  # noqa: PLC0415 (the accountants load slowly)

        del num_clients
        return amplify_poisson(event, self.sampling_rate)

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        return [] if self.sampling_rate < 1 else [off("sampler.sampling_rate=1", "all clients are in every round")]

    def expected_size(self, num_clients: int) -> float:
        """Return sampling_rate * num_clients."""
        return self.sampling_rate * num_clients


class Cyclic(Settings):
    """``groups`` groups of clients take turns; in its turn a client takes part with probability ``sampling_rate``.

    Client i is in group i mod ``groups``, and round t is the turn of group (t - 1) mod ``groups``, which is public: a
    client takes part at most once in any ``groups`` rounds in a row. At rate 1 no coin is drawn.
    """

    kind: Literal["cyclic"] = "cyclic"
    groups: int = Field(2, ge=1)
    sampling_rate: SamplingRate = 1.0

    def check(self, experiment: Choices) -> None:
        """Raise UserError where a group would have no client."""
        if self.groups > experiment.clients:
            raise UserError(
                f"sampler cyclic of {self.groups} groups needs as many clients, and there are {experiment.clients}: "
                "take fewer sampler.groups"
            )

    @property
    def rounds_apart(self) -> int:
        """Return in how many rounds in a row a client takes part at most once: what ``amplify`` tells the cost of."""
        return self.groups

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's clients, ascending, possibly none."""
        group = np.arange((server_round - 1) % self.groups, num_clients, self.groups)
        return group if self.sampling_rate == 1 else group[takes_part(coins(len(group)), self.sampling_rate)]

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the event of ``event`` for each of a client's turns, under adding or removing one client."""
        from fl_sim.privacy.events import amplify_poisson  # noqa: PLC0415 (the accountants load slowly)

        del num_clients
        return amplify_poisson(event, self.sampling_rate)

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        if self.groups > 1 or self.sampling_rate < 1:
            return []
        return [off("sampler.groups=1", "all clients are in every round")]

    def expected_size(self, num_clients: int) -> float:
        """Return sampling_rate * num_clients / groups, over all groups."""
        return self.sampling_rate * num_clients / self.groups


AnySampler: TypeAlias = Everyone | FixedSize | Poisson | Cyclic
"""The samplers of which the accountants know what they make of a round's cost."""
