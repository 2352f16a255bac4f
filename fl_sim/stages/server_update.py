"""The stage of aggregators such as FLTrust, in which the server also trains a model, on records of its own."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from clients.client_task import Client, ClientRuntime
from clients.train import Train
from fl_sim.data import load
from fl_sim.engines import wire
from fl_sim.errors import Diverged, UserError
from fl_sim.experiment.job import Job
from fl_sim.params import detached, is_finite, trainable
from fl_sim.seeding import process_kept
from fl_sim.simulation.client_runtime import fixed_threads, local_settings
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.timing import Work
from fl_sim.training.records import Records
from fl_sim.types import Examples, Payloads, ServerState
from strategies.algorithm import Unfolding, payload_template, turns_of
from strategies.flower import FederatedStrategy
from strategies.fltrust import FLTrust
from strategies.layer import found_in
from strategies.server_update import ServerUpdate


class ServerTraining(Stage):
    """Trains a model at the server, as if the server were a client with the ID ``num_clients``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        aggregator = job.experiment.aggregator
        assert isinstance(aggregator, FLTrust)
        self._name = aggregator.records if isinstance(aggregator.records, str) else ""
        self._examples = _records_of_server(job, self._name)

    def before(self, run: Run) -> None:
        """Pass the function that trains at the server to the layer ``ServerUpdate``, which calls it in every round."""
        layer = found_in(run.strategy.layer, ServerUpdate)
        layer.train = partial(self._updated, run.strategy, self._runtime(run.strategy))

    def _runtime(self, strategy: FederatedStrategy) -> ClientRuntime:
        """Return the client runtime for training at the server. It has no client layers, such as compression."""
        job = self.job
        records = job.source(self._examples).whole()
        model = job.model()
        initial = detached(trainable(model).items())

        def mine(*_: object) -> Records:
            return records

        counts = records.class_counts(job.dataset.num_classes)
        return ClientRuntime(
            strategy.algorithm, model.to(job.device), mine, mine, partial(local_settings, job), strategy.num_clients,
            job.experiment.seed, threads=job.experiment.engine.threads, class_counts=lambda *_: counts,
            precision=job.precision, read_tensors=job.read, initial=initial,
        )  # fmt: skip

    def _updated(
        self, strategy: FederatedStrategy, runtime: ClientRuntime, server: ServerState, server_round: int
    ) -> Payloads:
        """Return the payloads of the server's update. Raises Diverged if a number in them is not finite."""
        experiment, algorithm, number = self.job.experiment, strategy.algorithm, strategy.num_clients
        rate = experiment.local.rate_in(server_round, experiment.rounds)
        order = replace(strategy.order, server_round=server_round, learning_rate=rate, state_dir="")
        with process_kept(), fixed_threads(runtime.threads):
            answer = Train().run(Client(number, runtime, order, strategy.content(order, server)))
        template = payload_template(algorithm, server, (server_round - 1) % turns_of(algorithm) + 1)
        sent = wire.read_update(number, answer, template).payloads
        if not is_finite(sent):
            raise Diverged(
                f"the server's own update in round {server_round} is not finite; try a smaller local.learning_rate"
            )
        return algorithm.unfolded(sent) if isinstance(algorithm, Unfolding) else sent

    def work(self) -> tuple[Work, ...]:
        """Return the computation of training at the server. The forecast lists it, but does not estimate its time."""
        return (Work("training at the server in every round", pieces=1.0),)

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``server_records`` for ``result.json``: the number of records of the server."""
        count = len(self._examples)
        source = f"of {self._name}" if self._name else "that no client holds"
        return {"server_records": {"count": count, "in_words": f"the server trained on {count:,} records {source}"}}


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
            "take a data set of the same form"
        )
    return found.train
