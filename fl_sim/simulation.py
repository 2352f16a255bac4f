"""The main loop: run one experiment on an engine, round by round, leaving a directory that survives a crash."""

import importlib.metadata
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.serverapp import Grid

from clients.dafl import DaFl
from fl_sim.cohort import Trainer
from fl_sim.config import field_defaults
from fl_sim.data import load
from fl_sim.engine_choice import FLOWER, open_engine, threads_of
from fl_sim.experiment import Experiment, build_model, client_shards, device_of, experiment_from, read_table, resolved
from fl_sim.learning import resident
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached, num_parameters
from fl_sim.preparation import RunLog, federated_strategy
from fl_sim.report import rundir
from fl_sim.report.rundir import RoundRecord
from fl_sim.seeding import torch_kept
from fl_sim.types import BudgetExhausted, Dataset, RunError, ServerState, UserError
from strategies.flower import run_round
from strategies.global_dp import GlobalDP
from strategies.pate_settings import Pate

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
    Goes on after the last finished round where ``out`` holds an unfinished run of the same experiment. Raises RunError
    where the run cannot go on, UserError for settings that cannot be run; what is finished stays in ``out``.
    """
    observer = observer or Silent()
    experiment = resolved(experiment, data_root)
    dataset = load(experiment.data, data_root)
    client_shards(experiment, data_root)  # an impossible split is refused before anything is written
    log, first_round = _open(experiment, out, dataset)
    log.warnings = _warnings(experiment)
    start = time.perf_counter()
    error: BaseException | None = None
    with torch_kept(), _one_thread(experiment.engine.threads):
        try:
            # Under privacy how many clients take part in a round is theirs, on the screen too.
            replied = Silent().replied if isinstance(experiment.aggregator, GlobalDP) else observer.replied
            own = nullcontext((grid, FLOWER)) if grid else open_engine(experiment, data_root, replied)
            with own as (opened, engine):
                log.engine = engine.kind
                observer.started(experiment, "\n".join([engine.why, *log.warnings]), first_round)
                _train(experiment, opened, out, log, data_root, observer)
            status = "finished"
        except RunError as failure:
            status, error = "failed", failure
        except KeyboardInterrupt as interrupt:
            status, error = "interrupted", interrupt
        except OSError as failure:
            status, error = "failed", RunError(f"cannot write to {out}, or read from it: {failure}")
    result = _result(experiment, dataset, log, status, time.perf_counter() - start)
    result |= {"error": str(error)} if isinstance(error, RunError) else {}
    with suppress(OSError) if error else nullcontext():
        if log.server.params:
            rundir.write_model(out, log.server.params)
        rundir.write_result(out, result)
    if error is not None:
        raise error
    shutil.rmtree(out / rundir.STATE, ignore_errors=True)
    (out / rundir.CHECKPOINT).unlink(missing_ok=True)
    return result


def _train(
    experiment: Experiment, grid: Grid, out: Path, log: RunLog, data_root: Path | None, observer: Observer
) -> None:
    if not isinstance(experiment.algorithm, Pate):
        main_loop(experiment, grid, out, log, data_root, observer)
        return
    from fl_sim.pate_run import run_pate  # noqa: PLC0415 (the accountants load slowly)

    run_pate(experiment, grid, out, log, data_root, say=observer.preparing, finished=observer.finished_round)


def main_loop(
    experiment: Experiment, grid: Grid, out: Path, log: RunLog, data_root: Path | None, observer: Observer
) -> None:
    """Run every round that ``log`` does not have yet: train, evaluate, record, checkpoint."""
    if isinstance(experiment.preprocess, DaFl):
        observer.preparing(f"clients make synthetic records, {experiment.preprocess.generator.kind}")
    strategy = federated_strategy(experiment, grid, out, log, data_root)
    dataset = load(experiment.data, data_root)
    device = device_of(experiment)
    test = resident(dataset.test, dataset, device)
    evaluator = Trainer(build_model(experiment, dataset).to(device), load_kernel()[0])
    workers = threads_of(experiment.engine, experiment, data_root)
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
            accuracy, loss = evaluator.evaluate(
                strategy.server.params, test.inputs, test.labels, scale=test.scale, workers=workers
            )
        epsilon = strategy.privacy.ledger.epsilon if strategy.privacy else None
        record = RoundRecord(
            server_round, accuracy, loss, done.train_loss, epsilon, done.cohort_size, rate, time.perf_counter() - start
        )
        log.server = strategy.server
        log.rounds.append(record)
        rundir.append_round(out, record)
        norm = strategy.privacy.clipping_norm if strategy.privacy else None
        rundir.write_checkpoint(out, server_round, log.server, norm)
        observer.finished_round(record)


def _is_last(experiment: Experiment, server_round: int, privacy: "PrivateRounds | None") -> bool:
    return server_round == experiment.rounds or (privacy is not None and not privacy.affords_another())


def _open(experiment: Experiment, out: Path, dataset: Dataset) -> tuple[RunLog, int]:
    """Make or take up the run directory."""
    settings = experiment.model_dump(exclude={"engine", "round_timeout"})
    initial = detached(build_model(experiment, dataset).named_parameters())
    algorithm = experiment.algorithm
    log = RunLog(ServerState({}) if isinstance(algorithm, Pate) else algorithm.init(initial))
    before = out / rundir.CONFIG
    if before.exists():
        earlier = experiment_from(read_table(before)).model_dump(exclude={"engine", "round_timeout"})
        if earlier != settings:
            changed = ", ".join(key for key, value in settings.items() if earlier[key] != value)
            raise UserError(f"{out} holds a run with other settings ({changed}): choose another --out, or delete it")
        if (checkpoint := rundir.read_checkpoint(out)) is not None:
            last_round, log.server, log.clipping_norm = checkpoint
            log.rounds = rundir.keep_rounds(out, last_round)
            return log, last_round + 1
    elif out.exists() and any(not path.name.endswith(".part") for path in out.iterdir()):
        raise UserError(f"{out} is not empty and holds no run: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    # Never the ledger: what was released before stays paid for, and a run again with other noise pays again.
    for stale in (rundir.ROUNDS, rundir.RESULT, rundir.MODEL):
        (out / stale).unlink(missing_ok=True)
    rundir.write_config(out, experiment.model_dump(exclude_none=True))
    return log, 1


def _warnings(experiment: Experiment) -> list[str]:
    if isinstance(experiment.algorithm, Pate):
        return list(filter(None, [experiment.algorithm.advice(experiment.clients)]))
    if not isinstance(experiment.aggregator, GlobalDP):
        return []
    from fl_sim.privacy.planning import delta_advice  # noqa: PLC0415 (the accountants load slowly)

    advice = delta_advice(experiment.aggregator.delta, experiment.num_clients)
    return [advice] if advice else []


def _result(experiment: Experiment, dataset: Dataset, log: RunLog, status: str, seconds: float) -> dict[str, Any]:
    accuracies = [record.test_accuracy for record in log.rounds if record.test_accuracy is not None]
    return {
        "status": status,
        "algorithm": experiment.algorithm.kind,
        "data": experiment.data,
        "data_note": dataset.note,
        "partition": "centralized" if experiment.algorithm.kind == "centralized" else short_form(experiment.partition),
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
        "seconds": {
            "preprocess": log.preprocess_seconds,
            "train": sum(record.seconds for record in log.rounds),
            "total": seconds,
        },
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _preprocess(experiment: Experiment, log: RunLog) -> dict[str, object]:
    if log.pool is None:
        return {"kind": experiment.preprocess.kind}
    from fl_sim.synthesis import summary  # noqa: PLC0415 (the accountants load slowly)

    return summary(log.pool, experiment)


def _privacy(experiment: Experiment, log: RunLog) -> list[dict[str, object]]:
    """Return a statement for each unit that something was paid for."""
    if log.pate is not None:
        return log.pate.statements
    statements = [log.privacy.statement(experiment.rounds)] if log.privacy else []
    if log.pool is not None:
        from fl_sim.synthesis_bill import NOT_PER_CLIENT, statement  # noqa: PLC0415 (the accountants load slowly)

        statements = [one | {"does_not_cover": f"{one['does_not_cover']}{NOT_PER_CLIENT}"} for one in statements]
        statements.append(statement(log.pool, experiment))
    return statements


def short_form(settings: Any) -> str:
    """Return the short form of a settings value, such as ``label-1`` or ``dirichlet:0.05``."""
    defaults = {name: value for name, value in field_defaults(type(settings)).items() if name != "kind"}
    if not defaults:
        return str(settings.kind)
    value = getattr(settings, next(iter(defaults)))
    if settings.kind.endswith("-k"):
        return f"{settings.kind[:-2]}-{value}"
    return f"{settings.kind}:{value}"


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
