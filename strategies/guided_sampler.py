"""The base class of samplers that use feedback: facts about earlier updates, and clients' answers before a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, kind_of, off
from fl_sim.settings import Settings
from strategies.samplers import Coins


@dataclass(frozen=True)
class Met:
    """The server's facts about a client that has sent an update.

    ``server_round``: the last round with an update of the client. ``loss``: the mean loss of its local steps in that
    round. ``norm``: the L2 norm of its update. ``seconds``: the virtual duration of its work in that round, 0 without
    ``devices``. ``sketch``: a vector that the sampler's method ``sketch`` computes from the update.
    """

    server_round: int
    loss: float
    norm: float
    seconds: float
    sketch: tuple[float, ...] = ()


@dataclass(frozen=True)
class Feedback:
    """The server's facts about the clients when it samples a cohort.

    ``sizes``: the number of training records of each client, shape (clients,). ``met``: {client: facts}; a client that
    has sent no update so far is missing. ``asked``: {candidate client: loss on its training records}, the loss of the
    model from which the client would start this round. ``gains``: {earlier round: sum of (number of records times mean
    loss) over the clients of the round}.
    """

    sizes: NDArray[np.int64]
    met: Mapping[int, Met] = field(default_factory=dict)
    asked: Mapping[int, float] = field(default_factory=dict)
    gains: Mapping[int, float] = field(default_factory=dict)


class GuidedSampler(Settings):
    """Base class of samplers with feedback. A subclass defines ``select``."""

    layer: ClassVar[str] = "strategies.guided_cohorts:GuidedCohorts"
    stage: ClassVar[str] = "fl_sim.stages.asked_losses:AskedLosses"
    cohort_size: int = Field(10, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if clients are too few, or if the run is private: losses, norms and sizes have no noise."""
        if self.cohort_size > experiment.clients:
            raise ValueError(
                f"sampler.cohort_size={self.cohort_size} is more than the run's {experiment.clients} clients: set a "
                "smaller sampler.cohort_size"
            )
        for name, chosen, is_private in (
            ("aggregator", experiment.aggregator, hides_clients(experiment.aggregator)),
            ("local.privacy", experiment.local.privacy, not is_none(experiment.local.privacy)),
        ):
            if is_private:
                raise ValueError(
                    f"sampler {kind_of(self)} cannot run with {name}={kind_of(chosen)}: the cohort depends on "
                    "clients' losses, norms or numbers of records, and no noise covers these; take sampler=full, or "
                    f"leave {name} out"
                )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if self.cohort_size < experiment.clients:
            return []
        return [off(f"sampler.cohort_size={self.cohort_size}", f"all {experiment.clients} clients are in every round")]

    def sample(self, num_clients: int, coins: Coins, server_round: int) -> NDArray[np.int64]:
        """Return the cohort of a round, ascending, as if the server had no feedback about any client."""
        return self.select(coins, server_round, Feedback(np.ones(num_clients, np.int64)))

    def select(self, coins: Coins, server_round: int, feedback: Feedback) -> NDArray[np.int64]:
        """Return the cohort of a round, ascending: client indices as in ``Sampler.sample``."""
        raise NotImplementedError

    def candidates(self, coins: Coins, feedback: Feedback) -> NDArray[np.int64]:
        """Return the clients that are asked for their loss before the round, ascending; by default none."""
        del coins, feedback
        return np.arange(0)

    def num_asked(self, num_clients: int) -> int:
        """Return the largest number of clients that are asked for their loss before a round."""
        del num_clients
        return 0

    def sketch(self, update: torch.Tensor) -> tuple[float, ...]:
        """Return the vector that the server stores about an ``update`` of shape (parameters,); by default empty."""
        del update
        return ()

    def rates(self, feedback: Feedback) -> NDArray[np.float64] | None:
        """Return each client's sampling probability, to divide updates by. None: updates are not divided."""
        del feedback
        return None

    def expected_size(self, num_clients: int) -> float:
        """Return the expected cohort size, a public number."""
        del num_clients
        return float(self.cohort_size)


def smallest(drawn: NDArray[np.float64], weights: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return ``count`` clients, ascending, drawn without replacement in proportion to ``weights``, shape (clients,).

    ``drawn``: a random number u for each client. The clients with the smallest -log(1 - u) / weight are chosen
    (Efraimidis and Spirakis 2006): with equal weights, these are the clients with the smallest random numbers. A client
    of weight 0 is left out.
    """
    holders = np.flatnonzero(weights > 0)
    waits = -np.log1p(-drawn[holders]) / weights[holders]
    return np.sort(holders[np.lexsort((drawn[holders], waits))[:count]])
