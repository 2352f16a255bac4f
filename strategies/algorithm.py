"""The algorithm: a frozen settings object with a client half (plan, finish) and a server half (init, merge)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of
from fl_sim.local_plan import LocalAlgorithm, LocalPlan, Sending, sent_by
from fl_sim.local_plan import Sharing as Sharing  # noqa: PLC0414 (said so for mypy: it is one of these protocols)
from fl_sim.own_code import check_returned, error_context
from fl_sim.params import WriteGuard, add, scale, subtract
from fl_sim.seeding import rng, seeded_alone
from fl_sim.settings import Settings
from fl_sim.types import (
    Aggregate,
    ClientUpdate,
    Dataset,
    LocalSettings,
    LocalTask,
    Params,
    Payloads,
    Reply,
    ServerState,
    Trained,
)

Weighting: TypeAlias = Literal["examples", "uniform"]
"""How clients count in the mean: by their number of records, or all the same."""

Weigh: TypeAlias = Callable[[Sequence[Reply]], Sequence[float]]
"""How clients count in the mean: by what they declare of themselves (``Weighing``)."""

Split: TypeAlias = Callable[[NDArray[np.int64]], Sequence[NDArray[np.int64]]]
"""Records, as indices into the training set -> each client's indices into these, by the experiment's partition.

Raises UserError where that is impossible.
"""


FEDAVG = "the run is one of fedavg"
"""What a method is without its strength, in a remark."""

_LEAST, _MOST = 1e-37, 1e37
"""What float32 holds as it is and as one over it."""

_ONE_STEP = LocalSettings(learning_rate=1.0, momentum=0.0, weight_decay=0.0, batch_size=1, epochs=1)
"""A step for each record."""


class Algorithm(LocalAlgorithm, Protocol):
    """A federated algorithm. The server half sees means over clients, never a client."""

    weighting: ClassVar[Weighting]

    def init(self, params: Params) -> ServerState:
        """Return the server's state before the first round."""
        ...

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server's state after a round."""
        ...


@runtime_checkable
class Dealing(Protocol):
    """An algorithm that says itself which records its clients hold: not a part each of all training records."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        """Return each client's record indices into the training set. Raises UserError for data that do not serve."""
        ...


@runtime_checkable
class Central(Protocol):
    """An algorithm without clients: one holder has all training records, whatever the split and number of clients."""

    is_central: ClassVar[bool]


@runtime_checkable
class Pooling(Protocol):
    """An algorithm with a public pool of records."""

    @property
    def pools_test_records(self) -> bool:
        """Return True if test records are in the pool."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """An algorithm with an end of its own, or one that does not take all data."""

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return the number of rounds, at most ``rounds``. Raises UserError for data that do not serve."""
        ...


@runtime_checkable
class Weighing(Protocol):
    """An algorithm that weighs the clients of a round by what they declare of themselves, instead of ``weighting``.

    It goes with the plain mean alone.
    """

    def weigh(self, replies: Sequence[Reply]) -> Sequence[float]:
        """Return a weight, at least 0, of each client of a round that has records; they add up to more than 0."""
        ...


