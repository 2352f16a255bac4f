"""The protocols of federated algorithms, and ``Averaging`` (FedAvg), the base class of most algorithms.

An algorithm is an immutable settings object. The methods ``plan`` and ``finish`` run on clients, and the methods
``init`` and ``merge`` run on the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from fl_sim.data.naming import parts_of
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, is_none, kind_of
from fl_sim.local_plan import FurtherModels, LocalAlgorithm, LocalPlan, sends_a_part, sent_by
from fl_sim.local_plan import Sharing as Sharing  # noqa: PLC0414 (for mypy: this module exports the name, too)
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

if TYPE_CHECKING:
    from torch import nn

Size = TypeVar("Size")

Weighting: TypeAlias = Literal["examples", "uniform"]
"""The weights of clients in the mean: "examples" means the number of records, "uniform" means equal weights."""

Weigh: TypeAlias = Callable[[Sequence[Reply]], Sequence[float]]
"""A function from the replies of a round to the weights of clients in the mean (see ``Weighing``)."""

Split: TypeAlias = Callable[[NDArray[np.int64]], Sequence[NDArray[np.int64]]]
"""The experiment's partition as a function. Argument: record indices into the training set.

Result: for each client, the positions of its records in this array of indices. Raises UserError if the partition is
impossible.
"""


FEDAVG = "this is fedavg"
"""A clause of warnings about a setting with which a method equals FedAvg, for example FedProx with mu 0."""

_LEAST, _MOST = 1e-37, 1e37
"""The smallest and the largest absolute value x for which float32 can represent both x and 1 / x."""

ONE_STEP = LocalSettings(learning_rate=1.0, momentum=0.0, weight_decay=0.0, batch_size=1, epochs=1)
"""Local settings with one epoch and batch size 1: the number of local steps equals the number of records."""


class Algorithm(LocalAlgorithm, Protocol):
    """A federated algorithm. Its server methods see only means over clients, never the update of a single client."""

    weighting: ClassVar[Weighting]

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round."""
        ...

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state after a round, given the state before the round and the aggregate of the updates."""
        ...


@runtime_checkable
class Dealing(Protocol):
    """An algorithm that assigns training records to clients itself, instead of the partition."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        """Return each client's record indices into the training set. Raises UserError for an unsuitable data set."""
        ...


@runtime_checkable
class Central(Protocol):
    """An algorithm without federation: one client holds all training records. Partition and ``clients`` are ignored."""

    is_central: ClassVar[bool]


@runtime_checkable
class Alone(Protocol):
    """An algorithm in which every client trains its own model, without any exchange (local-only training).

    Tables compare the client models of other algorithms with the client models of this algorithm.
    """

    is_alone: ClassVar[bool]


@runtime_checkable
class Pooling(Protocol):
    """An algorithm that uses a public pool of records."""

    @property
    def pools_test_records(self) -> bool:
        """Return True if the public pool contains test records."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """An algorithm that limits its number of rounds itself, or that accepts only some data sets."""

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return the algorithm's number of rounds, at most ``rounds``. Raises UserError for an unsuitable data set."""
        ...


@runtime_checkable
class Weighing(Protocol):
    """An algorithm that computes the clients' weights from their replies, instead of using ``weighting``.

    Such an algorithm needs the aggregator ``mean``.
    """

    def weigh(self, replies: Sequence[Reply]) -> Sequence[float]:
        """Return one weight >= 0 for each reply of a client with records. The sum of the weights is above 0."""
        ...


@runtime_checkable
class MeanOnly(Protocol):
    """An algorithm whose server needs the mean of the payloads: no robust aggregator can replace the mean."""

    def mean_only(self) -> str:
        """Return the reason why the server needs the mean, as a clause; "" if it supports every aggregator.

        The reason may depend on settings: FedNova does not need the mean if its ``tau_eff`` is set.
        """
        ...


@runtime_checkable
class Reporting(Protocol):
    """An algorithm whose evaluated model differs from the model that clients receive in the next round."""

    def reported(self, server: ServerState) -> Params:
        """Return the parameters of the model that is evaluated after a round and saved after the last round."""
        ...

    def reports(self) -> str:
        """Return a description of the evaluated model in words, such as "the mean of the last two models"."""
        ...


@runtime_checkable
class Noted(Protocol):
    """An algorithm that needs a note below each table that compares it with other algorithms."""

    def note(self) -> str:
        """Return the note: one sentence in one line."""
        ...


@runtime_checkable
class Advising(Protocol):
    """An algorithm that gives advice on the settings of local training."""

    def advice(self, momentum: float) -> str:
        """Return advice on local training with this ``momentum``: one sentence, or an empty string for no advice."""
        ...


