"""Servers: they merge updates in synchronous rounds, or asynchronously as updates arrive (FedAsync, FedBuff)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, is_none, kind_of, off, path_in
from fl_sim.local_plan import Sending
from fl_sim.params import add, scale
from fl_sim.settings import Settings
from fl_sim.types import Cohort, Params, Reply, ServerState
from strategies.aggregators import WeightedMean
from strategies.algorithm import Algorithm, Averaging, Weighing, Weighting


class Synchronous(Settings):
    """The server waits in every round for the clients of the cohort, by the virtual clock of ``devices``.

    ``deadline``: the longest wait in virtual seconds (0: the server waits for the slowest client). ``late``: the
    treatment of a client that needs longer. "drop" discards its update and its new client state. With "partial" the
    client takes as many of its local steps as fit before the deadline; a client without time for one step is dropped.
    """

    kind: Literal["synchronous"] = "synchronous"
    deadline: float = Field(0.0, ge=0, le=1e9)
    late: Literal["drop", "partial"] = "drop"

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for a deadline without a virtual clock, and for ``late`` without a deadline."""
        if self.deadline and is_none(experiment.devices):
            raise ValueError(_without_clock(f"server.deadline={self.deadline:g}"))
        if self.late != "drop" and not self.deadline:
            raise ValueError(
                f"server.late={self.late} has no effect without a deadline: set server.deadline, in virtual seconds, "
                "or leave server.late out"
            )


@dataclass(frozen=True)
class Arrival:
    """An update that arrives at an asynchronous server.

    ``start``: the global model from which local training started. ``staleness``: the number of server steps since then.
    """

    reply: Reply
    start: Params
    staleness: int


class _Asynchronous(Settings):
    """Base class of FedAsync and FedBuff: checks that other settings are compatible with an asynchronous server."""

    procedure: ClassVar[str] = "fl_sim.stages.asynchronous:AsynchronousRounds"

    # Both subclasses declare these fields themselves, because the order of fields matters: a short form such as
    # "fedbuff:10" sets the first field.
    if TYPE_CHECKING:
        concurrency: int
        staleness_exponent: float

    @property
    def step_size(self) -> int:
        return 1

    def check(self, experiment: Choices) -> None:
        chosen = f"server={kind_of(self)}"
        if is_none(experiment.devices):
            raise ValueError(_without_clock(chosen))
        if experiment.hides_time:
            raise ValueError(
                f"{chosen} cannot run with a privacy guarantee: the clients of a server step depend on numbers of "
                "records and are no random sample, so no epsilon is known; take server=synchronous"
            )
        for name, count in (("concurrency", self.concurrency), ("buffer", self.step_size)):
            if count > experiment.clients:
                raise ValueError(
                    f"server.{name}={count} is more than the run's {experiment.clients} clients: set server.{name} to "
                    f"{experiment.clients} or less"
                )
        self._check_parts(experiment, chosen)
        self._check_algorithm(experiment.algorithm, chosen)

    def _check_parts(self, experiment: Choices, chosen: str) -> None:
        parts = {
            "sampler": (experiment.sampler, "full", "server.concurrency sets how many clients train at a time"),
            "aggregator": (experiment.aggregator, "mean", "its updates start from different models"),
            "attack": (experiment.attack, "none", "attacks without rounds are not modelled"),
        }
        for name, (part, wanted, why) in parts.items():
            if kind_of(part) != wanted:
                raise ValueError(f"{chosen} cannot run with {name} {kind_of(part)}: {why}; leave {name} out")
        has_part = isinstance(experiment.algorithm, Sending)
        if has_part or experiment.local.personal != "none":
            kind, personal = kind_of(experiment.algorithm), experiment.local.personal
            raise ValueError(
                f"{chosen} cannot run with {f'algorithm {kind}' if has_part else f'local.personal={personal}'}: a part "
                "of the model stays with the client, and would be trained with global models of different ages; take "
                "server=synchronous"
            )
        if experiment.local.batch_norm != "none":
            raise ValueError(
                f"{chosen} cannot run with local.batch_norm={experiment.local.batch_norm}: running statistics "
                "cannot be weighted by staleness; take a model with nn.GroupNorm"
            )
        if not is_none(experiment.compress) and experiment.compress.keeps_error:
            raise ValueError(
                f"{chosen} cannot run with compress {kind_of(experiment.compress)}: it adds the compression error to "
                "the client's next update, which starts from another model; take a compressor without error feedback, "
                "such as compress=qsgd, or leave compress out"
            )
        if getattr(experiment.engine, "stack", 0) > 1:
            raise ValueError(
                f"{chosen} cannot run with engine.stack={getattr(experiment.engine, 'stack', 0)}: the rounding of an "
                "update would depend on the other clients in its stack; leave engine.stack out"
            )

    def _check_algorithm(self, algorithm: object, chosen: str) -> None:
        if path_in(type(algorithm), "layer"):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with {chosen}: it has a round layer of its own, and there "
                "are no rounds; take server=synchronous"
            )
        taken = isinstance(algorithm, Averaging) and type(algorithm).finish is Averaging.finish
        if not taken or isinstance(algorithm, Weighing):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with {chosen}: client states, payloads other than the "
                "model's change, and weights that depend on other clients need rounds in which all clients have one "
                "model; take fedavg, fedprox, fedadam or another algorithm whose clients send only the model's change"
            )

    def check_broadcast(self, algorithm: object, server: ServerState) -> None:
        """Raise ValueError if the algorithm sends clients other tensors in addition to the model."""
        if server.broadcast:
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with server={kind_of(self)}: besides the model it sends "
                f"the last round's tensors {', '.join(map(repr, server.broadcast))}, and this server has no rounds; "
                "take fedavg, fedprox, fedadam or another algorithm that sends only the model"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        del experiment
        if not self.staleness_exponent:
            return [off("server.staleness_exponent=0", "all updates have the same weight, whatever their staleness")]
        if self.concurrency == 1:
            why = "server.concurrency=1, so that no update is older than the model"
            return [off(f"server.staleness_exponent={self.staleness_exponent:g}", why)]
        return []

    def _weight(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.staleness_exponent)


