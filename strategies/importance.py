"""Importance sampling: clients with large updates take part more often, with less weight (Chen et al. 2022)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.kinds import Choices, kind_of
from strategies.algorithm import Averaging
from strategies.guided_sampler import Feedback, GuidedSampler
from strategies.samplers import Coins


class Importance(GuidedSampler):
    """Client i takes part independently with probability p_i. Its update is divided by p_i, so the mean is unbiased.

    The expected server step is that of ``sampler=full``. ``cohort_size``: the expected number of clients in a round,
    the sum of the p_i. ``by``: with "records", p_i is in proportion to client i's number of records n_i. With "norms",
    p_i is in proportion to n_i times the norm of client i's last update; the mean then has little variance if norms
    change slowly. A client that has sent no update yet gets the mean norm. In the paper all clients train in every
    round and report the norm of this round's update; here the norm of the last update is used. ``uniform_share``: the
    share of p_i that is the same for all clients, so that no p_i is close to 0. A client without records takes no part.
    Probabilities above 1 become 1, and all others rise, so that the sum of all probabilities stays the same. A round
    may have no client. If clients are late (``server.deadline``), the mean is biased.
    """

    kind: Literal["importance"] = "importance"
    cohort_size: int = Field(10, ge=1)
    by: Literal["records", "norms"] = "norms"
    uniform_share: float = Field(0.1, gt=0, le=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the run is private, or if the server uses more than a mean of updates."""
        super().check(experiment)
        algorithm, what = experiment.algorithm, "sampler importance cannot run with"
        plain = isinstance(algorithm, Averaging) and type(algorithm).finish is Averaging.finish
        if not plain or hasattr(algorithm, "weigh"):
            raise ValueError(
                f"{what} algorithm {kind_of(algorithm)}: its clients send more than the change of their model, which "
                "cannot be divided by a probability; take fedavg, fedprox, fedadam or another algorithm whose clients "
                "send only the change of their model"
            )
        for name, value, wanted in (
            ("aggregator", kind_of(experiment.aggregator), "mean"),
            ("local.batch_norm", experiment.local.batch_norm, "none"),
        ):
            if value != wanted:
                raise ValueError(f"{what} {name}={value}: only a mean of updates stays unbiased; leave {name} out")

    def rates(self, feedback: Feedback) -> NDArray[np.float64]:
        """Return the probability p_i of each client, shape (clients,)."""
        scores = feedback.sizes.astype(np.float64)
        if self.by == "norms" and feedback.met:
            usual = float(np.mean([one.norm for one in feedback.met.values()]))
            norms = [feedback.met[i].norm if i in feedback.met else usual for i in range(len(scores))]
            scores = scores * norms if any(norms) else scores
        holders = feedback.sizes > 0
        scores = scores / max(scores.sum(), 1e-300)
        return inclusion(
            np.where(holders, (1 - self.uniform_share) * scores + self.uniform_share / max(1, holders.sum()), 0.0),
            self.cohort_size,
        )

    def select(self, coins: Coins, server_round: int, feedback: Feedback) -> NDArray[np.int64]:
        """Return the cohort of a round, drawn with the probabilities p_i, ascending. It may be empty."""
        del server_round
        return np.flatnonzero(coins(len(feedback.sizes)) < self.rates(feedback))


def inclusion(scores: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return each client's sampling probability min(1, c * score), shape (clients,), from the clients' ``scores``.

    The factor c makes the sum of all probabilities equal to ``size``. If fewer scores than ``size`` are positive, the
    probabilities of all positive scores are 1.
    """
    rates, free = np.zeros(len(scores)), scores > 0
    if np.count_nonzero(free) <= size:
        return free.astype(np.float64)
    while True:
        rates[free] = scores[free] / scores[free].sum() * (size - np.count_nonzero(rates == 1))
        if not (rates > 1).any():
            return rates
        free &= rates < 1
        rates[(scores > 0) & ~free] = 1.0
