"""The trackers TensorBoard, MLflow, Weights & Biases and Trackio. A ``Session`` sends one run to one tracker.

A tracker's library is imported only when a session opens. So users need to install only the libraries that they use.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

from filelock import lock_descriptor
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.mistakes import guess

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from tensorboard.compat.proto.event_pb2 import Event

    from fl_sim.report.measures import Value

PROJECT: Final = "fl-sim"
"""The name of the project in the tracker, unless the tracker's environment variable (WANDB_PROJECT, ...) is set."""

_FOLDER: Final = "tensorboard"
_AROUND: Final = 16  # bytes that an event file adds to each event: its length and two checksums

_PATIENCE: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}  # fmt: skip
"""Defaults of MLflow's environment variables: if the server is missing, MLflow fails quickly, with few messages."""

_IDENTITY: Final = "fl-sim.identity"
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # MLflow's limits for one request
_STATUS: Final = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@dataclass(frozen=True)
class TrackerState:
    """The part of a run that one tracker has already received, as stored in ``tracking.json``.

    ``identity``: the random identifier of the run in the tracker. ``sent``: the number of the last round that the
    tracker has received. ``ended``: the identifier (``ending_of``) of the results that the tracker has received; empty
    if it has received no results.
    """

    identity: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    sent: Annotated[int, Field(ge=0)] = 0
    ended: str = ""


@dataclass(frozen=True)
class TrackedRun:
    """The name, settings and state of a run, for the session of one tracker.

    ``name``: the name of the run directory. ``settings``: all settings of ``config.toml``, as {dotted name: value}.
    ``state``: the part of the run that the tracker has already received.
    """

    name: str
    directory: Path
    settings: Mapping[str, "Value"]
    state: TrackerState


class Session(Protocol):
    """The connection of one run to one tracker. The methods may raise any exception of the tracker's library."""

    @property
    def last_round(self) -> int:
        """Return the number of the last round that the tracker has received; 0 if the tracker has received no round."""
        ...

    @property
    def place(self) -> str:
        """Return a text that tells the user how to find the run in the tracker: a command, an address or a name."""
        ...

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Send the measures of new rounds. ``rounds``: {round: {name of a measure: value}}."""
        ...

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Send the ``results`` of the run, {name: value}, and close the session.

        ``status``: finished, failed or interrupted. ``last_round``: the last round of the run.
        """
        ...


class TensorBoard:
    """TensorBoard: writes one event file in the run directory. ``tensorboard --logdir`` shows this file.

    A resumed run appends to the file. If a crash has left an incomplete event at the end of the file, this event is
    removed first.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        self._path = tracked.directory / _FOLDER / f"events.out.tfevents.{tracked.state.identity}"
        self._path.parent.mkdir(exist_ok=True)
        for other in self._path.parent.glob("events.out.tfevents.*"):
            if other != self._path:
                other.unlink()  # delete the event file of an earlier run in this directory
        steps = [event.step for event in _complete_events(self._path)] if self._path.exists() else []
        self.last_round = max(steps, default=0)
        self.place = f"tensorboard --logdir {tracked.directory}"
        if not steps:
            self._write({"file_version": "brain.Event:2"}, {"summary": _text("settings", tracked.settings)})

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Write the measures of the rounds into the event file."""
        self._write(*({"step": step, "summary": _scalars(numbers)} for step, numbers in rounds.items()))

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Write the results and the status into the event file."""
        said = {"summary": _text("status", {"status": status})}
        self._write({"step": last_round, "summary": _scalars(results)}, said)

    def _write(self, *events: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (an extra)
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        now = time.time()
        with self._path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(Event(wall_time=now, **event).SerializeToString())


class MLflow:
    """MLflow: sends a run to the server or database ``$MLFLOW_TRACKING_URI``, with the run's identifier in a tag."""

    def __init__(self, tracked: TrackedRun) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient, get_tracking_uri  # noqa: PLC0415 (an extra)

        with _alone_at(get_tracking_uri()):
            self._client = MlflowClient()
            run = _run_of(self._client, tracked)
        self._id: str = run.info.run_id
        history = self._client.get_metric_history(self._id, "learning_rate")
        self.last_round = max((metric.step for metric in history), default=0)
        self.place = f"run {tracked.name} at {self._client.tracking_uri}"
        self._describe(tracked, run)

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Send the measures of the rounds, up to 1000 numbers per request."""
        from mlflow.entities import Metric  # noqa: PLC0415 (an extra)

        now = int(1000 * time.time())
        metrics = [Metric(name, one, now, step) for step, numbers in rounds.items() for name, one in numbers.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Send the results and the status; MLflow then shows the run as ended."""
        self.send({last_round: results})
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _describe(self, tracked: TrackedRun, run: "Run") -> None:
        """Send the settings of the run as MLflow parameters.

        MLflow's parameters cannot change. So if a setting of a resumed run has changed, the new value is sent as the
        tag ``now.SETTING``.
        """
        from mlflow.entities import Param, RunTag  # noqa: PLC0415 (an extra)

        settings = {name: str(value) for name, value in tracked.settings.items()}
        there = run.data.params
        params = [Param(name, value) for name, value in settings.items() if name not in there]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        changed = {name for name in settings if there.get(name, settings[name]) != settings[name]}
        self._client.log_batch(self._id, tags=[RunTag(f"now.{name}", settings[name]) for name in sorted(changed)])


