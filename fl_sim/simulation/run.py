"""The main loop: run one experiment on an engine, round by round, leaving a directory that survives a crash."""

import importlib.metadata
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.serverapp import Grid

from clients.dafl.settings import DaFl
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of
from fl_sim.kinds import kind_of, short_form
from fl_sim.params import num_parameters
from fl_sim.seeding import torch_kept
from fl_sim.simulation.engine_choice import FLOWER, open_engine, threads_of
from fl_sim.simulation.preparation import RunLog, federated_strategy, is_private
from fl_sim.simulation.resuming import clean_up, finished_result, has_leftovers, take_up
from fl_sim.store import run_directory
from fl_sim.store.checkpoint import Progress, write_checkpoint
from fl_sim.store.files import in_words
from fl_sim.store.locks import sole_run
from fl_sim.store.run_directory import RoundRecord, coarse
from fl_sim.store.tensors import write_private
from fl_sim.training.loop import resident
from fl_sim.types import BudgetExhausted, RunError
from strategies.fedavg import Centralized
from strategies.flower import FederatedStrategy, run_round
from strategies.global_dp import GlobalDP
from strategies.pate.settings import Pate

if TYPE_CHECKING:
    from strategies.private import PrivateRounds

VERSIONS = ("fl-sim", "flwr", "torch", "numpy")


class Observer(Protocol):
    """Whoever shows progress."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Hear which engine was taken and why, and where the run begins (above 1 where it goes on after a crash)."""
        ...

    def preparing(self, what: str) -> None:
        """Hear what clients do before the first round; ``replied`` counts who is done."""
        ...

    def replied(self, replies: int) -> None:
        """Hear how many clients of the current exchange have answered."""
        ...

    def finished_round(self, record: RoundRecord) -> None:
        """Hear of a round."""
        ...


class Silent:
    """Shows nothing."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Ignore the start."""

    def preparing(self, what: str) -> None:
        """Ignore what is prepared."""

    def replied(self, replies: int) -> None:
        """Ignore a reply."""

    def finished_round(self, record: RoundRecord) -> None:
        """Ignore a round."""


