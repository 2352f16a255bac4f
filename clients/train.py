"""Local training, the task of every round: a client trains on its records and sends what its algorithm makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import RecordDict

from clients.client_task import Client, OnClient, Starting
from fl_sim.engines import wire
from fl_sim.kinds import is_own_kind
from fl_sim.params import WriteGuard, check_layout, layout_of
from fl_sim.seeding import rng, seed_process
from fl_sim.store.tensors import save_state
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob
from fl_sim.types import LocalTask, Trained


@dataclass(frozen=True)
class Train:
    """One round of local training."""

    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def check(self, client: Client) -> None:
        """Raise RunError where the owner's policy does not allow to train on what the order says."""
        assert client.policy is not None
        own = client.runtime.trains_on_own(client.order.synthetic)
        client.policy.check_training(own_records=own)
        if not own:
            client.policy.check_pool(client.order.synthetic)

    def run(self, client: Client) -> RecordDict:
        """Return the client's update."""
        turn = Turn.of(client)
        [trained] = client.runtime.prepare([turn.job])()
        answer = turn.finished(trained)
        turn.check_bits()
        return answer


@dataclass(frozen=True)
class Turn:
    """One client's part in one round.

    ``came``: the task as it came to each layer, from the inside out. ``write_guard``: what the algorithm's code may
    read.
    """

    client: Client
    job: LocalJob
    came: tuple[LocalTask, ...]
    write_guard: tuple[WriteGuard, ...]

    @classmethod
    def of(cls, client: Client) -> Turn:
        """Read the task, and plan. Raises RunError where the algorithm's code wrote to what it was handed."""
        runtime, order, number = client.runtime, client.order, client.number
        records = runtime.records(number, order.synthetic)
        task = _task(client, records)
        came: list[LocalTask] = []
        for layer in reversed(runtime.layers):
            came.insert(0, task)
            task = layer.received(task)
        runtime.use_threads()
        keeps = {"the pool": task.pool} if task.pool else {}
        keeps |= {f"client state {name!r}": one for name, one in client.state.items()}
        sent = client.sent.write_guard
        # Ours are held to the law by fl_sim.testing.check; a sum over a large pool takes time for each client.
        write_guard = (sent, WriteGuard.of(keeps, by_bits=is_own_kind(runtime.algorithm))) if keeps else (sent,)
        task = _begun(client, task, records)
        with runtime.drawing("plan", number, order.server_round):
            plan = runtime.algorithm.plan(task)
        for layer, before in zip(runtime.layers, came, strict=True):
            plan = layer.planned(before, plan)
        seeded = partial(seed_process, runtime.seed, "local", number, order.server_round)
        batches = rng(runtime.seed, "batches", number, order.server_round)
        turn = cls(client, LocalJob(task, plan, records, batches, seeded), tuple(came), write_guard)
        turn.check(
            runtime.algorithm.plan, *([runtime.algorithm.start] if isinstance(runtime.algorithm, Starting) else ())
        )
        return turn

    def finished(self, trained: Trained) -> RecordDict:
        """Keep the client's state for its next round, and return its update.

        Raises RunError where training wrote to what the client was sent or keeps.
        """
        runtime, order, number = self.client.runtime, self.client.order, self.client.number
        self.check(runtime.model.forward, *([term.function] if (term := self.job.plan.loss_term) else ()))
        task, seen = self.job.task, trained
        for layer, came in zip(runtime.layers, self.came, strict=True):
            task, seen = layer.finishing(came, task, seen)
        with runtime.drawing("finish", number, order.server_round):
            update = runtime.algorithm.finish(task, seen)
        self.check(runtime.algorithm.finish)
        for kept in self.write_guard[1:]:
            kept.check_bits(runtime.algorithm.plan, runtime.algorithm.finish)
        for layer, came in zip(runtime.layers, self.came, strict=True):
            update = layer.sent(came, task, trained, update)
        content = wire.update_content(update)
        if order.state_dir:
            save_state(order.state_dir, number, order.server_round, update.state)
        elif update.state:
            content = RecordDict({**content, **wire.kept_records(update.state)})
        return content

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError where one of ``methods``, which have just run, wrote to what the client was sent or keeps."""
        for one in self.write_guard:
            one.check(*methods)

    def check_bits(self) -> None:
        """Raise the same for writes that PyTorch does not count."""
        for one in self.write_guard:
            one.check_bits(self.client.runtime.algorithm.plan, self.client.runtime.algorithm.finish)


def _task(client: Client, records: Records) -> LocalTask:
    """Return what the client is asked to do, as its message says it."""
    runtime, order, number = client.runtime, client.order, client.number
    settings = runtime.local_settings(order.learning_rate)
    if most_steps := order.most_steps.get(number):
        settings = replace(settings, steps=most_steps)
    return LocalTask(
        server_round=order.server_round,
        client=number,
        num_clients=runtime.num_clients,
        num_examples=len(records),
        settings=settings,
        params=client.sent.params,
        broadcast={**client.sent.broadcast},
        state={**client.state},
        pool=runtime.read_tensors(order.pool) if order.pool else {},
        class_counts=runtime.class_counts(number, order.synthetic),
    )


def _begun(client: Client, task: LocalTask, records: Records) -> LocalTask:
    """Return what the client begins with. Raises ValueError where its model has other names or shapes."""
    algorithm = client.runtime.algorithm
    if not isinstance(algorithm, Starting):
        return task
    with client.runtime.drawing("start", task.client, task.server_round):
        begun = algorithm.start(task, OnClient(records, client.runtime.trainer))
    check_layout("the weights that start returns", begun.params, layout_of(task.params))
    return begun
