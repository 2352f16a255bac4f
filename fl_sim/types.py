"""The basic data classes of a run, such as records, tasks and updates. They depend on no algorithm or engine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

if TYPE_CHECKING:
    Params: TypeAlias = Mapping[str, torch.Tensor]
else:
    # At run time the type does not name torch.Tensor, because this module must not import torch (takes seconds).
    Params = Mapping
"""Named float32 tensors: the trainable parameters of a model, or an update or control variate of the same shapes.

The tensors are read-only, because many objects of one process share them. Many are views of one vector
(fl_sim.params.FlatParams).
"""

Payloads: TypeAlias = dict[str, Params]
"""Named groups of tensors, such as ``{"delta": ..., "control_delta": ...}``."""

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
"""Numerical precision of matrix products and convolutions."""

Optimizer: TypeAlias = Literal["sgd", "adam", "adamw"]
"""Optimiser of local training, with the formulas of torch.optim."""

BatchNorm: TypeAlias = Literal["none", "average", "personal"]
"""The treatment of BatchNorm layers. "none" refuses such layers; "average" averages their statistics over clients.

With "personal", each client trains with its own BatchNorm layers, which no mean replaces (FedBN).
"""


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images; none by default.

    ``crop``: the number of pixels that are added on every side of an image; a random window of the original size is
    then cut out. The added pixels have the value ``black``: one number per channel, the normalised value of the byte 0.
    With ``reflect``, the added pixels are a reflection of the image at its edges; the edge itself is not repeated.
    ``flip``: the image is mirrored left to right with probability 1/2.
    """

    crop: int = 0
    flip: bool = False
    black: tuple[float, ...] = ()
    reflect: bool = False

    @property
    def moves(self) -> bool:
        """True if this augmentation changes images."""
        return bool(self.crop or self.flip)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return random window offsets (down, right) and mirroring for ``count`` images, shape (count, 3).

        Offsets are from 0 to 2 ``crop``; mirroring is 0 or 1. Without augmentation nothing is drawn from ``generator``.
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
    (records,), the ID of each record's source (its writer, hospital or device), if the sources are known. Arrays may be
    read-only memory maps, so no code may write to them.
    """

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """Return inputs, labels and, if known, groups. Digests of the records are computed in this order."""
        return (self.inputs, self.labels) if self.groups is None else (self.inputs, self.labels, self.groups)

    def take(self, indices: NDArray[np.int64]) -> Examples:
        """Return a copy of the records at ``indices``, in that order."""
        groups = None if self.groups is None else self.groups[indices]
        return Examples(self.inputs[indices], self.labels[indices], groups)


@dataclass(frozen=True)
class Column:
    """The public facts about one column of a table, which is one feature of a record or several neighbouring features.

    A column of numbers is one feature. The numbers may be rounded to ``values`` (in ascending order, in the units of
    the records). A column of categories has one feature for each of its ``categories``. At most one of
    these features is 1; for an unlisted category, all of them are 0.
    """

    name: str
    values: tuple[float, ...] = ()
    categories: int = 0

    @property
    def width(self) -> int:
        """The number of features (numbers in a record) of this column."""
        return self.categories or 1

    @property
    def cells(self) -> int:
        """The number of different values of this column. All unlisted categories together count as one value."""
        return len(self.values) or self.categories + 1


@dataclass(frozen=True)
class Dataset:
    """A classification task: training and test records, and the public constants that normalise them.

    ``name``: the value of the setting ``data``. ``train``: the records that are assigned to clients. ``test``: the
    records on which models are measured. ``num_classes``: labels are 0 to ``num_classes`` - 1. ``mean`` and ``std``:
    one float per channel; an input byte b becomes ``(b / 255 - mean) / std``. ``mean`` and ``std`` are published
    constants of the data set, never computed from the clients' records. ``note``: important facts about these
    records (a subset, generated stand-in data), shown with all results. ``counted``: private facts about the user's
    own records, such as the number of ignored records; shown only if the run promises no privacy. ``columns``: the
    columns of a table, in order, if the columns are known. The columns must be public, like ``mean`` and ``std``.
    ``classes``: the names of the classes, if known. ``names``: the names of a record's features, if known. ``shown``:
    pairs (column or part of a file, its use in the data set), for display to the user. ``read_off``: facts that were
    computed from the records, and that results or the model's shape reveal. The text of a fact
    may also name a setting that makes the fact public. Every privacy statement lists these facts. ``inferred``:
    assumptions about a file that no setting specifies, such as its decimal separator; one line each. ``vocabulary``: if
    above 0, records are sequences of tokens, whole numbers below ``vocabulary``. ``validation``: validation records
    that are part of the data set, for ``evaluate.validation=given``; they belong to no client. ``image_shape``: the
    shape of the original images if features have replaced the images; else empty. ``sources``: the names of the sources
    of records, if known. The source with the ID i (in ``Examples.groups``) is ``sources[i]``. ``text_of``: if records
    are texts, a function from one record (a row of tokens) to its text.
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
    sources: tuple[str, ...] = ()
    text_of: Callable[[NDArray[np.float32]], str] | None = None

    @property
    def has_labels(self) -> bool:
        """True if records have labels. Texts without labels, for next-token prediction, are all of one class."""
        return self.num_classes > 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record: (channels, height, width) or (features,)."""
        return self.train.inputs.shape[1:]


FINER: Final = {"cifar100-coarse": "cifar100"}
"""{data set: the data set with the same records in more classes}."""

_SETTINGS: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")
"""The pattern of the colon between a data set's location and its reading options, as in "table:FILE:label=COLUMN"."""


