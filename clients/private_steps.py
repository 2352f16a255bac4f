"""The client half of DP-SGD: each client pays for the private steps of a round in its privacy ledger, then trains.

The settings are in ``strategies.dp_sgd``, and the steps in ``fl_sim.training.private_steps``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NoReturn, cast

from dp_accounting import dp_event

from clients.client_layer import ClientLayer, Payer
from clients.policy import open_ledger
from fl_sim.engines.remote import Ticket
from fl_sim.errors import RunError, UserError
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.native.kernel import CompiledNormals, load_kernel
from fl_sim.privacy.accounting import epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Accountant
from fl_sim.training.private_steps import num_private_steps, sampling_rate, unsupported
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Trained

if TYPE_CHECKING:
    from pathlib import Path

    from fl_sim.privacy.ledger import Ledger

SPENT: Final = (0,)
"""The ``counts`` in the ticket of a client whose budget does not allow the round."""

_RELEASE: Final = "local steps of"
"""The beginning of the names of this module's charges in the privacy ledger."""


@dataclass(frozen=True)
class StepProtection:
    """The privacy parameters of local steps, for each record of a client.

    ``epsilon``, ``delta``: the most that all rounds may cost; an epsilon of None is no limit. ``clipping_norm``: the
    largest L2 norm of a record's gradient. ``noise_multiplier``: None means the least one that epsilon allows.
    ``noise``: "secret", or "seeded" for simulations only. ``accountant``: the accountant that finds the noise, and
    compares costs with epsilon.
    """

    epsilon: float | None
    delta: float
    clipping_norm: float
    noise_multiplier: float | None
    noise: Literal["secret", "seeded"]
    accountant: Accountant = "rdp"


