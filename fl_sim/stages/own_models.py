"""The stage that measures each client's models, such as a personal model, on the client's own test records.

The module ``clients.evaluate`` contains the client's code. The module ``fl_sim.experiment.own_tests`` chooses the test
records. The server receives no records, but only counts for each class (test records, predictions, correct predictions)
and user-defined metrics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from clients.client_task import ClientTask
from clients.evaluate import FINE_TUNED, MODELS, OWN, EvaluateOwn, OwnAnswer, OwnModel, answer_in
from fl_sim.engines import arrays, wire
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.experiment.own_tests import MOST_NAMED, num_shared, sources_of
from fl_sim.kinds import is_none, kind_of, path_in
from fl_sim.local_plan import Sharing
from fl_sim.params import detached, trainable
from fl_sim.simulation.client_runtime import records_as_seen
from fl_sim.simulation.stage import VALIDATION_ACCURACY, Run, Stage
from fl_sim.simulation.timing import Work
from fl_sim.stages.own_measures import HELD_OUT, TITLES, OwnMeasures, worse_than_alone
from fl_sim.store.run_directory import MOST_LISTED
from fl_sim.training.records import Records
from fl_sim.types import Params, ServerState, Traffic
from strategies.algorithm import first_state, states_sent

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

MEASURE, MEASURE_LAST = "measure-own", "measure-own-last"
"""Names of two client tasks: for measurements during the rounds, and after the last round (with more training)."""

_BEST: Final = tuple(
    f"{OWN}_{name}"
    for name in (
        "accuracy", "accuracy_pooled", "balanced_accuracy", "macro_f1", "mean_balanced_accuracy", "mean_macro_f1",
        "worst_tenth",
    )
)  # fmt: skip
"""Measures for which the result also contains the value of the best round, such as ``best_own_accuracy``."""


class OwnModels(Stage):
    """The stage at the server: it asks every client for counts of correct predictions, and computes accuracies."""

    titles: ClassVar[Mapping[str, str]] = TITLES

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._best: dict[str, float] = {}
        self._round, self._task, self._measures = -1, "", OwnMeasures((), job.members)
        _check_held_out(job)
        self._run, self._times_done, self._noisy = "", 0, None
        if job.experiment.is_private or job.experiment.evaluate.count_noise is not None:
            from fl_sim.stages.noisy_counts import noisy_counts  # noqa: PLC0415 (the accountants load slowly)

            self._noisy = noisy_counts(job, self._times)

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the settings ask for measures of clients' own models, and there is more than one client."""
        return bool(experiment.evaluate.measures_clients) and not experiment.is_central

    @classmethod
    def compared(cls, alone: Mapping[str, Any], result: Mapping[str, Any]) -> Mapping[str, float]:
        """Return {model: percentage of clients that have a better accuracy in the run ``alone`` than in ``result``}.

        In the run ``alone``, each client trains only on its own records.
        """
        return worse_than_alone(alone, result)

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return two client tasks: one during the rounds, and one after the last round.

        After the last round, clients also measure models after further training, unless the run promises privacy.
        """
        job, evaluate = self.job, self.job.experiment.evaluate
        is_tested = evaluate.tests(is_last=False)
        task = EvaluateOwn(ClientRecords(job), job.dataset.num_classes, is_tested, metrics=evaluate.metrics)
        if self._noisy:
            return dict.fromkeys((MEASURE, MEASURE_LAST), self._noisy.task(task))
        last = replace(
            task,
            is_tested=evaluate.tests(is_last=True),
            trains=not job.experiment.is_private,
            fine_tune_epochs=evaluate.fine_tune_epochs,
        )
        return {MEASURE: task, MEASURE_LAST: last}

    def validates(self) -> bool:
        """Return True if clients have their own validation records."""
        return len(self.job.validation.records) > 0

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return statistics over clients after ``server_round``; empty if this round is not measured.

        The validation accuracy is the mean over clients. Each client contributes the accuracy of its own model.
        """
        evaluate = self.job.experiment.evaluate
        is_measured = self._noisy is not None or self.validates() or evaluate.tests(is_last=is_last)
        if not is_measured or (server_round % evaluate.personal_every and not is_last):
            return {}
        self._ask(run, MEASURE_LAST if is_last else MEASURE, server_round)
        measures = self._measures.numbers
        validated = measures.get(f"{OWN}_{VALIDATION_ACCURACY}")
        return measures if validated is None else {**measures, VALIDATION_ACCURACY: validated}

    def after(self, run: Run) -> None:
        """Measure the models after the last round, unless they are measured already.

        Also store the bytes of the measurements' messages, and the best value of each measure. If there are validation
        records, the values of the round with the best validation accuracy are stored.
        """
        server_round = len(run.log.rounds)
        if self._round != server_round or self._task != MEASURE_LAST:
            self._ask(run, MEASURE_LAST, server_round)
        run.log.after["own models"] = self._traffic(run.strategy.server)
        rounds = [one for one in run.log.rounds if one.metrics and f"{OWN}_accuracy" in one.metrics]
        validated = [one for one in rounds if one.validation_accuracy is not None]
        if self.validates() and validated:
            rounds = [max(validated, key=lambda one: one.validation_accuracy or 0.0)]
        found = {name: [one.metrics[name] for one in rounds if one.metrics and name in one.metrics] for name in _BEST}
        self._best = {f"best_{name}": max(values) for name, values in found.items() if values}

    def _ask(self, run: Run, task: str, server_round: int) -> None:
        """Ask all clients to measure their models. Clients receive the same tensors as in the next round."""
        experiment, server = self.job.experiment, run.strategy.server
        order = replace(
            run.order,
            server_round=server_round + 1,
            learning_rate=experiment.local.rate_in(min(server_round + 1, experiment.rounds), experiment.rounds),
        )
        has_metrics, num_classes = experiment.evaluate.metrics != "none", self.job.dataset.num_classes
        read: Callable[[RecordDict], OwnAnswer]
        read = partial(answer_in, num_classes=1 if self._noisy else num_classes, has_metrics=has_metrics)
        answers = run.ask(task, read, quoted=not experiment.is_private, order=order, server=server)
        self._measures = OwnMeasures(answers, self.job.members, by_class=self._noisy is None)
        self._round, self._task = server_round, task
        self._run, self._times_done = run.order.run, -(-server_round // experiment.evaluate.personal_every)

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return columns for ``clients.csv``: numbers of test records, and measures of the models on them."""
        if not self._measures.answers:
            return {}
        columns = {f"{name}_accuracy": self._measures.accuracies(name) for name in self._measures.models}
        for model in self._measures.models:
            further = self._measures.over_classes(model) | self._measures.metrics(model)
            columns |= {f"{model}_{name}": values for name, values in further.items()}
        return {"test_records": self.job.own_tests.sizes, **columns}

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``personal`` for ``result.json``: numbers of test records, and statistics over clients."""
        tests, evaluate = self.job.own_tests, self.job.experiment.evaluate
        without = np.flatnonzero(tests.sizes == 0).tolist()
        records = {
            "test_records_from": evaluate.clients,
            "clients_tested": len(tests) - len(without),
            "clients_held_out": len(tests) - len(self.job.members),
            "clients_without_test_records": without[:100],
            "shared_test_records": num_shared(tests),
        }
        if self._noisy:
            counted = sum(bool(one.counts) for one in self._measures.answers)
            records |= {"clients_tested": counted, "count_noise": self._noisy.noise_multiplier}
        few = len(tests) <= MOST_LISTED
        measures = {**self._measures.numbers, **self._best}
        said = {"in_words": _in_words(measures, " (noisy counts)" * bool(self._noisy))} if measures else {}
        by_client: dict[str, Any] = {"by_client": self._by_client() if few else {}}
        if numbers := self._measures.num_with_metric:
            by_client["clients_with_metric"] = numbers
        if names := sources_of(self.job.dataset, self.job.shards):
            by_client["by_source"] = self._measures.by_source(names)
        dataset = self.job.dataset
        if dataset.has_labels and dataset.num_classes <= MOST_NAMED:
            classes = dataset.classes or tuple(map(str, range(dataset.num_classes)))
            by_client["by_class"] = self._measures.recall_of_classes(classes)
        return {"personal": {**records, **measures, **self._measures.recalls, **by_client, **said}}

    def _by_client(self) -> dict[str, list[float | None]]:
        """Return the accuracy of each client's models, {model: one accuracy for each client}; None if unknown."""
        return {
            name: [None if np.isnan(value) else value for value in self._measures.accuracies(name).tolist()]
            for name in self._measures.models
        }

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
                f"{shared:,} test records belong to several clients, because the test set has too few records of a "
                "class: the clients' accuracies are not independent of each other"
            )
        return said

    def payments(self) -> "Iterator[Payment]":
        """Yield the planned privacy cost of noisy counts. Yield nothing if the counts are exact."""
        if self._noisy:
            yield from self._noisy.payments()

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the given privacy statements ``others``, and the statement of the noisy counts."""
        return [*others, *([self._noisy.statement(self._run, self._times_done)] if self._noisy else [])]

    def work(self) -> Sequence[Work]:
        """Return the amounts of computation for the measures.

        Each measurement needs predictions. Some algorithms need further predictions, or training, in their method
        ``start``. After the last round, every client also trains once more.
        """
        from fl_sim.simulation.forecast import (  # noqa: PLC0415 (these ask all stages)
            by_architecture,
            evaluation_work,
            num_predicted_at_start,
            start_works,
            training_work,
        )
        from fl_sim.simulation.rounds import procedure_of  # noqa: PLC0415 (as above)

        procedure, experiment = procedure_of(self.job), self.job.experiment
        records = len(self.job.own_tests.records) + len(self.job.validation.records)
        models = 2 * self._times + 1 + bool(experiment.evaluate.fine_tune_epochs)
        epochs = experiment.evaluate.fine_tune_epochs / max(experiment.local.epochs, 1)
        share = experiment.num_clients / experiment.sampler.expected_size(experiment.num_members)
        algorithm = experiment.algorithm
        trains = not (isinstance(algorithm, OwnModel) or experiment.is_private)
        at_starts = num_predicted_at_start(self.job, algorithm, self._times * experiment.num_clients)
        every, rounds = experiment.evaluate.personal_every, experiment.rounds
        measured_after = [*range(every, rounds, every), rounds]
        return (
            *by_architecture(procedure, lambda one: evaluation_work(one, records * models + at_starts)),
            *by_architecture(procedure, lambda one: training_work(one, algorithm, share * (epochs + trains))),
            *start_works(procedure, algorithm, 1, before=[number / share for number in measured_after]),
        )

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: the models that all clients receive, and the counts that all clients send."""
        job, algorithm = self.job, self.job.experiment.algorithm
        server = ServerState(params)
        if not path_in(type(algorithm), "procedure"):  # an algorithm with rounds may send more than one model
            personal = job.experiment.local.personal
            server = first_state(algorithm, detached(trainable(job.model()).items()), personal)
        return {"own models": self._traffic(server)}

    @property
    def _times(self) -> int:
        """The number of measurements in the run: one every ``personal_every`` rounds, and one after the last round."""
        experiment = self.job.experiment
        return -(-experiment.rounds // experiment.evaluate.personal_every)

    def _traffic(self, server: ServerState) -> Traffic:
        experiment, times = self.job.experiment, self._times
        up, total = 8 * 3 * self.job.dataset.num_classes * 2, Traffic(0, 0)
        for _, state, count in states_sent(experiment.algorithm, server, range(experiment.num_clients)):
            content = wire.task_content(wire.BLANK, state.params, state.broadcast)
            total += Traffic(arrays.num_bytes(content), up) * (times * count)
        return total


def _in_words(measures: Mapping[str, float], how: str) -> str:
    """Return the mean accuracies as a line of text for the user. ``how``: a note about noise, or empty."""
    named = {f"{OWN}_accuracy": "mean", f"{OWN}_worst_tenth": "worst tenth"}
    named |= {f"{name}_accuracy": name.replace("_", "-") for name in MODELS if name != OWN}
    named[f"{HELD_OUT}{FINE_TUNED}_accuracy"] = "fine-tuned by clients that never took part"
    shown = [f"{word} {100 * measures[name]:.2f} %" for name, word in named.items() if name in measures]
    return f"own models on the clients' own test records{how}: {', '.join(shown)}"


def _check_held_out(job: Job) -> None:
    """Raise UserError if the setting ``evaluate.held_out_clients`` holds out no client or all clients.

    UserError is also raised if another setting sends requests to all clients. Such a setting does not work with
    held-out clients, which take no part in the run until their final test.
    """
    experiment = job.experiment
    if not (share := experiment.evaluate.held_out_clients):
        return
    if experiment.num_members in {0, experiment.num_clients}:
        raise UserError(
            f"evaluate.held_out_clients={share:g} holds out {experiment.num_clients - experiment.num_members} of "
            f"{experiment.num_clients} clients: at least one must be held out, and one must take part"
        )
    others = [name for name in ("preprocess", "calibrate") if not is_none(getattr(experiment, name))]
    others += ["algorithm"] if isinstance(experiment.algorithm, Sharing) else []
    others += [] if experiment.is_synchronous else ["server"]
    if others:
        kind = kind_of(getattr(experiment, others[0]))
        raise UserError(
            f"evaluate.held_out_clients={share:g} excludes held-out clients from the run until the last round, but "
            f"{others[0]} {kind} asks all clients: leave one of the two settings out"
        )


class ClientRecords:
    """The test and validation records of each client.

    If the partition gives clients a feature skew, it changes these records in the same way as the client's training
    records.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def tests(self, client: int) -> Records:
        """Return the client's own test records."""
        job = self._job
        return records_as_seen(job, job.records.test.take(job.own_tests[client]), client, "own test feature-noise")

    def validation(self, client: int) -> Records:
        """Return the client's own validation records. There are none if the run holds out no validation records."""
        job = self._job
        parts = job.validation[client] if len(job.validation) else np.zeros(0, dtype=np.int64)
        return records_as_seen(job, job.records.train.take(parts), client, "own validation feature-noise")
