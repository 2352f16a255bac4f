"""The values of a run: frozen, and independent of algorithms, engines and libraries above torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

if TYPE_CHECKING:
    Params: TypeAlias = Mapping[str, torch.Tensor]
else:
    Params = Mapping  # settings are read before torch is there
"""Named float32 tensors: the trainable parameters of a model, or an update or control variate of the same shapes.

They are read-only, as many places in one process share them; many are views of one vector (fl_sim.params.FlatParams).
"""

Payloads: TypeAlias = dict[str, Params]
"""Named groups of tensors, such as ``{"delta": ..., "control_delta": ...}``."""

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""Precision of products."""

Optimizer: TypeAlias = Literal["sgd", "adam", "adamw"]
"""Optimiser of local training, by the formulas of torch.optim."""

BatchNorm: TypeAlias = Literal["none", "average", "personal"]
"""Treatment of BatchNorm layers: refused; running statistics averaged; layers personal to each client."""


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images; none by default.

    ``crop``: an image is padded by as many pixels of ``black`` on every side, and a window of its own size is cut out
    anywhere. ``flip``: it is mirrored left to right as often as not. ``black``: one number per channel, what a byte of
    0 becomes by normalisation. ``reflect``: it is padded by its own pixels instead, mirrored at its edges, which are
    not repeated.
    """

    crop: int = 0
    flip: bool = False
    black: tuple[float, ...] = ()
    reflect: bool = False

    @property
    def moves(self) -> bool:
        """True if any image is changed."""
        return bool(self.crop or self.flip)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return random offsets of the window, down and right, and mirroring, for ``count`` images.

        (count, 3): the first two from 0 to 2 ``crop``, the third 0 or 1. Without augmentation nothing is drawn from
        ``generator``.
        """
        if not self.moves:
            return np.zeros((count, 3), np.int64)
        places = 2 * self.crop + 1
        return generator.integers(0, [places, places, 1 + int(self.flip)], size=(count, 3))


@dataclass(frozen=True)
class Examples:
    """Labelled records.

    ``inputs``: uint8 images of shape (records, channels, height, width) in 0..255, or float32 features of shape
    (records, features). ``labels``: int64 of shape (records,), values in 0..num_classes-1. ``groups``: int64 of shape
    (records,), where each record comes from (its writer, hospital or device), if that is known. Arrays may be read-only
    memory maps; nobody writes to them.
    """

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """Return all arrays that there are, in the order of a digest of them."""
        return (self.inputs, self.labels) if self.groups is None else (self.inputs, self.labels, self.groups)

    def take(self, indices: NDArray[np.int64]) -> Examples:
        """Copy the records at ``indices``, in that order."""
        groups = None if self.groups is None else self.groups[indices]
        return Examples(self.inputs[indices], self.labels[indices], groups)


@dataclass(frozen=True)
class Column:
    """The public facts of one column of a table, which is one feature of a record or several neighbouring ones.

    A number is one feature: it may be rounded to ``values``, ascending and in the units of the records. A category is
    one feature for each of its ``categories``, of which at most one is 1: none for an unlisted category.
    """

    name: str
    values: tuple[float, ...] = ()
    categories: int = 0

    @property
    def width(self) -> int:
        """The number of features."""
        return self.categories or 1

    @property
    def cells(self) -> int:
        """The number of different entries: for a category one more than are listed."""
        return len(self.values) or self.categories + 1


@dataclass(frozen=True)
class Dataset:
    """A classification task: training and test records and the public constants that normalise them.

    ``name``: as in ``data=name``. ``train`` is dealt to clients, ``test`` is what models are measured on.
    ``num_classes``: labels are 0 to one less. ``mean`` and ``std``: one float per channel, in units of 1 (an input byte
    b becomes ``(b / 255 - mean) / std``). They are published constants of the data set, never computed from what
    clients hold. ``note`` says what a reader must know about the copy at hand (a subset, a generated stand-in), and is
    shown wherever results are. ``counted``: what was counted or noticed among the user's own records, such as those
    left out; shown only where nobody is promised privacy. ``columns``: of a table, in order, if they are known; public
    as the constants are.
    ``classes``: what classes are called, and ``names``: what each number of a record is called, if that is known.
    ``shown``: what a file was found to hold, (what, how it is read) line by line. ``read_off``: the facts that were
    read off the records and show in results or in the model's shape, each with the setting that makes it public, if
    there is one; every privacy statement lists them. ``inferred``: what a reader took a file to be without being told,
    such as the decimal sign of its numbers, a line each. ``vocabulary``: above 0, records are sequences of whole
    numbers below it (fl_sim.models). ``validation``: records that no client holds and that are not for testing, for
    ``evaluate.validation=given``. ``image_shape``: of the images that records were before features took their place;
    empty for all others.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""
    columns: tuple[Column, ...] = ()
    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()
    read_off: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    vocabulary: int = 0
    validation: Examples | None = None
    image_shape: tuple[int, ...] = ()
    counted: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record: (channels, height, width) or (features,)."""
        return self.train.inputs.shape[1:]