@runtime_checkable
class ForModel(Protocol):
    """An algorithm whose initial server state depends on all parameters, even if clients send only some parameters."""

    def init_for(self, params: Params, model: Params) -> ServerState:
        """Return the server state before the first round, in place of ``init``.

        ``params``: the initial values of the parameters that clients send. ``model``: the initial values of all trained
        parameters.
        """
        ...


@runtime_checkable
class OfHead(Protocol):
    """An algorithm with special rules for the model's head, the last linear layer. The head must be trained."""

    needs_head: ClassVar[bool]


@runtime_checkable
class Widening(Protocol):
    """An algorithm whose model has more outputs than classes. The outputs of the classes come first."""

    further_outputs: ClassVar[int]


@runtime_checkable
class PartialTraining(Protocol):
    """An algorithm that selects the trained and sent parameters, after the setting ``model.trainable`` is applied."""

    def trains(self, trained: Collection[str], frozen: Collection[str]) -> Collection[str]:
        """Return the names of the parameters that are trained or sent; all others are frozen.

        ``trained``: the names of the parameters that are trained according to the model and the settings. ``frozen``:
        the names of all other parameters. Raises ValueError for a model that the algorithm does not support.
        """
        ...


@runtime_checkable
class Rebuilding(Protocol):
    """An algorithm that changes the architecture of the experiment's model, for example by adding classifiers."""

    def rebuilt(self, model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        """Return the model that clients train, made from the new ``model`` of the experiment.

        New weights are drawn from torch's global generators, which are seeded. ``input_shape``: the shape of one
        record. Raises UserError for a model that the algorithm does not support.
        """
        ...


@runtime_checkable
class Unfolding(Protocol):
    """An algorithm whose server transforms each update before averaging, for example multiplies low-rank factors."""

    def unfolded(self, payloads: Payloads) -> Payloads:
        """Transform the payloads that one client sent, and return the payloads for the mean."""
        ...


@runtime_checkable
class Sizing(Protocol):
    """The server part of an algorithm whose clients have models of different sizes, parts of the server's model.

    Sizes are public numbers in (0, 1]; 1 is the whole model. The client part is the protocol ``Resizing``, which builds
    the clients' models. A layer of the algorithm aggregates the updates, which have different shapes.
    """

    def size_of(self, client: int, server: ServerState) -> float:
        """Return the size of a client's model in the coming round."""
        ...

    def sized(self, server: ServerState, size: float) -> ServerState:
        """Return the server state for clients with models of ``size``: the smaller model and tensors to broadcast."""
        ...


def several(value: object) -> object:
    """Convert a single number to a tuple of length 1. Any other value is returned unchanged."""
    return (value,) if isinstance(value, int | float) else value


def in_turn(sizes: Sequence[Size], client: int, draws: str = "order of widths") -> Size:
    """Return the size of a client's model, one of the n ``sizes``. The size of a client never changes.

    Client IDs are divided into blocks of n consecutive IDs. In each block, each size is assigned to one client, in a
    random order. The order depends only on the block, n, and ``draws``, the name of these random numbers.
    """
    block, place = divmod(client, len(sizes))
    return sizes[int(rng(0, draws, block).permutation(len(sizes))[place])]


@runtime_checkable
class Alternating(Protocol):
    """An algorithm whose clients send tensors with different names or shapes in different rounds.

    The payload template, which has these names and shapes, repeats every ``turns`` rounds.
    """

    turns: ClassVar[int]


@runtime_checkable
class Steered(Protocol):
    """An algorithm with settings, such as step sizes, that can make training diverge."""

    knobs: ClassVar[str]
    """Advice after divergence: the names of these settings, as users type them, and whether to raise or lower them."""


class Averaging(Settings):
    """FedAvg. Also the base class of most algorithms, which override some of init, plan, finish and merge."""

    weighting: ClassVar[Weighting] = "examples"

    @model_validator(mode="after")
    def _strengths_are_float32(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), float) and value and not _LEAST <= abs(value) <= _MOST:
                raise ValueError(
                    f"{name}={value:g} is out of range: models are float32; set it to 0, or to an absolute value from "
                    f"{_LEAST:g} to {_MOST:g}"
                )
        return self

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round: the initial model ``params`` and nothing else."""
        return ServerState(params)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan of FedAvg: plain local steps on the client's loss, without extra terms."""
        del task
        return LocalPlan()

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x: local model minus global model. A client without records has weight zero."""
        return ClientUpdate({"delta": subtract(trained.params, task.params)}, task.num_examples, trained.loss)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: the mean update is added to the global model."""
        return ServerState(add(server.params, aggregate.payloads["delta"]), server.broadcast, server.memory)