@runtime_checkable
class MeanOnly(Protocol):
    """An algorithm of which the mean of what clients send makes sense, but not what looks at single updates makes."""

    def mean_only(self) -> str:
        """Return the reason, a clause; empty where other aggregates serve as well."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """An algorithm whose result is another model than the one that clients go on from."""

    def reported(self, server: ServerState) -> Params:
        """Return the model that is evaluated, and saved after the last round."""
        ...

    def reports(self) -> str:
        """Return in words which model that is."""
        ...


@runtime_checkable
class Noted(Protocol):
    """An algorithm that must be explained below a table in which it stands beside others."""

    def note(self) -> str:
        """Return a sentence for the reader of a table, in one line."""
        ...


@runtime_checkable
class Advising(Protocol):
    """An algorithm that does not go well with all ways to train on a client."""

    def advice(self, momentum: float) -> str:
        """Return advice on local training with this ``momentum``, a sentence; empty for none."""
        ...


@runtime_checkable
class Steered(Protocol):
    """An algorithm with settings of its own that decide whether training diverges."""

    knobs: ClassVar[str]
    """Those settings, as they are typed, and which way to turn them."""


class Averaging(Settings):
    """FedAvg's behaviour, of which every algorithm here changes one or two of the four parts."""

    weighting: ClassVar[Weighting] = "examples"

    @model_validator(mode="after")
    def _strengths_are_float32(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), float) and value and not _LEAST <= abs(value) <= _MOST:
                raise ValueError(
                    f"{name}={value:g} is out of range: models are float32, which holds 0 and sizes from {_LEAST:g} to "
                    f"{_MOST:g}"
                )
        return self

    def init(self, params: Params) -> ServerState:
        """Start from ``params``."""
        return ServerState(params)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Plain local SGD."""
        del task
        return LocalPlan()

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Send y_i - x; an empty shard sends zeros of weight zero."""
        return ClientUpdate({"delta": subtract(trained.params, task.params)}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Add the mean update."""
        return ServerState(add(server.params, aggregate.payloads["delta"]), server.broadcast, server.memory)


def weighting_of(algorithm: Algorithm) -> Weighting | Weigh:
    """Return the weighting of clients in a round's mean."""
    return algorithm.weigh if isinstance(algorithm, Weighing) else algorithm.weighting


def reported_by(algorithm: Algorithm, server: ServerState) -> Params:
    """Return the model that is evaluated after a round, and saved after the last one."""
    if not isinstance(algorithm, Reporting):
        return server.params
    with error_context(f"reported of {type(algorithm).__name__}"):
        return algorithm.reported(server)


def payload_template(algorithm: Algorithm, server: ServerState) -> Payloads:
    """Return the names and shapes of a client's payloads: those of a client that has no records."""
    return _blank_update(algorithm, server, num_examples=0).payloads


def client_state_template(algorithm: Algorithm, server: ServerState) -> Payloads:
    """Return the names and shapes of what a client keeps for its next round: of one that took one step."""
    return _blank_update(algorithm, server, num_examples=1).state


def share_template(algorithm: Sharing, input_shape: tuple[int, ...], num_classes: int) -> Params:
    """Return the names and shapes of what clients share before the first round: those of one that has no records."""
    inputs, labels = torch.zeros(0, *input_shape), torch.zeros(0, dtype=torch.int64)
    with seeded_alone(0, "template"):
        return algorithm.share(inputs, labels, num_classes, rng(0, "template"))


def plan_template(algorithm: Algorithm, params: Params, pool: Params, num_classes: int) -> LocalPlan:
    """Return the plan of a client with one record in its first round; ``pool``: what clients share, no matter which."""
    with seeded_alone(0, "template"), error_context(f"init of {type(algorithm).__name__}"):
        server = algorithm.init(sent_by(algorithm, params))
    check_returned(server, ServerState, algorithm.init)
    counts = (1, *[0] * (num_classes - 1))
    whole = {**params, **server.params} if isinstance(algorithm, Sending) else server.params
    with seeded_alone(0, "template"), error_context(f"plan of {type(algorithm).__name__}"):
        plan = algorithm.plan(LocalTask(1, 0, 1, 1, _ONE_STEP, whole, server.broadcast, {}, pool, counts))
    check_returned(plan, LocalPlan, algorithm.plan)
    return plan


def _blank_update(algorithm: Algorithm, server: ServerState, num_examples: int) -> ClientUpdate:
    """Return the update of a client that took one step per record without moving the model."""
    task = LocalTask(1, 0, 1, num_examples, _ONE_STEP, server.params, server.broadcast)
    loss = 0.0 if num_examples else None
    trained = Trained(scale(server.params, 1.0), {}, _ONE_STEP.num_steps(num_examples), loss)
    write_guard = WriteGuard.of(groups_of(server))
    with seeded_alone(0, "template"), error_context(f"finish of {type(algorithm).__name__}"):
        update = algorithm.finish(task, trained)
    check_returned(update, ClientUpdate, algorithm.finish)
    write_guard.check(algorithm.finish)
    write_guard.check_bits(algorithm.finish)
    return update


def groups_of(server: ServerState) -> Payloads:
    """Return all tensors of a server's state, by what they are called in words."""
    others = {**server.broadcast, **server.memory, **({"layers": server.layers} if server.layers else {})}
    return {"the global model": server.params, **{f"the server's {name!r}": one for name, one in others.items()}}


def check_sgd(algorithm: object, experiment: Choices, why: str) -> None:
    """Raise ValueError, with the reason ``why``, where clients take other steps than those of SGD."""
    if (optimizer := experiment.local.optimizer) != "sgd":
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with local.optimizer={optimizer}: {why}; leave local.optimizer "
            "out, or take another algorithm, such as fedavg"
        )


def accumulated_momentum(num_steps: int, momentum: float) -> float:
    """Return a_i: how far ``num_steps`` SGD steps of a constant unit gradient move, in units of the learning rate.

    a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho), tau without momentum (Wang et al. 2020, section 4.1).

    >>> [round(accumulated_momentum(tau, 0.9), 9) for tau in (1, 2, 10)]
    [1.0, 2.9, 41.381059609]
    """
    geometric = (1 - momentum**num_steps) / (1 - momentum)
    return (num_steps - momentum * geometric) / (1 - momentum)