def called(data: str) -> str:
    """Return the name by which privacy ledgers identify the records of ``data``.

    For table:FILE:label=COLUMN the name is table:FILE.
    """
    return _SETTINGS.split(records_of(data))[0]


def records_of(data: str) -> str:
    """Return the data set that has the same records with finer classes, such as cifar100 for cifar100-coarse.

    Any other ``data`` is returned unchanged. Privacy costs add up over all data sets with the same records.
    """
    return FINER.get(data, data)


@dataclass(frozen=True)
class LocalSettings:
    """The settings of one client's training in one round: SGD with momentum, or another ``optimizer``.

    Adam and AdamW start with new running means in every round; their betas are 0.9 and 0.999, their epsilon is 1e-8.
    ``learning_rate``: the learning rate of this round, after any schedule. ``momentum``: in [0, 1). ``batch_size``: at
    least 1; the last batch of an epoch may be smaller. ``epochs``: the number of epochs; 1.5 means that only half of
    the second epoch is trained. ``steps``: if not 0, the number of steps, in place of ``epochs``. When all records have
    been used, they are shuffled again. ``label_smoothing``: the share of every label that is distributed evenly over
    all classes. ``clip_norm``: the maximum L2 norm of the gradient of a step, all parameters together (0: no maximum).
    ``augment``: the random augmentation of images, drawn anew for each use of a record.

    The gradient is clipped after the local plan's corrections are added, and before weight decay and momentum. So a
    correction that cancels the gradient at the optimum still cancels it after clipping. FedDyn's released code has the
    same order, because its correction is part of the loss. (Only one term is not clipped there: alpha w for the
    parameters w, which that code adds as weight decay.)
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
        """Return the number of steps of a client with ``num_examples`` records, rounded up to a whole number."""
        if self.steps and num_examples:
            return self.steps
        if self.epochs % 1 == 0:  # the fast case of whole epochs, because Fraction is slow
            return int(self.epochs) * self.num_batches(num_examples)
        # Fraction is exact for decimal numbers. In floats, 1.1 * 10 is above 11 and would be rounded up to 12.
        return math.ceil(Fraction(str(self.epochs)) * self.num_batches(num_examples))

    def num_batches(self, num_examples: int) -> int:
        """Return the number of batches in one epoch over ``num_examples`` records."""
        return -(-num_examples // self.batch_size)

    def num_passes(self, num_examples: int) -> int:
        """Return the number of times that the records are shuffled: once for each epoch, also for a partial epoch."""
        return -(-self.num_steps(num_examples) // max(1, self.num_batches(num_examples)))


@dataclass(frozen=True)
class LocalTask:
    """The request to one client in one round: all data that the client part of an algorithm may read.

    ``server_round``: from 1. ``client``: the client ID, from 0 to ``num_clients`` - 1. ``settings``: the settings of
    the client's training. ``params``: the received model. ``broadcast``: further tensors from the server. ``state``:
    the client state after this client's last round. ``pool``: the tensors that all clients shared before the first
    round. ``class_counts``: the number of records of each class among the client's ``num_examples`` records, synthetic
    records included. Only the client knows these numbers. ``initial``: the run's initial model, which every client
    builds from the seed. ``statistics``: the received running statistics of BatchNorm layers. If ``statistics`` is
    empty, the client resets its running statistics.
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
    initial: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The result of local training.

    ``params``: the new model. ``momentum_buffers``: the optimiser's momentum buffers. ``num_steps``: the number of
    steps. ``loss``: the mean loss of all steps, None without a step (an empty shard). ``feature_sums``: shape (C, d)
    for C classes and d features, given if the plan asks for it. Features are the inputs of the new model's last linear
    layer. Row c is the sum of the features of the client's records of class c. ``statistics``: the running
    statistics of the new model's BatchNorm layers. ``personal``: the new values of the parameters that stay with the
    client; in an algorithm's ``finish``, ``params`` has only the sent parameters. ``further``: the results of the
    algorithm's further models, by name (fl_sim.local_plan.FurtherModels), or further tensors from a course:
    step-by-step local training (fl_sim.training.courses). ``gradient_sum``: the sum of the clipped gradients of
    all records in float64, without noise, if the plan asks for this sum alone (``PrivateSteps.sums_only``).
    """

    params: Params
    momentum_buffers: Params
    num_steps: int
    loss: float | None
    feature_sums: torch.Tensor | None = None
    statistics: Params = field(default_factory=dict)
    further: Mapping[str, Trained] = field(default_factory=dict)
    personal: Params = field(default_factory=dict)
    gradient_sum: Params | None = None

    def followed_by(self, later: Trained) -> Trained:
        """Return the joint result of two successive trainings: this training, and ``later``, its continuation."""
        losses = [(one.loss, one.num_steps) for one in (self, later) if one.loss is not None]
        steps = self.num_steps + later.num_steps
        loss = sum(loss * count for loss, count in losses) / sum(count for _, count in losses) if losses else None
        return replace(later, num_steps=steps, loss=loss)


class Size(NamedTuple):
    """The size of a compressed group of tensors (``Packed``).

    ``numbers``: the number of float32 numbers. ``bits``: the number of additional bytes.
    """

    numbers: int
    bits: int = 0


@dataclass(frozen=True)
class Packed:
    """A compressed group of an update's tensors: float32 ``numbers``, shape (n,), and bytes ``bits``, shape (m,)."""

    numbers: torch.Tensor
    bits: NDArray[np.uint8]

    @staticmethod
    def of(numbers: torch.Tensor | NDArray[np.float32], bits: NDArray[np.uint8] | None = None) -> Packed:
        """Return the compressed group with these float32 ``numbers`` and, if given, these bytes ``bits``."""
        kept = numbers if isinstance(numbers, torch.Tensor) else torch.from_numpy(numbers)
        return Packed(kept, np.zeros(0, np.uint8) if bits is None else bits)

    @staticmethod
    def blank(size: Size) -> Packed:
        """Return a compressed group of ``size.numbers`` zeros and ``size.bits`` zero bytes."""
        return Packed(torch.zeros(size.numbers), np.zeros(size.bits, np.uint8))


