"""The values that flow through the program: frozen, and innocent of algorithms, engines and libraries above torch."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fl_sim.errors import RunError

Params: TypeAlias = Mapping[str, torch.Tensor]
"""Named float32 tensors: a model's trainable parameters, or anything of their shape (an update, a control variate).

Nobody writes to them, so that those in one process may be the same in many places; many lie in one vector
(fl_sim.params.FlatParams).
"""

Payloads: TypeAlias = dict[str, Params]
"""Named groups of tensors, such as ``{"delta": ..., "control_delta": ...}``."""


@dataclass(frozen=True)
class Examples:
    """Labelled records.

    ``inputs``: uint8 images of shape (records, channels, height, width) in 0..255, or float32 features of shape
    (records, features). ``labels``: int64 of shape (records,), values in 0..num_classes-1. Arrays may be read-only
    memory maps; nobody writes to them.
    """

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> "Examples":
        """Copy the records at ``indices``, in that order."""
        return Examples(self.inputs[indices], self.labels[indices])


@dataclass(frozen=True)
class Dataset:
    """A classification task: training and test records and the public constants that normalise them.

    ``mean`` and ``std``: one float per channel, in units of 1 (an input byte b becomes ``(b / 255 - mean) / std``).
    They are published constants of the data set, never computed from what clients hold. ``note`` says what a reader
    must know about the copy at hand (a subset, a generated stand-in), and is shown wherever results are.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one record: (channels, height, width) or (features,)."""
        return self.train.inputs.shape[1:]


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains in one round: plain SGD with momentum.

    ``learning_rate`` is this round's, after any schedule; ``momentum`` in [0, 1); ``batch_size`` at least 1; the last
    batch of an epoch may be smaller.
    """

    learning_rate: float
    momentum: float
    weight_decay: float
    batch_size: int
    epochs: int

    def num_steps(self, num_examples: int) -> int:
        """Return the number of SGD steps a client with ``num_examples`` records takes."""
        return self.epochs * -(-num_examples // self.batch_size)


@dataclass(frozen=True)
class LocalTask:
    """What one client is asked to do in one round, with all it may look at."""

    server_round: int
    client: int
    num_clients: int
    num_examples: int
    settings: LocalSettings
    params: Params
    broadcast: Payloads = field(default_factory=dict)
    state: Payloads = field(default_factory=dict)
    pool: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Mix:
    """A loss that mixes each batch with one averaged record of the pool (FedMix, NaiveMix).

    ``inputs``: (pool size, *input shape), normalised; ``labels``: (pool size, classes), class proportions.
    ``linearise`` chooses FedMix's first-order expansion over NaiveMix's plain interpolation.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weight: float
    linearise: bool

    def __post_init__(self) -> None:
        """Raise RunError where a record of the pool has no label, or a label no record."""
        if len(self.inputs) != len(self.labels):
            raise RunError(
                f"the mixing pool holds {len(self.inputs)} averaged records and {len(self.labels)} rows of class "
                "proportions: a client shared more of one than of the other"
            )


@dataclass(frozen=True)
class Batch:
    """What a loss term may look at: one SGD step of one client, with n records.

    ``inputs``: (n, *input shape), normalised; ``labels``: (n,); ``weights``: (n,), each record's part in a mean over
    the batch. They add up to 1, and are 0 for the records that fill a smaller batch up where clients are stacked.
    ``logits``: (n, classes), what the model in training makes of the records; ``params``: that model, to be
    differentiated; ``anchor``: the model that the client received; ``data``: what the term brought along.
    ``logits_of(params, inputs)``: what the same architecture makes of records under other parameters.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    params: Params
    anchor: Params
    data: Params
    logits_of: Callable[[Params, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LossTerm:
    """An algorithm's own addition to the loss: ``function(batch)`` joins the cross-entropy (or ``mix``).

    ``function``: made of differentiable torch operations, without a choice that depends on numbers in tensors, as many
    clients go through it at once; the same object for all clients, such as a function of a module or a method of the
    algorithm. It returns one number per record, (n,), whose mean counts, or one number, (), that counts as it is.
    ``data``: this client's tensors for it, each of the same shape for all clients.
    """

    function: Callable[[Batch], torch.Tensor]
    data: Params = field(default_factory=dict)


@dataclass(frozen=True)
class LocalPlan:
    """What an algorithm adds to local SGD, as data, so that one definition serves one client or a stack of them.

    gradient <- gradient + ``gradient_offset`` + ``proximal_mu`` * (w - anchor), before weight decay and momentum;
    the anchor is the model the client received. ``momentum_buffers`` starts the optimiser warm; ``mix`` is the loss,
    and ``loss_term`` is added to it. A trainer that does not know a field that is in use hands the client on.
    """

    gradient_offset: Params | None = None
    proximal_mu: float = 0.0
    momentum_buffers: Params | None = None
    mix: Mix | None = None
    loss_term: LossTerm | None = None


def fields_in_use(values: LocalPlan | LocalSettings) -> frozenset[str]:
    """Return the names of the fields that differ from their defaults, and of those that have none."""
    return frozenset(part.name for part in fields(values) if not _is_default(getattr(values, part.name), part))


def _is_default(value: Any, part: Any) -> bool:
    default = part.default if part.default_factory is MISSING else part.default_factory()
    return value is default or (value == default) is True  # a tensor compared with a number is a tensor


@dataclass(frozen=True)
class Trained:
    """What local training hands back: the new model, the optimiser's buffers, the steps taken, the mean training loss.

    ``loss`` is None where no step was taken (an empty shard).
    """

    params: Params
    momentum_buffers: Params
    num_steps: int
    loss: float | None


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends (``payloads``) and what stays with it for its next round (``state``).

    ``num_examples`` is its weight in the mean, zero for an empty shard.
    """

    payloads: Payloads
    num_examples: int
    loss: float | None = None
    state: Payloads = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One client's update as the server received it."""

    client: int
    payloads: Payloads
    num_examples: int
    loss: float | None


@dataclass(frozen=True)
class Cohort:
    """A round's replies, sorted by client, with the public numbers of the round.

    ``expected_size`` is what the sampler plans for (fixed size, or sampling rate times population), not who replied.
    """

    server_round: int
    replies: tuple[Reply, ...]
    num_clients: int
    expected_size: float


@dataclass(frozen=True)
class Aggregate:
    """All that the server half of an algorithm sees of a round: means over clients.

    ``participation`` is the share of the population behind the mean (|S|/K, or its public expectation under privacy).
    """

    payloads: Payloads
    participation: float


@dataclass(frozen=True)
class ServerState:
    """The global model, what travels with it to clients (``broadcast``) and what stays on the server (``memory``)."""

    params: Params
    broadcast: Payloads = field(default_factory=dict)
    memory: Payloads = field(default_factory=dict)
