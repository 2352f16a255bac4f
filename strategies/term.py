"""TERM: a client's weight grows exponentially with its loss (Li et al. 2021, section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from fl_sim.kinds import Choices, off
from fl_sim.types import Reply
from strategies.algorithm import FEDAVG
from strategies.received_loss import SendingLoss, losses_of


class TERM(SendingLoss):
    """FedAvg with client weights in proportion to n_i exp(t F_i), as in the gradient of (1/t) log sum_i p_i exp(t F_i).

    F_i is the loss of the received model on all n_i training records of client i, and p_i = n_i / n. ``t``: the tilt.
    For large t only the client with the largest loss has weight, as in agnostic federated learning. With t = 0 the
    method is FedAvg. With a negative t a high loss means less weight. A larger t needs a smaller learning rate.
    Otherwise each round fits the model to the client with the largest loss, this client changes from round to round,
    and the model does not converge. The server sees every F_i.
    """

    kind: Literal["term"] = "term"
    title: ClassVar[str] = "TERM"
    t: float = 1.0

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        return [] if self.t else [off("algorithm.t=0", FEDAVG)]

    def weigh(self, replies: Sequence[Reply]) -> list[float]:
        """Return the weight n_i exp(t F_i) of each reply, divided by the largest exponential to avoid overflow."""
        tilted = [self.t * loss for loss in losses_of(replies)]
        return [reply.num_examples * math.exp(one - max(tilted)) for reply, one in zip(replies, tilted, strict=True)]