@dataclass(frozen=True)
class ClientUpdate:
    """The update of a client: its payload (``payloads``), and the client state for its next round (``state``).

    ``num_examples``: the client's weight in the mean, zero for an empty shard. ``loss``: the mean training loss; None
    without a step. ``packed``: the groups of tensors that are sent compressed. These groups are not in ``payloads``.
    """

    payloads: Payloads
    num_examples: int
    loss: float | None = None
    state: Payloads = field(default_factory=dict)
    packed: Mapping[str, Packed] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """One client's update at the server. ``packed``: the groups of tensors that are still compressed."""

    client: int
    payloads: Payloads
    num_examples: int
    loss: float | None
    packed: Mapping[str, Packed] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """The clients' updates of one round, sorted by client, with the public numbers of the round.

    ``expected_size``: the cohort size that the sampler plans (a fixed size, or sampling rate times population), not the
    number of replies. ``num_holders``: the number of clients with records to train on, among all ``num_clients``
    clients; None means all clients. ``seed``: the run's seed. ``memory``: the tensors that the aggregator stored after
    the last round. ``own``: the payloads of an update that the server itself trained; some aggregators compare the
    clients' updates with this update.
    """

    server_round: int
    replies: tuple[Reply, ...]
    num_clients: int
    expected_size: float
    num_holders: int | None = None
    seed: int = 0
    memory: Params = field(default_factory=dict)
    own: Payloads = field(default_factory=dict)

    def participation(self, num_trained: int) -> float:
        """Return the share of the clients with records that have trained: ``num_trained`` / ``num_holders``."""
        return num_trained / (self.num_clients if self.num_holders is None else self.num_holders)


@dataclass(frozen=True)
class Traffic:
    """The number of bytes of all arrays sent to clients (``down``) and received from clients (``up``)."""

    down: int
    up: int

    def __mul__(self, clients: int) -> Traffic:
        return Traffic(self.down * clients, self.up * clients)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.down + other.down, self.up + other.up)


class Load(NamedTuple):
    """The load of one client in a round.

    ``traffic``: the bytes that the client receives and sends. ``work``: the client's computation per training record,
    relative to the whole model. It is below 1 only for clients with smaller models.
    """

    traffic: Traffic
    work: float = 1.0


@dataclass(frozen=True)
class Aggregate:
    """The means over a round's clients. The server part of an algorithm receives no other data of a round.

    ``payloads``: the means of the clients' payloads, by group. ``participation``: the number of clients whose updates
    are in the means, divided by the number of clients with records. Under Global DP the set of clients with records is
    secret. In this case, ``participation`` is the public expected cohort size, divided by the number of all clients.
    ``without_effect``: a warning if the aggregator had no effect, because its result is the plain mean of the updates;
    else empty. ``memory``: the tensors that the aggregator stores for the next round.
    """

    payloads: Payloads
    participation: float
    without_effect: str = ""
    memory: Params = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    """The server state: the global model (``params``), and tensors for clients (``broadcast``) and server (``memory``).

    ``layers``: the means, over clients, of the running statistics of BatchNorm layers after the last round. If the
    clients' BatchNorm layers are personal, ``layers`` also contains the means of the parameters of these layers.
    Algorithms neither read nor change ``layers``.
    """

    params: Params
    broadcast: Payloads = field(default_factory=dict)
    memory: Payloads = field(default_factory=dict)
    layers: Params = field(default_factory=dict)

    @property
    def model(self) -> Params:
        """The tensors for evaluation: ``params`` and ``layers``. If a tensor is in both, ``layers`` has its value."""
        return {**self.params, **self.layers} if self.layers else self.params
