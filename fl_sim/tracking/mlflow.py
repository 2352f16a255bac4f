"""MLflow: a run at the server, or in the database, that ``$MLFLOW_TRACKING_URI`` names."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import lock_descriptor

from fl_sim.tracking.subject import PROJECT, Subject

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_PATIENCE: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip
"""Unless the user says otherwise: a server that is down is told of within seconds, and standard output stays ours."""

_IDENTITY: Final = "fl-sim.identity"
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # in one request
_STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class Tracker:
    """The run's entry, found again by its identity."""

    def __init__(self, subject: Subject) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient, get_tracking_uri  # noqa: PLC0415 (an extra)

        with _alone_at(get_tracking_uri()):
            self._client = MlflowClient()
            run = _run_of(self._client, subject)
        self._id: str = run.info.run_id
        history = self._client.get_metric_history(self._id, "learning_rate")
        self.last_round = max((metric.step for metric in history), default=0)
        self.place = f"run {subject.name} at {self._client.tracking_uri}"
        self._describe(subject, run)

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Send the rounds' numbers, many in one request."""
        from mlflow.entities import Metric  # noqa: PLC0415 (an extra)

        now = int(1000 * time.time())
        metrics = [Metric(name, one, now, step) for step, numbers in rounds.items() for name, one in numbers.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Send the results, and close the run."""
        self.send({last_round: results})
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _describe(self, subject: Subject, run: "Run") -> None:
        """Send the settings as parameters.

        One that a longer run has changed becomes a tag: MLflow lets no parameter change.
        """
        from mlflow.entities import Param, RunTag  # noqa: PLC0415 (an extra)

        settings = {name: str(value) for name, value in subject.settings.items()}
        there = run.data.params
        params = [Param(name, value) for name, value in settings.items() if name not in there]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        changed = {name for name in settings if there.get(name, settings[name]) != settings[name]}
        self._client.log_batch(self._id, tags=[RunTag(f"now.{name}", settings[name]) for name in sorted(changed)])


@contextmanager
def _alone_at(uri: str) -> Iterator[None]:
    """Wait until no other process opens this SQLite database: two that find none would both make its tables."""
    path = uri.removeprefix("sqlite:///")
    if path == uri:
        yield
        return
    descriptor = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_descriptor(descriptor)
        yield
    finally:
        os.close(descriptor)


def _run_of(client: "MlflowClient", subject: Subject) -> "Run":
    """Return the run of the subject's identity, which is made unless it is there."""
    experiment = _experiment(client, os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    found = client.search_runs([experiment], f"tags.`{_IDENTITY}` = '{subject.mark.identity}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, "RUNNING")
        return client.get_run(found[0].info.run_id)
    return client.create_run(experiment, tags={_IDENTITY: subject.mark.identity}, run_name=subject.name)


def _experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException  # noqa: PLC0415 (an extra)

    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run was quicker
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    return str(found.experiment_id)
