"""PATE's three parts of a data set: private records for teachers, a public unlabelled pool, records to evaluate on."""

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.types import Dataset, Examples

Source: TypeAlias = Literal["test", "train"]

_SHARE = {"test": 0.9, "train": 0.2}
"""How much of its source the public pool takes where no size is given."""


@dataclass(frozen=True)
class PublicSplit:
    """``private``: indices into the training records. ``pool``'s labels are for measurements, no student sees them."""

    private: NDArray[np.int64]
    pool: Examples
    evaluation: Examples


def split_off(dataset: Dataset, source: Source, num_public: int | None, seed: int) -> PublicSplit:
    """Return the three parts.

    ``source`` "test": the pool is the first ``num_public`` test records (default: nine tenths) and the others are for
    evaluation, as in Papernot et al. (2017). "train": the pool is drawn from the training records (default: a fifth),
    which are then nobody's private records, and the test records are for evaluation. Raises UserError where one of the
    parts would be empty.
    """
    part = dataset.test if source == "test" else dataset.train
    size = int(_SHARE[source] * len(part)) if num_public is None else num_public
    if not 0 < size < len(part):
        raise UserError(
            f"a public pool of {size} out of {len(part)} {source} records leaves "
            f"{'no pool' if size <= 0 else 'nothing'} "
            f"{'to label' if size <= 0 else 'to evaluate on' if source == 'test' else 'for teachers'}: choose "
            f"algorithm.public_records from 1 to {len(part) - 1}"
        )
    everything = np.arange(len(dataset.train), dtype=np.int64)
    if source == "test":
        rows = np.arange(len(part), dtype=np.int64)
        return PublicSplit(everything, part.take(rows[:size]), part.take(rows[size:]))
    order = rng(seed, "public pool").permutation(len(part)).astype(np.int64)
    return PublicSplit(np.sort(order[size:]), part.take(order[:size]), dataset.test)


def overlap(private: Examples, pool: Examples) -> NDArray[np.bool_]:
    """Return which of the private records the pool holds too, by the content of their inputs, shape (private,)."""
    public = set(_digests(pool))
    return np.fromiter((digest in public for digest in _digests(private)), dtype=np.bool_, count=len(private))


def _digests(examples: Examples) -> list[bytes]:
    rows = np.ascontiguousarray(examples.inputs)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]