class FedAsync(_Asynchronous):
    """x <- (1 - a) x + a y for each arriving model y, with a = ``mixing`` / (1 + staleness)^``staleness_exponent``.

    Xie et al. 2019, algorithm 1, with polynomial staleness. x is the global model. The staleness of y is the number of
    server steps since the client received x; it is 0 for a client that received the latest model. The paper's staleness
    t - tau is larger by 1 if t is the index of the new model. A round is the arrival of one update.

    ``mixing``: the share of an update without staleness in the new model. ``staleness_exponent``: larger values give
    stale updates less weight. ``concurrency``: the number of clients that train at the same time.
    """

    kind: Literal["fedasync"] = "fedasync"
    mixing: float = Field(0.6, gt=0, le=1)
    staleness_exponent: float = Field(0.5, ge=0, le=100)
    concurrency: int = Field(10, ge=1)
    title: ClassVar[str] = "FedAsync"

    def step(
        self, server: ServerState, algorithm: Algorithm, arrivals: Sequence[Arrival], server_round: int, clients: int
    ) -> ServerState:
        """Return the server state after the arrival of one update. A client without records changes nothing.

        ``clients``: the number of clients that hold records.
        """
        [arrival] = arrivals
        aggregate = WeightedMean().mean(Cohort(server_round, (arrival.reply,), clients, 1), algorithm.weighting)
        if aggregate is None:
            return server
        share = self.mixing * self._weight(arrival.staleness)
        arrived = add(arrival.start, aggregate.payloads["delta"])  # y in the paper: the client's model
        return replace(server, params=add(scale(server.params, 1 - share), arrived, share))

    def _check_algorithm(self, algorithm: object, chosen: str) -> None:
        super()._check_algorithm(algorithm, chosen)
        if isinstance(algorithm, Averaging) and type(algorithm).merge is not Averaging.merge:
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with {chosen}, which replaces the algorithm's server step: "
                "take fedavg, fedprox or another algorithm whose server adds the mean update, or server=fedbuff"
            )


class FedBuff(_Asynchronous):
    """The server makes a step whenever its buffer of updates is full (Nguyen et al. 2022, algorithm 1).

    x <- x + eta / B * sum of (y_i - x_i) / (1 + staleness_i)^a. x is the global model, x_i the model that client i
    received, and y_i its trained model. staleness_i is the number of server steps since client i received x_i. An
    algorithm with its own server step uses this sum as its mean update. A round is one server step.

    ``buffer``: the number of updates in a step (B). ``staleness_exponent``: larger values give stale updates less
    weight (a). ``concurrency``: the number of clients that train at the same time. ``server_learning_rate``: the
    factor of the server step (eta). ``weighting``: "uniform" gives all clients the same weight, as in the paper;
    "examples" weights clients by their number of records, as FedAvg does. A client without records has no weight.
    """

    kind: Literal["fedbuff"] = "fedbuff"
    buffer: int = Field(10, ge=1)
    staleness_exponent: float = Field(0.5, ge=0, le=100)
    concurrency: int = Field(10, ge=1)
    server_learning_rate: float = Field(1.0, gt=0, le=1e6)
    weighting: Weighting = "uniform"
    title: ClassVar[str] = "FedBuff"

    @property
    def step_size(self) -> int:
        """Return the number of updates in a server step."""
        return self.buffer

    def step(
        self, server: ServerState, algorithm: Algorithm, arrivals: Sequence[Arrival], server_round: int, clients: int
    ) -> ServerState:
        """Return the server state after one server step with all updates in the full buffer.

        If no client in the buffer has records, the state is unchanged. ``clients``: the number of clients that hold
        records.
        """
        replies = tuple(self._weighed(arrival) for arrival in arrivals)
        aggregate = WeightedMean().mean(Cohort(server_round, replies, clients, self.buffer), self.weighting)
        if aggregate is None:
            return server
        if self.server_learning_rate != 1:
            delta = scale(aggregate.payloads["delta"], self.server_learning_rate)
            aggregate = replace(aggregate, payloads={"delta": delta})
        return algorithm.merge(server, aggregate)

    def _weighed(self, arrival: Arrival) -> Reply:
        weight, reply = self._weight(arrival.staleness), arrival.reply
        if weight == 1:
            return reply
        return replace(reply, payloads={"delta": scale(reply.payloads["delta"], weight)})


def _without_clock(chosen: str) -> str:
    return (
        f"{chosen} needs a virtual clock, which only simulated devices have: set devices, for example "
        f"devices=log-normal, or leave {chosen} out"
    )
