"""The client side of ``preprocess=private-start``: a client sends sums of low image frequencies, in three steps.

From these sums, the server makes images and trains the first model on them. Every answer of a client is one vector. The
server clips the norm of each vector before it adds the clients' vectors and the noise. So the privacy unit is a client
with all its records. In each step, the server asks a question that depends on the noisy sum of the answers to the
previous question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clients.images import frequencies_of, lowest_frequencies
from clients.moments import Array, products
from fl_sim.importing import torch

if TYPE_CHECKING:
    from fl_sim.types import Params

Step: TypeAlias = Literal[1, 2, 3]
STEPS: Final[tuple[Step, ...]] = (1, 2, 3)

SQUARES: Final = 0.5
COUNT: Final = 0.5
COMMON: Final = 0.3
"""The weights of parts of a client's answer. The other part of each answer has the weight 1.

``SQUARES``: the weight of the sum of squares in step 1. ``COUNT``: the weight of the class counts in step 2.
``COMMON``: the weight of the sum of products over all classes in step 3.
"""

LONGEST: Final = 1.5
"""The clipping norm of a record after its scaling by a frame (see ``Frame``).

After this scaling, the norm of a typical record is about 1."""


@dataclass(frozen=True)
class Frame:
    """A scaling of a record's d frequencies before clipping: subtract ``centre``, then divide by ``width``."""

    centre: Array
    width: Array

    def rows(self, points: Array) -> Array:
        """Return the frequencies ``points`` (n, d) of n records, shifted and scaled by this frame."""
        found: Array = (points - self.centre) / self.width
        return found


@dataclass(frozen=True)
class FrequencyQuestion:
    """The question that the server asks clients in one step of the private start (see the module's docstring).

    Step 1 asks for the mean and the mean square of all records. Step 2 asks for the number and the mean of the records
    of each class. Step 3 asks for sums of outer products of the records. ``records``: the public mean number of records
    of a client. The client divides its sums by this number. ``frame``: the scaling of records. ``means``: the class
    means (C, d) in this frame. In step 3, the client subtracts these means from its records before it forms products.
    """

    step: Step
    records: float
    frame: Frame
    means: Array | None = None


def black_frame(shape: tuple[int, ...], order: NDArray[np.intp]) -> Frame:
    """Return the public scaling for step 1.

    ``order``: the positions of the selected frequencies in the flattened cosine transform. ``shape``: the shape of an
    image.

    The scaling subtracts the frequencies of the black image. It divides by the distance between the black image and a
    dark image, whose pixels are all a quarter of the way from black to white.
    """
    black = frequencies_of(torch.full((1, *shape), -1.0), order)[0]
    return Frame(black, np.full(len(order), 0.5 * math.sqrt(math.prod(shape))))


def shapes_of(step: Step, num_classes: int, num_frequencies: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a client's answer to the question of step ``step`` (1, 2 or 3)."""
    num_products = math.comb(num_frequencies + 1, 2)
    match step:
        case 1:
            return {"means": (num_frequencies,), "squares": (1,)}
        case 2:
            return {"counts": (num_classes,), "means": (num_classes, num_frequencies)}
        case 3:
            return {"common": (num_products,), "own": (num_classes, num_products)}


def answer(question: FrequencyQuestion, inputs: torch.Tensor, labels: NDArray[np.int64], num_classes: int) -> Params:
    """Return a client's answer to a question as named float32 tensors. Without records all values are zero.

    ``inputs``: the client's records (n, *shape), in [-1, 1]; records that are not finite are ignored.
    """
    order, _ = lowest_frequencies(tuple(inputs.shape[1:]), len(question.frame.centre))
    points = frequencies_of(inputs, order)
    finite = np.isfinite(points).all(axis=1)
    rows, labels = question.frame.rows(points[finite]), labels[finite]
    match question.step:
        case 1:
            sums = {"means": rows.sum(axis=0), "squares": SQUARES * np.array([(rows**2).sum()])}
        case 2:
            counts = COUNT * np.bincount(labels, minlength=num_classes).astype(np.float64)
            means = np.zeros((num_classes, rows.shape[1]))
            np.add.at(means, labels, _clipped(rows))
            sums = {"counts": counts, "means": means}
        case 3:
            assert question.means is not None
            rows = _clipped(rows) - question.means[labels]
            own = np.zeros((num_classes, math.comb(rows.shape[1] + 1, 2)))
            for label in np.unique(labels):
                own[label] = _clipped(products(rows[labels == label]), LONGEST**2).sum(axis=0)
            sums = {"common": COMMON * own.sum(axis=0), "own": own}
    return {name: torch.from_numpy(value / question.records).float() for name, value in sums.items()}


def question_tensors(question: FrequencyQuestion) -> Params:
    """Return a question as tensors for a message to clients."""
    frame = question.frame
    means = np.zeros((0, len(frame.centre))) if question.means is None else question.means
    arrays = {
        "step": np.array([question.step]),
        "records": np.array([question.records]),
        "centre": frame.centre,
        "width": frame.width,
        "means": means,
    }
    return {name: torch.from_numpy(value).float() for name, value in arrays.items()}


def read_question(tensors: Params) -> FrequencyQuestion:
    """Return the question that the ``tensors`` of a message encode: the inverse of ``question_tensors``."""
    arrays = {name: value.numpy().astype(np.float64) for name, value in tensors.items()}
    [step] = (one for one in STEPS if one == arrays["step"][0])
    means = arrays["means"] if len(arrays["means"]) else None
    return FrequencyQuestion(step, float(arrays["records"][0]), Frame(arrays["centre"], arrays["width"]), means)


def _clipped(rows: Array, longest: float = LONGEST) -> Array:
    found: Array = rows * np.minimum(1, longest / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
    return found
