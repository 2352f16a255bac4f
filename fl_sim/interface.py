"""The Python interface: ``fl_sim.run``, ``fl_sim.table`` and their results."""

import hashlib
import importlib
import io
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_sim.data import load
from fl_sim.data.naming import without_settings
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, experiment_of_run
from fl_sim.experiment.identity import edited_code, identity_of
from fl_sim.experiment.job import job_of, resolved
from fl_sim.kinds import is_settings, kind_of, short_form
from fl_sim.one_of import as_table
from fl_sim.params import layout_of
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.progress import RunProgress
from fl_sim.settings import read_table
from fl_sim.simulation import run as simulation
from fl_sim.simulation.resuming import on_trust, set_aside
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run_log import Silent
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.tables import file_or_preset
from fl_sim.tables.earlier_runs import begin_with_shorter
from fl_sim.tables.labels import run_name
from fl_sim.tables.plan import deadline_after, plan_table, read_settings, table_settings
from fl_sim.tracking.observers import tracking_of
from fl_sim.trained_part import as_made

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.report.table import SeedResult, Table

RESULTS = Path("results")


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    ``experiment``: the experiment with all defaults filled in. ``rounds``: one ``RoundRecord`` per round; accuracies
    are in [0, 1], and None in rounds without evaluation. ``final_accuracy``: test accuracy after the last round.
    ``best_accuracy``: test accuracy of the round with the best validation accuracy. Without validation records it is
    the best test accuracy of all rounds, an optimistic measure. ``privacy``: one privacy statement for each protected
    unit; empty if nothing is protected. ``facts``: the content of ``result.json`` in ``directory``.
    """

    experiment: Experiment
    directory: Path
    rounds: tuple[RoundRecord, ...] = field(repr=False)
    final_accuracy: float | None
    best_accuracy: float | None
    privacy: tuple[PrivacyStatement, ...]
    facts: Mapping[str, Any] = field(repr=False)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with one row per round. Raises UserError if pandas is not installed."""
        return _data_frame(record.numbers() for record in self.rounds)


@dataclass(frozen=True)
class TableResult:
    """The result of a grid of experiments: the ``table`` of finished cells, and the ``directory`` with all runs."""

    directory: Path
    table: "Table" = field(repr=False)

    @property
    def cells(self) -> "tuple[SeedResult, ...]":
        """The result of each run: accuracies in [0, 1], or the error of a failed run."""
        return self.table.results

    def to_markdown(self) -> str:
        """Return the table in Markdown, as ``fl-sim table`` prints it."""
        from fl_sim.report.table_files import markdown  # noqa: PLC0415 (of no use to a single run)

        return markdown(self.table)

    _repr_markdown_ = to_markdown  # Jupyter calls this method to show the object

    def to_pandas(self) -> Any:
        """Return ``table.csv`` as a pandas DataFrame with one row per run; accuracies and other shares are in percent.

        Each column is a setting or a measure. Raises UserError if pandas is not installed.
        """
        from fl_sim.report.table_files import run_lines  # noqa: PLC0415 (of no use to a single run)

        return _data_frame(run_lines(self.table))


def run(
    experiment: Experiment | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    again: bool = False,
    progress: bool = True,
    track: str | Iterable[str] = (),
    observer: object = None,
) -> RunResult:
    """Run an experiment and return the result. A run in ``out`` is resumed, or only read if it is finished.

    ``experiment``: an Experiment, or settings as in a TOML file; None is the default experiment. ``out``: the run
    directory, by default ``results/NAME``, named after the settings. ``data_root``: the first directory in which data
    sets are searched. ``again``: True moves the run in ``out`` to a folder next to it and starts a new run.
    ``progress``: True shows the progress on standard error. ``track``: trackers, such as "tensorboard,mlflow".
    ``observer``: an object with methods that the run calls (docs/tracking.md). The method ``finished_round`` ends the
    run by returning True, and ``metrics`` measures the model. Raises UserError for settings that cannot be run. Raises
    RunError for a failed run; its finished rounds are kept.
    """
    root = _data_root(data_root)
    tracking = tracking_of(track)
    given = experiment if isinstance(experiment, Experiment) else experiment_from(experiment or {})
    chosen, directory = directory_of(given, None if out is None else Path(out), root)
    title = f"{kind_of(chosen.algorithm)} on {without_settings(chosen.data)} {short_form(chosen.partition)}"
    stream = None if progress else io.StringIO()
    with RunProgress(title, chosen.rounds, stream, timed=not chosen.is_private) as shown:
        observers = tracking.of(directory, _ProgressObserver(shown), shown.say, observer)
        if again and (aside := set_aside(chosen, directory)):
            shown.say(f"the earlier files of {directory} are in {aside} now")
        if out is None and (shorter := begin_with_shorter(chosen, directory, root)):
            shown.say(f"the first rounds of this run are those of {shorter}, an equal run with fewer rounds")
        shown.say(f"results go to {directory}")
        facts = simulation.run(chosen, directory, root, observers)
        if not observers.has_started:
            shown.say("this run is already finished, so nothing was done: --again (again=True) repeats it")
            if doubt := on_trust(directory, identity_of(chosen, root)):
                shown.say(doubt)
            if edited := edited_code(chosen):
                shown.say(edited)
            tracking.catch_up(directory, shown.say)
    releases = tuple(PrivacyStatement.model_validate(release) for release in facts["privacy"])
    rounds = tuple(read_rounds(directory))
    return RunResult(chosen, directory, rounds, facts["final_accuracy"], facts["best_accuracy"], releases, facts)


