"""The main loop of a run with federated rounds.

A settings class can name another loop, as "module:Class", in its attribute ``procedure``.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

import numpy as np
import torch
from flwr.serverapp import Grid

from clients.client_layer import ClientLayer
from clients.client_task import ClientRuntime
from fl_sim.data import sealed_content
from fl_sim.engines import wire
from fl_sim.errors import Diverged, RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.frozen_body import FrozenBody
from fl_sim.experiment.job import Job, job_of
from fl_sim.experiment.node_job import own_job
from fl_sim.kinds import hides_clients, is_none, is_own, is_own_kind, kind_of, path_in, replaces_records, short_form
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import load_object
from fl_sim.own_loss import check_own_loss
from fl_sim.params import detached, layout_of, trainable
from fl_sim.seeding import seed_process
from fl_sim.simulation.client_runtime import local_settings, runtime_for, with_architectures, workload_of
from fl_sim.simulation.forecast import work_of_rounds
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import (
    VALIDATION_ACCURACY,
    Procedure,
    Run,
    Stage,
    holders_in,
    measured_by_stages,
    prepared_strategy,
    run_stage,
    stages_of,
    tasks_of,
)
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT, Progress, RoundRecord, write_state
from fl_sim.training.features import head_of
from fl_sim.types import Params, Payloads, ServerState, Traffic, called
from strategies.algorithm import (
    Advising,
    Algorithm,
    OfHead,
    Sharing,
    Steered,
    client_state_template,
    first_state,
    payload_template,
    plan_template,
    reported_by,
    share_template,
)
from strategies.flower import FederatedStrategy, Round, run_round
from strategies.layer import Beginning, Stop, check_names, client_layers, layer_kinds
from strategies.own_layer import states_of
from strategies.samplers import num_asked

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment, RunPayments

Exchange: TypeAlias = Callable[[int, float], Round]
"""A function (number of the round, learning rate) -> ``Round`` that executes one round.

