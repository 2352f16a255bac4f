"""DivFL: the server selects a cohort whose updates represent the updates of all clients (Balakrishnan et al. 2022)."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices
from fl_sim.seeding import rng
from strategies.guided_sampler import Feedback, GuidedSampler, smallest
from strategies.samplers import Coins, distinct

_MOST_CLIENTS: Final = 5000


class DivFL(GuidedSampler):
    """The cohort S is chosen so that every client has a client in S with a similar update.

    Let d_ij be the distance between the last updates of clients i and j, and D the largest of all distances. The cohort
    maximises the facility location function F(S) = sum over all clients i of (D - min over j in S of d_ij). The
    maximisation is greedy: each step adds the client with the largest gain (section 3). So F(S) is at least 1 - 1/e
    times the largest possible value. Between equal gains, the choice is random. This is the paper's variant without
    further messages: only clients in a cohort send a new update. Clients that have sent no update so far are chosen
    first, uniformly at random, until all clients have been in a cohort.

    ``cohort_size``: the number of clients in a round. ``sketch_size``: the length of a count sketch. The server stores
    only this sketch of each update, so checkpoints stay small, and computes the distances between sketches. The
    relative error of a squared distance is about sqrt(2 / ``sketch_size``). Updates with at most ``sketch_size``
    numbers are stored without a sketch.

    Differences from the paper: there, the gradients of all clients are collected once, before the first round, and a
    greedy step compares only a random part of the clients. Here, it compares all clients, and the mean has the weights
    of the algorithm.
    """

    kind: Literal["divfl"] = "divfl"
    title: ClassVar[str] = "DivFL"
    cohort_size: int = Field(10, ge=1)
    sketch_size: int = Field(256, ge=1, le=10**5)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for a private run, and for too few or too many clients.

        With too many clients, the matrix of all distances between clients would be too large.
        """
        super().check(experiment)
        if experiment.clients > _MOST_CLIENTS:
            raise ValueError(
                f"sampler divfl compares all pairs of clients, for {_MOST_CLIENTS:,} clients at most, and there are "
                f"{experiment.clients:,}: take another sampler, such as oort"
            )

    def sketch(self, update: torch.Tensor) -> tuple[float, ...]:
        """Return the count sketch of an update of shape (parameters,): a short vector that nearly preserves distances.

        Each number of the update gets a random sign, and is added to a random entry of the sketch. Signs and entries
        are the same for all updates.
        """
        numbers = update.double().numpy(force=True)
        if len(numbers) <= self.sketch_size:
            return tuple(numbers.tolist())
        signs, entries = _hashes(len(numbers), self.sketch_size)
        return tuple(np.bincount(entries, weights=signs * numbers, minlength=self.sketch_size).tolist())

    def select(self, coins: Coins, server_round: int, feedback: Feedback) -> NDArray[np.int64]:
        """Return the cohort, ascending: clients without any update so far, and the most representative clients."""
        del server_round
        num_clients = len(feedback.sizes)
        drawn, holds = distinct(num_clients, coins), feedback.sizes > 0
        known = np.array([client in feedback.met for client in range(num_clients)]) & holds
        new = smallest(drawn, holds & ~known, self.cohort_size)
        clients = np.flatnonzero(known)
        clients = clients[np.argsort(drawn[clients])]  # between equal gains, the first client in this random order wins
        sketches = np.array([feedback.met[client].sketch for client in clients.tolist()])
        chosen = representatives(sketches, self.cohort_size - len(new)) if len(clients) else []
        return np.sort(np.concatenate([new, clients[chosen]])).astype(np.int64)


@lru_cache(maxsize=1)  # all updates of a run have the same length
def _hashes(length: int, sketch_size: int) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Return for each number of an update its random sign, and its random entry of the sketch."""
    draw = rng(0, "sketch", length)
    signs = draw.choice([-1.0, 1.0], length).astype(np.int8)
    return signs, draw.integers(0, sketch_size, length).astype(np.int32)


def representatives(vectors: NDArray[np.float64], count: int) -> list[int]:
    """Return at most ``count`` rows of ``vectors``, (n, d), by the greedy rule of ``DivFL``, in the order of choice."""
    from scipy.spatial.distance import cdist  # noqa: PLC0415 (loads slowly)

    # no matrix product, because its rounding depends on the number of threads
    distances: NDArray[np.float64] = cdist(vectors, vectors)
    nearest, chosen = np.full(len(vectors), distances.max()), list[int]()
    free = np.ones(len(vectors), dtype=bool)
    while len(chosen) < min(count, len(vectors)):
        gains = np.maximum(nearest[:, None] - distances, 0.0).sum(axis=0)
        best = int(np.argmax(np.where(free, gains, -1.0)))
        chosen.append(best)
        free[best], nearest = False, np.minimum(nearest, distances[:, best])
    return chosen
