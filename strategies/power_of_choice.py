"""Power-of-choice: the candidates with the largest loss train (Cho, Wang, Joshi 2022, section 3)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.kinds import Choices
from strategies.guided_sampler import Feedback, GuidedSampler, smallest
from strategies.samplers import Coins, distinct


class PowerOfChoice(GuidedSampler):
    """Candidates evaluate the model and send their loss; the candidates with the largest loss train.

    Candidates are drawn without replacement, in proportion to their numbers of records. Each candidate receives the
    model, and evaluates the model on all its training records. Bytes and virtual clock include this evaluation.
    Evaluation of a record is assumed to take a third of the time of training on the record. The paper's mean has equal
    weights; here the weights are those of the algorithm. With more candidates, clients with a high loss take part more
    often. ``cohort_size``: the number of clients that train in a round. ``candidates_asked``: the number of candidates;
    the paper uses 2 to 10 times the cohort size. The default is twice the cohort size, or all clients if there are
    fewer. If the number equals the cohort size, no client is asked for its loss; if all clients have equal numbers of
    records, the run is then the same as with ``fixed-size``.
    """

    kind: Literal["power-of-choice"] = "power-of-choice"
    title: ClassVar[str] = "power-of-choice"
    cohort_size: int = Field(10, ge=1)
    candidates_asked: int | None = Field(None, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the run is private, or if ``cohort_size`` or ``candidates_asked`` is out of range."""
        super().check(experiment)
        asked = self.candidates_asked
        if asked is not None and not self.cohort_size <= asked <= experiment.clients:
            raise ValueError(
                f"sampler.candidates_asked={asked} must be from sampler.cohort_size={self.cohort_size} "
                f"to clients={experiment.clients}: set another number"
            )

    def candidates(self, coins: Coins, feedback: Feedback) -> NDArray[np.int64]:
        """Return the clients that are asked for their loss; none if all candidates will train anyway."""
        asked = self.num_asked(len(feedback.sizes))
        return smallest(distinct(len(feedback.sizes), coins), feedback.sizes, asked)

    def num_asked(self, num_clients: int) -> int:
        """Return the number of candidates that are asked for their loss; 0 if all candidates train."""
        asked = min(2 * self.cohort_size, num_clients) if self.candidates_asked is None else self.candidates_asked
        return asked if asked > self.cohort_size else 0

    def select(self, coins: Coins, server_round: int, feedback: Feedback) -> NDArray[np.int64]:
        """Return the candidates with the largest loss, ascending. At equal losses, the lower client ID is taken."""
        del server_round
        if not feedback.asked:
            return smallest(distinct(len(feedback.sizes), coins), feedback.sizes, self.cohort_size)
        clients, losses = (np.array(list(part)) for part in (feedback.asked, feedback.asked.values()))
        return np.sort(clients[np.lexsort((clients, -losses))[: self.cohort_size]])