The function stores the new server state in the strategy. It raises the same errors as ``strategies.flower.run_round``.
"""


@dataclass(frozen=True)
class Rounds(Procedure):
    """The procedure of a federated algorithm: one model, trained by clients in rounds."""

    algorithm: Algorithm
    has_rounds: ClassVar[bool] = True

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Run every round that ``log`` does not contain yet.

        A round has seven steps: begin, sample the cohort, send and receive messages, aggregate, merge, measure, record.
        The function ``strategies.flower.run_round`` executes the first five steps. Layers, such as Global DP or
        compression, take part in each of these five steps.
        """
        with _named_settings(self.algorithm):
            experiment, rounds_before = self.job.experiment, len(log.rounds)
            for stage in stages_of(self.job):
                if preparing := stage.preparing(log):
                    observer.preparing(preparing)
            strategy = prepared_strategy(self.job, self.algorithm, self.on_clients, grid, out, log, observer)
            run = Run(self.job, strategy, grid, out, log, observer.own_metrics)
            exchange = self._exchange(strategy, grid, out, log)
            while len(log.rounds) < experiment.rounds and not strategy.layer.ended(log.rounds):
                start, server_round = time.perf_counter(), len(log.rounds) + 1
                rate = experiment.local.rate_in(server_round, experiment.rounds)
                if self.job.moving is not None:
                    strategy.holders = holders_in(self.job, log, server_round)
                try:
                    made = exchange(server_round, rate)
                except Stop as why:
                    log.stopped = str(why)
                    break
                record = self._measured(made, rate, run)
                seconds = None if experiment.is_private else time.perf_counter() - start
                record = replace(record, seconds=seconds)
                _write_round(out, log, strategy, record, experiment.keep_every)
                if (ended := observer.finished_round(record)) and len(log.rounds) < experiment.rounds:
                    log.stopped_by_observer = ended
                    break
            self._conclude(run, rounds_before)

    def _exchange(self, strategy: FederatedStrategy, grid: Grid, out: Path, log: RunLog) -> Exchange:
        """Return the function that executes one round, in which clients train and the server merges their updates."""
        del out
        strategy.layer.ready(workload_of(self.job, log.num_pooled, strategy))
        return partial(run_round, strategy, grid, timeout=self.job.experiment.round_timeout)

    def _measured(self, made: Round, rate: float, run: Run) -> RoundRecord:
        """Return the line of a round for ``rounds.jsonl``. ``rate``: the learning rate of the round.

        The line contains the measures of the round's model if the settings ask for an evaluation after this round.
        """
        down, up = (made.traffic.down, made.traffic.up) if made.traffic is not None else (None, None)
        record = RoundRecord(
            made.server_round, None, None, made.train_loss, made.epsilon, made.cohort_size, rate, None,
            bytes_down=down, bytes_up=up,
            virtual_seconds=made.virtual_seconds, late=made.late, staleness=made.staleness,
        )  # fmt: skip
        experiment, layer, log = self.job.experiment, run.strategy.layer, run.log
        log.measured = None
        seed_process(experiment.seed, "evaluation", record.round)
        is_last = record.round == experiment.rounds or not layer.affords(record.round + 1)
        further = measured_by_stages(run, record.round, is_last=is_last)
        if record.round % experiment.evaluate_every and not is_last:
            return _with_measures(record, further, run)
        model, when = run.model(), f"after round {record.round}: {_CURE}"
        log.measured = run.measuring.measured(model, when, is_last=is_last, server_round=record.round)
        noted = _with_measures(log.measured.noted_in(record), further, run)
        if log.measured.test is None and layer.ended([*log.rounds, noted]):
            log.measured = run.measuring.measured(model, when, is_last=True, server_round=record.round)
            further = measured_by_stages(run, record.round, is_last=True)
        own = run.measuring.own(model, record.round) if log.measured.test is not None else {}
        if twice := sorted(further.keys() & own.keys()):
            raise RunError(f"your own metric {twice[0]!r} has the name of a stage's metric: rename your metric")
        return _with_measures(log.measured.noted_in(record), {**further, **own}, run)

    def _conclude(self, run: Run, rounds_before: int) -> None:
        """Add the final model and the warnings of the rounds to the log, then call ``after`` of every stage."""
        strategy, log = run.strategy, run.log
        log.stopped = log.stopped or strategy.layer.ended(log.rounds) or log.stopped_by_observer
        log.warnings += strategy.layer.conclusions(log.rounds)
        rounds_here = len(log.rounds) - rounds_before
        log.warnings += [
            f"{why} (in each of the last {rounds_here} rounds)"
            for why, count in strategy.without_effect.items()
            if count == rounds_here
        ]
        log.traffic, last = strategy.traffic, strategy.server
        on_clients = {name: value for name, value in self._whole(last.params).items() if name not in last.params}
        log.fixed = {**self.job.fixed, **on_clients}
        log.server = strategy.server = replace(last, params=reported_by(self.algorithm, last))
        ends_untested = log.stopped_by_observer and (log.measured is None or log.measured.test is None)
        if (log.measured is None or ends_untested) and log.rounds:
            # The last model may be unmeasured: an earlier process ran all rounds, or an observer ended the run early.
            model = self._model(log.server, log.server.params)
            when = f"after round {len(log.rounds)}: {_CURE}"
            log.measured = run.measuring.measured(model, when, is_last=True, server_round=len(log.rounds))
            log.measured_again = log.measured if ends_untested else None
        for stage in log.stages:
            assert isinstance(stage, Stage)
            run_stage(stage, run, "after")

    def model_after(self, server: ServerState) -> Params:
        """Return all tensors of the model after a round.

        ``server``: the server state after the round. Personal tensors, which stay on clients, have their initial
        values.
        """
        return {**self.job.fixed, **self._model(server, reported_by(self.algorithm, server))}

    def _model(self, server: ServerState, params: Params) -> Params:
        """Return all tensors of the model. ``params``: the trained parameters at the server."""
        return replace(server, params=self._whole(params)).model

    def _whole(self, params: Params) -> Params:
        """Return the server's ``params`` and the initial values of the parameters that never leave the clients."""
        for half in reversed(self.on_clients):
            params = half.model(params, {})
        return params

    @cached_property
    def on_clients(self) -> tuple[ClientLayer, ...]:
        """The client-side objects of the layers, such as compression. The innermost layer comes first."""
        return self._halves[0]

    @property
    def by_architecture(self) -> tuple[Procedure, ...]:
        """One procedure per architecture of the clients' models; for one architecture, it is ``self``."""
        jobs = self.job.by_architecture
        return (self,) if len(jobs) == 1 else tuple(Rounds(job, self.algorithm) for job in jobs)

    @cached_property
    def _halves(self) -> list[tuple[ClientLayer, ...]]:
        """The client-side objects of the layers, such as compression: one tuple for each model architecture."""
        jobs = self.job.by_architecture
        halves = [client_layers(one.experiment, self.algorithm, one.model) for one in jobs]
        if len(jobs) == 1:
            return halves
        alike = list(zip(*halves, strict=True))  # each element: one layer's objects, for all architectures
        return [tuple(half.beside(others) for half, others in zip(mine, alike, strict=True)) for mine in halves]

    def work(self) -> Sequence[Work]:
        """Return the amounts of computation for the time forecast: training, evaluation, and all stages."""
        return work_of_rounds(self, self.algorithm, self.job.experiment.rounds)

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of arrays to and from all clients, {purpose: bytes}.

        The purposes are "rounds", for all rounds, and those of each stage.
        """
        experiment = self.job.experiment
        updates = experiment.rounds * experiment.sampler.expected_size(experiment.num_members)
        return self._traffic_of(updates, experiment.rounds * num_asked(experiment.sampler, experiment.num_members))

    def _traffic_of(self, updates: float, more_sent: int = 0) -> dict[str, Traffic]:
        """Return the bytes of all rounds and of each stage, {purpose: bytes}.

        ``updates``: the number of client updates in all rounds. ``more_sent``: the number of further models that the
        server sends without an update in return, for example to ask clients for their loss.
        """
        experiment, server = self.job.experiment, self.beginning()
        each = FederatedStrategy(
            self.algorithm, experiment.aggregator, experiment.sampler, server,
            wire.BLANK, experiment.num_clients, experiment.seed,
            on_clients=self.on_clients,
        ).traffic  # fmt: skip
        once = {what: sent for stage in stages_of(self.job) for what, sent in stage.traffic(server.model).items()}
        in_rounds = each * round(updates) + Traffic(each.down * more_sent, 0)
        for kind in layer_kinds(experiment):
            in_rounds += kind.exchanged(experiment, server) * experiment.rounds
        return {"rounds": in_rounds, **once}

    def payments(self) -> "tuple[Payment, ...]":
        """Return the privacy costs of the rounds; an empty tuple if no layer, such as Global DP, adds noise."""
        experiment = self.job.experiment
        return tuple(payment for kind in layer_kinds(experiment) for payment in kind.payments(experiment))

    def typical_plan(self) -> LocalPlan:
        """Return a typical local plan (changes to plain SGD), to find the trainers that support the algorithm."""
        dataset, pool = self.job.dataset, {}
        if isinstance(self.algorithm, Sharing):
            template = share_template(self.algorithm, dataset.input_shape, dataset.num_classes)
            pool = {name: torch.zeros(1, *like.shape[1:], dtype=like.dtype) for name, like in template.items()}
        params = detached(trainable(self.job.model()).items())
        personal = self.job.experiment.local.personal
        plan = plan_template(self.algorithm, params, pool, dataset.num_classes, personal)
        for half in self.on_clients:
            plan = half.typical(plan)
        return plan

    def runtime(self) -> ClientRuntime:
        """Return the client runtime of a worker."""
        runtime = runtime_for(self.job, self.algorithm, tasks_of(self.job), self.on_clients)
        return with_architectures(runtime, self.job, self._halves)

    def beginning(self) -> ServerState:
        """Check the algorithm and all layers, then return the server state before the first round."""
        model, experiment = self.job.model(), self.job.experiment
        self._check_own_code()
        self._check_head(model, isinstance(self.algorithm, OfHead) and self.algorithm.needs_head)
        plan = self.typical_plan()
        check_own_loss(model, plan, local_settings(self.job, experiment.local.learning_rate))
        self._check_head(model, plan.class_features)
        server = first_state(self.algorithm, detached(trainable(model).items()), experiment.local.personal)
        self._check_architectures(server)
        sent, kept = payload_template(self.algorithm, server), client_state_template(self.algorithm, server)
        check_names(experiment, {**server.broadcast, **sent, **kept})
        whole = [type(one).__name__ for one in stages_of(self.job) if one.trains_model()]
        for layer in layer_kinds(experiment):
            layer.check(experiment, Beginning(server, plan, sent, kept, whole))
            server = layer.begun(experiment, model, server)
        return server

    def _check_head(self, model: torch.nn.Module, needed: bool) -> None:  # noqa: FBT001
        """Raise UserError if the model's head is frozen, but ``local.personal`` or the algorithm needs a trained head.

        The head is the model's last layer. ``needed``: True if the algorithm needs a trained head.
        """
        personal, what = self.job.experiment.local.personal, f"algorithm {kind_of(self.algorithm)}"
        if personal in {"head", "body"}:
            what = f"local.personal={personal}"
        elif not needed:
            return
        if all(weight.ndim < 2 for weight in trainable(head_of(model)).values()):
            raise UserError(
                f"{what} needs a trainable head (last layer), and the head of {type(model).__name__} is frozen: train "
                "the head, or choose another algorithm, such as fedavg"
            )

    def _check_architectures(self, server: ServerState) -> None:
        """Raise UserError if clients have different architectures, and messages depend on the architecture.

        ``server``: the first server state, made for the first architecture.
        """
        jobs = self.job.by_architecture
        for job in jobs if len(jobs) > 1 else ():
            if isinstance(job.body, FrozenBody):
                raise UserError(
                    f"model={job.experiment.model.name} has a frozen body, and clients with different architectures "
                    "cannot share its stored features: choose models whose parameters are all trained"
                )
            params = detached(trainable(job.model()).items())
            mine = first_state(self.algorithm, params, job.experiment.local.personal)
            first, other = (
                {name: layout_of(group) for name, group in groups.items()}
                for groups in (one.broadcast | payload_template(self.algorithm, one) for one in (server, mine))
            )
            if wrong := [name for name in first if first[name] != other.get(name)]:
                shapes = [", ".join(f"{key} {shape}" for key, shape in one[wrong[0]]) for one in (first, other)]
                raise UserError(
                    f"algorithm {kind_of(self.algorithm)} exchanges {wrong[0]!r}, whose shapes depend on the model: "
                    f"{shapes[0]} with {jobs[0].experiment.model.name}, and {shapes[1]} with "
                    f"{job.experiment.model.name}; choose models whose last layers have the same number of inputs, or "
                    "an algorithm whose messages do not depend on this number, such as local-only"
                )

    def _check_own_code(self) -> None:
        """Raise UserError if a run promises privacy and the user's own code would receive answers without noise."""
        experiment = self.job.experiment
        hides, protects = hides_clients(experiment.aggregator), not is_none(experiment.local.privacy)
        if (hides or protects) and (own := [one for one in layer_kinds(experiment) if is_own(one)]):
            sees = "clients' updates without noise" if hides else "clients' records"
            raise UserError(
                f"{own[0].__name__}, a layer of your own, sees {sees}, and this run promises privacy: the stated "
                "epsilon would not cover what the layer sees; remove the layer, or turn the privacy setting off"
            )
        if not (hides or protects or replaces_records(experiment.preprocess)):
            return
        for name, task in tasks_of(self.job).items():
            if is_own_kind(task):
                raise UserError(
                    f"{type(task).__name__}, code of your own, asks clients for {name!r}, and this run promises "
                    "privacy: the answers have no noise, so the stated epsilon would not cover them; remove the stage, "
                    "or turn the privacy setting off"
                )

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return names, shapes and types of the tensors that a client stores between rounds (its client state).

        ``server``: the first server state.
        """
        kept, sent = client_state_template(self.algorithm, server), payload_template(self.algorithm, server)
        for half in self.on_clients:
            kept = half.kept(kept, sent, server)
        return kept

    def warnings(self, log: RunLog) -> list[str]:
        """Return the warnings to the user before the first round."""
        experiment = self.job.experiment
        warnings = [said for stage in stages_of(self.job) for said in stage.warnings()]
        if isinstance(self.algorithm, Advising) and (advice := self.algorithm.advice(experiment.local.momentum)):
            warnings.append(advice)
        # A private run has no warning about clients without records, because numbers of records are private.
        # A record moves at most once. So a client without records in the first and the last round never has records.
        held = self.job.shards_in(1).sizes + self.job.shards_in(experiment.rounds).sizes
        idle = [] if experiment.is_private else np.flatnonzero(held == 0).tolist()
        for kind in layer_kinds(experiment):
            warnings += kind.warnings(experiment, len(log.rounds), idle)
        everybody, without = experiment.num_clients, len(idle)
        cohort = experiment.sampler.expected_size(everybody)
        if without and cohort != everybody:
            warnings.append(
                f"{without:,} of {everybody:,} clients hold no records and are sampled like the others: of {cohort:g} "
                f"clients in a round, on average about {cohort * (1 - without / everybody):.3g} train"
            )
        return warnings


def _with_measures(record: RoundRecord, measures: Mapping[str, float], run: Run) -> RoundRecord:
    """Return a copy of a round's ``RoundRecord`` with added ``measures`` of stages and observers, {name: number}."""
    numbers = {name: value for name, value in measures.items() if name != VALIDATION_ACCURACY}
    if numbers:
        record = replace(record, metrics=numbers)
    if any(isinstance(stage, Stage) and stage.validates() for stage in run.log.stages):
        record = replace(record, validation_accuracy=measures.get(VALIDATION_ACCURACY), validation_loss=None)
    return record


