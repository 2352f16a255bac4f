"""How a run proceeds: in federated rounds, or as its algorithm or its server says by ``procedure = "module:Class"``."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
import torch
from flwr.serverapp import Grid

from clients.client_layer import ClientLayer
from clients.client_task import ClientRuntime
from fl_sim.data import sealed_content
from fl_sim.engines import wire
from fl_sim.errors import Diverged, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of, own_job
from fl_sim.kinds import hides_clients, is_own, is_own_kind, kind_of, path_in, replaces_records, short_form
from fl_sim.local_plan import LocalPlan, sent_by
from fl_sim.names import called
from fl_sim.own_code import error_context, load_object
from fl_sim.params import detached, fixed_in, trainable
from fl_sim.seeding import seed_process
from fl_sim.simulation.client_runtime import runtime_for, workload_of
from fl_sim.simulation.forecast import work_of_rounds
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import Run, Stage, done, prepared_strategy, stages_of, tasks_of
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT, Progress, RoundRecord, write_state
from fl_sim.training.features import head_of
from fl_sim.types import Params, Payloads, ServerState, Traffic
from strategies.algorithm import (
    Advising,
    Algorithm,
    Sharing,
    Steered,
    client_state_template,
    payload_template,
    plan_template,
    reported_by,
    share_template,
)
from strategies.flower import FederatedStrategy, Round, run_round
from strategies.layer import Beginning, Stop, check_names, client_layers, layer_kinds
from strategies.own_layer import states_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Paid, Payment

Exchange: TypeAlias = Callable[[int, float], Round]
"""(round, its learning rate) -> what it did; the strategy has the server's new state. Raises what run_round raises."""


