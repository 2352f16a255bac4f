"""Samplers: the cohort of a round is everyone, a fixed number of clients, a Poisson sample, or one of several groups.

The caller supplies the random numbers ("coins"). If cohorts are public, these numbers come from the experiment's seed.
Under Global DP they come from the secret key of the noise, because privacy amplification by sampling holds only against
an observer who cannot recompute the cohorts.
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
"""A function that returns ``count`` new independent random numbers: uniform multiples of 2^-53 in [0, 1)."""


def _somebody_takes_part(sampling_rate: float) -> float:
    if sampling_rate < 2.0**-53:
        raise ValueError("a rate below 1.2e-16 is rounded to 0, so no client would ever take part: set a larger rate")
    return sampling_rate


SamplingRate: TypeAlias = Annotated[float, Field(gt=0, le=1), AfterValidator(_somebody_takes_part)]


def in_random_order(num_clients: int, coins: Coins) -> NDArray[np.int64]:
    """Return all client indices in a random order, shape (num_clients,)."""
    return np.argsort(distinct(num_clients, coins))


def distinct(num_clients: int, coins: Coins) -> NDArray[np.float64]:
    """Return one random number per client. All are different, because a sort of equal numbers favours some clients."""
    drawn = coins(num_clients)
    while ((ordered := np.sort(drawn))[1:] == ordered[:-1]).any():
        drawn = coins(num_clients)
    return drawn


@runtime_checkable
class Sampler(Protocol):
    """A rule that samples cohorts: a frozen settings class, built in or written by the user."""

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the cohort of a round: distinct client indices in 0..num_clients-1, ascending. It may be empty.

        Rounds are counted from 1.
        """
        ...

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, a public number."""
        ...


@runtime_checkable
class AskingSampler(Protocol):
    """A sampler that asks some clients to evaluate the model before it draws a cohort."""

    def num_asked(self, num_clients: int) -> int:
        """Return the largest number of clients that evaluate the model before a cohort is drawn."""
        ...


def num_asked(sampler: Sampler, num_clients: int) -> int:
    """Return the largest number of clients that ``sampler`` lets evaluate the model before it draws a cohort."""
    return sampler.num_asked(num_clients) if isinstance(sampler, AskingSampler) else 0


class Everyone(Settings):
    """All clients take part in every round."""

    kind: Literal["full"] = "full"
    rounds_apart: ClassVar[int] = 1

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's cohort, ascending: all clients."""
        del coins, server_round
        return np.arange(num_clients)

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the round's privacy event ``event`` unchanged, because without sampling there is no amplification."""
        del num_clients
        return event

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, a public number."""
        return float(num_clients)


class FixedSize(Settings):
    """In every round ``cohort_size`` clients are drawn uniformly without replacement."""

    kind: Literal["fixed-size"] = "fixed-size"
    cohort_size: int = Field(10, ge=1)
    rounds_apart: ClassVar[int] = 1

    def check(self, experiment: Choices) -> None:
        """Raise UserError if the experiment has fewer than ``cohort_size`` clients."""
        self._check(experiment.clients)

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's cohort, ascending: the ``cohort_size`` clients with the smallest random numbers.

        Raises UserError if there are fewer than ``cohort_size`` clients.
        """
        del server_round
        self._check(num_clients)
        drawn = distinct(num_clients, coins)
        return np.flatnonzero(drawn <= np.sort(drawn)[self.cohort_size - 1])

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the round's privacy event ``event``, amplified by sampling. Adjacency: replace one client."""
        from fl_sim.privacy.events import amplify_fixed_size  # noqa: PLC0415 (the accountants load slowly)

        return amplify_fixed_size(event, self.cohort_size, num_clients)

    def expected_size(self, num_clients: int) -> float:
        """Return the size of every cohort (``cohort_size``)."""
        del num_clients
        return float(self.cohort_size)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.cohort_size < experiment.clients:
            return []
        return [off(f"sampler.cohort_size={self.cohort_size}", f"all {experiment.clients} clients are in every round")]

    def _check(self, num_clients: int) -> None:
        if self.cohort_size > num_clients:
            raise UserError(
                f"sampler fixed-size:{self.cohort_size} needs more than the run's {num_clients} clients: set a smaller "
                "sampler.cohort_size"
            )


class Poisson(Settings):
    """Every client takes part with probability ``sampling_rate``, independently; a round may be empty."""

    kind: Literal["poisson"] = "poisson"
    sampling_rate: SamplingRate = 0.1
    rounds_apart: ClassVar[int] = 1

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's cohort, ascending, possibly empty."""
        del server_round
        return np.flatnonzero(takes_part(coins(num_clients), self.sampling_rate))

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the round's privacy event ``event``, amplified by sampling. Adjacency: add or remove one client."""
        from fl_sim.privacy.events import amplify_poisson  # noqa: PLC0415 (the accountants load slowly)

        del num_clients
        return amplify_poisson(event, self.sampling_rate)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.sampling_rate < 1 else [off("sampler.sampling_rate=1", "all clients are in every round")]

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, sampling_rate * num_clients."""
        return self.sampling_rate * num_clients


class Cyclic(Settings):
    """Each round samples one group of clients; a client of that group takes part with a fixed probability.

    ``groups``: the number G of groups. Client i is in group i mod G. Round t samples group (t - 1) mod G; the group is
    public. So a client takes part at most once in any G consecutive rounds. ``sampling_rate``: the probability with
    which a client of the group takes part. With 1, all clients of the group take part, and no random number is drawn.
    """

    kind: Literal["cyclic"] = "cyclic"
    groups: int = Field(2, ge=1)
    sampling_rate: SamplingRate = 1.0

    def check(self, experiment: Choices) -> None:
        """Raise UserError if a group would have no client."""
        if self.groups > experiment.clients:
            raise UserError(
                f"sampler cyclic with {self.groups} groups needs as many clients, and there are {experiment.clients}: "
                "take fewer sampler.groups"
            )

    @property
    def rounds_apart(self) -> int:
        """Return the number G of groups (``groups``). A client takes part at most once in any G consecutive rounds.

        ``amplify`` gives the privacy cost of G rounds together.
        """
        return self.groups

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the round's cohort, ascending, possibly empty."""
        group = np.arange((server_round - 1) % self.groups, num_clients, self.groups)
        return group if self.sampling_rate == 1 else group[takes_part(coins(len(group)), self.sampling_rate)]

    def amplify(self, event: "DpEvent", num_clients: int) -> "DpEvent":
        """Return the privacy event of G rounds, amplified by sampling. ``event``: one round's event without sampling.

        Adjacency: add or remove one client.
        """
        from fl_sim.privacy.events import amplify_poisson  # noqa: PLC0415 (the accountants load slowly)

        del num_clients
        return amplify_poisson(event, self.sampling_rate)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        if self.groups > 1 or self.sampling_rate < 1:
            return []
        return [off("sampler.groups=1", "all clients are in every round")]

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, sampling_rate * num_clients / groups: the mean over all groups."""
        return self.sampling_rate * num_clients / self.groups


AnySampler: TypeAlias = Everyone | FixedSize | Poisson | Cyclic
"""The samplers whose effect on the privacy cost of a round is known to the accountants."""
