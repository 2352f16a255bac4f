"""The virtual clock of a run: from its settings, its split and the size of its messages."""

from collections.abc import Mapping
from typing import Any

from fl_sim.devices.clock import Clock, Turnout, turnout
from fl_sim.devices.settings import NoDevices, fleet_of_clients
from fl_sim.experiment.job import Job
from fl_sim.kinds import replaces_records
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.site import local_settings
from strategies.flower import FederatedStrategy
from strategies.layer import Drawn, Layer
from strategies.samplers import Coins
from strategies.servers import Synchronous


def start_clock(job: Job, strategy: FederatedStrategy, log: RunLog) -> None:
    """Let rounds go by the clock, where clients have devices; one holder of all records is no client."""
    server, timed = job.experiment.server, not isinstance(job.experiment.devices, NoDevices)
    if isinstance(server, Synchronous) and timed and not job.experiment.is_central:
        strategy.wrap(TimedRounds(clock_of(job, strategy, log), server))


class TimedRounds(Layer):
    """Rounds by a virtual clock: who is there is asked, and who is through in time counts."""

    def __init__(self, clock: Clock, server: Synchronous) -> None:
        self._clock, self._server = clock, server
        self._last: Turnout | None = None

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return those of the inner cohort who are there, and through by the deadline."""
        drawn, server = self.inner.cohort(server_round, coins).clients.tolist(), self._server
        is_partial = server.late == "partial"
        self._last = turnout(self._clock, server_round, drawn, deadline=server.deadline, partial=is_partial)
        return Drawn(self._last.in_time, self._last.most_steps)

    def metrics(self) -> Mapping[str, Any]:
        """Return how long the round lasted, and how many updates came too late."""
        timed = {} if self._last is None else {"virtual_seconds": self._last.seconds, "late": self._last.num_late}
        return {**self.inner.metrics(), **timed}


def clock_of(job: Job, strategy: FederatedStrategy, log: RunLog) -> Clock:
    """Return the clock by which clients take their turns. Raises UserError for devices that do not fit the run."""
    experiment = job.experiment
    assert not isinstance(experiment.devices, NoDevices)
    sizes = log.num_pooled + (0 if replaces_records(experiment.preprocess) else 1) * job.shards.sizes
    settings = local_settings(job, experiment.local.learning_rate)
    fleet = fleet_of_clients(experiment.devices, experiment.num_clients, experiment.seed)
    return Clock(fleet, sizes, settings, strategy.traffic, experiment.seed)
