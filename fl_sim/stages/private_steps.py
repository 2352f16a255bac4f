"""The privacy bill of DP-SGD on clients: the costs of their steps, for the forecast and the privacy statement.

The settings are in ``strategies.dp_sgd``. The module ``clients.private_steps`` writes the costs into the clients'
privacy ledgers.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from clients.paid_rounds import ClientProtection, RoundCost
from clients.private_steps import RELEASED, round_cost
from fl_sim.params import num_parameters
from fl_sim.privacy.terms import Adjacency, Terms, delta_advice, rounded_up
from fl_sim.simulation.client_runtime import local_settings
from fl_sim.stages.paid_rounds import PaidRoundsBill, PayingClients, range_in_words
from fl_sim.training.private_steps import num_private_steps
from strategies.dp_sgd import DPSGD
from strategies.private_steps import models_of


class PrivateStepsBill(PaidRoundsBill):
    """The stage at the server: it states the privacy cost of the clients' DP-SGD steps, per record."""

    released: ClassVar[str] = RELEASED
    covers: ClassVar[str] = (
        "everything that a client sends in the rounds, its client state, and all results that are computed from these "
        "two, such as the model of every round, also against the server. The clients' records are disjoint: epsilon is "
        "the largest epsilon of a client, and holds for each record of every client."
    )
    does_not_cover: ClassVar[str] = (
        "The number of each client's records and the cohort of each round are treated as public, so sampling clients "
        "does not reduce the cost."
    )

    @property
    def settings(self) -> DPSGD:
        """Return the settings of DP-SGD."""
        assert isinstance(self.job.experiment.local.privacy, DPSGD)
        return self.job.experiment.local.privacy

    @property
    def terms(self) -> Terms:
        """Return the terms of the privacy statement: privacy unit (a record), adjacency and delta."""
        return Terms("record", Adjacency.ADD_OR_REMOVE_ONE, self.settings.delta)

    def warnings(self) -> list[str]:
        """Return a sentence about the clients' noise and privacy cost, and a warning if delta is too large."""
        if (worst := self.worst) is None:
            return []
        noises, rates = zip(*((group.cost.noise_multiplier, group.cost.rate) for group in self.groups), strict=True)
        said = (
            f"local.privacy=dp-sgd: each sum of gradients has noise of {range_in_words(noises)} clipping norms "
            f"(clipping {self.settings.clipping_in_words}), and a record joins a batch with probability "
            f"{range_in_words(rates)}; {self.rounds_of(worst):,} rounds of {worst.cost.num_steps:,} steps cost "
            f"each record at most epsilon {rounded_up(self.spent_by(worst))} at delta {self.settings.delta:g}"
        )
        advice = delta_advice(self.settings.delta, min(group.num_records for group in self.groups))
        return [said, *([advice] if advice else [])]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``local_privacy`` for ``result.json``.

        It lists, for each number of records that a client may have, the noise and the DP-SGD steps of such clients.
        """
        groups = sorted(self.groups, key=lambda group: group.num_records)
        listed = [
            {
                "records": group.num_records, "clients": len(group.clients), "steps": group.cost.num_steps,
                "noise_multiplier": group.cost.noise_multiplier, "sampling_rate": group.cost.rate,
                "rounds": self.rounds_of(group),
            }
            for group in groups
        ]  # fmt: skip
        return {
            "local_privacy": {
                "kind": self.settings.kind,
                "clipping": self.settings.clipping_in_words,
                "by_records": listed,
            }
        }

    @cached_property
    def groups(self) -> list[PayingClients]:
        """Return all clients with records, in groups with equal numbers of records."""
        from fl_sim.simulation.rounds import procedure_of  # noqa: PLC0415 (it asks all stages)

        job, experiment = self.job, self.job.experiment
        settings = local_settings(job, experiment.local.learning_rate)
        plan = procedure_of(job).typical_plan()
        further = models_of(experiment.algorithm, self.params) - 1

        def steps_of(size: int) -> int:
            return num_private_steps(plan, settings, size) + further * settings.num_steps(size)

        sizes: dict[int, list[int]] = {}
        for client, size in enumerate(np.asarray(job.shards.sizes).tolist()):
            sizes.setdefault(size, []).append(client)

        def cost_of(protection: ClientProtection, size: int) -> RoundCost:
            return round_cost(protection, settings, size, experiment.rounds, steps_of(size))

        protection, found = self.protection_in_time(partial(cost_of, size=max(sizes))), []
        for size, clients in sizes.items():
            if size:
                cost = cost_of(protection, size)
                std, planned = cost.noise_multiplier * protection.clipping_norm, {cost.event: cost.num_steps}
                found.append(PayingClients(tuple(clients), cost, planned, std, num_parameters(self.params), size, size))
        return found
