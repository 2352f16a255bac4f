"""The layer for samplers with feedback: it stores facts about updates, and asks clients for losses before a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from clients.asked_loss import loss_in
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.params import scale
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, Cohort, Reply, ServerState, Traffic
from strategies.aggregators import as_rows, weights_of
from strategies.algorithm import Algorithm
from strategies.guided_sampler import Feedback, Met
from strategies.layer import Ask, Beginning, Drawn, Layer, Workload
from strategies.samplers import Coins

TELL_LOSS: Final = "tell-loss"
"""Name of the client task that reports a client's loss."""


class GuidedCohorts(Layer):
    """Samples cohorts by facts about clients. If the sampler has sampling probabilities, divides updates by them.

    ``met``: {client: facts about its last update} for all clients that have sent an update. ``gains``: {round: sum of
    (number of records times mean loss) over the clients of the round}.
    """

    def __init__(self, experiment: Any, met: Mapping[int, Met], gains: Mapping[int, float] = MappingProxyType({})):
        self._experiment, self.met, self.gains = experiment, dict(met), dict(gains)
        self._sampler, self._sizes = experiment.sampler, np.ones(experiment.num_clients, np.int64)
        self._asked = dict[int, float]()
        self._rates: NDArray[np.float64] | None = None
        self._seconds: Callable[[int, int], float] = lambda client, server_round: 0.0  # noqa: ARG005

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> GuidedCohorts:
        """Return the layer for a run. In a resumed run it has the facts about the updates of earlier rounds."""
        del out
        gains = {int(number): gain for number, gain in progress.get("gains", {}).items()}
        met = {
            int(client): Met(*facts[:4], *map(tuple, facts[4:])) for client, facts in progress.get("met", {}).items()
        }
        return cls(experiment, met, gains)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if clients are held out of training: the sampler would ask them for their loss, too."""
        del beginning
        if experiment.num_members < experiment.num_clients:
            raise UserError(
                f"sampler {kind_of(experiment.sampler)} cannot run with evaluate.held_out_clients="
                f"{experiment.evaluate.held_out_clients:g}: it would ask clients that never train; leave "
                "evaluate.held_out_clients out"
            )

    def ready(self, work: Workload) -> None:
        """Store the clients' numbers of records, and the function that returns the duration of a client's work."""
        self._sizes, self._seconds = work.sizes, work.seconds
        self.inner.ready(work)

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Ask the sampler's candidates for their loss, and return the number of bytes that were sent."""
        candidates = self._sampler.candidates(self._coins(server_round), self._feedback()).tolist()
        traffic = self.inner.consult(server_round, ask)
        self._asked = {}
        if candidates:
            losses, sent = ask(TELL_LOSS, candidates, loss_in)
            self._asked, traffic = dict(zip(candidates, losses, strict=True)), traffic + sent
        return traffic

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the cohort that the sampler selects; field ``asked`` lists clients that were asked for losses."""
        feedback, coins = self._feedback(), coins or self._coins(server_round)
        self._rates = self._sampler.rates(feedback)
        return Drawn(self._sampler.select(coins, server_round, feedback), asked=tuple(self._asked))

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the mean of the updates, and store facts about the updates, from which later cohorts are sampled.

        If the sampler has sampling probabilities p_i, updates are divided by them, so that the mean is unbiased. Let
        w_i be the weight of client i, for all clients with records. The update of client i is multiplied by f_i = (sum
        of w in the cohort) / (p_i sum of all w). The weighted mean over the cohort then is (sum of w_i update_i / p_i)
        / (sum of all w).
        """
        trained = [reply for reply in cohort.replies if reply.num_examples]
        if self._rates is not None and trained:
            assert isinstance(algorithm.weighting, str)
            everybody = [Reply(client, {}, size, None) for client, size in enumerate(self._sizes.tolist()) if size]
            present, whole = (sum(weights_of(some, algorithm.weighting)) for some in (trained, everybody))
            factors = {one.client: float(present / whole / self._rates[one.client]) for one in trained}
            replies = tuple(_times(one, factors.get(one.client, 0.0)) for one in cohort.replies)
            cohort = replace(cohort, replies=replies)
        found = self.inner.aggregate(cohort, algorithm, server)
        for reply in trained:  # only after aggregation, because it checks that all numbers are finite
            self.met[reply.client] = self._met(reply, cohort.server_round)
        self.gains[cohort.server_round] = sum(
            float(self._sizes[one.client]) * max(0.0, one.loss or 0.0) for one in trained
        )
        return found

    def state(self) -> Mapping[str, Any]:
        """Return the layer's state for the checkpoint: the facts about clients, and the loss sum of each round."""
        met = {str(client): [*astuple(facts)[:4], list(facts.sketch)] for client, facts in self.met.items()}
        return {"met": met, "gains": {str(number): gain for number, gain in self.gains.items()}}

    def _coins(self, server_round: int) -> Coins:
        return rng(self._experiment.seed_of_sampling, "sampler", server_round).random

    def _feedback(self) -> Feedback:
        return Feedback(self._sizes, self.met, self._asked, self.gains)

    def _met(self, reply: Reply, server_round: int) -> Met:
        [update], seconds = as_rows([reply]), self._seconds(reply.client, server_round)
        norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        sketch = self._sampler.sketch(update)
        return Met(server_round, reply.loss or 0.0, norm, seconds, sketch)


def _times(reply: Reply, factor: float) -> Reply:
    """Return the reply with all its payloads multiplied by ``factor``."""
    return replace(reply, payloads={name: scale(part, factor) for name, part in reply.payloads.items()})
