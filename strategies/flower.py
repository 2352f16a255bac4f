"""The Flower Strategy that runs every algorithm of this project, and the execution of one round."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from clients.client_layer import ClientLayer
from fl_sim.engines import arrays, wire
from fl_sim.errors import Diverged, Malformed, RunError
from fl_sim.kinds import is_own_kind
from fl_sim.own_code import check_returned, error_context
from fl_sim.params import WriteGuard, flattened, is_finite
from fl_sim.seeding import rng, seed_process
from fl_sim.store.run_directory import RoundRecord
from fl_sim.types import Aggregate, ClientUpdate, Cohort, Packed, Payloads, Reply, ServerState, Size, Traffic
from strategies.aggregators import Aggregator, WeightedMean
from strategies.algorithm import (
    Algorithm,
    Sizing,
    Unfolding,
    groups_of,
    payload_template,
    states_sent,
    turns_of,
    weighting_of,
)
from strategies.answers import (
    Asking,
    Population,
    Read,
    ask_everybody,
    by_client,
    content_of,
    find_population,
    refusal,
)
from strategies.layer import Ask, Drawn, Layer, Layered, Workload
from strategies.own_layer import OwnLayer
from strategies.samplers import Coins, Sampler


@dataclass
class FederatedStrategy(Strategy):
    """A Flower Strategy made of one algorithm, one aggregator, one sampler, and the layers around them.

    ``server``: the server state after the last round; Flower's own ``arrays`` argument is the same model and is not
    read. ``order``: the settings of local training that every client receives. Each round sets the round number and the
    learning rate in ``order``. ``most_examples``: the largest possible number of records of a client, if known.
    ``sampling_seed``: the seed of the cohorts, or None for ``seed``. ``on_clients``: the code of the layers that runs
    on clients. ``cohort``: the clients of the last round whose updates are used. ``late``: the clients of the last
    round whose updates come too late. ``layer``: the outermost layer of ``layers``. ``holders``: True for each client
    that is known to hold training records, shape (clients,); None: all clients hold records. ``members``: the IDs of
    the clients that may take part in rounds; None: all.
    """

    algorithm: Algorithm
    aggregator: Aggregator | Layered
    sampler: Sampler
    server: ServerState
    order: wire.TaskConfig
    num_clients: int
    seed: int
    most_examples: int = sys.maxsize
    sampling_seed: int | None = None
    on_clients: tuple[ClientLayer, ...] = ()
    population: Population = field(default_factory=lambda: Population(()))
    cohort: NDArray[np.int64] = field(default_factory=lambda: np.arange(0))
    holders: NDArray[np.bool_] | None = None
    members: NDArray[np.int64] | None = None
    _sent: WriteGuard | None = None
    without_effect: Counter[str] = field(default_factory=Counter)
    layer: Layer = field(init=False)
    layers: list[Layer] = field(default_factory=list)
    late: Sequence[int] = ()
    _by_turn: dict[tuple[int, float], _Expected] = field(default_factory=dict)
    _sized: tuple[ServerState | None, dict[float, ServerState]] = (None, {})

    def __post_init__(self) -> None:
        self.layer = _Innermost(self)
        self._sizing = self.algorithm if isinstance(self.algorithm, Sizing) else None

    def wrap(self, layer: Layer) -> None:
        """Add ``layer`` as the new outermost layer."""
        layer.inner, self.layer = self.layer, layer
        self.layers.append(layer)
        if is_own_kind(layer):
            self.layer = OwnLayer(layer, self.num_clients)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the cohort and return one message for each of its clients.

        Clients that receive the same tensors share one message content, and their messages are next to each other.

        ``config``: contains the learning rate.
        """
        del arrays
        if not self.population.nodes:
            self.population = find_population(grid, self.num_clients, timeout=60.0)
        seed_process(self.seed, "sampling", server_round)
        drawn = self.layer.cohort(server_round)
        self.cohort, self.late, rate = drawn.clients, drawn.late, float(str(config["learning-rate"]))
        order = replace(self.order, server_round=server_round, learning_rate=rate, most_steps=drawn.most_steps)
        self._sent = WriteGuard.of(groups_of(self.server))
        contents = self.contents(order, self.server, self.cohort.tolist())
        return [Message(content, self.population.nodes[client], wire.TRAIN) for client, content in contents.items()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply, aggregate the updates in the order of clients, and let the algorithm merge the aggregate.

        Raises RunError, which names client and round, if a client failed, did not answer or sent an invalid update.
        Under Global DP zeros replace the update of such a client, and RunError is raised only if no client sends a
        valid update.
        """
        if self._sent is not None:  # clients in this process share the server's tensors, and must not change them
            self._sent.check_bits(self.algorithm.plan, self.algorithm.finish)
        answers = self._checked(server_round, list(replies))
        seed_process(self.seed, "merging", server_round)
        answers = self.layer.received(answers)
        self.without_effect.update(self.layer.remarks())
        expected = self.sampler.expected_size(self.num_members)
        cohort = Cohort(server_round, answers, self.num_members, expected, self.num_holders(answers), self.seed)
        aggregate = self.layer.aggregate(cohort, self.algorithm, self.server)
        if aggregate is not None:
            self.without_effect.update([aggregate.without_effect] if aggregate.without_effect else [])
            server = self.layer.merge(self.algorithm, self.server, aggregate)
            check_finite({"params": server.params, "layers": server.layers}, server_round)
            self.server = server
        if self.layer.hides_clients:  # private run: only the noised mean may depend on cohort size or losses
            return arrays.array_record(self.server.model), None
        metrics = MetricRecord({"cohort": len(answers)})
        if (loss := mean_loss(answers)) is not None:
            metrics["train_loss"] = loss
        return arrays.array_record(self.server.model), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: clients do not evaluate, as the server measures the model on the public test set."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: clients do not evaluate, so there are no metrics."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Print nothing: the caller of the strategy reports progress."""

    @property
    def traffic(self) -> Traffic:
        """Return the mean number of bytes that one client receives and sends in a round."""
        states, total = states_sent(self.algorithm, self.server, range(self.num_clients)), Traffic(0, 0)
        for size, _, count in states:
            total += self.traffic_of(size) * count
        return Traffic(round(total.down / self.num_clients), round(total.up / self.num_clients))

    def traffic_of(self, size: float) -> Traffic:
        """Return the mean number of bytes per round to and from a client. ``size``: the client's share of the model."""
        content, turns = self.content(self.order, self.sized(self.server, size)), turns_of(self.algorithm)
        ups = [self._expected(server_round, size).num_bytes for server_round in range(1, turns + 1)]
        return Traffic(arrays.num_bytes(content), round(sum(ups) / turns))

    def traffic_with(self, messages: Sequence[Message], server_round: int) -> Traffic:
        """Return the number of bytes of a round: of ``messages``, of the replies, and of the models for late clients.

        Call this method before the round changes the server state, because model sizes are read from the state.
        """
        contents = {id(one.content): one.content for one in messages}
        counts = Counter(id(one.content) for one in messages)
        down = sum(arrays.num_bytes(contents[key]) * count for key, count in counts.items())
        sizes, late = (Counter(map(self.size_of, clients)) for clients in (self.cohort.tolist(), self.late))
        down += sum(self.traffic_of(size).down * count for size, count in late.items())
        return Traffic(down, sum(self._expected(server_round, size).num_bytes * n for size, n in sizes.items()))

    def content(self, order: wire.TaskConfig, server: ServerState) -> RecordDict:
        """Return the content of a round's message to clients: task settings, global model and broadcast tensors."""
        return wire.task_content(order, server.params, self.broadcast(server))

    def size_of(self, client: int) -> float:
        """Return the size of a client's model in the coming round; 1 is the whole model."""
        return 1.0 if self._sizing is None else self._sizing.size_of(client, self.server)

    def sized(self, server: ServerState, size: float) -> ServerState:
        """Return the server state for clients whose model has the size ``size``, a share of the whole model in (0, 1].

        All calls for one server state and one size return the same object.
        """
        if self._sizing is None or size == 1:
            return server
        if self._sized[0] is not server:
            self._sized = (server, {})
        if size not in self._sized[1]:
            self._sized[1][size] = self._sizing.sized(server, size)
        return self._sized[1][size]

    def contents(self, order: wire.TaskConfig, server: ServerState, clients: Sequence[int]) -> dict[int, RecordDict]:
        """Return {client: content of its message}; clients that receive the same content are next to each other.

        Clients that receive the same tensors (``Layer.sent_to``) share one content, which engines send only once.
        """
        groups: dict[int, tuple[ServerState, list[int]]] = {}
        for client in clients:
            state = self.layer.sent_to(client, server)
            groups.setdefault(id(state), (state, []))[1].append(client)
        contents = ((self.content(order, state), members) for state, members in groups.values())
        return {client: content for content, members in contents for client in members}

    def ask(
        self, grid: Grid, order: wire.TaskConfig, timeout: float, task: str, clients: Sequence[int],
        read: Callable[[RecordDict], Read],
    ) -> tuple[list[Read], Traffic]:  # fmt: skip
        """Ask ``clients`` to do ``task`` before a round. Return their answers, and the number of bytes sent to them.

        ``clients``: ascending. ``order``: the settings of the round. ``read``: a function that checks and converts one
        answer.
        """
        order = replace(order, task=task)
        contents = self.contents(order, self.server, clients)
        asking = Asking(order, timeout, not self.order.synthetic, contents=contents)
        down = sum(arrays.num_bytes(content) for content in contents.values())
        return ask_everybody(grid, self.population, asking, read), Traffic(down, 0)

    def train(self, grid: Grid, order: wire.TaskConfig, timeout: float, clients: Sequence[int]) -> tuple[Reply, ...]:
        """Train ``clients`` from the server state, and return their updates. Layers do not change these updates.

        ``clients``: ascending. ``order``: the settings of the round. Raises RunError as ``aggregate_train`` does.
        """
        contents, self.cohort = self.contents(order, self.server, clients), np.array(clients, np.int64)
        messages = [Message(content, self.population.nodes[client], wire.TRAIN) for client, content in contents.items()]
        return self._checked(order.server_round, list(grid.send_and_receive(messages, timeout=timeout)))

    def broadcast(self, server: ServerState) -> Payloads:
        """Return the tensors that clients receive in addition to the model, from the algorithm and the layers."""
        groups = {**server.broadcast}
        for half in self.on_clients:
            groups = _both(groups, half.broadcast(server))
        return groups

    def read(self, client: int, replies: Sequence[Message], server_round: int) -> Reply:
        """Return the update in a client's reply. Raises Malformed for an invalid reply, no reply or several replies."""
        expected = self._expected(server_round, self.size_of(client))
        reply = wire.read_update(client, content_of(replies), expected.template, self.most_examples, expected.packed)
        for half in reversed(self.on_clients):
            reply = half.unpacked(reply, expected.template, server_round)
        if isinstance(self.algorithm, Unfolding):
            reply = replace(reply, payloads=self.algorithm.unfolded(reply.payloads))
        return reply

    @property
    def num_members(self) -> int:
        """Return the number of clients that may take part in rounds, without clients that are held out of training."""
        return self.num_clients if self.members is None else len(self.members)

    def num_holders(self, answers: Sequence[Reply]) -> int | None:
        """Return the number of clients that hold records, or None if all clients hold records.

        ``answers``: the updates of a round. A client without known records is counted as soon as it sends an update
        from at least one record.
        """
        if self.holders is None:
            return None
        for reply in answers:  # a node may hold records that the server does not know of
            self.holders[reply.client] |= reply.num_examples > 0
        return int(self.holders.sum() if self.members is None else self.holders[self.members].sum())

    def _expected(self, server_round: int, size: float) -> _Expected:
        """Return the expected tensors of an update in round ``server_round`` from a client with a model of ``size``."""
        key = ((server_round - 1) % turns_of(self.algorithm) + 1, size)
        if key not in self._by_turn:
            server = self.sized(self.server, size)
            template = {**payload_template(self.algorithm, server, key[0])}
            for half in self.on_clients:
                template = _both(template, half.adds(server))
            template = {name: flattened(params) for name, params in template.items()}
            packed = [half.packs(template, server.params) for half in self.on_clients]
            self._by_turn[key] = _Expected(template, {name: one for each in packed for name, one in each.items()})
        return self._by_turn[key]

    def _checked(self, server_round: int, replies: list[Message]) -> tuple[Reply, ...]:
        """Check the replies of the cohort, and return its valid updates.

        Raises RunError if an update is invalid or missing. Under Global DP such updates are left out instead.
        """
        answers = by_client(replies, self.population.client_of, strict=not self.layer.hides_clients)
        updates: list[Reply] = []
        failed: dict[int, Malformed] = {}
        for client in map(int, self.cohort):
            try:
                updates.append(self.read(client, answers.get(client, []), server_round))
            except Malformed as reason:
                failed[client] = reason
        self.layer.lost(server_round, failed, answered=bool(updates))
        return tuple(updates)


@dataclass(frozen=True)
class _Expected:
    """The tensors that a client's update must have in a round.

    ``template``: names and shapes of the payloads. ``packed``: {payload name: compressed size} for all payloads that
    clients compress.
    """

    template: Payloads
    packed: Mapping[str, Size]

    @cached_property
    def num_bytes(self) -> int:
        """Return the number of bytes of the tensors in an update."""
        whole = {name: params for name, params in self.template.items() if name not in self.packed}
        packed = {name: Packed.blank(size) for name, size in self.packed.items()}
        return arrays.num_bytes(wire.update_content(ClientUpdate(whole, 0, packed=packed)))


@dataclass
class _Innermost(Layer):
    """The innermost layer: it samples the cohort, applies the aggregator, and calls the algorithm's ``merge``."""

    strategy: FederatedStrategy

    def ready(self, work: Workload) -> None:
        """Do nothing: the innermost layer does not use the clients' workload (numbers of records, local settings)."""

    def begin(self, server_round: int) -> None:
        """Do nothing: the innermost layer needs no preparation for a round."""

    def consult(self, server_round: int, ask: Ask) -> Traffic:
        """Return a traffic of 0 bytes: the innermost layer sends clients no requests before the round."""
        del server_round, ask
        return Traffic(0, 0)

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        strategy = self.strategy
        if coins is None:
            seed = strategy.seed if strategy.sampling_seed is None else strategy.sampling_seed
            coins = rng(seed, "sampler", server_round).random
        with error_context(f"sample of {type(strategy.sampler).__name__}"):
            drawn = strategy.sampler.sample(strategy.num_members, coins, server_round)
            return Drawn(drawn if strategy.members is None else strategy.members[drawn])

    def sent_to(self, client: int, server: ServerState) -> ServerState:
        return self.strategy.sized(server, self.strategy.size_of(client))

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        return replies

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Raise RunError, with an error message that names the first failed client."""
        del answered
        for client, error in failed.items():
            who = f"client {client} in round {server_round}"
            raise refusal(who, error, quoted=not self.strategy.order.synthetic)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the result of the aggregator. Raises an error if the aggregator changes its arguments."""
        aggregator: Any = self.strategy.aggregator
        weighting = weighting_of(algorithm)
        assert isinstance(weighting, str) or isinstance(aggregator, WeightedMean)  # see aggregators.check_weighing
        sent = {f"what client {one.client} sent": part for one in cohort.replies for part in one.payloads.values()}
        write_guard = WriteGuard.of({**sent, **groups_of(server)}, by_bits=False)
        with error_context(f"mean of {type(aggregator).__name__}"):
            aggregate: Aggregate | None = aggregator.mean(cohort, weighting)
        write_guard.check(aggregator.mean)
        return aggregate

    def foreseen(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of a hypothetical ``cohort``. The call changes no state."""
        return self.aggregate(cohort, algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the algorithm's next server state. Raises an error if the algorithm changes its arguments."""
        write_guard = WriteGuard.of(groups_of(server))
        with error_context(f"merge of {type(algorithm).__name__}"):
            merged = algorithm.merge(server, aggregate)
        check_returned(merged, ServerState, algorithm.merge)
        write_guard.check(algorithm.merge)
        write_guard.check_bits(algorithm.merge)
        return replace(merged, layers={})

    def metrics(self) -> Mapping[str, Any]:
        return {}

    def remarks(self) -> Sequence[str]:
        return ()

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        del rounds
        return ""

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        del rounds
        return []

    def affords(self, server_round: int) -> bool:
        del server_round
        return True

    @property
    def hides_clients(self) -> bool:
        return False

    def statements(self, rounds: int) -> list[dict[str, object]]:
        del rounds
        return []


def _both(groups: Payloads, more: Payloads) -> Payloads:
    """Return one mapping with an algorithm's payloads ``groups`` and a layer's payloads ``more``.

    Raises RunError if a name occurs in ``groups`` and in ``more``.
    """
    if twice := sorted(groups.keys() & more.keys()):
        raise RunError(
            f"a layer adds a payload {twice[0]!r}, and the algorithm or another layer has one of this name: give it "
            "another name"
        )
    return {**groups, **more}


def check_finite(groups: Payloads, server_round: int) -> None:
    """Raise Diverged if the global model after round ``server_round`` contains numbers that are not finite."""
    if not is_finite(groups):
        raise Diverged(f"the global model is not finite after round {server_round}; try smaller learning rates")


def mean_loss(replies: Iterable[Reply]) -> float | None:
    """Return the mean training loss over the records of all clients, or None if no client has a loss."""
    summed, count = 0.0, 0
    for reply in replies:
        if reply.loss is not None:
            summed, count = summed + reply.loss * reply.num_examples, count + reply.num_examples
    return summed / count if count else None


@dataclass(frozen=True)
class Round:
    """The outcome of a round, without evaluation.

    ``traffic``: the number of bytes that clients receive and send in the round; None if the cohort is secret.
    ``epsilon``: a client's privacy cost of all rounds so far; None without a privacy ledger. With a virtual clock:
    ``virtual_seconds`` is the round's duration, ``late`` the number of clients whose updates came too late and are
    lost, and ``staleness`` the mean staleness of the updates in server steps.
    """

    server_round: int
    cohort_size: int | None
    train_loss: float | None
    traffic: Traffic | None
    seconds: float
    epsilon: float | None = None
    virtual_seconds: float | None = None
    late: int | None = None
    staleness: float | None = None


def run_round(
    strategy: FederatedStrategy, grid: Grid, server_round: int, learning_rate: float, timeout: float
) -> Round:
    """Run one round and return its outcome.

    The steps are: charge the privacy cost to the privacy ledger, sample clients, send tasks, check replies, aggregate
    updates, and merge the aggregate into the global model.

    ``timeout``: the limit, in seconds, for all messages and replies together. Raises Stop, before anything else is
    done, if a layer ends the run before this round.
    """
    start = time.perf_counter()
    if not strategy.population.nodes:  # client nodes may be missing: find this out before any privacy cost is charged
        strategy.population = find_population(grid, strategy.num_clients, timeout)
    strategy.layer.begin(server_round)
    order = replace(strategy.order, server_round=server_round, learning_rate=learning_rate)
    asked = strategy.layer.consult(server_round, partial(strategy.ask, grid, order, timeout))
    config = ConfigRecord({"learning-rate": learning_rate})
    messages = list(strategy.configure_train(server_round, ArrayRecord(), config, grid))
    traffic = strategy.traffic_with(messages, server_round) + asked
    replies = grid.send_and_receive(messages, timeout=timeout) if messages else []
    _, metrics = strategy.aggregate_train(server_round, replies)
    loss = float(str(metrics["train_loss"])) if metrics and "train_loss" in metrics else None
    size, metrics_of_layers = None if strategy.layer.hides_clients else len(messages), strategy.layer.metrics()
    done = Round(server_round, size, loss, None if size is None else traffic, time.perf_counter() - start)
    return replace(done, **metrics_of_layers)
