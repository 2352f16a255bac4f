"""Local training, the task of every round: a client trains on its records and sends what its algorithm makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import RecordDict

from clients.client_task import Client, OnClient, Starting
from fl_sim.engines import wire
from fl_sim.handed_out import HandedOut
from fl_sim.kinds import is_own_kind
from fl_sim.params import check_layout, layout_of
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
        own = client.site.trains_on_own(client.order.synthetic)
        client.policy.check_training(own_records=own)
        if not own:
            client.policy.check_pool(client.order.synthetic)

    def run(self, client: Client) -> RecordDict:
        """Return the client's update."""
        turn = Turn.of(client)
        [trained] = client.site.prepare([turn.job])()
        answer = turn.finished(trained)
        turn.check_bits()
        return answer


@dataclass(frozen=True)
class Turn:
    """One client's part in one round.

    ``came``: the task as it came to each layer, from the inside out. ``handed_out``: what the algorithm's code may
    read.
    """

    client: Client
    job: LocalJob
    came: tuple[LocalTask, ...]
    handed_out: tuple[HandedOut, ...]

    @classmethod
    def of(cls, client: Client) -> Turn:
        """Read the task, and plan. Raises RunError where the algorithm's code wrote to what it was handed."""
        site, order, number = client.site, client.order, client.number
        records = site.records(number, order.synthetic)
        task = _task(client, records)
        came: list[LocalTask] = []
        for layer in reversed(site.layers):
            came.insert(0, task)
            task = layer.received(task)
        site.use_threads()
        keeps = {"the pool": task.pool} if task.pool else {}
        keeps |= {f"client state {name!r}": one for name, one in client.state.items()}
        sent = client.sent.handed_out
        # Ours are held to the law by fl_sim.testing.check; a sum over a large pool takes time for each client.
        handed_out = (sent, HandedOut.of(keeps, by_bits=is_own_kind(site.algorithm))) if keeps else (sent,)
        task = _begun(client, task, records)
        with site.drawing("plan", number, order.server_round):
            plan = site.algorithm.plan(task)
        for layer, before in zip(site.layers, came, strict=True):
            plan = layer.planned(before, plan)
        seeded = partial(seed_process, site.seed, "local", number, order.server_round)
        batches = rng(site.seed, "batches", number, order.server_round)
        turn = cls(client, LocalJob(task, plan, records, batches, seeded), tuple(came), handed_out)
        turn.check(site.algorithm.plan, *([site.algorithm.start] if isinstance(site.algorithm, Starting) else ()))
        return turn

    def finished(self, trained: Trained) -> RecordDict:
        """Keep the client's state for its next round, and return its update.

        Raises RunError where training wrote to what the client was sent or keeps.
        """
        site, order, number = self.client.site, self.client.order, self.client.number
        self.check(site.model.forward, *([term.function] if (term := self.job.plan.loss_term) else ()))
        task, seen = self.job.task, trained
        for layer, came in zip(site.layers, self.came, strict=True):
            task, seen = layer.finishing(came, task, seen)
        with site.drawing("finish", number, order.server_round):
            update = site.algorithm.finish(task, seen)
        self.check(site.algorithm.finish)
        for kept in self.handed_out[1:]:
            kept.check_bits(site.algorithm.plan, site.algorithm.finish)
        for layer, came in zip(site.layers, self.came, strict=True):
            update = layer.sent(came, task, trained, update)
        content = wire.update_content(update)
        if order.state_dir:
            save_state(order.state_dir, number, order.server_round, update.state)
        elif update.state:
            content = RecordDict({**content, **wire.kept_records(update.state)})
        return content

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError where one of ``methods``, which have just run, wrote to what the client was sent or keeps."""
        for one in self.handed_out:
            one.check(*methods)

    def check_bits(self) -> None:
        """Raise the same for writes that PyTorch does not count."""
        for one in self.handed_out:
            one.check_bits(self.client.site.algorithm.plan, self.client.site.algorithm.finish)


def _task(client: Client, records: Records) -> LocalTask:
    """Return what the client is asked to do, as its message says it."""
    site, order, number = client.site, client.order, client.number
    settings = site.local_settings(order.learning_rate)
    if most_steps := order.most_steps.get(number):
        settings = replace(settings, steps=most_steps)
    return LocalTask(
        server_round=order.server_round,
        client=number,
        num_clients=site.num_clients,
        num_examples=len(records),
        settings=settings,
        params=client.sent.params,
        broadcast={**client.sent.broadcast},
        state={**client.state},
        pool=site.read_tensors(order.pool) if order.pool else {},
        class_counts=site.class_counts(number, order.synthetic),
    )


def _begun(client: Client, task: LocalTask, records: Records) -> LocalTask:
    """Return what the client begins with. Raises ValueError where its model has other names or shapes."""
    algorithm = client.site.algorithm
    if not isinstance(algorithm, Starting):
        return task
    with client.site.drawing("start", task.client, task.server_round):
        begun = algorithm.start(task, OnClient(records, client.site.trainer))
    check_layout("the weights that start returns", begun.params, layout_of(task.params))
    return begun
