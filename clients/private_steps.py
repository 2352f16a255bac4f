"""The client half of DP-SGD: a client writes the cost of a round's private steps into its privacy ledger, then trains.

The settings are in ``strategies.dp_sgd``, and the steps in ``fl_sim.training.private_steps``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NoReturn, cast

from clients.client_layer import ClientLayer, PaidRound, Payer
from clients.paid_rounds import (
    ClientProtection,
    Releases,
    RoundCost,
    cost_of_round,
    round_without_records,
    ticket_of,
)
from fl_sim.clipping import FLAT, Clipping
from fl_sim.errors import UserError
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.privacy.mechanisms import Noise
from fl_sim.training.private_steps import num_private_steps, sampling_rate, unsupported
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Trained

RELEASED: Final = "local steps"
"""The name of a round's released numbers in the privacy ledger."""


def round_cost(
    protection: ClientProtection, settings: LocalSettings, num_records: int, rounds: int, num_steps: int
) -> RoundCost:
    """Return the privacy cost of one round for a client with ``num_records`` records, in a run of ``rounds`` rounds.

    ``num_steps``: the number of private steps in a round, of all models of the client together. The sensitivity of a
    step's sum is one clipping norm. Raises UserError if no noise is enough for epsilon.
    """
    return cost_of_round(protection, 1.0, sampling_rate(settings, num_records), rounds, num_steps)


class Withheld:
    """A placeholder for records or class counts that an algorithm must not read under local.privacy.

    Every use of the placeholder raises UserError.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise UserError(
            f"the algorithm reads {self._what} without noise, and local.privacy promises privacy for each record: set "
            "another algorithm, such as fedavg, fedprox or scaffold, or leave local.privacy out"
        )

    __len__ = __iter__ = __bool__ = __getitem__ = __add__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]  # as for every class with __eq__

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


CLASS_COUNTS: Final = cast("tuple[int, ...]", Withheld("the number of a client's records of each class"))
RECORDS: Final = cast("Records", Withheld("a client's records"))


@dataclass(frozen=True)
class ClientPrivateSteps(ClientLayer):
    """Writes the cost of a round's local steps into the client's privacy ledger, and then makes the steps private.

    ``run_digest``: a digest of the experiment. ``rounds``: the number of rounds of the run. ``clipping``: the rule that
    bounds the gradients of records.
    """

    protects: ClassVar[bool] = True
    protection: ClientProtection
    run_digest: str
    rounds: int
    clipping: Clipping = FLAT

    def received(self, task: LocalTask) -> LocalTask:
        """Return ``task`` without class counts, and with an equal weight for every client that has records.

        Exact class counts and weights would reveal facts about the records.
        """
        return replace(task, class_counts=CLASS_COUNTS, num_examples=min(1, task.num_examples))

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return ``plan`` with private steps and seeded noise, only for forecasts and the choice of a trainer."""
        noise = self.protection.noise_multiplier or 1.0
        norm = self.protection.clipping_norm
        return replace(plan, private=PrivateSteps(norm, noise, Noise.seeded(0), "typical", self.clipping))

    def shown(self, records: Records) -> Records:
        """Return a placeholder instead of the records, because the algorithm's own code must not read them."""
        del records
        return RECORDS

    def protected(self, client: Payer, jobs: Mapping[str, LocalJob]) -> PaidRound:
        """Write the joint privacy cost of all ``jobs`` into the client's privacy ledger, and return a private round.

        The jobs (the trainer's inputs, one for each model of the client) get private steps.

        If the client's budget does not allow the round, the jobs have no records. The client then trains nothing and
        has weight 0. Raises UserError for a local plan with terms that private steps do not support.
        """
        for name, job in jobs.items():
            if unknown := unsupported(job.plan, job.task.settings):
                raise UserError(refused(unknown, name))
        first = next(iter(jobs.values()))
        if not len(first.records):
            return round_without_records(jobs)
        steps = sum(num_private_steps(job.plan, job.task.settings, len(job.records)) for job in jobs.values())
        cost = round_cost(self.protection, first.task.settings, len(first.records), self.rounds, steps)
        releases = Releases(RELEASED, self.protection.noise, self.run_digest)
        noise = releases.paid(client, first.task.server_round, cost)
        if noise is None:
            return round_without_records(jobs)
        private = {name: self._private(job, cost, noise, name) for name, job in jobs.items()}
        return PaidRound(private, ticket_of(noise))

    def _private(self, job: LocalJob, cost: RoundCost, noise: Noise, name: str) -> LocalJob:
        norm = self.protection.clipping_norm
        steps = PrivateSteps(norm, cost.noise_multiplier, noise, name or "model", self.clipping)
        return replace(job, plan=replace(job.plan, private=steps))

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update without the training loss, which has no noise. A client that did not train has weight 0."""
        del came, task
        return replace(update, loss=None, num_examples=min(1, trained.num_steps))


def refused(fields: list[str], name: str = "") -> str:
    """Return the error message that private steps do not support ``fields`` of a local plan or of local settings."""
    whose = f" of its model {name}" if name else ""
    return (
        f"the algorithm's local plan{whose} uses {', '.join(fields)}, which local.privacy=dp-sgd does not support: the "
        "term reads records without noise, or joins several records in one gradient; set another algorithm, such as "
        "fedavg, fedprox or scaffold"
    )
