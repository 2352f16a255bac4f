"""FoolsGold: clients with similar updates have less weight (Fung, Yoon, Beschastnikh 2020, algorithm 1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.types import Cohort, Params, Payloads
from strategies.aggregators import Robust, as_named, row_like
from strategies.algorithm import Weighting


class FoolsGold(Robust):
    """The mean of updates, with less weight for clients whose updates were similar in all rounds so far.

    A client's history h_i is the sum of its updates, including this round's. c_i is the largest cosine between h_i and
    the history of another client of the round, at least 0. The cosine of h_i and h_j is multiplied by c_i / c_j if c_j
    > c_i (the paper calls this pardoning). v_i is the largest cosine of h_i and another history after this step. The
    weight is kappa (ln(a / (1 - a)) + 0.5), clipped to [0, 1], with a = (1 - v_i) / max of all (1 - v_j). If all
    weights are 0, all clients have the same weight. The checkpoint contains the histories. Each history takes as much
    memory as a model.

    The rule assumes that honest clients have different data, and that several hostile clients send similar updates. It
    does not bound the norm of an update, so a single hostile client can change the result without limit. On IID data
    the rule may also remove honest clients. No privacy guarantee.

    ``confidence``: the factor kappa of the weights.
    """

    kind: Literal["foolsgold"] = "foolsgold"
    confidence: float = Field(1.0, gt=0, le=1000)
    title: ClassVar[str] = "FoolsGold"
    needs_names: ClassVar[bool] = True

    @property
    def has_memory(self) -> bool:
        """Return True: the aggregator stores the history of every client from round to round."""
        return True

    def remembered(self, payloads: Payloads, num_clients: int) -> Params:
        """Return the histories (each client's sum of updates) before the first round: zeros."""
        named = as_named(payloads)
        return {f"{client}/{name}": torch.zeros_like(named[name]) for client in range(num_clients) for name in named}

    def memory_after(self, cohort: Cohort, payloads: Payloads) -> Params:
        """Return the histories (each client's sum of updates) after this round."""
        del payloads
        memory = {**cohort.memory}
        for reply in cohort.replies:
            for name, value in as_named(reply.payloads).items():
                key = f"{reply.client}/{name}"
                memory[key] = memory[key] + value if key in memory else value
        return memory

    def of_rows(self, rows: torch.Tensor, cohort: Cohort, weighting: Weighting) -> torch.Tensor:
        """Return the weighted mean of the updates ``rows``, shape (n, d)."""
        del weighting
        past = [row_like(cohort.memory, reply.payloads, f"{reply.client}/") for reply in cohort.replies]
        weights = foolsgold_weights(torch.stack(past).double() + rows, self.confidence)
        if not bool(weights.any()):
            weights = torch.ones_like(weights)
        return weights / weights.sum() @ rows.double()


def foolsgold_weights(histories: torch.Tensor, confidence: float) -> torch.Tensor:
    """Return the weight in [0, 1] of each client, shape (n,), from all clients' ``histories``, shape (n, d)."""
    units = histories / histories.norm(dim=1, keepdim=True).clamp(min=1e-300)
    cosines = (units @ units.T).fill_diagonal_(0)
    largest = cosines.max(dim=1).values
    pardoned = cosines * (largest[:, None] / largest).where(largest > largest[:, None], torch.ones_like(cosines))
    share = (1 - pardoned.max(dim=1).values).clamp(0, 1)
    if not float(share.max()):
        return torch.zeros_like(share)
    weights: torch.Tensor = (confidence * ((share / share.max()).logit() + 0.5)).clamp(0, 1)
    return weights
