"""PATE's noisy majorities: LNMax (Papernot et al. 2017), GNMax and Confident-GNMax (Papernot et al. 2018, algorithm 1).

Teachers vote, noise goes on the counts, the largest noisy count is the label. One record is in one teacher's shard, so
one vote of a query may move: two counts change by 1, the largest count by 1.
"""

import math
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.privacy.mechanisms import Noise, add_noise
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from dp_accounting import dp_event

    from fl_sim.privacy.pate.labelling_cost import Cost


class Voting(Protocol):
    """A noisy majority. ``votes`` are one query's counts, shape (classes,); ``query`` keys the noise."""

    def cost(self) -> "Cost":
        """Return what a query costs, for analysis."""
        ...

    def charges(self) -> tuple["dp_event.DpEvent | None", "dp_event.DpEvent"]:
        """Return what the ledger is charged for the test whether to answer (None: all are) and for an answer."""
        ...

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return whether the query is answered."""
        ...

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the label."""
        ...


class LNMax(Settings):
    """Laplace noise of scale 1 / ``gamma`` on every count: (2 gamma, 0)-private per query."""

    kind: Literal["lnmax"] = "lnmax"
    gamma: float = Field(0.05, ge=1e-5)

    def cost(self) -> "Cost":
        """Return what a query costs, for analysis."""
        from fl_sim.privacy.pate.labelling_cost import LNMaxCost  # noqa: PLC0415 (the accountants load slowly)

        return LNMaxCost(self.gamma)

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return the charge of a query: two counts with Laplace noise move by 1, so two Laplace mechanisms."""
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.SelfComposedDpEvent(dp_event.LaplaceDpEvent(1 / self.gamma), 2)

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return True: every query is answered."""
        del votes, noise, query
        return True

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the class with the largest noisy count."""
        steps = noise.laplace(len(votes), 1 / self.gamma, purpose="pate votes", server_round=query)
        return _largest(votes, 1 / self.gamma, steps)


class GNMax(Settings):
    """Gaussian noise of standard deviation ``sigma``, in votes, on every count."""

    kind: Literal["gnmax"] = "gnmax"
    sigma: float = Field(40.0, gt=0, le=1e5)

    def cost(self) -> "Cost":
        """Return what a query costs, for analysis."""
        from fl_sim.privacy.pate.labelling_cost import GNMaxCost  # noqa: PLC0415 (the accountants load slowly)

        return GNMaxCost(self.sigma)

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return the charge of a query: the counts, as one vector, move by sqrt(2)."""
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.GaussianDpEvent(self.sigma / math.sqrt(2))

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return True: every query is answered."""
        del votes, noise, query
        return True

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the class with the largest noisy count."""
        steps = noise.gaussian(len(votes), self.sigma, purpose="pate votes", server_round=query)
        return _largest(votes, self.sigma, steps)


class ConfidentGNMax(Settings):
    """GNMax for the queries on which teachers agree: whose largest count, with noise, reaches ``threshold`` votes.

    ``sigma_threshold``: the noise of that test, in votes, paid on every query; it is drawn apart from the answer's.
    ``sigma``: the noise on the counts of an answer, in votes.
    """

    kind: Literal["confident"] = "confident"
    threshold: float = Field(200.0, ge=0)
    sigma_threshold: float = Field(150.0, gt=0, le=1e5)
    sigma: float = Field(40.0, gt=0, le=1e5)

    def cost(self) -> "Cost":
        """Return what a query costs, for analysis."""
        from fl_sim.privacy.pate.labelling_cost import ConfidentCost  # noqa: PLC0415 (the accountants load slowly)

        return ConfidentCost(self.threshold, self.sigma_threshold, self.sigma)

    def charges(self) -> tuple["dp_event.DpEvent", "dp_event.DpEvent"]:
        """Return the charge of the test, whose one number moves by 1, and of an answer."""
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return dp_event.GaussianDpEvent(self.sigma_threshold), GNMax(sigma=self.sigma).charges()[1]

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return whether the noisy largest count reaches the threshold."""
        steps = noise.gaussian(1, self.sigma_threshold, purpose="pate threshold", server_round=query)
        largest = np.array([votes.max()], dtype=np.float64)
        return bool(add_noise(largest, self.sigma_threshold, steps)[0] >= self.threshold)

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the class with the largest noisy count."""
        return GNMax(sigma=self.sigma).winner(votes, noise=noise, query=query)


class NoNoise(Settings):
    """The plain majority, for whoever asks for it by name: no guarantee, for comparisons only."""

    kind: Literal["none"] = "none"

    def cost(self) -> "Cost":
        """Refuse: there is nothing to add up. Raises UserError."""
        raise UserError("mechanism none adds no noise, so no epsilon exists: choose lnmax, gnmax or confident")

    def charges(self) -> tuple[None, "dp_event.DpEvent"]:
        """Return the charge that ends every guarantee."""
        from dp_accounting import dp_event  # noqa: PLC0415 (the accountants load slowly)

        return None, dp_event.NonPrivateDpEvent()

    def passes(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> bool:
        """Return True: every query is answered."""
        del votes, noise, query
        return True

    def winner(self, votes: NDArray[np.int64], *, noise: Noise, query: int) -> int:
        """Return the class with the most votes, the first of several."""
        del noise, query
        return int(np.argmax(votes))


Mechanism: TypeAlias = LNMax | GNMax | ConfidentGNMax | NoNoise


def _largest(votes: NDArray[np.int64], scale: float, steps: NDArray[np.float64]) -> int:
    return int(np.argmax(add_noise(votes.astype(np.float64), scale, steps)))
