"""The stage that measures each client's models, such as a personal model, on the client's own test records.

The client half is ``clients.evaluate``; ``fl_sim.experiment.own_tests`` chooses the records. The server receives only
counts by class: of records and of correct predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from clients.evaluate import FINE_TUNED, OWN, RECEIVED, TESTED, TRAINED, VALIDATED, EvaluateOwn, counts_in
from fl_sim.engines import arrays, wire
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.experiment.own_tests import num_shared
from fl_sim.kinds import kind_of
from fl_sim.simulation.client_runtime import records_as_seen
from fl_sim.simulation.stage import Run, Stage
from fl_sim.training.evaluation import OverClients, known
from fl_sim.training.records import Records
from fl_sim.types import Params, Traffic

MEASURE, MEASURE_LAST = "measure-own", "measure-own-last"
"""Names of the client tasks: during the rounds, and after the last round with further training."""

MODELS: Final = (RECEIVED, OWN, TRAINED, FINE_TUNED)

_PRIVATE: Final = (
    "a client's own model is trained on its records without noise, and the number of its correct predictions would be "
    "published; no epsilon covers that"
)


class OwnModels(Stage):
    """The stage at the server: it asks every client for counts, and computes measures over clients from them."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._round, self._answers = -1, list[Mapping[str, NDArray[np.int64]]]()
        evaluate = job.experiment.evaluate
        if job.experiment.is_private:
            raise UserError(
                f"evaluate.clients={evaluate.clients} has no place in a run that promises privacy: {_PRIVATE}; leave "
                "evaluate.clients out"
            )
        if job.experiment.is_central:
            raise UserError(
                f"evaluate.clients={evaluate.clients} measures clients' own models, and algorithm "
                f"{kind_of(job.experiment.algorithm)} has one client with all records: leave evaluate.clients out"
            )

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the settings ask for measures of the clients' own models."""
        return bool(experiment.evaluate.measures_clients)

    def tasks(self) -> Mapping[str, EvaluateOwn]:
        """Return the client tasks: one for the rounds, and one, with further training, for after the last round."""
        job, records = self.job, ClientRecords(self.job)
        task = EvaluateOwn(records, job.dataset.num_classes)
        last = replace(task, trains=True, fine_tune_epochs=job.experiment.evaluate.fine_tune_epochs)
        return {MEASURE: task, MEASURE_LAST: last}

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return the measures over clients after ``server_round``; empty if this round is not measured."""
        if server_round % self.job.experiment.evaluate.personal_every and not is_last:
            return {}
        self._ask(run, MEASURE_LAST if is_last else MEASURE, server_round)
        return {f"{model}_{name}": value for model in self._models for name, value in self._over_clients(model).items()}

    def after(self, run: Run) -> None:
        """Measure the models after the last round, unless that is done already, and log the number of bytes."""
        server_round = len(run.log.rounds)
        if self._round != server_round or not any(f"{TRAINED}/{TESTED}" in one for one in self._answers):
            self._ask(run, MEASURE_LAST, server_round)
        run.log.after["own models"] = self._traffic(run.strategy.server.params)

    def _ask(self, run: Run, task: str, server_round: int) -> None:
        """Ask all clients to measure their models after ``server_round``, with the message of the next round."""
        experiment, server = self.job.experiment, run.strategy.server
        order = replace(
            run.order,
            server_round=server_round + 1,
            learning_rate=experiment.local.rate_in(min(server_round + 1, experiment.rounds), experiment.rounds),
        )
        broadcast = {**server.broadcast}
        for half in run.strategy.on_clients:
            broadcast |= half.broadcast(server)
        read: Callable[[RecordDict], Mapping[str, NDArray[np.int64]]]
        read = partial(counts_in, num_classes=self.job.dataset.num_classes)
        self._answers = run.ask(task, read, quoted=True, params=server.params, broadcast=broadcast, order=order)
        self._round = server_round

    @property
    def _models(self) -> Sequence[str]:
        return [name for name in MODELS if any(f"{name}/{TESTED}" in one for one in self._answers)]

    def _over_clients(self, model: str) -> dict[str, float]:
        """Return measures of the kind of model ``model``, such as "own", over all clients with test records."""
        found, sums = self._accuracies(model, TESTED), self._sums(model, TESTED)
        over = OverClients.of(known(found))
        measures = {
            "accuracy": over.mean,
            "accuracy_pooled": float(sums[2].sum() / sums[0].sum()),
            "worst_tenth": over.worst_tenth,
            "deviation": over.deviation,
        }
        validated = known(self._accuracies(model, VALIDATED))
        return measures | ({"validation_accuracy": float(validated.mean())} if len(validated) else {})

    def _accuracies(self, model: str, what: str) -> NDArray[np.float64]:
        """Return each client's accuracy with ``model``; NaN without records. ``what``: "test" or "validation"."""
        blank = np.zeros((3, 1), dtype=np.int64)
        counts = [one.get(f"{model}/{what}", blank) for one in self._answers]
        held, right = (np.array([one[row].sum() for one in counts], dtype=np.float64) for row in (0, 2))
        shares = np.full(len(held), np.nan)
        np.divide(right, held, out=shares, where=held > 0)
        return shares

    def _sums(self, model: str, what: str) -> NDArray[np.int64]:
        """Return the sum of the counts of all clients, shape (3, classes)."""
        sums: NDArray[np.int64] = np.sum(
            [one[f"{model}/{what}"] for one in self._answers if f"{model}/{what}" in one], 0
        )
        return sums

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return the number of test records of each client, and the accuracy of each of its models."""
        if not self._answers:
            return {}
        accuracies = {f"{name}_accuracy": self._accuracies(name, TESTED) for name in self._models}
        return {"test_records": self.job.own_tests.sizes, **accuracies}

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``personal`` for ``result.json``: facts about test records, and measures over clients."""
        tests, evaluate = self.job.own_tests, self.job.experiment.evaluate
        without = np.flatnonzero(tests.sizes == 0).tolist()
        records = {
            "test_records_from": evaluate.clients,
            "clients_tested": len(tests) - len(without),
            "clients_without_test_records": without[:100],
            "shared_test_records": num_shared(tests),
        }
        measures = {
            f"{model}_{name}": value for model in self._models for name, value in self._over_clients(model).items()
        }
        return {"personal": {**records, **measures}}

    def warnings(self) -> list[str]:
        """Return warnings about clients without test records, and about test records that several clients share."""
        tests = self.job.own_tests
        without, said = np.flatnonzero(tests.sizes == 0), list[str]()
        if len(without):
            named = ", ".join(map(str, without[:10].tolist())) + (", ..." if len(without) > 10 else "")
            said.append(
                f"{len(without):,} of {len(tests):,} clients have no test records of their own, and the measures leave "
                f"them out: {named}"
            )
        if shared := num_shared(tests):
            said.append(
                f"{shared:,} test records belong to several clients, because the test set has too few of a class: "
                "the clients' accuracies are not independent of each other"
            )
        return said

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of the bytes of the models to all clients, and of the counts from all clients."""
        return {"own models": self._traffic(params)}

    def _traffic(self, params: Params) -> Traffic:
        experiment = self.job.experiment
        times = -(-experiment.rounds // experiment.evaluate.personal_every)
        down = arrays.num_bytes(wire.task_content(wire.BLANK, params, {}))
        up = 8 * 3 * self.job.dataset.num_classes * 2
        return Traffic(down, up) * (times * experiment.num_clients)


class ClientRecords:
    """The test and validation records of each client, changed by the client's feature skew as in training."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def tests(self, client: int) -> Records:
        """Return the client's own test records."""
        job = self._job
        return records_as_seen(job, job.dataset.test.take(job.own_tests[client]), client, "own test feature-noise")

    def validation(self, client: int) -> Records:
        """Return the client's own validation records; none if the run holds out none."""
        job = self._job
        parts = job.validation[client] if len(job.validation) else np.zeros(0, dtype=np.int64)
        return records_as_seen(job, job.dataset.train.take(parts), client, "own validation feature-noise")
