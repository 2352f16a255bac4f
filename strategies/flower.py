"""The Flower Strategy that runs any algorithm of ours, and the round loop."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fl_sim import wire
from fl_sim.engine import LocalGrid
from fl_sim.params import is_finite
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, Cohort, Params, Reply, RunError, ServerState
from strategies.aggregators import WeightedMean
from strategies.algorithm import Algorithm
from strategies.global_dp import GlobalDP
from strategies.samplers import Sampler

if TYPE_CHECKING:
    from strategies.private import PrivateRounds

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Population:
    """Which Flower node plays which client: ``nodes[client]`` is a node id."""

    nodes: tuple[int, ...]

    @cached_property
    def clients(self) -> dict[int, int]:
        """Return {node id: client}."""
        return {node: client for client, node in enumerate(self.nodes)}


@dataclass
class FederatedStrategy(Strategy):
    """One algorithm, one aggregator, one sampler, as Flower sees them.

    ``server`` is the state after the last round; Flower's own ``arrays`` argument is the model in it and is not read.
    ``order`` holds what every message says; its round and learning rate are filled in per round.
    """

    algorithm: Algorithm
    aggregator: WeightedMean | GlobalDP
    sampler: Sampler
    server: ServerState
    order: wire.Order
    num_clients: int
    seed: int
    privacy: "PrivateRounds | None" = None
    population: Population = field(default_factory=lambda: Population(()))
    cohort: NDArray[np.int64] = field(default_factory=lambda: np.arange(0))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address one shared message to each. ``config`` holds the learning rate."""
        del arrays
        if not self.population.nodes:
            self.population = find_population(grid, self.num_clients, timeout=60.0)
        # Under privacy the seed is published: cohorts drawn from it would hide nobody.
        coins = self.privacy.coins(server_round) if self.privacy else rng(self.seed, "sampler", server_round).random
        self.cohort = self.sampler.sample(self.num_clients, coins)
        rate = float(str(config["learning-rate"]))
        order = replace(self.order, server_round=server_round, learning_rate=rate)
        content = wire.task_content(order, self.server.params, self.server.broadcast)
        return [Message(content, self.population.nodes[client], wire.TRAIN) for client in self.cohort]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply, sort by client, and let the algorithm merge the aggregate.

        Raises RunError, naming client and round, where a client failed, did not answer or sent something not finite;
        under privacy such a client counts as the zero vector, unless all of them failed.
        """
        answers = self._checked(server_round, list(replies))
        cohort = Cohort(server_round, answers, self.num_clients, self.sampler.expected_size(self.num_clients))
        aggregate = self._aggregate(cohort)
        if aggregate is not None:
            server = self.algorithm.merge(self.server, aggregate)
            if not is_finite({"params": server.params}):
                raise RunError(f"the global model is not finite after round {server_round}; try smaller learning rates")
            self.server = server
        if self.privacy is not None:  # how many came and how they fared is theirs: it leaves only in the noised mean
            return wire.to_arrays(self.server.params), None
        losses = [(reply.loss, reply.num_examples) for reply in answers if reply.loss is not None]
        total = sum(count for _, count in losses)
        metrics = MetricRecord({"cohort": len(answers)})
        if total:
            metrics["train_loss"] = sum(loss * count for loss, count in losses) / total
        return wire.to_arrays(self.server.params), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing of clients: the model is evaluated on the server, on the public test set."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Have nothing to add up."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Say nothing: progress belongs to whoever runs the strategy."""

    def _aggregate(self, cohort: Cohort) -> Aggregate | None:
        if isinstance(self.aggregator, GlobalDP):
            assert self.privacy is not None
            return self.privacy.release(cohort, self.algorithm, self.server)
        return self.aggregator.mean(cohort, self.algorithm.weighting)

    def _checked(self, server_round: int, replies: list[Message]) -> tuple[Reply, ...]:
        clients = self.population.clients
        answered = {clients[reply.metadata.src_node_id]: reply for reply in replies}
        if self.privacy is not None:
            whole = {client: reply for client, reply in answered.items() if not reply.has_error()}
            answered = whole or answered
        for client in self.cohort:
            where = f"client {client} in round {server_round}"
            if self.privacy is not None and client not in answered:
                continue
            if client not in answered:
                raise RunError(f"{where} did not answer in time")
            if reason := wire.error_of(answered[client]):
                raise RunError(f"{where} failed: {reason}")
        return tuple(wire.read_update(client, answered[client].content) for client in sorted(answered))


@dataclass(frozen=True)
class Round:
    """What a round did, apart from evaluation."""

    server_round: int
    cohort_size: int | None
    train_loss: float | None
    seconds: float


