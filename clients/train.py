"""Local training, the task of every round: a client trains on its records and sends the algorithm's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, ClassVar

import numpy as np
from flwr.app import RecordDict

from clients.client_layer import PaidRound
from clients.client_task import Client, CustomStart, OnClient
from fl_sim.engines import remote, wire
from fl_sim.kinds import is_own_kind
from fl_sim.local_plan import FurtherModel, FurtherModels, LocalPlan
from fl_sim.own_code import check_returned
from fl_sim.params import WriteGuard, check_layout, layout_of
from fl_sim.seeding import rng, seed_process
from fl_sim.store.tensors import save_state
from fl_sim.training.trainer import LocalJob
from fl_sim.types import ClientUpdate, LocalTask, Trained


@dataclass(frozen=True)
class Train:
    """The client task for one round of local training."""

    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def check(self, client: Client) -> None:
        """Raise RunError if the policy of the client's owner forbids training on the records that the task uses."""
        assert client.policy is not None
        own = client.runtime.trains_on_own(client.config.synthetic)
        if own and any(layer.protects for layer in client.runtime.layers):
            return  # no check is needed here: the policy limits the privacy cost when a layer writes it into the ledger
        client.policy.check_training(own_records=own)
        if not own:
            client.policy.check_pool(client.config.synthetic)

    def run(self, client: Client) -> RecordDict:
        """Train the client for one round, and return its update."""
        job = TrainingJob.of(client)
        answer = job.finished(client.runtime.prepare(job.jobs)())
        job.check_bits()
        return answer


@dataclass(frozen=True)
class TrainingJob:
    """The local training of one client in one round.

    ``job``: the input of the trainer. ``further``: the inputs for further models of the client, such as a personal
    model, by name (``FurtherModels``). ``paid``: the private rounds of the layers that protect the client. ``came``:
    for each layer, innermost first, the task before that layer changed it. ``guards``: detectors of writes to tensors
    that the algorithm's code must only read. The first guard covers the broadcast (the tensors that all clients
    receive). A second guard covers the pool (the clients' shared summaries) and the client state, if any.
    """

    client: Client
    job: LocalJob
    came: tuple[LocalTask, ...]
    guards: tuple[WriteGuard, ...]
    further: Mapping[str, LocalJob] = field(default_factory=dict)
    paid: tuple[PaidRound, ...] = ()

    @property
    def jobs(self) -> list[LocalJob]:
        """Return the inputs of the trainer for all models of the client. The model that is sent comes first."""
        return [self.job, *self.further.values()]

    @property
    def ticket(self) -> remote.Ticket | None:
        """Return the round's ticket: the proof that the round's cost is in the client's privacy ledger.

        A worker without access to the client's files needs this proof. The result is None if no layer protects the
        client.
        """
        return self.paid[0].ticket if self.paid else None

    @classmethod
    def of(cls, client: Client, *, trains: bool = True) -> TrainingJob:
        """Return the training job for the message to ``client``, with the algorithm's local plan (local objective).

        ``trains``: False for a job whose models are only measured. Such a job has no privacy cost and no noise. Raises
        RunError if the algorithm's code wrote to its arguments.
        """
        runtime, number, server_round = client.runtime, client.number, client.config.server_round
        algorithm = runtime.algorithm
        records = runtime.records(number, client.config.synthetic, server_round)
        task = _received(client, len(records))
        came: list[LocalTask] = []
        for layer in reversed(runtime.layers):
            came.insert(0, task)
            task = layer.received(task)
        runtime.use_threads()
        guards, methods = _guards(client, task), list[Callable[..., Any]]([algorithm.plan])
        if isinstance(algorithm, CustomStart):
            methods.append(algorithm.start)
            layout = layout_of(task.params)
            shown = reduce(lambda some, layer: layer.shown(some), runtime.layers, records)
            with runtime.drawing("start", number, server_round):
                task = algorithm.start(task, OnClient(shown, runtime.sized(task).trainer, runtime.seed))
            check_layout("the parameters that start returns", task.params, layout)
        with runtime.drawing("plan", number, server_round):
            plan = algorithm.plan(task)
        check_returned(plan, LocalPlan, algorithm.plan)
        for layer, before in zip(runtime.layers, came, strict=True):
            plan = layer.planned(before, plan)
        seeded = partial(seed_process, runtime.seed, "local", number, server_round)
        batches = partial(
            rng, runtime.seed, "batches", number, server_round
        )  # equal random numbers for all models of the client, so that they train on equal batches
        models: Mapping[str, FurtherModel] = {}
        if isinstance(algorithm, FurtherModels):
            methods.append(algorithm.further)
            with runtime.drawing("further", number, server_round):
                models = algorithm.further(task)
        first = LocalJob(task, plan, records, batches(), seeded)
        further = {name: further_job(first, name, model, batches()) for name, model in models.items()}
        jobs: Mapping[str, LocalJob] = {"": first, **further}
        jobs, paid = _protected(client, jobs) if trains else (jobs, ())
        further = {name: one for name, one in jobs.items() if name}
        job = cls(client, jobs[""], tuple(came), tuple(guards), further, paid)
        job.check(*methods)
        return job

    def finished(self, results: Sequence[Trained]) -> RecordDict:
        """Store the client's new state, and return the message with its update.

        ``results``: the trainer's results for ``jobs``, in the same order. If there is no folder for the client state,
        the message carries the state. Raises RunError if training wrote to read-only tensors (see ``updated``).
        """
        update, config, number = self.updated(results), self.client.config, self.client.number
        content = wire.update_content(update)
        if config.state_dir:
            save_state(config.state_dir, number, config.server_round, update.state)
        elif update.state:
            content = RecordDict({**content, **wire.state_records(update.state)})
        return content

    def updated(self, results: Sequence[Trained]) -> ClientUpdate:
        """Return the client's update, as it leaves the client, with the new client state.

        ``results``: the trainer's results for ``jobs``, in the same order. Raises RunError if training wrote to the
        broadcast, to the client state, or to the pool of the clients' shared summaries.
        """
        runtime, number, server_round = self.client.runtime, self.client.number, self.client.config.server_round
        algorithm = runtime.algorithm
        first, *others = results
        trained = replace(first, further={**first.further, **dict(zip(self.further, others, strict=True))})
        self.check(runtime.model.forward, *([term.function] if (term := self.job.plan.loss_term) else ()))
        task, seen = self.job.task, trained
        for layer, came in zip(runtime.layers, self.came, strict=True):
            task, seen = layer.finishing(came, task, seen)
        with runtime.drawing("finish", number, server_round):
            update = algorithm.finish(task, seen)
        check_returned(update, ClientUpdate, algorithm.finish)
        self.check(algorithm.finish)
        for guard in self.guards[1:]:
            guard.check_bits(algorithm.plan, algorithm.finish)
        update = reduce(lambda some, one: one.release(some), self.paid, update)
        for layer, came in zip(runtime.layers, self.came, strict=True):
            update = layer.sent(came, task, trained, update)
        return update

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError if the algorithm wrote to a tensor that it must only read.

        PyTorch counts the writes to each tensor, and this method compares the counts. ``methods``: the functions of the
        algorithm that ran since the last check.
        """
        for guard in self.guards:
            guard.check(*methods)

    def check_bits(self) -> None:
        """Raise RunError if a read-only tensor changed. This check also finds writes that PyTorch does not count."""
        for guard in self.guards:
            guard.check_bits(self.client.runtime.algorithm.plan, self.client.runtime.algorithm.finish)


def _protected(client: Client, jobs: Mapping[str, LocalJob]) -> tuple[Mapping[str, LocalJob], tuple[PaidRound, ...]]:
    """Return the trainer's inputs after the changes of all protecting layers, and the private round of each of them."""
    paid = list[PaidRound]()
    for layer in client.runtime.layers:
        if one := layer.protected(client, jobs):
            paid.append(one)
            jobs = one.jobs
    return jobs, tuple(paid)