@dataclass(frozen=True)
class Rounds:
    """The procedure of a federated algorithm: one model, trained by clients in rounds."""

    job: Job
    algorithm: Algorithm

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Run every round that ``log`` does not have yet: begin, draw, ask, aggregate, merge, measure, record.

        The first five are the exchange, ``strategies.flower.run_round``; layers have a part in each of them.
        """
        with _knobs_told(self.algorithm):
            experiment, rounds_before = self.job.experiment, len(log.rounds)
            strategy = self._prepared(grid, out, log, observer)
            run, exchange = Run(self.job, strategy, grid, out, log), self._exchange(strategy, grid, out, log)
            while len(log.rounds) < experiment.rounds and not strategy.layer.ended(log.rounds):
                start, server_round = time.perf_counter(), len(log.rounds) + 1
                rate = experiment.local.rate_in(server_round, experiment.rounds)
                try:
                    made = exchange(server_round, rate)
                except Stop as why:
                    log.stopped = str(why)
                    break
                record = self._measured(_recorded(made, rate), strategy, log, run.measuring)
                seconds = None if experiment.is_private else time.perf_counter() - start
                record = replace(record, seconds=seconds)
                _keep(out, log, strategy, record)
                observer.finished_round(record)
            self._conclude(run, rounds_before)

    def _prepared(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> FederatedStrategy:
        """Return the Strategy, after the work of stages before the first round."""
        for stage in stages_of(self.job):
            if preparing := stage.preparing(log):
                observer.preparing(preparing)
        return prepared_strategy(self.job, self.algorithm, grid, out, log, observer)

    def _exchange(self, strategy: FederatedStrategy, grid: Grid, out: Path, log: RunLog) -> Exchange:
        """Return what has clients train, and the server merge what they send."""
        del out
        strategy.layer.ready(workload_of(self.job, log.num_pooled, strategy.traffic))
        return partial(run_round, strategy, grid, timeout=self.job.experiment.round_timeout)

    def _conclude(self, run: Run, rounds_before: int) -> None:
        """Say what there is to say of all rounds, and have the stages do their work after the last."""
        strategy, log = run.strategy, run.log
        log.stopped = log.stopped or strategy.layer.ended(log.rounds)
        log.warnings += strategy.layer.conclusions(log.rounds)
        rounds_here = len(log.rounds) - rounds_before
        log.warnings += [
            f"{why} (in each of the last {rounds_here} rounds)"
            for why, count in strategy.without_effect.items()
            if count == rounds_here
        ]
        log.traffic = strategy.traffic
        last = strategy.server
        log.fixed = {**fixed_in(self.job.model()), **self._kept_at_first(last)}
        log.server = strategy.server = replace(last, params=reported_by(self.algorithm, last))
        if log.measured is None and log.rounds:  # all of them ran before this process
            whole = replace(log.server, params=self._whole(log.server.params)).model
            log.measured = run.measuring.measured(whole, _after(len(log.rounds)), is_last=True)
        for stage in log.stages:
            assert isinstance(stage, Stage)
            done(stage, run, "after")

    def _measured(
        self, record: RoundRecord, strategy: FederatedStrategy, log: RunLog, measuring: Measuring
    ) -> RoundRecord:
        """Return a round's record with what its model is measured to be, where that is due."""
        experiment, log.measured = self.job.experiment, None
        seed_process(experiment.seed, "evaluation", record.round)
        is_last = record.round == experiment.rounds or not strategy.layer.affords(record.round + 1)
        if record.round % experiment.evaluate_every and not is_last:
            return record
        params = self._whole(reported_by(self.algorithm, strategy.server))
        model = replace(strategy.server, params=params).model
        when = _after(record.round)
        log.measured = measuring.measured(model, when, is_last=is_last)
        if log.measured.test is None and strategy.layer.ended([*log.rounds, log.measured.noted_in(record)]):
            log.measured = measuring.measured(model, when, is_last=True)
        return log.measured.noted_in(record)

    def work(self) -> Sequence[Work]:
        """Return training and measuring, and what the stages do."""
        return work_of_rounds(self, self.algorithm, self.job.experiment.rounds)

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of arrays to and from all clients, in the rounds, before and after."""
        experiment = self.job.experiment
        updates = experiment.rounds * experiment.sampler.expected_size(experiment.num_clients)
        return self._traffic_of(updates)

    def _traffic_of(self, updates: float, more_sent: int = 0) -> dict[str, Traffic]:
        """Return the bytes of ``updates``, and those of the stages; ``more_sent``: models that none comes back for."""
        experiment, server = self.job.experiment, self.beginning()
        each = FederatedStrategy(
            self.algorithm, experiment.aggregator, experiment.sampler, server,
            wire.BLANK, experiment.num_clients, experiment.seed,
            on_clients=self._on_clients,
        ).traffic  # fmt: skip
        once = {what: sent for stage in stages_of(self.job) for what, sent in stage.traffic(server.model).items()}
        return {"rounds": each * round(updates) + Traffic(each.down * more_sent, 0), **once}

    def payments(self) -> "tuple[Payment, ...]":
        """Return the cost of noisy rounds, nothing where rounds have no noise."""
        experiment = self.job.experiment
        return tuple(payment for kind in layer_kinds(experiment) for payment in kind.payments(experiment))

    def typical_plan(self) -> LocalPlan:
        """Return what clients' plans look like, to be held against what trainers take."""
        dataset, pool = self.job.dataset, {}
        if isinstance(self.algorithm, Sharing):
            template = share_template(self.algorithm, dataset.input_shape, dataset.num_classes)
            pool = {name: torch.zeros(1, *like.shape[1:], dtype=like.dtype) for name, like in template.items()}
        params = detached(trainable(self.job.model()).items())
        return plan_template(self.algorithm, params, pool, dataset.num_classes)

    def runtime(self) -> ClientRuntime:
        """Return what a worker needs to play any client."""
        return runtime_for(self.job, self.algorithm, tasks_of(self.job))

    def beginning(self) -> ServerState:
        """Return what the server starts from: the model with its initial weights."""
        model, experiment = self.job.model(), self.job.experiment
        plan = self.typical_plan()
        if plan.class_features and not trainable(head_of(model)):
            raise UserError(
                f"algorithm {kind_of(self.algorithm)} looks at the features of a head that learns, and that of "
                f"{type(model).__name__} is frozen: let it be trained, or take another algorithm, such as fedavg"
            )
        with error_context(f"init of {type(self.algorithm).__name__}"):
            server = self.algorithm.init(sent_by(self.algorithm, detached(trainable(model).items())))
        sent, kept = payload_template(self.algorithm, server), client_state_template(self.algorithm, server)
        check_names(experiment, {**server.broadcast, **sent, **kept})
        whole = [type(one).__name__ for one in stages_of(self.job) if one.trains_model()]
        for layer in layer_kinds(experiment):
            layer.check(experiment, Beginning(server, plan, sent, kept, whole))
            server = layer.begun(experiment, model, server)
        self._check_asked()
        return server

    def _check_asked(self) -> None:
        """Raise UserError where code of the user's own asks clients for what no noise covers in a private run."""
        experiment = self.job.experiment
        if hides_clients(experiment.aggregator) and (own := [one for one in layer_kinds(experiment) if is_own(one)]):
            raise UserError(
                f"{own[0].__name__}, a layer of your own, sees clients' updates without noise, and this run promises "
                "privacy: no epsilon could be printed; leave it out, or the promise"
            )
        if not (hides_clients(experiment.aggregator) or replaces_records(experiment.preprocess)):
            return
        for name, task in tasks_of(self.job).items():
            if is_own_kind(task):
                raise UserError(
                    f"{type(task).__name__}, code of your own, asks clients for {name!r}, and this run promises "
                    "privacy: no noise covers what they answer, so no epsilon could be printed; leave its stage out, "
                    "or the promise"
                )

    @cached_property
    def _on_clients(self) -> tuple[ClientLayer, ...]:
        return client_layers(self.job.experiment, self.algorithm, self.job.model)

    def _whole(self, params: Params) -> Params:
        """Return the server's ``params`` with what stays with clients as these first had it."""
        for half in reversed(self._on_clients):
            params = half.model(params, {})
        return params

    def _kept_at_first(self, server: ServerState) -> Params:
        """Return what stays with clients of the model, as these first had it."""
        return {name: value for name, value in self._whole(server.params).items() if name not in server.params}

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return the names and shapes of what a client keeps from one round for its next."""
        kept, sent = client_state_template(self.algorithm, server), payload_template(self.algorithm, server)
        for half in self._on_clients:
            kept = half.kept(kept, sent, server)
        return kept

    def warnings(self, log: RunLog) -> list[str]:
        """Return what a user must know before the first round."""
        experiment = self.job.experiment
        warnings = [said for stage in stages_of(self.job) for said in stage.warnings()]
        if isinstance(self.algorithm, Advising) and (told := self.algorithm.advice(experiment.local.momentum)):
            warnings.append(told)
        # How many records clients hold is their own affair under privacy.
        idle = [] if experiment.is_private else np.flatnonzero(self.job.shards.sizes == 0).tolist()
        for kind in layer_kinds(experiment):
            warnings += kind.warnings(experiment, len(log.rounds), idle)
        return warnings + _drawn_idle(experiment, len(idle))


@contextmanager
def _knobs_told(algorithm: object) -> Iterator[None]:
    """Say of a run that diverges which settings of its algorithm may be to blame."""
    try:
        yield
    except Diverged as error:
        if not isinstance(algorithm, Steered):
            raise
        raise Diverged(f"{error}; {algorithm.knobs}", private=error.private) from error


def _recorded(made: Round, rate: float) -> RoundRecord:
    """Return the line of a round before its model is measured; ``rate``: the learning rate."""
    down, up = (made.traffic.down, made.traffic.up) if made.traffic is not None else (None, None)
    return RoundRecord(
        made.server_round, None, None, made.train_loss, made.epsilon, made.cohort_size, rate, None,
        bytes_down=down, bytes_up=up,
        virtual_seconds=made.virtual_seconds, late=made.late, staleness=made.staleness,
    )  # fmt: skip


def _drawn_idle(experiment: Experiment, without: int) -> list[str]:
    """Return what is said of ``without`` clients without records where these are drawn as others are."""
    everybody = experiment.num_clients
    if not without or (cohort := experiment.sampler.expected_size(everybody)) == everybody:
        return []
    share = cohort * (1 - without / everybody)
    told = (
        f"{without:,} of {everybody:,} clients hold no records and are drawn as others are: of {cohort:g} clients in a "
    )
    return [f"{told}round about {share:.3g} train"]


def _after(server_round: int) -> str:
    return f"after round {server_round}: training diverges, try smaller learning rates"


def _keep(out: Path, log: RunLog, strategy: FederatedStrategy, record: RoundRecord) -> None:
    """Put a finished round on the disk. The checkpoint comes last: whoever finds it finds all that it counts on."""
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
    write_state(out / CHECKPOINT, progress, log.server)


class Procedure(Protocol):
    """What depends on how a run proceeds; all else about a run is the same for every algorithm."""

    @property
    def job(self) -> Job:
        """Return what is run."""
        ...

    def work(self) -> Sequence[Work]:
        """Return what takes time in the whole run, by its kinds: what is timed, and what cannot be."""
        ...

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of arrays to and from all clients, by what they are.

        Those of all ``rounds`` together, where there are rounds; others travel once, before or after the rounds, and
        are foretold, so about.
        """
        ...

    def payments(self) -> "tuple[Payment, ...] | None":
        """Return what its own releases will cost: () where it protects nothing, None where votes decide that."""
        ...

    def typical_plan(self) -> LocalPlan:
        """Return what clients' plans look like, to be held against what trainers take."""
        ...

    def runtime(self) -> ClientRuntime:
        """Return what a worker needs to play any client."""
        ...

    def beginning(self) -> ServerState:
        """Return what the server starts from."""
        ...

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return the names and shapes of what a client keeps from one round for its next; nothing for most."""
        ...

    def warnings(self, log: RunLog) -> list[str]:
        """Return what a user must know beforehand."""
        ...

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Do all that ``log`` does not have yet. Raises RunError where that cannot go on."""
        ...


