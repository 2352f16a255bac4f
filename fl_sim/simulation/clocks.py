"""The virtual clock of a run: from its settings, its split and the size of its messages."""

from functools import partial

from fl_sim.devices.clock import Clock, turnout
from fl_sim.devices.settings import NoDevices, fleet_of_clients
from fl_sim.experiment.job import Job
from fl_sim.kinds import replaces_records
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.site import local_settings
from strategies.flower import FederatedStrategy
from strategies.servers import Synchronous


def start_clock(job: Job, strategy: FederatedStrategy, log: RunLog) -> None:
    """Let rounds go by the clock, where clients have devices; one holder of all records is no client."""
    server, timed = job.experiment.server, not isinstance(job.experiment.devices, NoDevices)
    if isinstance(server, Synchronous) and timed and not job.experiment.is_central:
        clock, is_partial = clock_of(job, strategy, log), server.late == "partial"
        strategy.turnout_of = partial(turnout, clock, deadline=server.deadline, partial=is_partial)


def clock_of(job: Job, strategy: FederatedStrategy, log: RunLog) -> Clock:
    """Return the clock by which clients take their turns. Raises UserError for devices that do not fit the run."""
    experiment = job.experiment
    assert not isinstance(experiment.devices, NoDevices)
    pooled = log.pooled.count if log.pooled else 0
    sizes = pooled + (0 if replaces_records(experiment.preprocess) else 1) * job.shards.sizes
    settings = local_settings(job, experiment.local.learning_rate)
    fleet = fleet_of_clients(experiment.devices, experiment.num_clients, experiment.seed)
    return Clock(fleet, sizes, settings, strategy.traffic, experiment.seed)
