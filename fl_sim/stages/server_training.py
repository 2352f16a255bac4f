"""The base class of stages in which the server trains a model on its own records, as a client does."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from clients.client_task import Client, ClientRuntime
from clients.train import Train
from fl_sim.engines import wire
from fl_sim.errors import Diverged
from fl_sim.params import detached, is_finite, trainable
from fl_sim.seeding import process_kept
from fl_sim.simulation.client_runtime import fixed_threads, local_settings
from fl_sim.simulation.stage import Stage
from fl_sim.simulation.timing import Work
from fl_sim.training.records import Records
from fl_sim.types import Examples, Payloads, ServerState
from strategies.algorithm import Unfolding, payload_template, turns_of
from strategies.flower import FederatedStrategy


class TrainsAtServer(Stage):
    """Trains a model at the server, as if the server were a client.

    ``examples``: the server's records. ``source``: the origin of these records, as a part of a sentence.
    """

    examples: Examples
    source: str = "that no client holds"

    def number(self, num_clients: int) -> int:
        """Return the server's number in place of a client ID. The server's random numbers depend on this number."""
        return num_clients

    @cached_property
    def _records(self) -> Records:
        return self.job.source(self.examples).whole()

    def runtime(self, strategy: FederatedStrategy) -> ClientRuntime:
        """Return the client runtime for training at the server. It has no client layers, such as compression."""
        job, records = self.job, self._records
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

    def updated(
        self, strategy: FederatedStrategy, runtime: ClientRuntime, server: ServerState, server_round: int
    ) -> Payloads:
        """Return the payloads of the server's update. Raises Diverged if a number in them is not finite."""
        experiment, algorithm, number = self.job.experiment, strategy.algorithm, self.number(strategy.num_clients)
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
        count = len(self.examples)
        words = f"the server trained on {count:,} records {self.source}"
        return {"server_records": {"count": count, "in_words": words}}