def load_model(directory: str | Path, *, data_root: str | Path | None = None) -> "nn.Module":
    """Return the trained model of the finished run in ``directory``, on the CPU and in evaluation mode.

    The model expects records as in training: normalised by the data set's mean and standard deviation. The data set is
    loaded, because its shape and classes are needed. ``data_root``: as for ``run``. Raises UserError if there is no
    finished run, or if the run saved no model.
    """
    out, root = Path(directory), _data_root(data_root)
    if not (out / run_directory.CONFIG).exists():
        raise UserError(
            f"{out} holds no run ({run_directory.CONFIG} is missing): give the run directory, as in --out of the run"
        )
    experiment, facts = experiment_of_run(read_table(out / run_directory.CONFIG)), run_directory.read_result(out)
    if facts is None or facts.get("status") != "finished":
        done = len(read_rounds(out))
        raise UserError(
            f"{out} holds an unfinished run ({done} of {experiment.rounds} rounds): repeat the run's command to finish "
            "it"
        )
    path = out / run_directory.MODEL
    if not path.exists():
        raise UserError(f"{path} is missing: restore it, or repeat the run with --again (again=True)")
    tensors = run_directory.read_model(out)
    if not tensors:
        raise UserError(f"{out} holds a run of algorithm {kind_of(experiment.algorithm)}, which saves no model")
    architecture = experiment.model_copy(update={"model": experiment.model.without_weights})
    model = as_made(procedure_of(job_of(architecture, root)).model())
    found, wanted = dict(layout_of(tensors)), dict(layout_of(model.state_dict()))
    # evaluation does not use the tensors num_batches_tracked, so the file may lack these tensors
    counted = {name for name in wanted if name.endswith("num_batches_tracked")}
    if wrong := [name for name in {**wanted, **found} if name not in counted and found.get(name) != wanted.get(name)]:
        raise UserError(
            f"{path} does not fit model {experiment.model}: tensor {wrong[0]} is {found.get(wrong[0], 'missing')} "
            f"in the file and {wanted.get(wrong[0], 'unknown')} in the model: restore the code that the run used"
        )
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def directory_of(experiment: Experiment, out: Path | None, data_root: Path | None) -> tuple[Experiment, Path]:
    """Return (``experiment`` with all defaults filled in, run directory).

    The run directory is ``out``, or, if ``out`` is None, a directory in ``results`` that is named after the settings.
    """
    chosen = resolved(experiment, data_root)
    return chosen, out or RESULTS / run_name(chosen, load(chosen.data, data_root, chosen.features))


def table(
    plan: str | Path | Mapping[str, Any] = "digits",
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_root: str | Path | None = None,
    budget: float | None = None,
    progress: bool = True,
    track: str | Iterable[str] = (),
    again: bool = False,
) -> TableResult:
    """Run a grid of experiments in worker processes, and return the table. Finished runs are not repeated.

    ``plan``: the name of a preset, the path of a TOML file, or the content of such a file: ``{"base": {...}, "grid":
    {...}}``, which may contain settings objects. ``out``: the directory of all runs, by default ``results/NAME``, or
    ``results/table-DIGEST`` if ``plan`` is a mapping. ``jobs``: the number of parallel runs (default: one per core).
    ``budget``: the time limit in hours. After this time the table is returned with the finished cells; the same call
    later runs the missing cells. A failed run becomes a cell with its error. ``track``: trackers of each run, as for
    ``run``. ``again``: True repeats each finished run whose records or code have changed since the run, and moves its
    old files to another folder. If ``again`` is False, such a run raises UserError. A plan that cannot be run raises
    UserError, too.
    """
    from fl_sim.tables.filling import TableState, TimeIsUp, conclude, fill  # noqa: PLC0415 (of no use to a single run)

    deadline = deadline_after(budget)

    tracking = tracking_of(track)
    if isinstance(plan, Mapping):
        content = _without_objects(plan)
        settings = table_settings(content, [], "the table")
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]
        name = f"table-{digest}"
    else:
        path, which = file_or_preset(str(plan))
        if which and progress:
            print(which, file=sys.stderr)
        settings, name = read_settings(path, []), path.stem
    root, directory = _data_root(data_root), RESULTS / name if out is None else Path(out)
    board = TableState(settings, plan_table(settings, root))
    with suppress(TimeIsUp):  # the time limit has passed: the cells finished so far are returned
        fill(board, directory, jobs, root, deadline=deadline, progress=progress, tracking=tracking, again=again)
    return TableResult(directory, conclude(board, directory)[0])


class _ProgressObserver(Silent):
    """An observer: it gets the events of a run, such as a finished round, for the progress display."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._shown = ""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        del experiment
        self._shown = engine
        self._progress.say(engine)
        self._progress.started(first_round)

    def replied(self, replies: int) -> None:
        self._progress.replied(replies)

    def finished_round(self, record: RoundRecord) -> None:
        self._progress.finished_round(record)

    def preparing(self, what: str) -> None:
        self._shown += f"\n{what}"
        self._progress.preparing(what)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Show the run's warnings that were not shown at its start. The result is not shown: ``run`` returns it."""
        for warning in facts["warnings"]:
            if warning not in self._shown:
                self._progress.say(warning)


def _data_root(given: str | Path | None) -> Path | None:
    root = None if given is None else Path(given)
    if root is not None and not root.is_dir():
        raise UserError(
            f"data_root={str(root)!r} is no directory: give the directory of the data sets, or leave data_root out"
        )
    return root


def _without_objects(value: Any) -> Any:
    """Convert each settings object in a table's plan (its base and grid) to a dict, as in a TOML file."""
    if isinstance(value, Mapping):
        return {key: _without_objects(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [_without_objects(inner) for inner in value]
    return as_table(value) if is_settings(type(value)) else value


def _data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise UserError("to_pandas() needs pandas, which fl-sim does not install: pip install pandas") from error
    return pandas.DataFrame(list(rows))
