"""The privacy bill of local differential privacy: the costs of updates, for the forecast and privacy statement.

The settings are in ``strategies.local_dp``. The module ``clients.private_updates`` writes the costs into the clients'
privacy ledgers.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from dp_accounting import dp_event

from clients.private_updates import RELEASED, noise_std, update_cost
from fl_sim.params import num_parameters
from fl_sim.privacy.events import under_replacement
from fl_sim.privacy.terms import Adjacency, Terms, delta_advice, rounded_up
from fl_sim.stages.paid_rounds import PaidRoundsBill, PayingClients
from strategies.algorithm import first_template


class PrivateUpdatesBill(PaidRoundsBill):
    """The stage at the server: it states the privacy cost of the clients' updates, per client."""

    released: ClassVar[str] = RELEASED
    covers: ClassVar[str] = (
        "everything that a client sends in the rounds and all results that are computed from it, such as the model of "
        "every round, also against the server. Epsilon holds for each client, for any behaviour of the other clients."
    )
    does_not_cover: ClassVar[str] = (
        "The clients with records and the cohort of each round are treated as public: sampling clients does not "
        "reduce the cost. The client state never leaves its client, and has no noise."
    )

    @property
    def terms(self) -> Terms:
        """Return the terms of the privacy statement: privacy unit (a client), adjacency and delta."""
        return Terms("client", Adjacency.REPLACE_ONE, self.settings.delta)

    def warnings(self) -> list[str]:
        """Return a sentence about noise and privacy cost of updates, and a warning if delta is too large."""
        if not (groups := self.groups):
            return []
        experiment, settings, [group] = self.job.experiment, self.settings, groups
        cohort = max(1.0, experiment.sampler.expected_size(len(group.clients)))
        length = group.std * (group.size / cohort) ** 0.5 / settings.clipping_norm
        said = (
            f"local.privacy=local-dp: each number of an update has noise of {group.std / settings.clipping_norm:.4g} "
            f"clipping norms. The noise of the mean of {cohort:g} updates has a norm of {length:.3g} clipping "
            f"norms; a clipped update has a norm of at most 1. {self.rounds_of(group):,} rounds cost each client at "
            f"most epsilon {rounded_up(self.spent_by(group))} at delta {settings.delta:g}"
        )
        advice = delta_advice(settings.delta, len(group.clients))
        return [said, *([advice] if advice else [])]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``local_privacy`` for ``result.json``: noise multiplier, and number of allowed rounds."""
        return {
            "local_privacy": {
                "kind": self.settings.kind,
                "noise_multiplier": next((group.std / self.settings.clipping_norm for group in self.groups), None),
                "rounds": next(map(self.rounds_of, self.groups), 0),
            }
        }

    @cached_property
    def groups(self) -> list[PayingClients]:
        """Return one group of all clients with records, because a client's cost does not depend on its records."""
        experiment = self.job.experiment
        clients = tuple(np.flatnonzero(np.asarray(self.job.shards.sizes)).tolist())
        if not clients:
            return []
        protection = self.protection_in_time(partial(update_cost, rounds=experiment.rounds))
        cost = update_cost(protection, experiment.rounds)
        algorithm, std = experiment.algorithm, noise_std(protection, cost)
        sent = first_template(algorithm, self.params, experiment.local.personal)
        size = sum(num_parameters(params) for params in sent.values())
        event = under_replacement(dp_event.GaussianDpEvent(std / protection.clipping_norm))
        return [PayingClients(clients, cost, {event: 1}, std, size)]
