"""What a run will release about its records and what that costs, as far as it is fixed before the run begins."""

import math
from collections.abc import Iterator
from dataclasses import replace

from clients.dafl.settings import DaFl
from fl_sim.data import sealed_content
from fl_sim.experiment.job import Job
from fl_sim.kinds import short_form
from fl_sim.privacy.accounting import Adjacency
from fl_sim.privacy.bill import Paid, Payment
from fl_sim.privacy.ledger import Terms
from fl_sim.same_records import called
from fl_sim.simulation.dafl.synthesis import pool_key
from fl_sim.simulation.planned_payment import payment_of
from fl_sim.simulation.procedure import procedure_of
from strategies.ccvr import CCVR


def planned(job: Job) -> Paid:
    """Return what a run of ``job`` will have paid. Takes seconds where it is private: the PLD is computed here."""
    experiment, of_training = job.experiment, procedure_of(job).payments()
    split = "centralized" if experiment.is_central else short_form(experiment.partition)
    on_synthetic = isinstance(experiment.preprocess, DaFl) and experiment.preprocess.train_on == "synthetic"
    rounds = [replace(one, on_records=not on_synthetic) for one in of_training or ()]
    payments = None if of_training is None else (*rounds, *_payments_beside(job))
    is_bare = of_training == () and not on_synthetic
    name, content = called(experiment.data), sealed_content(experiment.data, job.root, make_key=False)
    return Paid(name, f"{split}, {experiment.clients} clients", payments, is_bare, content)


def _payments_beside(job: Job) -> Iterator[Payment]:
    """Yield the cost of what is released before and after training."""
    experiment = job.experiment
    if isinstance(experiment.preprocess, DaFl):  # its events depend on clients' numbers of records; the budget does not
        yield _of_budget(pool_key(job), experiment.preprocess)
    if isinstance(experiment.calibrate, CCVR) and (protection := experiment.calibrate.protection) is not None:
        terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, protection.delta)
        yield payment_of(terms, {protection.event: 1}, "", is_simulated=protection.noise == "seeded")


def _of_budget(identity: str, settings: DaFl) -> Payment:
    epsilon = settings.epsilon if math.isfinite(settings.epsilon) else None
    simulated = settings.noise == "seeded"
    return Payment("record", identity, epsilon, settings.delta, Adjacency.ADD_OR_REMOVE_ONE, simulation_only=simulated)