class WandB:
    """Weights & Biases: writes files in the run directory (offline mode), unless ``$WANDB_MODE`` sets another mode.

    fl-sim switches off the library's collection of data about the machine, the program and its code.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        import wandb  # noqa: PLC0415 (an extra)

        os.environ.setdefault("WANDB_MODE", "offline")
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
            x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, reinit="create_new",
        )  # fmt: skip
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=tracked.name, id=tracked.state.identity,
            resume="allow", dir=tracked.directory, settings=quiet,
        )  # fmt: skip
        self._run.config.update(dict(tracked.settings), allow_val_change=True)
        self.last_round = tracked.state.sent
        self.place = f"wandb sync {tracked.directory}/wandb/offline-run-*" if self._run.offline else str(self._run.url)

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Log the measures of the rounds, each round as one step."""
        for step, numbers in rounds.items():
            self._run.log(dict(numbers), step=step)

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Write the results and the status into the summary of the run, and close the run."""
        del last_round
        self._run.summary.update({**results, "status": status})
        self._run.finish(exit_code=int(status != "finished"))


class Trackio:
    """Trackio: writes to a local database or to the server ``$TRACKIO_SERVER_URL``. ``trackio show`` shows the runs.

    The name of a run in Trackio consists of the name of its directory and its random identifier.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        import trackio  # noqa: PLC0415 (an extra)

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{tracked.name}-{tracked.state.identity}"
        with redirect_stdout(StringIO()):  # hides Trackio's message: with --json, only JSON may be printed
            self._run = trackio.init(
                project, name=name, config=dict(tracked.settings), resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
        self.last_round = tracked.state.sent
        self.place = f"trackio show --project {project}"

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Log the measures of the rounds, each round as one step."""
        for step, numbers in rounds.items():
            self._run.log(dict(numbers), step=step)

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Log the results and the status at the last round. Wait until all data are written."""
        self._run.log({**results, "status": status}, step=last_round)
        with redirect_stdout(StringIO()):
            self._run.finish()


TRACKERS: Final[Mapping[str, Callable[[TrackedRun], Session]]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB, "trackio": Trackio,
}  # fmt: skip
"""{name of a tracker: its session class}.

The tracker's library and the extra of fl-sim that installs this library have the same name as the tracker.
"""


def chosen_trackers(typed: str | Iterable[str]) -> tuple[str, ...]:
    """Split the option ``--track`` into names of trackers and import paths of observers, without duplicates.

    ``typed``: a list, or text with commas. Raises UserError for a tracker that is unknown or not installed.
    """
    names = typed.split(",") if isinstance(typed, str) else typed
    chosen = tuple(dict.fromkeys(name.strip() for name in names if name))
    for name in (one for one in chosen if ":" not in one):
        if name not in TRACKERS:
            raise UserError(
                f"unknown tracker {name!r}{guess(name, TRACKERS)}; valid: {', '.join(TRACKERS)}, and MODULE:NAME for "
                "your own observer"
            )
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracker {name!r} is not installed: pip install {name}")
    return chosen


def _complete_events(path: Path) -> "Iterator[Event]":
    """Return the events in the file ``path``. An incomplete last event, left by a crash, is first removed."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # noqa: PLC0415 (an extra)
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415

    records = list(RawEventFileLoader(str(path)).Load())
    os.truncate(path, sum(_AROUND + len(record) for record in records))
    return map(Event.FromString, records)


def _scalars(numbers: Mapping[str, float]) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 (an extra)

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])


def _text(tag: str, table: Mapping[str, Any]) -> object:
    from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415 (an extra)

    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table.items())]
    return text_pb(tag, "\n".join(lines))


@contextmanager
def _alone_at(uri: str) -> Iterator[None]:
    """Lock the folder of the SQLite database at ``uri``, so that only one process at a time creates the tables."""
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


def _run_of(client: "MlflowClient", tracked: TrackedRun) -> "Run":
    experiment = _experiment(client, os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    found = client.search_runs([experiment], f"tags.`{_IDENTITY}` = '{tracked.state.identity}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, "RUNNING")
        return client.get_run(found[0].info.run_id)
    return client.create_run(experiment, tags={_IDENTITY: tracked.state.identity}, run_name=tracked.name)


def _experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException  # noqa: PLC0415 (an extra)

    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another process may have created the experiment in the meantime
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    return str(found.experiment_id)
