"""Noisy counts of the correct predictions of clients' own models in a run with DP-SGD, and their privacy bill.

The module ``clients.noisy_counts`` draws the noise, and writes the costs into the clients' privacy ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from dp_accounting import dp_event

from clients.evaluate import EvaluateOwn
from clients.noisy_counts import COUNTED, CountPrivately, counting_cost
from clients.paid_rounds import ClientProtection
from fl_sim.data import is_own
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.privacy.bill import payment_of
from fl_sim.privacy.statement import Coverage, statement
from fl_sim.privacy.terms import Adjacency, Terms
from strategies.dp_sgd import ClientPrivacy
from strategies.private_steps import digest_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

_UNCOVERED: Final = (
    "a client's own model is trained on its records without noise, and the number of its correct predictions would be "
    "published; no epsilon covers that; leave evaluate.clients out, or take local.privacy=dp-sgd"
)
_COVERS: Final = (
    "the noisy number of right answers of each client's own model on the client's test records; the accuracies of own "
    "models, and all measures over clients, are computed from these noisy numbers only. Each measurement changes by at "
    "most 1 in one client's number if one record changes. Test records are not training records: the releases of the "
    "rounds have no cost for test records, and these numbers have no cost for training records. Nevertheless, the "
    "clients' ledgers add up both costs."
)
_DOES_NOT_COVER: Final = (
    "How many test records a client has, and the client of each test record, are treated as public: both depend on the "
    "positions of records in the data set, not on the contents of records."
)


@dataclass(frozen=True)
class NoisyCounts:
    """The noisy counts of a run: a client's count is the number of correct predictions of its own model.

    ``times``: the number of measurements in the run. In each measurement a client sends at most one noisy count.
    """

    job: Job
    protection: ClientProtection
    times: int

    @property
    def noise_multiplier(self) -> float:
        """Return the noise multiplier. It equals the noise's standard deviation, because a count has sensitivity 1."""
        return counting_cost(self.protection, self.times).noise_multiplier

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the privacy event of one noisy count."""
        return counting_cost(self.protection, self.times).charge

    def task(self, measuring: EvaluateOwn) -> CountPrivately:
        """Return the client task that sends noisy counts. ``measuring``: the task whose exact counts get the noise."""
        return CountPrivately(measuring, self.protection, self.times, digest_of(self.job.experiment))

    def payments(self) -> Iterator[Payment]:
        """Yield the planned privacy cost of all counts together. The cost is for one test record (the privacy unit)."""
        yield payment_of(self._terms, {self.event: self.times}, "", is_simulated=self._is_seeded)

    def statement(self, run: str, done: int) -> dict[str, object]:
        """Return the privacy statement for ``result.json``.

        ``run``: the random name of the run. ``done``: the number of measurements of clients' models so far.
        """
        coverage = Coverage(_COVERS, _DOES_NOT_COVER, self._is_seeded)
        charges = [(f"{COUNTED} {number}", self.event) for number in range(done)]
        return {"ledger": f"{run} counts", **statement(self._terms, charges, {self.event: self.times}, coverage)}

    @property
    def _terms(self) -> Terms:
        return Terms("record", Adjacency.ADD_OR_REMOVE_ONE, self.protection.delta)

    @property
    def _is_seeded(self) -> bool:
        return self.protection.noise == "seeded"


def noisy_counts(job: Job, times: int) -> NoisyCounts | None:
    """Return the noisy counts of a run with ``times`` measurements of clients' own models; None for exact counts.

    Counts need no noise if the run is not private, or if the test records are public. Raises UserError for settings
    that would publish facts about records without noise, and if the counts cost more than the epsilon in the settings.
    """
    experiment, evaluate = job.experiment, job.experiment.evaluate
    if not experiment.is_private:
        if evaluate.count_noise is not None:
            raise UserError(
                f"evaluate.count_noise={evaluate.count_noise:g} is for runs that promise privacy for each record: set "
                "local.privacy=dp-sgd, or leave evaluate.count_noise out"
            )
        return None
    _check(job)
    is_public = evaluate.test_is_public or not is_own(experiment.data)
    if evaluate.clients == "own" and is_public and evaluate.count_noise is None:
        return None
    _check_private_tests(job)
    privacy = experiment.local.privacy
    assert isinstance(privacy, ClientPrivacy)
    if privacy.epsilon is None and evaluate.count_noise is None:
        raise UserError(
            f"evaluate.clients={evaluate.clients} needs noise on counts, and the noise is computed "
            "from local.privacy.epsilon, which is not set: set evaluate.count_noise, the standard deviation of the "
            "noise, for example to 10"
        )
    counts = NoisyCounts(job, replace(privacy.protection, noise_multiplier=evaluate.count_noise), times)
    most = counting_cost(counts.protection, times).most_rounds
    if most is not None and most < times:
        raise UserError(
            f"evaluate.count_noise={evaluate.count_noise:g} allows {most:,} measurements of a client within "
            f"local.privacy.epsilon={privacy.epsilon:g}, and the run has {times:,}: set a larger evaluate.count_noise "
            "or evaluate.personal_every, or leave count_noise out; then the noise is computed from epsilon"
        )
    return counts


def _check(job: Job) -> None:
    """Raise UserError if the measures would reveal facts about training records that no privacy cost covers."""
    experiment, evaluate = job.experiment, job.experiment.evaluate
    promise = f"evaluate.clients={evaluate.clients} is not possible in a run that promises privacy: "
    privacy = experiment.local.privacy
    if not (isinstance(privacy, ClientPrivacy) and privacy.covers_own_models):
        raise UserError(f"{promise}{_UNCOVERED}")
    if evaluate.clients == "class-shares":
        raise UserError(
            f"{promise}it chooses test records by the labels of the clients' training records, and no epsilon covers "
            "this choice; set evaluate.clients=own or pooled:0.25"
        )
    if evaluate.fine_tune_epochs:
        raise UserError(
            f"evaluate.fine_tune_epochs={evaluate.fine_tune_epochs} trains on a client's records without noise, and "
            "this run promises privacy: leave it out"
        )


def _check_private_tests(job: Job) -> None:
    """Raise UserError if a setting would publish numbers without noise about the clients' own test records."""
    evaluate = job.experiment.evaluate
    if evaluate.metrics != "none":
        raise UserError(
            f"evaluate.metrics={evaluate.metrics} returns numbers on the clients' test records without noise, and this "
            "run promises privacy: leave it out"
        )
    if evaluate.pooled_share and evaluate.test != "never":
        raise UserError(
            f"evaluate.test={evaluate.test} measures the server's model without noise, but this run promises privacy, "
            f"and evaluate.clients={evaluate.clients} takes the test records from the clients' records: set "
            "evaluate.test=never; clients still return noisy counts"
        )
    if evaluate.clients == "own" and (groups := job.dataset.train.groups) is not None:
        pairs = np.unique(np.stack([groups[job.shards.records], job.shards.owners]), axis=1)
        if len(np.unique(pairs[0])) < pairs.shape[1]:
            raise UserError(
                "evaluate.clients=own divides the test records of a source among its clients by their labels, but "
                "this run promises privacy: use one client for each source (partition=natural), or set "
                "evaluate.clients=pooled:0.25"
            )