@contextmanager
def _named_settings(algorithm: object) -> Iterator[None]:
    """Add a hint to the error message of a diverged run: the names of algorithm settings that may be the cause."""
    try:
        yield
    except Diverged as error:
        if not isinstance(algorithm, Steered):
            raise
        raise Diverged(f"{error}; {algorithm.knobs}", private=error.private) from error


def _write_round(out: Path, log: RunLog, strategy: FederatedStrategy, record: RoundRecord, keep_every: int = 0) -> None:
    """Write a finished round to the disk. The checkpoint is written last, after all files that it refers to.

    ``keep_every``: n keeps a copy of the checkpoint after every n-th round; 0 keeps no copies.
    """
    if log.seal is not None:
        log.seal.put(record.round, strategy.cohort.tolist())
    log.server = strategy.server
    log.chain = run_directory.append_round(out, record, log.chain)
    log.rounds.append(record)
    holders = strategy.holders is not None
    progress = Progress(
        record.round, log.chain,
        records=log.records, versions=log.versions, counts_holders=holders, layers=states_of(strategy.layers),
    )  # fmt: skip
    if keep_every and record.round % keep_every == 0:
        write_state(run_directory.kept_path(out, record.round), progress, log.server)
    write_state(out / CHECKPOINT, progress, log.server)


