"""FedDisco: clients whose label distribution is further from uniform have less weight (Ye et al. 2023, eq. 6)."""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.types import ClientUpdate, LocalTask, Reply, Trained
from strategies.algorithm import FEDAVG, Averaging


class FedDisco(Averaging):
    """FedAvg with client weights in proportion to max(0, p_i - a d_i + b), where p_i = n_i / n.

    n_i is the number of records of client i, and n the sum of n_i over the cohort. Client i sends the KL divergence of
    its label distribution from the uniform distribution. d_i is this divergence, divided by the sum of the cohort's
    divergences. If all weights would be 0, the weights are the p_i. ``a``: the factor of d_i. ``b``: the constant in
    every weight. The released scripts have ``a`` 0.5 and ``b`` 0.1.
    """

    kind: Literal["feddisco"] = "feddisco"
    a: float = Field(0.5, ge=0)
    b: float = Field(0.1, ge=0)
    title: ClassVar[str] = "FedDisco"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        if self.a:
            return []
        return [off("algorithm.a=0", "labels have no effect on the weights" if self.b else FEDAVG)]

    def note(self) -> str:
        """Return the note below result tables. It says that clients send one number in addition to their update."""
        return "FedDisco: every client also sends one number, the distance of its label distribution from uniform."

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x, and the KL divergence of the client's label distribution from the uniform one."""
        update, total = super().finish(task, trained), max(sum(task.class_counts), 1)
        shares = [count / total for count in task.class_counts if count]
        divergence = sum(share * math.log(share * len(task.class_counts)) for share in shares)
        payloads = {**update.payloads, "labels": {"divergence": torch.tensor([divergence], dtype=torch.float32)}}
        return ClientUpdate(payloads, update.num_examples, update.loss)

    def weigh(self, replies: Sequence[Reply]) -> list[float]:
        """Return the weight of each client's update in the mean. All ``replies`` come from clients with records."""
        total = sum(reply.num_examples for reply in replies)
        shares = [reply.num_examples / total for reply in replies]
        found = [float(reply.payloads["labels"]["divergence"]) for reply in replies]
        unit = sum(found) or 1.0
        weights = [max(0.0, p_i - self.a * d / unit + self.b) for p_i, d in zip(shares, found, strict=True)]
        return weights if any(weights) else shares