FINER: Final = {"cifar100-coarse": "cifar100"}
"""{data set: the one with the same records in more classes}."""

_SETTINGS: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")
"""The separator of a data set's place and its reading options."""


def called(data: str) -> str:
    """Return the name of the records of ``data`` in bills, without classes and reading options."""
    return _SETTINGS.split(records_of(data))[0]


def records_of(data: str) -> str:
    """Return the data set with the same records, for most ``data`` itself. Releases about both add up."""
    return FINER.get(data, data)


@dataclass(frozen=True)
class LocalSettings:
    """The settings of one client's training in one round: SGD with momentum, or another ``optimizer``.

    Adam's and AdamW's running means start anew in every round; their betas are 0.9 and 0.999, their epsilon 1e-8.
    ``learning_rate`` is this round's, after any schedule; ``momentum`` in [0, 1); ``batch_size`` at least 1; the
    last batch of an epoch may be smaller. Of the last of ``epochs`` there may be a part. ``steps``, where it is not
    0, says how many steps there are whatever ``epochs`` is; records that are used up are shuffled again.
    ``label_smoothing``: what part of every label is spread evenly over all classes.
    ``clip_norm``: the most that the L2 norm of a step's gradient, over all parameters, may be (0: as long as it
    is). What is clipped is the gradient with all that the plan adds to it, before weight decay and momentum. So a
    correction that cancels the gradient at the optimum still cancels it, as in FedDyn's program, which puts the
    correction into the loss; that program adds alpha w as weight decay, and so does not clip it.
    ``augment``: how images are moved each time that they are trained on.
    """

    learning_rate: float
    momentum: float
    weight_decay: float
    batch_size: int
    epochs: float
    clip_norm: float = 0.0
    steps: int = 0
    label_smoothing: float = 0.0
    optimizer: Optimizer = "sgd"
    augment: Augment = Augment()

    def num_steps(self, num_examples: int) -> int:
        """Return the number of steps a client with ``num_examples`` records takes; a part of a step is a whole one."""
        if self.steps and num_examples:
            return self.steps
        if self.epochs % 1 == 0:  # the usual case, asked for several times a client and round
            return int(self.epochs) * self.num_batches(num_examples)
        # As the decimal that it is written as: 0.7 * 10 is more than 7 in binary, and would be rounded up to 8.
        return math.ceil(Fraction(str(self.epochs)) * self.num_batches(num_examples))

    def num_batches(self, num_examples: int) -> int:
        """Return the number of batches in an epoch."""
        return -(-num_examples // self.batch_size)

    def num_passes(self, num_examples: int) -> int:
        """Return the number of shuffles: one for each epoch that is begun."""
        return -(-self.num_steps(num_examples) // max(1, self.num_batches(num_examples)))


@dataclass(frozen=True)
class LocalTask:
    """The request to one client in one round, with everything that its algorithm may read.

    ``server_round``: from 1. ``client``: its number among ``num_clients``, from 0. ``settings``: of its training.
    ``params``: the received model. ``broadcast``: further tensors from the server. ``state``: this client's state after
    its last round. ``pool``: the tensors that all clients shared before the first round.
    ``class_counts``: the number of its ``num_examples`` records, synthetic ones included, of each class, which no one
    else knows. ``statistics``: the received running statistics of BatchNorm layers; empty ones are reset.
    """

    server_round: int
    client: int
    num_clients: int
    num_examples: int
    settings: LocalSettings
    params: Params
    broadcast: Payloads = field(default_factory=dict)
    state: Payloads = field(default_factory=dict)
    pool: Mapping[str, torch.Tensor] = field(default_factory=dict)
    class_counts: tuple[int, ...] = ()
    statistics: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The result of local training.

    ``params``: the new model. ``momentum_buffers``: the optimiser's. ``num_steps``: the steps taken. ``loss``: the mean
    over them, None without a step (an empty shard). ``feature_sums``: (C, d), the sums of the inputs of the new model's
    last linear layer over the client's records of each class, where the plan asks for them.
    ``statistics``: the running statistics of the new model's BatchNorm layers.
    """

    params: Params
    momentum_buffers: Params
    num_steps: int
    loss: float | None
    feature_sums: torch.Tensor | None = None
    statistics: Params = field(default_factory=dict)


class Size(NamedTuple):
    """The size of a packed group: float32 ``numbers``, and bytes of ``bits``."""

    numbers: int
    bits: int = 0


@dataclass(frozen=True)
class Packed:
    """A group of tensors, packed for the wire. ``numbers``: float32, (numbers,). ``bits``: uint8, (bytes,)."""

    numbers: torch.Tensor
    bits: NDArray[np.uint8]

    @staticmethod
    def of(numbers: torch.Tensor | NDArray[np.float32], bits: NDArray[np.uint8] | None = None) -> Packed:
        """Return a packed group of float32 ``numbers`` and ``bits``, if there are any."""
        kept = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
        return Packed(kept, np.zeros(0, np.uint8) if bits is None else bits)

    @staticmethod
    def blank(size: Size) -> Packed:
        """Return a packed group of zeros."""
        return Packed(torch.zeros(size.numbers), np.zeros(size.bits, np.uint8))


@dataclass(frozen=True)
class ClientUpdate:
    """The payload of a client (``payloads``), and its state until its next round (``state``).

    ``num_examples`` is its weight in the mean, zero for an empty shard. ``loss``: the mean training loss, if any.
    ``packed``: groups that travel packed in place of whole.
    """

    payloads: Payloads
    num_examples: int
    loss: float | None = None
    state: Payloads = field(default_factory=dict)
    packed: Mapping[str, Packed] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One client's update as the server received it. ``packed``: groups that are still packed."""

    client: int
    payloads: Payloads
    num_examples: int
    loss: float | None
    packed: Mapping[str, Packed] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """A round's replies, sorted by client, with the public numbers of the round.

    ``expected_size``: the size that the sampler plans (fixed size, or sampling rate times population), not the number
    of replies. ``num_holders``: the number of the ``num_clients`` with records to train on; None: all.
    """

    server_round: int
    replies: tuple[Reply, ...]
    num_clients: int
    expected_size: float
    num_holders: int | None = None

    def participation(self, num_trained: int) -> float:
        """Return |S|/K for ``num_trained`` clients: their share of those that can ever take part."""
        return num_trained / (self.num_clients if self.num_holders is None else self.num_holders)


@dataclass(frozen=True)
class Traffic:
    """Bytes of arrays to clients (``down``) and from them (``up``)."""

    down: int
    up: int

    def __mul__(self, clients: int) -> Traffic:
        """Return the traffic of ``clients`` clients."""
        return Traffic(self.down * clients, self.up * clients)

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum of both."""
        return Traffic(self.down + other.down, self.up + other.up)


@dataclass(frozen=True)
class Aggregate:
    """The means over clients: all that the server half of an algorithm sees of a round.

    ``payloads``: the means of the clients' payloads, by group. ``participation``: the share of the population behind
    the means, |S|/K, where K are the clients with records. Under privacy the clients with records are secret: it is the
    public expectation, and K are all clients. ``without_effect``: a remark where the aggregator returned the plain mean
    of these updates, else empty.
    """

    payloads: Payloads
    participation: float
    without_effect: str = ""


@dataclass(frozen=True)
class ServerState:
    """The global model (``params``), further tensors for clients (``broadcast``) and for the server (``memory``).

    ``layers``: running statistics of BatchNorm layers, and their parameters where they are personal: the clients' means
    after the last round (fl_sim.params). Algorithms neither see nor change them.
    """

    params: Params
    broadcast: Payloads = field(default_factory=dict)
    memory: Payloads = field(default_factory=dict)
    layers: Params = field(default_factory=dict)

    @property
    def model(self) -> Params:
        """The tensors for evaluation: parameters, and the layers in place of theirs if there are any."""
        return {**self.params, **self.layers} if self.layers else self.params
