"""Run one experiment in a run directory. After a crash, the same call resumes the run from its checkpoint."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import Job, job_of
from fl_sim.kinds import Budgeted, kind_of
from fl_sim.seeding import process_kept, seeded_alone
from fl_sim.simulation.client_runtime import fixed_threads
from fl_sim.simulation.engine_choice import FLOWER, open_engine
from fl_sim.simulation.resuming import clean_up, finished_result, has_leftovers, start_or_resume
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run_log import Observer, RunLog, Silent, error_fields, result_of
from fl_sim.simulation.stage import Procedure
from fl_sim.store import run_directory
from fl_sim.store.files import LOCK, readable_os_errors, run_lock
from fl_sim.store.private import PrivateLog, prints_to, warnings_to
from fl_sim.training.own_metrics import metrics_at
from strategies.layer import layer_kinds


def run(
    experiment: Experiment,
    out: Path,
    data_root: Path | None = None,
    observer: Observer | None = None,
    *,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Run ``experiment`` in the run directory ``out`` and return the content of ``result.json``.

    ``grid``: Flower's Grid (it delivers messages), if Flower's own runtime started this process. Without ``grid``, this
    function starts the experiment's engine. ``out`` may contain an unfinished run of the experiment, or a run with
    fewer rounds. In both cases, the run continues after its last finished round. A finished run is not repeated: its
    stored result is returned, without a further privacy cost. Raises RunError if the run cannot continue; finished
    rounds stay on the disk. Raises UserError for settings that cannot be run, and for files that do not fit together.
    """
    observer = observer or Silent()
    if grid is not None and experiment.is_timed:
        raise UserError(
            f"devices={kind_of(experiment.devices)} simulates the time of clients, and Flower's own runtime cannot do "
            "that: leave devices and server out, or use fl-sim run"
        )
    # job_of raises an error for an impossible partition, before any file is written
    job = job_of(experiment, data_root)
    with readable_os_errors():
        now = identity_of(job.experiment, data_root)
        result = finished_result(job.experiment, out, now)
        if result is None:
            _check_budgets(job)
            _check_metrics(job, observer)
        if result is None or has_leftovers(job.experiment, out):
            out.mkdir(parents=True, exist_ok=True)
            with run_lock(out):
                result = finished_result(job.experiment, out, now) or _run(procedure_of(job), out, observer, grid)
                clean_up(job.experiment, out)
        return result


def _check_budgets(job: Job) -> None:
    """Raise UserError if a privacy budget is too small for even one output of the chosen private method."""
    experiment, records = job.experiment, [len(shard) for shard in job.shards]
    for kind in (experiment.algorithm, experiment.aggregator, experiment.preprocess, experiment.calibrate):
        if isinstance(kind, Budgeted):
            kind.check_budget(experiment, records, job.dataset.num_classes)


def _check_metrics(job: Job, observer: Observer) -> None:
    """Raise UserError if the user's own metrics would never be computed in this run."""
    origins = [(f"observer {name}", "leave out the observer's method metrics") for name in observer.own_metrics]
    origins += [(origin, "leave evaluate.metrics out") for origin in metrics_at(job.experiment.evaluate.metrics)]
    for origin, cure in origins:
        if not type(procedure_of(job)).has_rounds:
            raise UserError(
                f"{origin} has metrics of a round's model, and algorithm {kind_of(job.experiment.algorithm)} has no "
                f"rounds: {cure}"
            )
        if job.experiment.evaluate.test == "never":
            raise UserError(
                f"{origin} has metrics on the test records, and evaluate.test=never uses none: set "
                f"evaluate.test=rounds or last, or {cure}"
            )


