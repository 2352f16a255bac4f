"""Sums for a private start: a client sends a few sums over its records' lowest frequencies, three times.

Every answer is one vector. The server clips its length before it adds up clients and noise: so a client is protected
as a whole, whatever its records. The next question depends on the noisy answers to the last one.
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
"""The weights of squares beside means, of a record beside its frequencies, of common products beside each class's."""

LONGEST: Final = 1.5
"""The clipping norm of a record, in a frame in which records are about 1 long."""


@dataclass(frozen=True)
class Frame:
    """The origin and the units of frequencies: ``centre`` and ``width``, both (d,)."""

    centre: Array
    width: Array

    def rows(self, points: Array) -> Array:
        """Return frequencies (n, d) in this frame."""
        found: Array = (points - self.centre) / self.width
        return found


@dataclass(frozen=True)
class FrequencyQuestion:
    """Step 1: mean and mean square of all records; 2: counts and means by class; 3: products by class.

    ``records``: the mean number of records of a client, public; sums are divided by it. ``means``: of the classes,
    (C, d) in ``frame``, about which step 3 takes products.
    """

    step: Step
    records: float
    frame: Frame
    means: Array | None = None


def black_frame(shape: tuple[int, ...], order: NDArray[np.intp]) -> Frame:
    """Return the public frame of step 1 for images of ``shape`` and their frequencies at ``order``.

    It measures from black, and its unit is an image all of whose pixels are a quarter of the way to white.
    """
    black = frequencies_of(torch.full((1, *shape), -1.0), order)[0]
    return Frame(black, np.full(len(order), 0.5 * math.sqrt(math.prod(shape))))


def shapes_of(step: Step, num_classes: int, num_frequencies: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of an answer."""
    num_products = math.comb(num_frequencies + 1, 2)
    match step:
        case 1:
            return {"means": (num_frequencies,), "squares": (1,)}
        case 2:
            return {"counts": (num_classes,), "means": (num_classes, num_frequencies)}
        case 3:
            return {"common": (num_products,), "own": (num_classes, num_products)}


def answer(question: FrequencyQuestion, inputs: torch.Tensor, labels: NDArray[np.int64], num_classes: int) -> Params:
    """Return the answer of a client with these records (n, *shape), in [-1, 1]: float32, zeros without records.

    Records that are not finite are left out.
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
            np.add.at(means, labels, _shortened(rows))
            sums = {"counts": counts, "means": means}
        case 3:
            assert question.means is not None
            rows = _shortened(rows) - question.means[labels]
            own = np.zeros((num_classes, math.comb(rows.shape[1] + 1, 2)))
            for label in np.unique(labels):
                own[label] = _shortened(products(rows[labels == label]), LONGEST**2).sum(axis=0)
            sums = {"common": COMMON * own.sum(axis=0), "own": own}
    return {name: torch.from_numpy(value / question.records).float() for name, value in sums.items()}


def question_tensors(question: FrequencyQuestion) -> Params:
    """Return a question as tensors that travel in a message."""
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
    """Return the question in the tensors of ``question_tensors``."""
    arrays = {name: value.numpy().astype(np.float64) for name, value in tensors.items()}
    [step] = (one for one in STEPS if one == arrays["step"][0])
    means = arrays["means"] if len(arrays["means"]) else None
    return FrequencyQuestion(step, float(arrays["records"][0]), Frame(arrays["centre"], arrays["width"]), means)


def _shortened(rows: Array, longest: float = LONGEST) -> Array:
    """Return rows that are longer than ``longest`` shortened to it."""
    found: Array = rows * np.minimum(1, longest / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
    return found
