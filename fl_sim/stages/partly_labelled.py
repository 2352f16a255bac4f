"""The stage of methods such as SemiFL: the server trains on its labelled records after each round."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fl_sim.experiment.job import Job
from fl_sim.simulation.stage import Run
from fl_sim.simulation.timing import Work
from fl_sim.stages.server_training import TrainsAtServer
from strategies.layer import found_in
from strategies.partly_labelled import SERVER, LabelledServer, PartlyLabelled


class LabelledRecords(TrainsAtServer):
    """Trains the merged model on the records that the run has set aside for the server, if there are any."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if job.set_aside is not None:
            self.examples = job.set_aside

    def number(self, num_clients: int) -> int:
        """Return the server's number in place of a client ID: a constant, which does not depend on ``num_clients``.

        The server's random numbers depend on this constant. So additional empty clients do not change them.
        """
        del num_clients
        return SERVER

    @property
    def has_any(self) -> bool:
        """True if the server has labelled records."""
        return self.job.set_aside is not None

    def before(self, run: Run) -> None:
        """Pass the function that trains at the server to the layer ``LabelledServer``."""
        if self.has_any:
            layer = found_in(run.strategy.layer, LabelledServer)
            layer.train = partial(self.updated, run.strategy, self.runtime(run.strategy))

    def work(self) -> tuple[Work, ...]:
        """Return the computation of the server, and of clients without labels. The forecast lists it without a time.

        The number of local steps on pseudo-labels follows from the model, so it is unknown before the run.
        """
        algorithm = self.job.experiment.algorithm
        assert isinstance(algorithm, PartlyLabelled)
        steps = (Work("local steps on pseudo-labels", pieces=1.0),) if algorithm.unlabelled else ()
        return (*(super().work() if self.has_any else ()), *steps)

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``server_records`` for ``result.json``, if the server has records."""
        return super().facts() if self.has_any else {}