def run_round(
    strategy: FederatedStrategy, grid: Grid, server_round: int, learning_rate: float, timeout: float
) -> Round:
    """Run one round: pay where privacy costs, sample, send, check, aggregate, merge.

    ``timeout`` in seconds is for the whole exchange. Raises BudgetExhausted, with nothing done, where the privacy
    budget does not afford the round.
    """
    start = time.perf_counter()
    if strategy.privacy is not None:
        strategy.privacy.pay(server_round)
    config = ConfigRecord({"learning-rate": learning_rate})
    messages = list(strategy.configure_train(server_round, ArrayRecord(), config, grid))
    replies = grid.send_and_receive(messages, timeout=timeout) if messages else []
    _, metrics = strategy.aggregate_train(server_round, replies)
    loss = float(str(metrics["train_loss"])) if metrics and "train_loss" in metrics else None
    size = None if strategy.privacy else len(messages)
    return Round(server_round, size, loss, time.perf_counter() - start)


def share_before_training(strategy: FederatedStrategy, grid: Grid, timeout: float) -> Params:
    """Ask every client to share, and return the tensors of all of them, concatenated in the order of clients."""
    shared = [wire.read_pool(reply) for reply in _ask_everybody(strategy, grid, wire.SHARE, strategy.order, timeout)]
    return {name: torch.cat([part[name] for part in shared]) for name in shared[0]}


def synthesize_before_training(
    strategy: FederatedStrategy, grid: Grid, order: wire.Order, timeout: float
) -> list[tuple[torch.Tensor, str]]:
    """Ask every client to release synthetic records; return, by client, (records, what it says of them)."""
    return [wire.read_synthetic(reply) for reply in _ask_everybody(strategy, grid, wire.SYNTHESIZE, order, timeout)]


def ask_teachers(
    grid: Grid, order: wire.Order, timeout: float, *, teachers: int, records: int, classes: int, private: bool
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Have every client train a teacher and vote; return the votes, shape (teachers, records), and who gave none.

    Raises RunError that names the first teacher whose votes are missing or malformed. Under ``private`` such a teacher
    votes for class 0 throughout, one vote a query as ever, because a run that stops for one teacher tells about its
    records; where all of them fail, the set-up is at fault, and the reason given comes from no client.
    """
    population = find_population(grid, teachers, timeout)
    replies = _replies(grid, population, wire.VOTE, order, timeout)
    votes, silent = np.zeros((teachers, records), dtype=np.int64), []
    for teacher in range(teachers):
        try:
            votes[teacher] = wire.read_votes(_answer(replies, teacher, wire.VOTE), records, classes)
        except RunError as error:
            if not private:
                raise RunError(f"teacher {teacher}: {error}") from error
            silent.append(teacher)
    if len(silent) == teachers:
        raise RunError(
            f"none of {teachers} teachers voted: local.learning_rate may be too large, or the model not fit the "
            "records. Why is theirs alone; algorithm.labelling.mechanism=none, which protects nothing, tells"
        )
    return votes, tuple(silent)


def _ask_everybody(
    strategy: FederatedStrategy, grid: Grid, message_type: str, order: wire.Order, timeout: float
) -> list[RecordDict]:
    strategy.population = find_population(grid, strategy.num_clients, timeout)
    return _answers(grid, strategy.population, message_type, order, timeout)


def _answers(
    grid: Grid, population: Population, message_type: str, order: wire.Order, timeout: float
) -> list[RecordDict]:
    """Return every client's answer to ``order``, by client. Raises RunError that names the first who gives none."""
    replies = _replies(grid, population, message_type, order, timeout)
    return [_answer(replies, client, message_type) for client in range(len(population.nodes))]


def _replies(
    grid: Grid, population: Population, message_type: str, order: wire.Order, timeout: float
) -> dict[int, Message]:
    """Send ``order`` to every client; return {client: what came back, an error too}."""
    content = wire.share_content(order)
    messages = [Message(content, node, message_type) for node in population.nodes]
    clients = population.clients
    return {clients[reply.metadata.src_node_id]: reply for reply in grid.send_and_receive(messages, timeout=timeout)}


def _answer(replies: dict[int, Message], client: int, message_type: str) -> RecordDict:
    what = message_type.rpartition(".")[2]
    if client not in replies:
        raise RunError(f"client {client} did not {what} in time")
    if reason := wire.error_of(replies[client]):
        raise RunError(f"client {client} failed to {what}: {reason}")
    return replies[client].content


def find_population(grid: Grid, num_clients: int, timeout: float) -> Population:
    """Wait for all nodes and learn which client each one is; Flower hands out random node ids in random order."""
    if isinstance(grid, LocalGrid):
        return Population(tuple(grid.get_node_ids()))
    deadline = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < num_clients:
        if time.monotonic() > deadline:
            raise RunError(
                f"only {len(nodes)} of {num_clients} nodes came in {timeout:.0f} s: start as many supernodes as clients"
            )
        time.sleep(_POLL_SECONDS)
    replies = list(
        grid.send_and_receive([Message(wire.who_content(0), node, wire.WHO) for node in nodes], timeout=timeout)
    )
    failed = [reason for reply in replies if (reason := wire.error_of(reply))]
    if failed or len(replies) != num_clients:
        raise RunError(
            f"{len(nodes)} nodes for {num_clients} clients, {len(replies)} said which they are; {failed[:1]}"
        )
    return Population(
        tuple(reply.metadata.src_node_id for reply in sorted(replies, key=lambda reply: wire.read_who(reply.content)))
    )