def _received(client: Client, num_examples: int) -> LocalTask:
    runtime, config, number = client.runtime, client.config, client.number
    settings = runtime.local_settings(config.learning_rate)
    if most_steps := config.most_steps.get(number):
        settings = replace(settings, steps=most_steps)
    return LocalTask(
        server_round=config.server_round,
        client=number,
        num_clients=runtime.num_clients,
        num_examples=num_examples,
        settings=settings,
        params=client.broadcast.params,
        broadcast={**client.broadcast.groups},
        state={**client.state},
        pool=runtime.read_tensors(config.pool) if config.pool else {},
        class_counts=runtime.class_counts(number, config.synthetic, config.server_round),
        initial=runtime.initial,
    )


def _guards(client: Client, task: LocalTask) -> list[WriteGuard]:
    """Return write guards: one for the broadcast, and one for the pool and the client state together.

    The pool consists of the clients' shared summaries. The second guard is left out if there is neither a pool nor a
    client state.
    """
    own = {"the pool": task.pool} if task.pool else {}
    own |= {f"client state {name!r}": group for name, group in client.state.items()}
    guards = [client.broadcast.write_guard]
    if own:
        # A checksum of all bits detects every change of an argument, but for a large pool it takes long. fl-sim's own
        # algorithms need none, because fl_sim.testing.check has tested that they do not change their arguments.
        guards.append(WriteGuard.of(own, by_bits=is_own_kind(client.runtime.algorithm)))
    return guards


def further_job(job: LocalJob, name: str, model: FurtherModel, batches: np.random.Generator) -> LocalJob:
    """Return the trainer's input for a client's further ``model`` called ``name``, such as a personal model.

    ``job``: the trainer's input for the model that the client sends. Raises ValueError if names or shapes of the
    parameters differ from those of the model that the client sends.
    """
    task = job.task
    check_layout(f"the parameters of the further model {name}", model.params, layout_of(task.params))
    start = replace(task, params=model.params, settings=model.settings or task.settings)
    return replace(job, task=start, plan=model.plan, generator=batches)
