"""Partitions for groups of clients with different inputs or labels: client i is in group i mod k.

All partitions of this module except ``Domain`` form such groups, and change the records of clients by group. ``Domain``
uses the groups that the data set has: the sources of its records.

Such groups serve to test clustered and personalised methods (Sattler et al. 2021, Ghosh et al. 2020). The group of a
client is public. The inner partition ``over`` assigns records to clients. The outer partition (of this module) then
changes a client's training records, validation records and own test records. The global test set is not changed. Group
0 keeps its records unchanged, so the global test set has the inputs and labels of group 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from partitions.assign import STRICT, check_sizes
from partitions.feature_skew import without_sources
from partitions.moving import ByRound
from partitions.quantity import Iid
from partitions.scheme import (
    ByGroup,
    FeatureSkew,
    ImpossibleSplit,
    Indices,
    Parts,
    RecordSkew,
    Scheme,
    Stored,
    WithinSources,
    uses_labels,
)

COLOURS: Final = {1: "grey", 3: "colour"}
"""{number of channels: name of this kind of image}, for the images that ``Colour`` supports."""


_IID: Final = Iid()


class AnyPartition:
    """Type annotation for a field whose value is a partition: fl-sim parses the field like the setting ``partition``.

    pydantic calls the method of this class. fl-sim requires pydantic; the package ``partitions`` requires only numpy.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the pydantic schema of the setting ``partition``."""
        one_of = import_module("fl_sim.one_of").OneOf("partition", group="fl_sim.partition")
        return one_of.__get_pydantic_core_schema__(source, handler)


@dataclass(frozen=True)
class OverSplit:
    """The base class of partitions that change the records of groups of clients.

    ``k``: the number of groups, at least 2; client i is in group i mod ``k``. ``over``: the partition that assigns the
    records to clients, such as ``dirichlet:0.3``.
    """

    k: int = 2
    over: Annotated[Scheme, AnyPartition()] = _IID

    __pydantic_config__ = STRICT
    needs_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ImpossibleSplit(
                f"{self._name}: k={self.k} groups: take at least 2, or use the partition in `over` directly"
            )
        check_inner(self._name, self.over)

    @property
    def _name(self) -> str:
        return str(getattr(self, "kind", type(self).__name__))

    @property
    def keeps_sources(self) -> bool:
        """True if, with partition ``over``, each client has records of only one source (see ``WithinSources``)."""
        return isinstance(self.over, WithinSources) and self.over.keeps_sources

    @property
    def uses_labels(self) -> bool:
        """True if the inner partition ``over`` uses labels (see ``ByLabels``)."""
        return uses_labels(self.over)

    def group_of(self, client: int) -> int:
        """Return the group of ``client``. Groups and clients are numbered from 0."""
        return client % self.k

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client, as assigned by the inner partition ``over``.

        Raises ImpossibleSplit for fewer clients than groups. A single client is also allowed. This client is in group
        0, so the partition does not change its records.
        """
        self._check_groups(num_partitions)
        return self.over.split(labels, num_partitions, rng)

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the record indices of every client, as assigned by the inner partition ``over``.

        ``groups``: the source ID of each record, used only if ``over`` uses sources (``ByGroup``).
        """
        self._check_groups(num_partitions)
        if isinstance(self.over, ByGroup):
            return self.over.split_groups(labels, groups, num_partitions, rng)
        return self.over.split(labels, num_partitions, rng)

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise ImpossibleSplit for records that this partition cannot change (``RecordSkew.check_records``)."""
        del num_classes
        if self.needs_images and len(shape) != 3:
            raise ImpossibleSplit(
                f"{self._name} changes images, and the records have shape {shape}: take images (and leave out the "
                "setting features), or permute-labels, which changes labels only"
            )

    def held_by(
        self, client: int, inputs: Stored, labels: Indices, num_classes: int, rng: Generator
    ) -> tuple[Stored, Indices]:
        """Return the inputs of ``client``, changed by the rule of the client's group, and unchanged ``labels``."""
        del num_classes, rng
        return self.seen_in(self.group_of(client), inputs), labels

    def seen_in(self, number: int, inputs: Stored) -> Stored:
        """Return ``inputs``, changed by the rule of group ``number``.

        ``inputs``: images of bytes, shape (records, channels, height, width).
        """
        raise NotImplementedError

    def _check_groups(self, num_partitions: int) -> None:
        if 1 < num_partitions < self.k:
            raise ImpossibleSplit(
                f"{self._name}:{self.k} has {self.k} groups for {num_partitions} clients; use at least {self.k} "
                "clients or a smaller k"
            )


