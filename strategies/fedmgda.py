"""FedMGDA+: normalised updates are combined into a step that lowers every client's loss (Hu et al. 2022, alg. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.params import add, flattened, scale
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Reply, ServerState, Trained
from strategies.algorithm import Averaging

_EXACT: Final = 1e-10
_MOST_STEPS: Final = 100_000


class FedMGDA(Averaging):
    """x <- x + server_learning_rate sum_i lambda_i d_i, with d_i = (y_i - x) / ||y_i - x||.

    x is the global model, and y_i the trained model of client i. The weights lambda_i are at least 0 and sum to 1.
    Among all such weights with |lambda_i - p_i| <= epsilon for every i, the lambda_i minimise ||sum_i lambda_i d_i||.
    p_i = n_i / n is client i's share of the records. At epsilon 1 a small step lowers the loss of every client. At
    epsilon 0 each lambda_i is p_i. All d_i have length 1, so that a client with a huge update has a limited effect.

    ``epsilon``: the largest difference of a weight lambda_i from the share p_i. ``server_learning_rate``: also the
    largest possible length of a step, because the weighted mean of vectors of length 1 has at most length 1. In the
    paper, this rate decays over the rounds. The default values come from an implementation by other authors.
    """

    kind: Literal["fedmgda"] = "fedmgda"
    title: ClassVar[str] = "FedMGDA+"
    epsilon: float = Field(0.1, ge=0, le=1)
    server_learning_rate: float = Field(1.0, gt=0)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return d_i, the update scaled to norm 1, or zeros if the model did not change."""
        update = super().finish(task, trained)
        delta = update.payloads["delta"]
        length = float(torch.linalg.vector_norm(flattened(delta).flat, dtype=torch.float64))
        direction = scale(delta, 1 / length if length else 0.0)
        return ClientUpdate({"direction": direction}, task.num_examples, trained.loss)

    def weigh(self, replies: Sequence[Reply]) -> list[float]:
        """Return lambda_i, the weight of direction d_i in the mean, for each reply."""
        rows = torch.stack([flattened(reply.payloads["direction"]).flat.double() for reply in replies])
        shares = np.array([reply.num_examples for reply in replies], dtype=np.float64)
        found: list[float] = least_norm((rows @ rows.T).numpy(force=True), shares / shares.sum(), self.epsilon).tolist()
        return found

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the model plus a step along the weighted mean of the directions d_i."""
        return ServerState(add(server.params, aggregate.payloads["direction"], self.server_learning_rate))


def least_norm(products: NDArray[np.float64], shares: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """Return the weights lambda that minimise lambda' G lambda, where ``products`` is the Gram matrix G, (n, n).

    Each weight is at least 0, and differs from its entry in ``shares`` by at most ``epsilon``. The weights sum to 1,
    like ``shares``. Each iteration chooses the two clients between which a shift of weight lowers the norm fastest, and
    shifts the weight that minimises the norm.
    """
    lowest, highest = np.maximum(0.0, shares - epsilon), shares + epsilon
    mixture, slopes = shares.copy(), products @ shares
    for _ in range(_MOST_STEPS):
        gains = np.where(mixture < highest, slopes, np.inf), np.where(mixture > lowest, slopes, -np.inf)
        to, source = int(gains[0].argmin()), int(gains[1].argmax())
        fall = gains[1][source] - gains[0][to]
        if not fall > _EXACT:
            break
        bend = products[to, to] + products[source, source] - 2 * products[to, source]
        room = min(highest[to] - mixture[to], mixture[source] - lowest[source])
        moved = min(fall / bend, room) if bend > 0 else room
        mixture[to] = highest[to] if moved == highest[to] - mixture[to] else mixture[to] + moved
        mixture[source] = lowest[source] if moved == mixture[source] - lowest[source] else mixture[source] - moved
        slopes += moved * (products[:, to] - products[:, source])
    return mixture
