"""The stage of aggregators such as FLTrust, in which the server also trains a model, on its own records."""

from functools import partial

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.simulation.stage import Run
from fl_sim.stages.server_training import TrainsAtServer
from fl_sim.types import Examples
from strategies.fltrust import FLTrust
from strategies.layer import found_in
from strategies.server_update import ServerUpdate


class ServerTraining(TrainsAtServer):
    """Trains a model at the server in every round, and passes its update to the aggregator."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        aggregator = job.experiment.aggregator
        assert isinstance(aggregator, FLTrust)
        name = aggregator.records if isinstance(aggregator.records, str) else ""
        self.examples = _records_of_server(job, name)
        if name:
            self.source = f"of {name}"

    def before(self, run: Run) -> None:
        """Pass the function that trains at the server to the layer ``ServerUpdate``, which calls it in every round."""
        layer = found_in(run.strategy.layer, ServerUpdate)
        layer.train = partial(self.updated, run.strategy, self.runtime(run.strategy))


def _records_of_server(job: Job, name: str) -> Examples:
    """Return the server's training records, from the data set ``name``.

    If ``name`` is "", these are the records that the run has set aside for the server. Raises UserError if the data set
    is missing, or if its records or classes do not fit.
    """
    dataset = job.dataset
    if not name:
        assert job.set_aside is not None
        return job.set_aside
    found = load(name, job.root, job.experiment.features)
    got = (found.input_shape, found.train.inputs.dtype, found.vocabulary)
    wanted = (dataset.input_shape, dataset.train.inputs.dtype, dataset.vocabulary)
    if got != wanted or found.num_classes > dataset.num_classes:
        raise UserError(
            f"aggregator.records={name} has {got[1]} records of shape {got[0]} in {found.num_classes} classes, and "
            f"{job.experiment.data} has {wanted[1]} records of shape {wanted[0]} in {dataset.num_classes} classes: "
            "choose a data set with the same shape and classes"
        )
    return found.train
