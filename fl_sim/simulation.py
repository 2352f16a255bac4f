"""The main loop: run one experiment on an engine, round by round, leaving a directory that survives a crash."""

import hashlib
import importlib.metadata
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.serverapp import Grid
from safetensors.torch import save

from fl_sim.config import field_defaults
from fl_sim.data import load
from fl_sim.engine_choice import FLOWER, open_engine
from fl_sim.experiment import Experiment, build_model, client_shards, device_of, experiment_from, read_table, resolved
from fl_sim.learning import evaluate, to_tensors
from fl_sim.params import detached, num_parameters
from fl_sim.report import rundir
from fl_sim.report.rundir import RoundRecord
from fl_sim.seeding import torch_kept
from fl_sim.types import BudgetExhausted, Dataset, RunError, ServerState, UserError
from fl_sim.wire import Order
from strategies.algorithm import Sharing
from strategies.flower import FederatedStrategy, run_round, share_before_training
from strategies.global_dp import GlobalDP

if TYPE_CHECKING:
    from strategies.private import PrivateRounds

VERSIONS = ("fl-sim", "flwr", "torch", "numpy")


class Observer(Protocol):
    """Whoever shows progress."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Hear which engine was taken and why, and where the run begins (above 1 where it goes on after a crash)."""
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

    def replied(self, replies: int) -> None:
        """Ignore a reply."""

    def finished_round(self, record: RoundRecord) -> None:
        """Ignore a round."""


@dataclass
class RunLog:
    """What a run has to show so far."""

    server: ServerState
    rounds: list[RoundRecord] = field(default_factory=list)
    preprocess_seconds: float = 0.0
    engine: str = ""
    stopped: str = ""
    privacy: "PrivateRounds | None" = None
    warnings: list[str] = field(default_factory=list)
    clipping_norm: float | None = None


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
                main_loop(experiment, opened, out, log, data_root, observer)
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
        rundir.write_model(out, log.server.params)
        rundir.write_result(out, result)
    if error is not None:
        raise error
    shutil.rmtree(out / rundir.STATE, ignore_errors=True)
    (out / rundir.CHECKPOINT).unlink(missing_ok=True)
    return result


def main_loop(
    experiment: Experiment, grid: Grid, out: Path, log: RunLog, data_root: Path | None, observer: Observer
) -> None:
    """Run every round that ``log`` does not have yet: train, evaluate, record, checkpoint."""
    strategy = federated_strategy(experiment, grid, out, log, data_root)
    dataset = load(experiment.data, data_root)
    device = device_of(experiment)
    inputs, labels = (tensor.to(device) for tensor in to_tensors(dataset.test, dataset))
    model = build_model(experiment, dataset).to(device)
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
            accuracy, loss = evaluate(model, strategy.server.params, inputs, labels)
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


def federated_strategy(
    experiment: Experiment, grid: Grid, out: Path, log: RunLog, data_root: Path | None
) -> FederatedStrategy:
    """Return the experiment's Strategy, after whatever its clients share before the first round."""
    order = Order(
        experiment=experiment.model_dump_json(),
        server_round=0,
        learning_rate=0.0,
        data_root=str(data_root.absolute()) if data_root else "",
        state_dir=str(out.absolute() / rundir.STATE),
        pool="",
    )
    strategy = FederatedStrategy(
        experiment.algorithm,
        experiment.aggregator,
        experiment.sampler,
        log.server,
        order,
        experiment.num_clients,
        experiment.seed,
    )
    if isinstance(experiment.aggregator, GlobalDP):
        from strategies.private import open_private_rounds  # noqa: PLC0415 (the accountants load slowly)

        strategy.privacy = log.privacy = open_private_rounds(
            experiment.aggregator,
            experiment.sampler,
            experiment.num_clients,
            experiment.seed,
            out,
            log.clipping_norm,
        )
    if isinstance(experiment.algorithm, Sharing):
        start = time.perf_counter()
        shared = share_before_training(strategy, grid, experiment.round_timeout)
        strategy.order = replace(order, pool=str(_write_pool(out, shared)))
        log.preprocess_seconds = time.perf_counter() - start
    return strategy


def _write_pool(out: Path, shared: dict[str, torch.Tensor]) -> Path:
    content = save(shared)
    path = out.absolute() / f"pool-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    return path


def _open(experiment: Experiment, out: Path, dataset: Dataset) -> tuple[RunLog, int]:
    """Make or take up the run directory."""
    settings = experiment.model_dump(exclude={"engine", "round_timeout"})
    initial = detached(build_model(experiment, dataset).named_parameters())
    log = RunLog(experiment.algorithm.init(initial))
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
        "rounds": len(log.rounds),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "privacy": [log.privacy.statement()] if log.privacy else [],
        "stopped": log.stopped,
        "warnings": log.warnings,
        "seconds": {
            "preprocess": log.preprocess_seconds,
            "train": sum(record.seconds for record in log.rounds),
            "total": seconds,
        },
        "versions": {name: _version(name) for name in VERSIONS},
    }


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