_CURE: Final = "training diverges, try smaller learning rates"
_ROUNDS: Final = "fl_sim.simulation.rounds:Rounds"


def procedure_of(job: Job) -> Procedure:
    """Return the procedure of a run of ``job``: the code that executes the whole run, such as ``Rounds``.

    Raises UserError if ``devices`` is set and the algorithm has no rounds whose time could be simulated.
    """
    experiment, algorithm = job.experiment, job.experiment.algorithm
    path = path_in(type(algorithm), "procedure")
    if path and experiment.is_timed:
        raise UserError(
            f"devices={kind_of(experiment.devices)} does not work with algorithm {kind_of(algorithm)}, which has "
            "no rounds whose time could be simulated: leave devices out"
        )
    ignored = (
        ("evaluate.clients", experiment.evaluate.clients, "none"),
        ("local.personal", experiment.local.personal, "none"),
        ("model.trainable", experiment.model.trainable, "all"),
    )
    for name, value, default in ignored if path else ():
        if value != default:
            raise UserError(
                f"{name}={value} cannot run with algorithm {kind_of(algorithm)}, whose clients train no model in "
                f"rounds: leave {name} out"
            )
    path = path or path_in(type(experiment.server), "procedure") or _ROUNDS
    procedure: Procedure = load_object(path, "procedure")(job, algorithm)
    return procedure


