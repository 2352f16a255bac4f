"""The cohorts of a finished run (if they depend only on the seed), and the clients' numbers of local steps."""

from collections.abc import Iterable

from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import local_settings
from strategies.layer import Layer, layer_kinds
from strategies.samplers import AnySampler


def cohorts_known(job: Job) -> bool:
    """Return True if the cohorts of a run of ``job`` depend only on its seed, not on clients' answers or times."""
    experiment = job.experiment
    drawn = isinstance(experiment.sampler, AnySampler) and not experiment.is_timed and experiment.is_synchronous
    kinds = layer_kinds(experiment)
    return drawn and all(kind.cohort is Layer.cohort and kind.consult is Layer.consult for kind in kinds)


def cohort_of(job: Job, server_round: int) -> list[int]:
    """Return the IDs of the clients that take part in round ``server_round``, ascending.

    The cohorts must be known (``cohorts_known``). The round may be after the last round of the run.
    """
    experiment = job.experiment
    coins = rng(experiment.seed_of_sampling, "sampler", server_round).random
    drawn = experiment.sampler.sample(experiment.num_members, coins, server_round)
    found: list[int] = (drawn if experiment.num_members == experiment.num_clients else job.members[drawn]).tolist()
    return found


def first_round(job: Job, client: int, rounds: int) -> int | None:
    """Return the first of ``rounds`` rounds in which ``client`` takes part; None if it never takes part.

    The cohorts must be known (``cohorts_known``).
    """
    return next((one for one in range(1, rounds + 1) if client in cohort_of(job, one)), None)


def num_steps(job: Job, client: int) -> int:
    """Return the number of local steps of ``client`` in a round, on its own records."""
    return local_settings(job, job.experiment.local.learning_rate).num_steps(int(job.shards.sizes[client]))


def steps_in(job: Job, rounds: Iterable[int], without: int) -> int | None:
    """Return the sum of the local steps of all clients except ``without`` in ``rounds``.

    Return None if the cohorts do not depend only on the seed (``cohorts_known``).
    """
    if not cohorts_known(job):
        return None
    return sum(num_steps(job, one) for server_round in rounds for one in cohort_of(job, server_round) if one != without)