@dataclass(frozen=True)
class Rotate(OverSplit):
    """The images of group g of ``k`` are turned by g / ``k`` of a full turn, counter-clockwise (IFCA's rotated MNIST).

    There are 4 groups (quarter turns) or 2 (half turns). Images that are not square need 2 groups, because a quarter
    turn changes their shape.
    """

    kind: Literal["rotate"] = field(default="rotate", kw_only=True)
    k: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k not in (2, 4):
            raise ImpossibleSplit(
                f"rotate: k={self.k} groups: take 4 (quarter turns) or 2 (half turns); other angles blur images"
            )

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``rotate:4``."""
        return f"rotate:{self.k}"

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise ImpossibleSplit unless records are images. For quarter turns the images must be square."""
        super().check_records(shape, num_classes)
        if self.k == 4 and shape[1] != shape[2]:
            raise ImpossibleSplit(
                f"rotate:4 turns images by quarter turns, and these have {shape[1]} x {shape[2]} pixels: take rotate:2"
            )

    def seen_in(self, number: int, inputs: Stored) -> Stored:
        """Return the images turned by ``number`` / ``k`` of a full turn."""
        return np.ascontiguousarray(np.rot90(inputs, number * (4 // self.k), axes=(-2, -1)))


@dataclass(frozen=True)
class Invert(OverSplit):
    """The images of the last group are negatives: a pixel p becomes 255 - p. All other groups keep their images.

    So one of every ``k`` clients has negatives: with ``invert:2``, half of the clients.
    """

    kind: Literal["invert"] = field(default="invert", kw_only=True)
    k: int = 2

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``invert:2``."""
        return f"invert:{self.k}"

    def seen_in(self, number: int, inputs: Stored) -> Stored:
        """Return the negatives of the images for the last group, and the images themselves for all others."""
        return np.bitwise_not(inputs) if number == self.k - 1 else inputs  # bitwise: a byte p becomes 255 - p


@dataclass(frozen=True)
class Colour(OverSplit):
    """The images of each group except the first are changed as if by coloured light, which darkens some channels.

    Each channel is multiplied by a factor between 1/2 and 1, and rounded. In colour images, group g = 1, 2, ... has
    light of the hue (g - 1) / (``k`` - 1) on the colour circle, where 0 is red. Grey images have one channel and no
    hue: group g has the brightness 1 - g / (2 (``k`` - 1)), from 1 down to 1/2. The literature has no common
    definition; this definition is fl-sim's own.
    """

    kind: Literal["colour"] = field(default="colour", kw_only=True)
    k: int = 2

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``colour:3``."""
        return f"colour:{self.k}"

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise ImpossibleSplit unless the records are images with 1 or 3 channels."""
        super().check_records(shape, num_classes)
        if shape[0] not in COLOURS:
            raise ImpossibleSplit(
                f"colour needs images with 1 channel (grey) or 3 channels (red, green, blue), and these have "
                f"{shape[0]}: take rotate or invert"
            )

    def light(self, number: int, channels: int) -> NDArray[np.float64]:
        """Return the factors by which group ``number`` multiplies the channels, shape (channels,)."""
        if number == 0:
            return np.ones(channels)
        if channels == 1:
            return np.array([1 - number / (2 * (self.k - 1))])
        hue = (number - 1) / (self.k - 1)
        pure = np.clip(np.abs((6 * hue + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
        factors: NDArray[np.float64] = (1 + pure) / 2
        return factors

    def seen_in(self, number: int, inputs: Stored) -> Stored:
        """Return the images in the light of group ``number``."""
        factors = self.light(number, inputs.shape[1])
        tables = np.rint(np.arange(256) * factors[:, None]).astype(np.uint8)
        return np.stack([tables[channel][inputs[:, channel]] for channel in range(len(factors))], axis=1)


@dataclass(frozen=True)
class PermuteLabels(OverSplit):
    """A permutation of the classes changes the labels of each group except the first. All permutations differ.

    The inputs do not change, so the same input has different labels in different groups (Sattler et al. 2021). The seed
    of the partition determines the permutations. The number of groups is at most the number of permutations.
    """

    kind: Literal["permute-labels"] = field(default="permute-labels", kw_only=True)
    k: int = 2

    needs_images: ClassVar[bool] = False

    @property
    def uses_labels(self) -> bool:
        """Return True, because the labels of a client depend on its group (see ``ByLabels``)."""
        return True

    @property
    def title(self) -> str:
        """The short name of this partition in tables and plots, such as ``permute-labels:4``."""
        return f"permute-labels:{self.k}"

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise ImpossibleSplit if there are fewer permutations of the classes than groups."""
        del shape
        if math.factorial(min(num_classes, 20)) < self.k:
            raise ImpossibleSplit(
                f"permute-labels:{self.k} gives each group a different permutation of the classes, and {num_classes} "
                f"classes have only {math.factorial(num_classes)}: use a smaller k"
            )

    def permutations(self, num_classes: int, rng: Generator) -> Indices:
        """Return the new label of each class in each group, shape (``k``, ``num_classes``). All rows differ."""
        rows = {tuple(range(num_classes)): None}  # a dict ignores repeated rows, and preserves the order
        while len(rows) < self.k:
            rows[tuple(rng.permutation(num_classes).tolist())] = None
        return np.array(list(rows), dtype=np.int64)

    def held_by(
        self, client: int, inputs: Stored, labels: Indices, num_classes: int, rng: Generator
    ) -> tuple[Stored, Indices]:
        """Return ``inputs`` unchanged, and the labels after the permutation of the client's group."""
        permuted: Indices = self.permutations(num_classes, rng)[self.group_of(client)][labels]
        return inputs, permuted


@dataclass(frozen=True)
class Domain:
    """Each client has records of one domain, and the records of a domain are divided among its clients.

    A domain is a source of records, such as a hospital or a style of images (PACS, Li et al. 2017). The domains are
    sorted by their IDs. With D domains, client i has domain i mod D. ``over``: the partition that divides the records
    of each domain among the clients of this domain, such as ``dirichlet:0.3``.
    """

    kind: Literal["domain"] = field(default="domain", kw_only=True)
    over: Annotated[Scheme, AnyPartition()] = _IID

    title: ClassVar[str] = "domain"
    keeps_sources: ClassVar[bool] = True
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_inner("domain", self.over)
        if isinstance(self.over, ByGroup):
            raise ImpossibleSplit(
                f"domain: over={getattr(self.over, 'kind', type(self.over).__name__)} also follows the sources of the "
                "records: take it by itself, or divide each domain by a partition that does not, such as dirichlet:0.3"
            )

    @property
    def uses_labels(self) -> bool:
        """True if the inner partition ``over`` uses labels (see ``ByLabels``)."""
        return uses_labels(self.over)

    def split(self, labels: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Raise ImpossibleSplit, because this partition needs the source of each record."""
        del labels, num_partitions, rng
        raise without_sources()

    def split_groups(self, labels: Indices, groups: Indices, num_partitions: int, rng: Generator) -> Sequence[Indices]:
        """Return the sorted record indices of every client. No client has records of two domains.

        Every record belongs to a client, unless ``over`` leaves out records. ``groups``: the domain ID of each record.
        Raises ImpossibleSplit for a single domain, for fewer clients than domains, and for a domain that ``over``
        cannot divide.
        """
        check_sizes(len(labels), num_partitions)
        numbers, domain_of = np.unique(groups, return_inverse=True)
        num_domains = len(numbers)
        if num_domains == 1:
            raise ImpossibleSplit("all records have the same source: take the partition in `over` directly")
        if num_partitions < num_domains:
            raise ImpossibleSplit(
                f"its records come from {num_domains} domains; use at least {num_domains} clients, or "
                "partition=natural, which gives several domains to one client"
            )
        held: dict[int, Indices] = {}
        for domain in range(num_domains):
            records, clients = np.flatnonzero(domain_of == domain), np.arange(domain, num_partitions, num_domains)
            try:
                parts = self.over.split(labels[records], len(clients), rng)
            except ImpossibleSplit as error:
                raise ImpossibleSplit(f"domain {domain}, with {len(records)} records: {error}") from error
            held |= {client: records[part] for client, part in zip(clients.tolist(), parts, strict=True)}
        return Parts.of(held[client] for client in range(num_partitions))


def check_inner(name: str, inner: object, field_name: str = "over") -> None:
    """Raise ImpossibleSplit unless ``inner`` is a partition that only assigns records, equally in all rounds.

    ``name``: the name of the outer partition. ``field_name``: the field of the outer partition that contains ``inner``.
    """
    if isinstance(inner, str) or not hasattr(inner, "split"):
        raise ImpossibleSplit(f"{name}: {field_name}={inner!r} is no partition: give an object, such as Dirichlet(0.3)")
    kind = getattr(inner, "kind", type(inner).__name__)
    if isinstance(inner, FeatureSkew | RecordSkew):
        raise ImpossibleSplit(
            f"{name}: {field_name}={kind} changes the records of clients by itself: take a partition that only assigns "
            "records, such as iid or dirichlet:0.3"
        )
    if isinstance(inner, ByRound):
        raise ImpossibleSplit(
            f"{name}: {field_name}={kind} moves records between rounds: take a partition with the same shards in all "
            "rounds, such as iid or dirichlet:0.3"
        )