@lru_cache(maxsize=2)
def runtime_of(experiment_json: str, data_root: str, own: str = "", client: int = 0, facts: str = "") -> ClientRuntime:
    """Return the client runtime of a worker process. Each process makes its runtime once and caches it.

    ``own``: the name of a node's own data set; empty for nodes without one. A node with its own records executes only
    the client ``client``. ``facts``: the public facts of the server's data set, as JSON. Raises UserError if the node's
    records do not fit these facts, or if the experiment needs the server's records on every node.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    if not own:
        return procedure_of(job_of(experiment, Path(data_root) if data_root else None)).runtime()
    procedure = procedure_of(own_job(experiment, own, client, json.loads(facts)))
    if not isinstance(procedure, Rounds):
        raise UserError(
            f"algorithm {kind_of(experiment.algorithm)} needs public records of the server's data set on every node, "
            "but this node has only its own records: remove the key data from the node's configuration"
        )
    return procedure.runtime()


def planned_bill(job: Job) -> "RunPayments":
    """Return the planned privacy costs of a run of ``job``, as far as they are known before the run begins.

    If the run has a privacy guarantee, this call takes a few seconds: it computes the privacy loss distribution (PLD).
    """
    from fl_sim.privacy.bill import RunPayments  # noqa: PLC0415 (the accountants load slowly)

    experiment, of_training = job.experiment, procedure_of(job).payments()
    split = "centralized" if experiment.is_central else short_form(experiment.partition)
    on_synthetic = replaces_records(experiment.preprocess)
    rounds = [replace(one, on_records=not on_synthetic) for one in of_training or ()]
    beside = [payment for stage in stages_of(job) for payment in stage.payments()]
    payments = None if of_training is None else (*rounds, *beside)
    protects = hides_clients(experiment.aggregator) or not is_none(experiment.local.privacy)
    is_bare = of_training == () and not on_synthetic and not protects
    name, content = called(experiment.data), sealed_content(experiment.data, job.root, make_key=False)
    return RunPayments(name, f"{split}, {experiment.clients} clients", payments, is_bare, content)
