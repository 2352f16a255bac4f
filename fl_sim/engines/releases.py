"""What clients release beside their training: how it stands in Flower's records, and how it is read.

What a client sends is not trusted: whoever reads an answer says what it must be, and anything else is Malformed.
"""

import sys
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fl_sim.engines.arrays import numbers_in
from fl_sim.engines.tensor_records import exactly, pack, read_group, read_json, read_rows, unpack, whole
from fl_sim.errors import Malformed
from fl_sim.params import layout_of
from fl_sim.types import Params

_POOL, _SAID, _VOTES, _MOMENTS, _SUMS, _REPORT = "pool", "said", "votes", "moments", "sums", "report"
_JSON, _PARTITION = "json", "partition-id"

_LONGEST_TEXT: Final = 1_000_000
_LARGEST_MOMENT: Final = 1e100  # products of float32 numbers, added up


def pool_content(shared: Mapping[str, torch.Tensor]) -> RecordDict:
    """Pack what a client shares before the first round."""
    return RecordDict({_POOL: pack(dict(shared))})


def read_pool(content: RecordDict, template: Params, most_rows: int) -> Params:
    """Unpack what a client shared: tensors like ``template``'s, but all of the same number of rows.

    Raises Malformed for anything else, more than ``most_rows``, and for numbers that are not finite.
    """
    exactly(content, {_POOL})
    return read_rows(content[_POOL], {name: tuple(value.shape[1:]) for name, value in template.items()}, most_rows)


def made_content(inputs: torch.Tensor) -> RecordDict:
    """Pack synthetic records on their way home, where what is to be said of them is added."""
    return RecordDict({_POOL: pack({"inputs": inputs})})


def read_made(content: RecordDict) -> torch.Tensor:
    """Unpack what ``made_content`` packed, on a worker of ours."""
    return unpack(content[_POOL])["inputs"]


def synthetic_content(inputs: torch.Tensor, said: str) -> RecordDict:
    """Pack a client's synthetic records and, as JSON, what it says of them."""
    return RecordDict({_POOL: pack({"inputs": inputs}), _SAID: ConfigRecord({_JSON: said})})


def read_synthetic(
    content: RecordDict, input_shape: tuple[int, ...], num_classes: int, most_rows: int
) -> tuple[torch.Tensor, str]:
    """Unpack (synthetic records, what the client says of them as JSON: counts, refused, facts, receipt).

    Raises Malformed where the records are not ``most_rows`` or fewer of that shape, finite, and as many as the counts
    add up to; what the facts and the receipt say is not looked at.
    """
    exactly(content, {_POOL, _SAID})
    inputs = read_rows(content[_POOL], {"inputs": input_shape}, most_rows)["inputs"]
    text = content[_SAID].get(_JSON)
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise Malformed("says of its records what is no text, or too long")
    match read_json(text):
        case {"counts": list(counts), "refused": str(), "facts": dict(), "receipt": dict() | None, **others} if (
            not others
        ):
            if len(counts) != num_classes or sum(whole(one, most_rows, "a count") for one in counts) != len(inputs):
                raise Malformed(
                    f"sent counts that are not one for each of {num_classes} classes, adding up to its records"
                )
        case _:
            raise Malformed("says something else of its records than their counts, why there are none, and facts")
    return inputs, text


def votes_content(votes: NDArray[np.int64]) -> RecordDict:
    """Pack a teacher's votes, one class a public record."""
    return RecordDict({_VOTES: ArrayRecord({_VOTES: Array(votes)})})


def read_votes(content: RecordDict, num_records: int, num_classes: int) -> NDArray[np.int64]:
    """Unpack a teacher's votes, shape (records,). Raises Malformed for anything but one class for each record."""
    exactly(content, {_VOTES})
    record = content[_VOTES]
    if not isinstance(record, ArrayRecord) or set(record) != {_VOTES}:
        raise Malformed("sent no votes, or more than them")
    votes = numbers_in(record[_VOTES], (num_records,), "<i8").astype(np.int64)
    if ((votes < 0) | (votes >= num_classes)).any():
        raise Malformed(f"votes for a class that does not exist: classes are 0 to {num_classes - 1}")
    return votes


def moments_content(moments: NDArray[np.float64]) -> RecordDict:
    """Pack the moments of a client's features, a row for each class."""
    return RecordDict({_MOMENTS: ArrayRecord({_MOMENTS: Array(moments)})})


def read_moments(content: RecordDict, shape: tuple[int, int], most_records: int | None = None) -> NDArray[np.float64]:
    """Unpack the moments of a client's features, of at most that many records; None where there is noise on them.

    Raises Malformed for another shape, for absurd numbers, and without noise for counts that are none.
    """
    exactly(content, {_MOMENTS})
    record = content[_MOMENTS]
    if not isinstance(record, ArrayRecord) or set(record) != {_MOMENTS}:
        raise Malformed("sent no moments, or more than them")
    moments = numbers_in(record[_MOMENTS], shape, "<f8").astype(np.float64)
    if not (np.abs(moments) <= _LARGEST_MOMENT).all():
        raise Malformed("sent moments of features that are not finite, or far too large")
    counts = moments[:, 0]
    if most_records is not None and ((counts < 0) | (counts % 1 != 0) | (counts.sum() > most_records)).any():
        raise Malformed(f"sent numbers of records that are not whole, or add up to more than {most_records}")
    return moments


def sums_content(sums: Params) -> RecordDict:
    """Pack a client's answer to a question before the first round: sums over its records."""
    return RecordDict({_SUMS: pack(sums)})


def read_sums(content: RecordDict, template: Params) -> Params:
    """Unpack such an answer: float32 tensors like ``template``'s. Raises Malformed for anything else."""
    exactly(content, {_SUMS})
    return read_group(content[_SUMS], layout_of(template))


def who_content(partition: int) -> RecordDict:
    """Pack a node's answer to which partition it holds."""
    return RecordDict({_REPORT: MetricRecord({_PARTITION: partition})})


def read_who(content: RecordDict) -> int:
    """Unpack which partition a node holds. Raises Malformed for anything but a number from 0 on."""
    exactly(content, {_REPORT})
    report = content[_REPORT]
    if not isinstance(report, MetricRecord) or set(report) != {_PARTITION}:
        raise Malformed("reported something else than the number of a partition")
    return whole(report[_PARTITION], sys.maxsize, "a partition's number")
