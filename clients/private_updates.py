"""The client half of local differential privacy: each client clips its update, adds noise, and sends the result.

The private update is min(1, C / |u|) u + N(0, z^2 C^2 I). Here u is the vector of all numbers in the algorithm's
update, C is the clipping norm and z is the noise multiplier (Gaussian mechanism; Dwork and Roth 2014, theorem A.1). Two
clipped updates differ by at most 2 C, the sensitivity. So the noise multiplier in the privacy ledger is z / 2. The
settings are in ``strategies.local_dp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final

import torch

from clients.client_layer import ClientLayer, PaidRound, Payer
from clients.paid_rounds import (
    ClientProtection,
    Releases,
    RoundCost,
    cost_of_round,
    round_without_records,
    ticket_of,
)
from fl_sim.errors import RunError
from fl_sim.params import layout_of, payload_vector, payloads_in
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalTask, Payloads

RELEASED: Final = "update"
"""The name of a round's released numbers in the privacy ledger."""

SENSITIVITY: Final = 2.0
"""The largest distance of two clipped updates, in clipping norms."""


def update_cost(protection: ClientProtection, rounds: int) -> RoundCost:
    """Return the privacy cost of one update, in a run of ``rounds`` rounds.

    Adjacency: all records of the client are replaced by others.

    This cost is an upper bound of the cost for each record of the client. Raises UserError if no noise is enough for
    epsilon.
    """
    return cost_of_round(protection, SENSITIVITY, 1.0, rounds, 1)


def noise_std(protection: ClientProtection, cost: RoundCost) -> float:
    """Return the standard deviation of the noise on each number of an update."""
    return cost.noise_multiplier * SENSITIVITY * protection.clipping_norm


@dataclass(frozen=True)
class ClientPrivateUpdates(ClientLayer):
    """Writes the cost of a client's update into its privacy ledger, and then clips the update and adds noise.

    ``run_digest``: a digest of the experiment. ``rounds``: the number of rounds of the run. ``template``: the names and
    shapes of the tensors in the algorithm's update.
    """

    protects: ClassVar[bool] = True
    protection: ClientProtection
    run_digest: str
    rounds: int
    template: Payloads

    def received(self, task: LocalTask) -> LocalTask:
        """Return ``task`` with weight 1 for every client that has records.

        The usual weight, the exact number of records, would reveal a fact about the records.
        """
        return replace(task, num_examples=min(1, task.num_examples))

    def protected(self, client: Payer, jobs: Mapping[str, LocalJob]) -> PaidRound:
        """Write the update's cost into the privacy ledger, and return the round with unchanged jobs.

        The round's function ``release`` clips the update and adds the noise.

        If the client's budget does not allow the round, the client trains nothing, and sends zeros with weight 0.
        """
        first = next(iter(jobs.values()))
        if not len(first.records):
            return round_without_records(jobs)
        cost, server_round = update_cost(self.protection, self.rounds), first.task.server_round
        releases = Releases(RELEASED, self.protection.noise, self.run_digest)
        noise = releases.paid(client, server_round, cost)
        if noise is None:
            return round_without_records(jobs)
        std = noise_std(self.protection, cost)
        release = partial(self._released, std=std, noise=noise, server_round=server_round)
        return PaidRound(jobs, ticket_of(noise), release)

    def _released(self, update: ClientUpdate, *, std: float, noise: Noise, server_round: int) -> ClientUpdate:
        """Return the clipped update with noise. It has the weight 1, no loss, and the unchanged client state.

        All payloads together are one vector with one norm. An update that is not finite is replaced by zeros. Raises
        RunError if names or shapes of the update differ from the template, because such differences could reveal facts
        about records.
        """
        shapes = [{group: dict(layout_of(one)) for group, one in of.items()} for of in (update.payloads, self.template)]
        if shapes[0] != shapes[1] or update.packed:
            raise RunError(
                "the algorithm's update has other tensors than the update of a client without records, so names and "
                "shapes could reveal facts about records: let finish return the same names and shapes for all clients"
            )
        row = payload_vector(update.payloads, self.template).double()
        limit = clipping_norm_on_grid(self.protection.clipping_norm, std, len(row), summands=1)
        factor = clip_factor(float(torch.linalg.vector_norm(row)), limit)
        clipped = row * factor if factor else torch.zeros_like(row)
        steps = noise.gaussian(len(row), std, purpose="client update", server_round=server_round)
        noisy = torch.from_numpy(add_noise(clipped.numpy(), std, steps))
        return ClientUpdate(payloads_in(noisy, self.template), 1, None, update.state)
