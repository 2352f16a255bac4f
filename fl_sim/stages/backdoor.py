"""The stage that measures the success rate of a backdoor attack, on the test records that the attack targets."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.simulation.client_runtime import threads_of
from fl_sim.simulation.stage import Run, Stage
from strategies.attacks import hostile_clients
from strategies.backdoors import Planted


class BackdoorSuccess(Stage):
    """Measures the success rate of a backdoor attack on models at the server.

    Raises UserError if the data set does not fit the attack.
    """

    titles: ClassVar[Mapping[str, str]] = {
        "backdoor.success_rate_percent": "Attack success rate: percentage of test records with the backdoor (of other "
        "classes) that the model predicts as the target class"
    }  # fmt: skip

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        attack = job.experiment.attack
        assert isinstance(attack, Planted)
        self._attack, triggered = attack, attack.triggered(job.dataset)
        self._num_records = len(triggered)
        self._records = job.source(triggered)
        self._round, self._success = -1, 0.0

    def warnings(self) -> list[str]:
        """Return a warning if no hostile client has a record that the attack targets."""
        experiment, job = self.job.experiment, self.job
        if experiment.is_private:  # the warning would reveal facts about private records
            return []
        hostile = hostile_clients(self._attack, experiment.num_clients, experiment.seed)
        if any(self._attack.is_held(job.dataset.train.take(job.shards[client])) for client in sorted(hostile)):
            return []
        nobody = f"no hostile client holds a record that attack {kind_of(self._attack)} targets, so there is no attack"
        return [
            f"{nobody}: set a larger attack.clients, another seed, or a partition that gives more clients such records"
        ]

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return {name: attack success rate} after ``server_round``; empty if the model is not tested in this round."""
        experiment = self.job.experiment
        is_due = is_last or not server_round % experiment.evaluate_every
        if not is_due or not experiment.evaluate.tests(is_last=is_last):
            return {}
        self._measure(run, server_round)
        return {"backdoor_success_rate": self._success}

    def after(self, run: Run) -> None:
        """Measure the final model if it is not measured yet and the settings allow tests."""
        if self.job.experiment.evaluate.tests(is_last=True) and self._round != len(run.log.rounds):
            self._measure(run, len(run.log.rounds))

    def _measure(self, run: Run, server_round: int) -> None:
        workers, records = threads_of(self.job.experiment.engine, self.job), self._records
        scores = self.job.trainer.evaluate(
            run.model(), records.inputs, records.labels, scale=records.scale, workers=workers
        )
        self._round, self._success = server_round, scores.accuracy

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``backdoor`` for ``result.json``: target class, number of test records, success rate."""
        said = (
            f"attack success rate {100 * self._success:.1f} %: share of the {self._num_records:,} "
            f"{self._attack.of_tests} that the model predicts as class {self._attack.target}"
        )
        found = {"target": self._attack.target, "triggered_records": self._num_records}
        return {"backdoor": {**found, "success_rate": self._success, "in_words": said} if self._round >= 0 else found}
