"""What a run will take, before it runs: seconds on this machine, and bytes on the wire."""

from dataclasses import dataclass

from fl_sim.engines.wire import Order
from fl_sim.experiment.job import Job
from fl_sim.simulation.engine_choice import synthesis_seconds
from fl_sim.simulation.pace import Pace, clients_at_once, num_steps
from fl_sim.simulation.procedure import procedure_of
from fl_sim.simulation.rounds import Rounds
from fl_sim.types import Traffic
from strategies.flower import FederatedStrategy
from strategies.pate.settings import Pate


@dataclass(frozen=True)
class Estimate:
    """What a whole run is expected to take.

    ``seconds``: on this machine, by itself; None where that was not timed. ``traffic``: bytes of arrays to and from all
    clients in all rounds; None for PATE, which has none. ``left_out``: what is in neither, in words.
    """

    seconds: float | None
    traffic: Traffic | None
    left_out: tuple[str, ...] = ()


def estimate_of(job: Job, pace: Pace | None, *, has_pool: bool) -> Estimate:
    """Return what a run of ``job`` takes; without its ``pace`` only what needs no timing.

    ``has_pool``: whether its synthetic records are there already.
    """
    seconds = None
    if pace is not None:
        work = num_steps(job) * pace.step + _records_measured(job) * pace.record
        made = 0.0 if has_pool else synthesis_seconds(job)
        seconds = (work + made) / clients_at_once(job)
    left_out = ("the student's training",) if isinstance(job.experiment.algorithm, Pate) else ()
    return Estimate(seconds, _traffic(job), left_out)


def _records_measured(job: Job) -> int:
    """Return on how many records a model is measured, all rounds together; a teacher's votes are such, too."""
    experiment = job.experiment
    if isinstance(experiment.algorithm, Pate):
        pool = experiment.algorithm.public_split(job.dataset, experiment.seed_of_partition).pool
        return experiment.clients * len(pool)
    times = -(-experiment.rounds // experiment.evaluate_every)  # the last round is measured in any case
    tested = {"rounds": times, "last": 1, "never": 0}[experiment.evaluate.test]
    return tested * len(job.dataset.test) + times * sum(map(len, job.validation))


def _traffic(job: Job) -> Traffic | None:
    experiment, procedure = job.experiment, procedure_of(job)
    if not isinstance(procedure, Rounds):
        return None
    strategy = FederatedStrategy(
        procedure.algorithm, experiment.aggregator, experiment.sampler, procedure.beginning(),
        Order("", 0, 0.0, "", ""), experiment.num_clients, experiment.seed,
    )  # fmt: skip
    cohort = experiment.sampler.expected_size(experiment.num_clients)
    return strategy.traffic * round(experiment.rounds * cohort)