def num_further_outputs(algorithm: object) -> int:
    """Return the number of the model's outputs after the outputs of the classes: 0 for most algorithms."""
    return algorithm.further_outputs if isinstance(algorithm, Widening) else 0


def weighting_of(algorithm: Algorithm) -> Weighting | Weigh:
    """Return the weighting of clients in the mean: the name of a rule, or the algorithm's method ``weigh``."""
    return algorithm.weigh if isinstance(algorithm, Weighing) else algorithm.weighting


def reported_by(algorithm: Algorithm, server: ServerState) -> Params:
    """Return the model that is evaluated after a round and saved after the last round."""
    if not isinstance(algorithm, Reporting):
        return server.params
    with error_context(f"reported of {type(algorithm).__name__}"):
        return algorithm.reported(server)


def first_state(algorithm: Algorithm, params: Params, personal: str = "none") -> ServerState:
    """Return the server state before the first round.

    ``params``: the initial values of the trained parameters. ``personal``: the setting ``local.personal``.
    """
    with error_context(f"init of {type(algorithm).__name__}"):
        sent = sent_by(algorithm, params, personal)
        server = algorithm.init_for(sent, params) if isinstance(algorithm, ForModel) else algorithm.init(sent)
    check_returned(server, ServerState, algorithm.init)
    return server


def payload_template(algorithm: Algorithm, server: ServerState, server_round: int = 1) -> Payloads:
    """Return the payload template: names and shapes of the tensors in an update.

    The template is computed from the update of a client without records in round ``server_round``.
    """
    return _blank_update(algorithm, server, num_examples=0, server_round=server_round).payloads


def first_template(algorithm: Algorithm, params: Params, personal: str) -> Payloads:
    """Return the payload template of round 1: names and shapes of the tensors in an update.

    ``params``: the initial values of the trained parameters. ``personal``: the setting ``local.personal``.
    """
    with seeded_alone(0, "template"):
        return payload_template(algorithm, first_state(algorithm, params, personal))


def turns_of(algorithm: object) -> int:
    """Return the number of rounds after which the payload templates repeat: 1 if the template never changes."""
    return algorithm.turns if isinstance(algorithm, Alternating) else 1


def client_state_template(algorithm: Algorithm, server: ServerState) -> Payloads:
    """Return an example of a client state after one local step. The values of its tensors have no meaning."""
    return _blank_update(algorithm, server, num_examples=1).state


def share_template(algorithm: Sharing, input_shape: tuple[int, ...], num_classes: int) -> Params:
    """Return the tensors that a client without records shares before round 1. Their values have no meaning.

    ``input_shape``: the shape of one input.
    """
    inputs, labels = torch.zeros(0, *input_shape), torch.zeros(0, dtype=torch.int64)
    with seeded_alone(0, "template"):
        return algorithm.share(inputs, labels, num_classes, rng(0, "template"))


def plan_template(
    algorithm: Algorithm, params: Params, pool: Params, num_classes: int, personal: str = "none"
) -> LocalPlan:
    """Return an example of a local plan, from which a run finds the trainers that support the algorithm.

    The example is the plan of a client with one record in round 1.

    ``params``: the trained parameters. ``personal``: the setting ``local.personal``. ``pool``: the tensors that clients
    share before the first round; their values have no meaning.
    """
    with seeded_alone(0, "template"):
        server = first_state(algorithm, params, personal)
    counts = (1, *[0] * (num_classes - 1))
    whole = {**params, **server.params} if sends_a_part(algorithm, personal) else server.params
    with seeded_alone(0, "template"), error_context(f"plan of {type(algorithm).__name__}"):
        task = LocalTask(1, 0, 1, 1, ONE_STEP, whole, server.broadcast, {}, pool, counts, initial=whole)
        plan = algorithm.plan(task)
    check_returned(plan, LocalPlan, algorithm.plan)
    return plan


def _blank_update(algorithm: Algorithm, server: ServerState, num_examples: int, server_round: int = 1) -> ClientUpdate:
    """Return an example of an update, from which templates are computed.

    In the example, a client took one local step per record, and its model did not change.
    """
    task = LocalTask(server_round, 0, 1, num_examples, ONE_STEP, server.params, server.broadcast, initial=server.params)
    loss = 0.0 if num_examples else None
    trained = Trained(scale(server.params, 1.0), {}, ONE_STEP.num_steps(num_examples), loss)
    if isinstance(algorithm, FurtherModels):
        with seeded_alone(0, "template"), error_context(f"further of {type(algorithm).__name__}"):
            names = list(algorithm.further(task))
        trained = replace(trained, further=dict.fromkeys(names, trained))
    write_guard = WriteGuard.of(groups_of(server))
    with seeded_alone(0, "template"), error_context(f"finish of {type(algorithm).__name__}"):
        update = algorithm.finish(task, trained)
    check_returned(update, ClientUpdate, algorithm.finish)
    write_guard.check(algorithm.finish)
    write_guard.check_bits(algorithm.finish)
    return update