def run(
    experiment: Experiment,
    out: Path,
    data_root: Path | None = None,
    observer: Observer | None = None,
    *,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Run ``experiment`` in ``out`` and return what ``result.json`` says.

    ``grid``: Flower's own, where its runtime runs us; otherwise the experiment's engine is started.
    Goes on after the last finished round where ``out`` holds an unfinished run of the experiment; a finished run is
    not run again, and costs no privacy again: its result is returned as it was. Raises RunError where the run cannot go
    on, UserError for settings that cannot be run and for files that do not fit together; what is finished stays.
    """
    observer = observer or Silent()
    job = job_of(experiment, data_root)  # an impossible split is refused before anything is written
    with in_words():
        result = finished_result(job.experiment, out)
        if result is None or has_leftovers(out):
            out.mkdir(parents=True, exist_ok=True)
            with sole_run(out):
                result = finished_result(job.experiment, out) or _run(job, out, observer, grid)
                clean_up(out)
        return result


def _run(job: Job, out: Path, observer: Observer, grid: Grid | None) -> dict[str, Any]:
    experiment = job.experiment
    log, first_round = take_up(job, out)
    log.warnings = _warnings(experiment, out, log)
    start = time.perf_counter()
    error: BaseException | None = None
    with torch_kept(), _one_thread(experiment.engine.threads):
        try:
            # Under privacy who has answered when is the clients' own affair, on the screen, too.
            replied = Silent().replied if is_private(experiment) else observer.replied
            own = nullcontext((grid, FLOWER)) if grid else open_engine(job, replied)
            with in_words(), own as (opened, engine):
                log.engine = engine.kind
                observer.started(experiment, "\n".join([engine.why, *log.warnings]), first_round)
                _train(job, opened, out, log, observer)
                run_directory.write_model(out, log.server.params)
            status = "finished"
        except RunError as failure:
            status, error = "failed", failure
        except KeyboardInterrupt as interrupt:
            status, error = "interrupted", interrupt
    result = _result(job, log, status, time.perf_counter() - start)
    if error is None:
        run_directory.write_result(out, result)
        return result
    with suppress(OSError):
        run_directory.write_result(out, result | _told(error, out))
    with suppress(OSError):
        if log.server.params:
            run_directory.write_model(out, log.server.params)
    raise error


def _told(error: BaseException | None, out: Path) -> dict[str, str]:
    """Return what ``result.json`` says of a failed run; what clients said in private goes into a file of its own."""
    if not isinstance(error, RunError):
        return {}
    if error.private:
        with suppress(OSError):
            write_private(out / run_directory.PRIVATE_ERRORS, f"{error.private}\n".encode())
    return {"error": str(error)}


def _train(job: Job, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
    if not isinstance(job.experiment.algorithm, Pate):
        main_loop(job, grid, out, log, observer)
        return
    from fl_sim.simulation.pate.run import run_pate  # noqa: PLC0415 (the accountants load slowly)

    run_pate(job, grid, out, log, say=observer.preparing, finished=observer.finished_round)


def main_loop(job: Job, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
    """Run every round that ``log`` does not have yet: train, evaluate, record, checkpoint."""
    experiment = job.experiment
    if isinstance(experiment.preprocess, DaFl):
        observer.preparing(f"clients make synthetic records, {kind_of(experiment.preprocess.generator)}")
    strategy = federated_strategy(job, grid, out, log)
    test = resident(job.dataset.test, job.dataset, job.device)
    workers = threads_of(experiment.engine, job)
    for server_round in range(len(log.rounds) + 1, experiment.rounds + 1):
        start = time.perf_counter()
        factor = experiment.local.schedule.factor(server_round, experiment.rounds)
        rate = experiment.local.learning_rate * factor
        try:
            done = run_round(strategy, grid, server_round, rate, experiment.round_timeout)
        except BudgetExhausted as spent:
            log.stopped = f"privacy budget spent after {len(log.rounds)} rounds ({spent})"
            break
        accuracy, loss = None, None
        if server_round % experiment.evaluate_every == 0 or _is_last(experiment, server_round, log.privacy):
            accuracy, loss = job.trainer.evaluate(
                strategy.server.params, test.inputs, test.labels, scale=test.scale, workers=workers
            )
            if not math.isfinite(loss):
                raise RunError(
                    f"the test loss is {loss} after round {server_round}: training diverges, try smaller learning rates"
                )
        epsilon = strategy.privacy.ledger.epsilon if strategy.privacy else None
        seconds = None if is_private(experiment) else time.perf_counter() - start
        record = RoundRecord(server_round, accuracy, loss, done.train_loss, epsilon, done.cohort_size, rate, seconds)
        _keep(out, log, strategy, record)
        observer.finished_round(record)


def _keep(out: Path, log: RunLog, strategy: FederatedStrategy, record: RoundRecord) -> None:
    """Put a finished round on the disk. The checkpoint comes last: whoever finds it finds all that it counts on."""
    if log.seal is not None:
        log.seal.put(record.round, strategy.cohort.tolist())
    log.server = strategy.server
    log.chain = run_directory.append_round(out, record, log.chain)
    log.rounds.append(record)
    progress = Progress(record.round, log.chain)
    if strategy.privacy is not None:
        receipt = strategy.privacy.ledger.receipt.to_json()
        progress = Progress(record.round, log.chain, strategy.privacy.clipping_norm, receipt)
    write_checkpoint(out, progress, log.server)


def _is_last(experiment: Experiment, server_round: int, privacy: "PrivateRounds | None") -> bool:
    return server_round == experiment.rounds or (privacy is not None and not privacy.affords_another())


def _warnings(experiment: Experiment, out: Path, log: RunLog) -> list[str]:
    if isinstance(experiment.algorithm, Pate):
        return list(filter(None, [experiment.algorithm.advice(experiment.clients)]))
    kept = (
        f"what clients keep between rounds is private: it lies in {out / run_directory.STATE}, for your eyes only, "
        "until the run has finished"
    )
    warnings = [kept] if log.seal and is_private(experiment) else []
    if not isinstance(experiment.aggregator, GlobalDP):
        return warnings
    from fl_sim.privacy.planning import delta_advice  # noqa: PLC0415 (the accountants load slowly)

    advice = delta_advice(experiment.aggregator.delta, experiment.num_clients)
    return [*warnings, advice] if advice else warnings


def _result(job: Job, log: RunLog, status: str, seconds: float) -> dict[str, Any]:
    experiment = job.experiment
    accuracies = [record.test_accuracy for record in log.rounds if record.test_accuracy is not None]
    return {
        "status": status,
        "algorithm": kind_of(experiment.algorithm),
        "data": experiment.data,
        "data_note": job.dataset.note,
        "partition": _split(experiment),
        "clients": experiment.num_clients,
        "model": experiment.model,
        "num_parameters": num_parameters(log.server.params),
        "seed": experiment.seed,
        "engine": log.engine,
        "precision": experiment.local.precision,
        "rounds": len(log.rounds),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "preprocess": _preprocess(experiment, log),
        **({"pate": log.pate.facts} if log.pate else {}),
        "privacy": _privacy(experiment, log),
        "stopped": log.stopped,
        "warnings": log.warnings,
        "chain": log.chain,
        "seconds": _seconds(experiment, log, seconds),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _split(experiment: Experiment) -> str:
    return "centralized" if isinstance(experiment.algorithm, Centralized) else short_form(experiment.partition)


def _seconds(experiment: Experiment, log: RunLog, total: float) -> dict[str, float]:
    train = sum(record.seconds or 0.0 for record in log.rounds)
    if not is_private(experiment):
        return {"preprocess": log.preprocess_seconds, "train": train, "total": total}
    return {"preprocess": coarse(log.preprocess_seconds), "train": coarse(total), "total": coarse(total)}


def _preprocess(experiment: Experiment, log: RunLog) -> dict[str, object]:
    if log.pool is None:
        return {"kind": experiment.preprocess.kind}
    from fl_sim.simulation.dafl.synthesis import summary  # noqa: PLC0415 (the accountants load slowly)

    return summary(log.pool, experiment)


def _privacy(experiment: Experiment, log: RunLog) -> list[dict[str, object]]:
    """Return a statement for each unit that something was paid for."""
    if log.pate is not None:
        return log.pate.statements
    statements = [log.privacy.statement(experiment.rounds)] if log.privacy else []
    if log.pool is not None:
        from fl_sim.simulation.dafl.bill import NOT_PER_CLIENT, statement  # noqa: PLC0415 (the accountants load slowly)

        statements = [one | {"does_not_cover": f"{one['does_not_cover']}{NOT_PER_CLIENT}"} for one in statements]
        statements.append(statement(log.pool, experiment))
    return statements


@contextmanager
def _one_thread(threads: int) -> Iterator[None]:
    """Fix torch's threads for a run, and put them back: their number changes the last bits of every sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _version(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "not installed"
