"""A model whose loss is written down by hand, and a federation without an engine; conftest.py hands them to tests."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import nn

from clients.client_task import CustomStart, OnClient
from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.local_plan import FurtherModels, LocalPlan
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.training.courses import StepByStep, follow
from fl_sim.training.loop import train
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer, Training
from fl_sim.types import ClientUpdate, Cohort, LocalSettings, LocalTask, Params, Payloads, Reply, ServerState, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import Rebuilding, weighting_of
from strategies.answers import Population
from strategies.flower import FederatedStrategy
from strategies.samplers import Everyone, Sampler

Shard = tuple[torch.Tensor, torch.Tensor]


class Bowl(nn.Module):
    """One weight w. A record (a, b, g) has the loss 50 + a/2 (w - b)^2 + g w, exact in float64.

    Label 0 and logits (0, q) have the cross-entropy log(1 + e^q), which rounds to q from q = 40 on, with slope 1.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        a, b, g = records.T
        loss = 50 + a / 2 * (self.w - b) ** 2 + g * self.w
        return torch.stack([torch.zeros_like(loss), loss], 1)


@dataclass
class Federation:
    """A federation in a dozen lines, with no engine: what the server holds, and what each client keeps."""

    algorithm: Any
    model: nn.Module
    shards: list[Shard]
    settings: LocalSettings
    server: ServerState = field(init=False)
    states: list[Payloads] = field(init=False)
    initial: Params = field(init=False)
    server_round: int = 0
    num_classes: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, Rebuilding):
            self.model = self.algorithm.rebuilt(self.model, tuple(self.shards[0][0].shape[1:]))
        self.server = self.algorithm.init(detached(self.model.named_parameters()))
        self.states = [{} for _ in self.shards]
        self.initial = detached(self.model.named_parameters())

    def task(self, client: int) -> LocalTask:
        """Return the task of a client in the coming round."""
        _, labels = self.shards[client]
        return LocalTask(
            self.server_round + 1, client, len(self.shards), len(labels), self.settings,
            self.server.params, self.server.broadcast, self.states[client],
            class_counts=tuple(torch.bincount(labels, minlength=self.num_classes).tolist()),
            initial=self.initial,
        )  # fmt: skip

    def own(self, client: int) -> Records:
        """Return the records of a client."""
        return Records.of(*self.shards[client])

    def client(self, client: int) -> ClientUpdate:
        """Play one client of the coming round; nothing is kept."""
        task = self.task(client)
        algorithm, own = self.algorithm, self.own(client)
        if isinstance(algorithm, CustomStart):
            task = algorithm.start(task, OnClient(own, Trainer(self.model, None)))
        jobs = [self.job(task, algorithm.plan(task), own)]
        models = algorithm.further(task) if isinstance(algorithm, FurtherModels) else {}
        jobs += [self.job(replace(task, params=one.params), one.plan, own) for one in models.values()]
        if isinstance(algorithm, StepByStep):
            [trained], others = follow(algorithm, jobs, lambda steps: list(map(self.trained, steps))), []
        else:
            trained, *others = map(self.trained, jobs)
        further = {**trained.further, **dict(zip(models, others, strict=True))}
        return algorithm.finish(task, replace(trained, further=further))

    def job(self, task: LocalTask, plan: LocalPlan, own: Records) -> LocalJob:
        return LocalJob(task, plan, own, rng(0, "batches", task.client, task.server_round))

    def trained(self, job: LocalJob) -> Trained:
        """Train by the algorithm's own trainer, if it has one, else by PyTorch's loop."""
        kinds = self.algorithm.trainers(self.model) if isinstance(self.algorithm, Training) else ()
        for trainer in kinds:
            if trainer.supports(job):
                return trainer.train(job)
        return train(self.model, job.task, job.plan, *job.records.tensors(), job.generator)

    def round(self, *cohort: int) -> list[ClientUpdate]:
        """Play one round with the clients of ``cohort`` (all if none are given)."""
        clients = cohort or tuple(range(len(self.shards)))
        updates = [self.client(client) for client in clients]
        replies = tuple(
            Reply(client, update.payloads, update.num_examples, update.loss)
            for client, update in zip(clients, updates, strict=True)
        )
        self.server_round += 1
        aggregate = WeightedMean().mean(
            Cohort(self.server_round, replies, len(self.shards), len(clients)), weighting_of(self.algorithm)
        )
        if aggregate is not None:
            self.server = self.algorithm.merge(self.server, aggregate)
        for client, update in zip(clients, updates, strict=True):
            self.states[client] = update.state or self.states[client]
        return updates

    @property
    def w(self) -> float:
        """The global weight of a ``Bowl``."""
        return float(self.server.params["w"])


def records(*rows: tuple[float, float, float]) -> Shard:
    """Return records of a ``Bowl``: (a, b, g) each."""
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3), torch.zeros(len(rows), dtype=torch.int64)


def settings(learning_rate: float = 0.1, momentum: float = 0.0, **others: Any) -> LocalSettings:
    return LocalSettings(learning_rate, momentum, **{"weight_decay": 0.0, "batch_size": 100, "epochs": 1, **others})


def strategy_of(
    algorithm: Any, params: Params, num_clients: int, sampler: Sampler | None = None, seed: int = 0
) -> FederatedStrategy:
    """Return a strategy whose clients are the nodes of a LocalGrid, with the whole population as its cohort."""
    grid = LocalGrid(num_clients)
    strategy = FederatedStrategy(
        algorithm, WeightedMean(), sampler or Everyone(), algorithm.init(params),
        wire.TaskConfig("", 0, 0.0, "", "", ""), num_clients, seed,
        population=Population(tuple(grid.get_node_ids())),
    )  # fmt: skip
    strategy.cohort = strategy.sampler.sample(num_clients, rng(seed, "sampler", 1).random, 1)
    return strategy


def reply_of(client: int, content: RecordDict) -> Message:
    """Return what the server receives when client i of a LocalGrid answers with some content."""
    LocalGrid(1)  # sets the identity that Flower wants before a message can be made
    sent = Message(RecordDict(), 1000 + client, wire.TRAIN)
    sent.metadata.__dict__["_message_id"] = f"message-{client}"
    return Message(content, reply_to=sent)