@dataclass(frozen=True)
class RoundCost:
    """The private steps of one client in one round, and their privacy cost for each of its records.

    ``noise_multiplier``: the standard deviation of the noise on a sum, divided by the clipping norm. ``rate``: the
    probability with which a record joins a batch. ``num_steps``: the number of steps of all models of the client.
    ``most_rounds``: the number of rounds that the client's epsilon allows, None for no limit.
    """

    noise_multiplier: float
    rate: float
    num_steps: int
    most_rounds: int | None

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the privacy event of one step."""
        return amplify_poisson(dp_event.GaussianDpEvent(self.noise_multiplier), self.rate)

    @property
    def charge(self) -> dp_event.DpEvent:
        """Return the privacy event of all steps of the round."""
        return self.event if self.num_steps == 1 else dp_event.SelfComposedDpEvent(self.event, self.num_steps)


def round_cost(
    protection: StepProtection, settings: LocalSettings, num_records: int, rounds: int, num_steps: int
) -> RoundCost:
    """Return the cost of a round of a client with ``num_records`` records, in a run of ``rounds`` rounds.

    ``num_steps``: the number of private steps in a round, of all models of the client together. If ``protection`` has
    no noise multiplier, it is the least one with which all rounds cost at most epsilon. Raises UserError if no noise
    reaches epsilon.
    """
    plain = replace(settings, learning_rate=0.0)  # so that a schedule of learning rates repeats no search
    return _round_cost(replace(protection, clipping_norm=1.0, noise="secret"), plain, num_records, rounds, num_steps)


@lru_cache(maxsize=2**16)
def _round_cost(
    protection: StepProtection, settings: LocalSettings, num_records: int, rounds: int, steps: int
) -> RoundCost:
    epsilon, delta, accountant = protection.epsilon, protection.delta, protection.accountant
    rate = sampling_rate(settings, num_records)
    if protection.noise_multiplier is None:
        assert epsilon is not None
        sampled = partial(amplify_poisson, sampling_rate=rate)
        found = noise_multiplier(sampled, max(1, steps * rounds), epsilon, delta, accountant=accountant)
        return RoundCost(found, rate, steps, rounds)
    cost = RoundCost(protection.noise_multiplier, rate, steps, None)
    if epsilon is None:
        return cost
    if not steps or epsilon_of_counts({cost.charge: rounds}, delta, accountant=accountant) <= epsilon:
        return replace(cost, most_rounds=rounds)
    return replace(cost, most_rounds=steps_that_fit(cost.event, epsilon, delta, accountant=accountant) // steps)


def num_charged(ledger: Ledger, run: str, client: int) -> int:
    """Return the number of rounds of a run that the privacy ledger of ``client`` has charged, with repetitions.

    ``run``: the name of the run; for seeded noise, the digest of the experiment.
    """
    return sum(one.release.startswith(_rounds_of(run, client)) for one in ledger.charges)


def _rounds_of(run: str, client: int) -> str:
    return f"{_RELEASE} run {run}, client {client}, round "


class Withheld:
    """A stand-in for facts about a client's records that no code without noise may read. Every use raises UserError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise UserError(
            f"the algorithm reads {self._what} without noise, and local.privacy promises privacy for each record: take "
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
    """Makes the local steps of every job private, after their cost is in the client's privacy ledger.

    ``run_digest``: a digest of the experiment. ``rounds``: the number of rounds of the run.
    """

    protects: ClassVar[bool] = True
    protection: StepProtection
    run_digest: str
    rounds: int

    def received(self, task: LocalTask) -> LocalTask:
        """Return the task without facts about the client's records: all clients with records have the same weight."""
        return replace(task, class_counts=CLASS_COUNTS, num_examples=min(1, task.num_examples))

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return the plan with private steps, whose noise has a typical size and comes from a seed."""
        noise = self.protection.noise_multiplier or 1.0
        return replace(plan, private=PrivateSteps(self.protection.clipping_norm, noise, Noise.seeded(0), "typical"))

    def shown(self, records: Records) -> Records:
        """Return a stand-in for the records, which the algorithm's own code may not read."""
        del records
        return RECORDS

    def protected(self, client: Payer, jobs: Mapping[str, LocalJob]) -> Mapping[str, LocalJob]:
        """Return the jobs with private steps, after writing their joint cost into the client's privacy ledger.

        A client whose budget does not allow the round gets jobs without records: it trains nothing and has weight 0.
        Raises UserError for a local plan with terms that private steps do not support.
        """
        for name, job in jobs.items():
            if unknown := unsupported(job.plan, job.task.settings):
                raise UserError(refused(unknown, name))
        first = next(iter(jobs.values()))
        if not len(first.records):
            return jobs
        steps = sum(num_private_steps(job.plan, job.task.settings, len(job.records)) for job in jobs.values())
        cost = round_cost(self.protection, first.task.settings, len(first.records), self.rounds, steps)
        noise = self._paid(client, first.task, cost)
        if noise is None:
            return {name: _without_records(job) for name, job in jobs.items()}
        return {name: self._private(job, cost, noise, name) for name, job in jobs.items()}

    def ticket(self, jobs: Mapping[str, LocalJob]) -> Ticket:
        """Return the ticket with the key of the round's noise, or with ``SPENT`` if the client may not train."""
        steps = next(iter(jobs.values())).plan.private
        if steps is None:
            return Ticket(bytes(32), simulation_only=True, counts=SPENT)
        return Ticket(steps.noise.key, steps.noise.simulation_only)

    def _private(self, job: LocalJob, cost: RoundCost, noise: Noise, name: str) -> LocalJob:
        if kernel := load_kernel()[0]:
            noise = replace(noise, normals=CompiledNormals(kernel))
        steps = PrivateSteps(self.protection.clipping_norm, cost.noise_multiplier, noise, name or "model")
        return replace(job, plan=replace(job.plan, private=steps))

    def _paid(self, client: Payer, task: LocalTask, cost: RoundCost) -> Noise | None:
        """Return the source of the round's noise, after its cost is on the disk; None if the budget is spent."""
        policy = client.policy
        if client.ticket:
            return None if client.ticket.counts == SPENT else Noise(client.ticket.key, client.ticket.simulation_only)
        if not client.has_disk:
            raise RunError(
                "this worker has no access to the client's privacy ledger, and nothing is released without a charge: "
                "start the same version of fl-sim on all machines"
            )
        if policy:
            policy.check_noise(self.protection.noise, "local.privacy.noise")
        if self.protection.noise == "seeded":
            text = f"{self.run_digest} {client.number} {task.server_round}"
            noise, run = Noise.seeded(int.from_bytes(hashlib.sha256(text.encode()).digest())), self.run_digest
        else:
            noise, run = Noise.secret(), client.run
        release = f"{_rounds_of(run, client.number)}{task.server_round}"
        if cost.most_rounds is not None:
            ledger = policy.open_ledger() if policy else _open(client.ledger)
            ledger.catch_up()
            is_new = not ledger.has_charged(release, noise.identity)
            if is_new and num_charged(ledger, run, client.number) >= cost.most_rounds:
                return None
        if policy:
            policy.pay({release: cost.charge}, noise.identity)
        else:
            _open(client.ledger).charge(cost.charge, release=release, noise=noise.identity)
        return noise

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the update without a loss, and with weight 0 if the client did not train."""
        del came, task
        return replace(update, loss=None, num_examples=min(1, trained.num_steps))


def refused(fields: list[str], name: str = "") -> str:
    """Return the error message for fields of a plan or of local settings that private steps do not support."""
    whose = f" of its model {name}" if name else ""
    return (
        f"the algorithm's local plan{whose} uses {', '.join(fields)}, which local.privacy=dp-sgd does not support: the "
        "term reads records without noise, or joins several records in one gradient; take another algorithm, such as "
        "fedavg, fedprox or scaffold"
    )


@lru_cache(maxsize=2**14)
def _open(path: Path) -> Ledger:
    return open_ledger(path)


def _without_records(job: LocalJob) -> LocalJob:
    return replace(job, records=job.records.none(), task=replace(job.task, num_examples=0))