_ROUNDS: Final = "fl_sim.simulation.rounds:Rounds"


def procedure_of(job: Job) -> Procedure:
    """Return how a run of ``job`` proceeds. Raises UserError where nothing of it goes by a clock that it has."""
    experiment, algorithm = job.experiment, job.experiment.algorithm
    if path := path_in(type(algorithm), "procedure"):
        if experiment.is_timed:
            raise UserError(
                f"devices={kind_of(experiment.devices)} has no place beside algorithm {kind_of(algorithm)}, which has "
                "no rounds whose time could be simulated: leave devices out"
            )
        return _imported(path, job, algorithm)
    path = path_in(type(experiment.server), "procedure")
    return _imported(path or _ROUNDS, job, algorithm)


def _imported(path: str, job: Job, algorithm: object) -> Procedure:
    procedure: Procedure = load_object(path, "procedure")(job, algorithm)
    return procedure


@lru_cache(maxsize=2)
def runtime_of(experiment_json: str, data_root: str, own: str = "", client: int = 0, facts: str = "") -> ClientRuntime:
    """Return what a worker elsewhere needs to play any client of the experiment; made once per process.

    ``own``: the records of a node that has some itself, and plays ``client`` alone; ``facts``: what its order says of
    the server's. Raises UserError where they do not fit, or the experiment needs the server's on nodes.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    if not own:
        return procedure_of(job_of(experiment, Path(data_root) if data_root else None)).runtime()
    procedure = procedure_of(own_job(experiment, own, client, json.loads(facts)))
    if not isinstance(procedure, Rounds):
        raise UserError(
            f"algorithm {kind_of(experiment.algorithm)} needs public records of the server's data set on every node, "
            "and this one has records of its own alone: leave data out of its node configuration"
        )
    return procedure.runtime()


def planned_bill(job: Job) -> "Paid":
    """Return the privacy bill of a run of ``job``, as far as it is fixed before the run begins.

    Takes seconds where the run is private: the PLD is computed here.
    """
    from fl_sim.privacy.bill import Paid  # noqa: PLC0415 (the accountants load slowly)

    experiment, of_training = job.experiment, procedure_of(job).payments()
    split = "centralized" if experiment.is_central else short_form(experiment.partition)
    on_synthetic = replaces_records(experiment.preprocess)
    rounds = [replace(one, on_records=not on_synthetic) for one in of_training or ()]
    beside = [payment for stage in stages_of(job) for payment in stage.payments()]
    payments = None if of_training is None else (*rounds, *beside)
    is_bare = of_training == () and not on_synthetic
    name, content = called(experiment.data), sealed_content(experiment.data, job.root, make_key=False)
    return Paid(name, f"{split}, {experiment.clients} clients", payments, is_bare, content)
