"""The layer of agnostic federated learning: clients with higher losses get larger weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch
from fl_sim.types import Aggregate, Cohort, Params, ServerState
from strategies.algorithm import Algorithm
from strategies.layer import Layer
from strategies.received_loss import losses_of

MIXTURE: Final = "mixture"
"""Name of the payload with a client's weight, which the layer adds to the client's reply."""


class Mixture(Layer):
    """Stores the weight lambda of each client that has sent an update. Adds these weights to replies, for the mean."""

    def __init__(self, rate: float, weights: Mapping[int, float]) -> None:
        self._rate, self.weights = rate, dict(weights)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Mixture:
        """Return the layer of a new or resumed run."""
        del out
        known = {int(client): weight for client, weight in progress.get("weights", {}).items()}
        return cls(experiment.algorithm.mixture_learning_rate, known)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the mean of the updates with weights lambda. Then update lambda for the next round.

        Each lambda is raised in proportion to the client's loss. Then all lambda are projected to sum 1.
        """
        trained = [reply for reply in cohort.replies if reply.num_examples]
        self._admit([reply.client for reply in trained])
        replies = tuple(
            replace(reply, payloads={**reply.payloads, MIXTURE: self._weight_of(reply.client)})
            for reply in cohort.replies
        )
        found = self.inner.aggregate(replace(cohort, replies=replies), algorithm, server)
        if trained:
            losses = dict(zip([reply.client for reply in trained], losses_of(trained), strict=True))
            raised = [weight + self._rate * losses.get(client, 0.0) for client, weight in self.weights.items()]
            self.weights = dict(zip(self.weights, on_simplex(np.array(raised)).tolist(), strict=True))
        return found

    def _admit(self, clients: Sequence[int]) -> None:
        """Give each client in its first round the mean weight of all known clients."""
        new = [client for client in clients if client not in self.weights]
        count = len(self.weights) + len(new)
        kept = {client: weight * len(self.weights) / count for client, weight in self.weights.items()}
        self.weights = {**kept, **dict.fromkeys(new, 1 / max(1, count))}

    def _weight_of(self, client: int) -> Params:
        return {"weight": torch.tensor([self.weights.get(client, 0.0)], dtype=torch.float64)}

    def state(self) -> Mapping[str, Any]:
        """Return the clients' weights lambda, for the checkpoint."""
        return {"weights": {str(client): weight for client, weight in self.weights.items()}}


def on_simplex(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Project ``values``, (n,), onto the simplex: return the nearest vector with entries >= 0 and sum 1, (n,)."""
    values = values - values.max()  # does not change the result, but makes rounding errors smaller
    ordered = np.sort(values)[::-1]
    shifts = (np.cumsum(ordered) - 1) / np.arange(1, len(values) + 1)
    nearest: NDArray[np.float64] = np.maximum(values - shifts[ordered > shifts][-1], 0.0)
    return nearest