def states_sent(algorithm: object, server: ServerState, clients: Sequence[int]) -> list[tuple[float, ServerState, int]]:
    """Return one triple for each model size of ``clients``: (size, server state, number of clients with this size).

    If all clients have whole models, the only triple has the size 1 and the state ``server``.
    """
    if not isinstance(algorithm, Sizing):
        return [(1.0, server, len(clients))]
    sizes = Counter(algorithm.size_of(client, server) for client in clients)
    return [(size, server if size == 1 else algorithm.sized(server, size), count) for size, count in sizes.items()]


def groups_of(server: ServerState) -> Payloads:
    """Return all tensors of the server state, as {description for error messages: tensors by name}."""
    others = {**server.broadcast, **server.memory, **({"layers": server.layers} if server.layers else {})}
    return {"the global model": server.params, **{f"the server's {name!r}": one for name, one in others.items()}}


def check_sgd(algorithm: object, experiment: Choices, why: str) -> None:
    """Raise ValueError, with the reason ``why``, if the local optimizer is not SGD."""
    if (optimizer := experiment.local.optimizer) != "sgd":
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with local.optimizer={optimizer}: {why}; leave local.optimizer "
            "out, or take another algorithm, such as fedavg"
        )


def check_images(algorithm: object, dataset: Dataset, does: str, cure: str) -> None:
    """Raise UserError if the records are not images.

    ``does``: a verb phrase with the method's use of images, such as "makes images". ``cure``: advice to the user.
    """
    if len(dataset.input_shape) != 3:
        raise UserError(
            f"algorithm {kind_of(algorithm)} {does}, and records of {dataset.name} have shape {dataset.input_shape}: "
            f"{cure}"
        )


def check_proxy(algorithm: object, proxy: str, experiment: Choices) -> None:
    """Raise UserError if the clients' records are those of ``proxy``, the data set with the method's public records."""
    data = getattr(experiment, "data", "")
    if {*parts_of(proxy)} & {*parts_of(data)}:
        raise UserError(
            f"algorithm {kind_of(algorithm)} reads the public records of algorithm.proxy={proxy}, and clients hold the "
            f"records of {data}: algorithm.proxy must be another data set"
        )


def check_one_shape(experiment: Choices, why: str, cure: str, further: Mapping[str, tuple[str, bool]]) -> None:
    """Raise ValueError if a setting needs updates of one shape, or models of one size.

    ``why``: the reason why updates have several shapes. ``cure``: advice for updates of one shape. ``further``:
    {setting: (value, True if the value is allowed)} for settings that only some methods refuse.
    """
    local = experiment.local
    refused = {
        **further,
        "server": (kind_of(experiment.server), kind_of(experiment.server) == "synchronous"),
        "local.privacy": (kind_of(local.privacy), is_none(local.privacy)),
        "local.batch_norm": (local.batch_norm, local.batch_norm == "none"),
        "local.personal": (local.personal, local.personal == "none"),
    }
    for name, (value, is_usual) in refused.items():
        if not is_usual:
            raise ValueError(f"{name}={value} needs models of one size, but {why}: leave {name} out, or {cure}")


def check_plain_sgd(algorithm: object, experiment: Choices) -> None:
    """Raise ValueError if the local optimizer is not SGD without momentum."""
    check_sgd(algorithm, experiment, "its local steps are steps of SGD")
    if momentum := experiment.local.momentum:
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with local.momentum={momentum:g}: its local steps have no "
            "momentum; leave local.momentum out"
        )


def accumulated_momentum(num_steps: int, momentum: float) -> float:
    """Return FedNova's a_i: the total movement by ``num_steps`` SGD steps with gradient 1 and learning rate 1.

    a = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho), with tau = ``num_steps`` and rho = ``momentum``. Without
    momentum, a = tau (Wang et al. 2020, section 4.1).

    >>> [round(accumulated_momentum(tau, 0.9), 9) for tau in (1, 2, 10)]
    [1.0, 2.9, 41.381059609]
    """
    geometric = (1 - momentum**num_steps) / (1 - momentum)
    return (num_steps - momentum * geometric) / (1 - momentum)