def _write_outcome(job: Job, log: RunLog, out: Path) -> None:
    """Write the final model, and ``clients.csv`` with one line for each client.

    ``clients.csv`` is never written if the run promises privacy. It is also left out if no measures per client are
    known, or if there are more than ``run_directory.MOST_LISTED`` clients.
    """
    run_directory.write_model(out, job.whole({**log.fixed, **log.server.model}))
    records = job.shards_in(len(log.rounds)).sizes + (job.validation.sizes if len(job.validation.sizes) else 0)
    if job.experiment.is_private or len(records) > run_directory.MOST_LISTED:
        return
    columns: dict[str, NDArray[Any]] = {}
    if (last := log.measured) is not None and last.by_client is not None:
        columns["client_accuracy"] = np.full(len(records), np.nan)
        columns["client_accuracy"][: len(last.by_client)] = last.by_client
    for stage in log.stages:
        found = stage.by_client()
        if twice := sorted(found.keys() & {"client", "records", *columns}):
            raise RunError(
                f"by_client of {type(stage).__name__} returned {twice[0]!r}, a column that clients.csv has: rename it"
            )
        columns |= found
    if not columns:
        return
    rows = zip(records.tolist(), *(column.tolist() for column in columns.values()), strict=True)
    lines = [
        ",".join([str(client), str(count), *("" if math.isnan(value) else str(value) for value in values)])
        for client, (count, *values) in enumerate(rows)
    ]
    heads = ",".join(["client", "records", *columns])
    run_directory.write_text(out / run_directory.CLIENTS, "\n".join([heads, *lines]) + "\n")


def _run(procedure: Procedure, out: Path, observer: Observer, grid: Grid | None) -> dict[str, Any]:
    job, experiment = procedure.job, procedure.job.experiment
    with seeded_alone(experiment.seed, "beginning"):
        log, first_round = start_or_resume(procedure, out)
    log.warnings = [*log.doubts, *_warnings_of_settings(job), *procedure.warnings(log)]
    start = time.perf_counter() - _seconds_before(experiment, log, out)
    error: BaseException | None = None
    with process_kept(), fixed_threads(experiment.engine.threads):
        try:
            # In a private run, the screen must not show the arrival of replies, because their times are private.
            replied = Silent().replied if experiment.is_private else observer.replied
            own = nullcontext((grid, FLOWER)) if grid else open_engine(job, replied)
            with readable_os_errors(), own as (opened, engine):
                log.engine, log.trainer = engine.kind, engine.trainer
                said = [f"{engine.why}; {engine.trainer}", *_first_lines(job, log, out)]
                observer.started(experiment, "\n".join(said), first_round)
                with _off_screen(experiment, out, opened):
                    procedure.run(opened, out, log, observer)
                _write_outcome(job, log, out)
            status = "finished"
        except RunError as failure:
            status, error = "failed", failure
        except KeyboardInterrupt as interrupt:
            status, error = "interrupted", interrupt
    result = result_of(job, log, status, time.perf_counter() - start) | error_fields(error, out)
    if error is None:
        run_directory.write_result(out, result)
        observer.ended(result)
        return result
    with suppress(OSError):
        run_directory.write_result(out, result)
    with suppress(OSError):
        if log.server.params:
            run_directory.write_model(out, job.whole({**log.fixed, **log.server.model}))
    with suppress(RunError):  # an error that an observer raises must not replace the error of the run
        observer.ended(result)
    raise error


def _warnings_of_settings(job: Job) -> list[str]:
    return [*([] if job.experiment.is_private else job.dataset.counted), *job.experiment.remarks]


def _first_lines(job: Job, log: RunLog, out: Path) -> list[str]:
    """Return the lines that are shown to the user before the first round, without repetitions.

    Of these lines, only the warnings are stored in the result.
    """
    experiment, states = job.experiment, out / run_directory.STATE
    on_states = [f"client states are private: only you can read {states}; the finished run deletes this folder"]
    of_layers = [line for kind in layer_kinds(experiment) for line in kind.told(experiment)]
    of_states = on_states if log.seal and experiment.is_private else []
    return list(dict.fromkeys([*job.model_in_words, *of_states, *log.warnings, *of_layers]))


def _seconds_before(experiment: Experiment, log: RunLog, out: Path) -> float:
    """Return the seconds that a resumed run took in earlier processes.

    The log of a private run contains no seconds. For a private run, the result is the time since the oldest
    modification of a file in ``out``. This time includes all pauses between processes.
    """
    if not experiment.is_private:
        return sum(record.seconds or 0.0 for record in log.rounds)
    return max(0.0, time.time() - min(found.stat().st_mtime for found in out.iterdir() if found.name != LOCK))


@contextmanager
def _off_screen(experiment: Experiment, out: Path, grid: Grid) -> Iterator[None]:
    """In a private run, redirect prints and warnings of client code from the screen to a private log file."""
    if not experiment.is_private:
        yield
        return
    stream = PrivateLog(out / run_directory.PRIVATE_WARNINGS)
    if isinstance(grid, LocalGrid):
        grid.quiet = partial(prints_to, stream)
    with warnings_to(stream):
        yield
