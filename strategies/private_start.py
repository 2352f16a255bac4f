"""A private start under Global DP: the first model learns from synthetic images drawn from noisy statistics.

Before the first round clients send sums over the lowest frequencies of their images (see ``clients.frequency_sums``),
in three steps. Step 1: mean and variance of all records. Step 2: for each class, the number of records and their mean.
Step 3: covariances. Each step publishes one noisy sum by Global DP's own mechanism. A client's answer is clipped as a
whole, noise is added once to the sum over clients, and the cost is charged to the run's privacy ledger. Everything else
is post-processing: covariances are shrunk because a part of them may be noise, images are drawn from one normal
distribution per class, and the server trains on these images. The method follows Harder et al. 2021 (DP-MERF), where a
single holder of all records publishes the sums. After this start, the rounds need to change the model only little, so
their noise harms less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.frequency_sums import COMMON, COUNT, SQUARES, STEPS, Frame, Step, black_frame, shapes_of
from clients.images import before_clamping, clamped, images_of, lowest_frequencies, warped
from clients.moments import Array, shrunk, symmetric
from fl_sim.data.dataset import check_unit_range
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, kind_of
from fl_sim.privacy.terms import rounded_up
from fl_sim.settings import Settings
from fl_sim.types import Dataset
from strategies.global_dp import Amplifying, GlobalDP
from strategies.samplers import Cyclic

if TYPE_CHECKING:
    from fl_sim.types import Params

Sums: TypeAlias = "Params"
"""The noisy result of one step: the mean of the clients' answers, by name."""

_SHARES: Final[dict[Step, float]] = {1: 0.04, 2: 0.48, 3: 0.48}  # each step's share of 1 / noise_multiplier^2
_LEAST_SHARE: Final = 0.3  # a class's share of the records is at least this number / number of classes
_LEAST_VARIANCE: Final = 1e-3  # the least total variance of images, in the units of ``black_frame``
_LEAST_WITHIN: Final = 0.2  # the least share of a frequency's variance that counts as variance within classes
_LEAST_DIRECTION: Final = 0.05  # the least variance in any direction, as a share of the variance within classes
_LONGEST: Final = 2**28  # the largest answer of a client in bytes, half of Flower's largest message

ClippingNorm: TypeAlias = Annotated[float, Field(gt=0)]


class PrivateStart(Settings):
    """The server trains the first model on synthetic images, drawn from noisy sums over all clients' records.

    The cost of these sums is charged to the privacy ledger of the rounds.

    ``noise_multiplier``: the noise multiplier of the three noisy sums together: they cost as much as one noisy sum with
    this noise multiplier. The rounds' cost is added to this cost. ``clipping_norms``: the clipping norm of a client's
    answer for each of the three sums, in public units in which the three answers have norms of about 1, 0.6 and 0.3.
    ``frequencies``: the number of lowest frequencies of an image that are used. ``images``: the number of synthetic
    images. ``warp``: the strength of random rotation, stretching and shifting of the synthetic images; 1 means up to 10
    degrees, a tenth of a side, and a twentieth of a side, respectively. This helps with digits. ``server_epochs``: the
    number of epochs that the server trains on the synthetic images, with the settings of ``local``.
    """

    kind: Literal["private-start"] = "private-start"
    title: ClassVar[str] = "private start"
    stage: ClassVar[str] = "fl_sim.stages.private_start:Start"
    computes_with_records: ClassVar[bool] = True
    noise_multiplier: float = Field(1.0, gt=0)
    clipping_norms: tuple[ClippingNorm, ClippingNorm, ClippingNorm] = (0.9, 0.4, 0.1)
    frequencies: int = Field(60, ge=2)
    images: int = Field(20_000, ge=1, le=10**7)
    warp: float = Field(1.0, ge=0, le=3)
    server_epochs: int = Field(5, ge=1)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the run lacks Global DP, or has cyclic sampling or an attack."""
        if not isinstance(experiment.aggregator, GlobalDP):
            raise ValueError(
                f"preprocess private-start needs aggregator global-dp, whose ledger it charges, and the aggregator is "
                f"{kind_of(experiment.aggregator)}: set aggregator=global-dp, or leave preprocess out"
            )
        if isinstance(experiment.sampler, Cyclic):
            raise ValueError(
                "preprocess private-start samples cohorts as rounds do, and with sampler cyclic these come from one "
                "group of clients only: take sampler full, poisson or fixed-size"
            )
        if experiment.attack.clients:
            raise ValueError(
                f"preprocess private-start cannot run with attack {kind_of(experiment.attack)}: attacks before the "
                "first round are not modelled; set preprocess=none or attack=none"
            )

    def check_budget(self, experiment: Choices, records: Sequence[int], num_classes: int) -> None:
        """Raise UserError if the three noisy sums and one round after them cost more than the aggregator's budget."""
        del records, num_classes
        aggregator, sampler = experiment.aggregator, experiment.sampler
        assert isinstance(aggregator, GlobalDP)
        assert isinstance(sampler, Amplifying)
        if aggregator.epsilon is None:
            return
        mechanisms = (*self.releases(aggregator), aggregator)
        cost = aggregator.cost(Counter(sampler.amplify(one.event(), experiment.clients) for one in mechanisms))
        if cost > aggregator.epsilon:
            raise UserError(
                f"aggregator.epsilon={aggregator.epsilon:g} does not afford the private start and one round, which "
                f"cost {rounded_up(cost)} at delta {aggregator.delta:g}: take a larger preprocess.noise_multiplier, or "
                "a larger epsilon"
            )

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError if the records are not images, or if the sums of one client are too large for one message."""
        shape, num_classes = dataset.input_shape, dataset.num_classes
        if len(shape) != 3 or features != "none":
            raise UserError(
                f"preprocess private-start draws images, and these records have shape {shape}: leave preprocess out, "
                "or take data and features that are images"
            )
        size = 4 * sum(math.prod(one) for one in shapes_of(3, num_classes, self.num_frequencies(shape)).values())
        if size > _LONGEST:
            raise UserError(
                f"preprocess.frequencies={self.frequencies} is too large: the covariances of {num_classes} classes are "
                f"{size >> 20} MiB a client, more than {_LONGEST >> 20} MiB: take fewer frequencies"
            )
        check_unit_range(dataset, "private-start")

    def num_frequencies(self, shape: tuple[int, ...]) -> int:
        """Return the setting ``frequencies``, or the number of all frequencies if images of ``shape`` have fewer."""
        return min(self.frequencies, math.prod(shape))

    def releases(self, aggregator: GlobalDP) -> tuple[GlobalDP, ...]:
        """Return the privacy mechanisms of the three noisy sums, in the order of the steps."""
        return tuple(self.release(step, aggregator) for step in STEPS)

    def release(self, step: Step, aggregator: GlobalDP) -> GlobalDP:
        """Return one step's mechanism: Global DP with the noise multiplier and the clipping norm of this step."""
        noise_multiplier = self.noise_multiplier / math.sqrt(_SHARES[step])
        return GlobalDP(
            noise_multiplier=noise_multiplier,
            clipping_norm=self.clipping_norms[step - 1],
            delta=aggregator.delta,
            noise=aggregator.noise,
        )


@dataclass(frozen=True)
class Classes:
    """Differentially private statistics of each class, in the coordinates of a ``Frame``.

    A ``Frame`` scales the d frequencies of an image. There are C classes. ``shares``: the share of records of each
    class, shape (C,). ``means``: the mean of each class, shape (C, d).
    """

    shares: Array
    means: Array


def frame_of(sums: Sums, std: float, shape: tuple[int, ...], num_frequencies: int) -> Frame:
    """Return the coordinates (``Frame``) in which frequencies have mean 0 and total variance 1, from step 1's sums.

    Only the total of all variances is estimated, because the noise hides single variances. A public spectrum divides
    this total among the frequencies, so that all frequencies have about the same variance in the frame. ``std``:
    standard deviation of the noise on each number of ``sums``.
    """
    order, spectrum = lowest_frequencies(shape, num_frequencies)
    black = black_frame(shape, order)
    means = shrunk(_array(sums["means"]), std, len(order))
    variance = float(_array(sums["squares"])[0]) / SQUARES - float((means**2).sum())
    variance = max(variance, std / SQUARES, _LEAST_VARIANCE)
    width = black.width * np.sqrt(variance * spectrum * len(order))
    return Frame(black.centre + black.width * means, width)


def classes_of(sums: Sums, std: float) -> Classes:
    """Return each class's share of the records, and its mean, from the noisy sums of step 2.

    Means are shrunk towards 0, because a part of them may be noise. ``std``: standard deviation of the noise on each
    number of ``sums``.
    """
    counts, totals = _array(sums["counts"]), _array(sums["means"])
    shares = np.maximum(counts / COUNT, _LEAST_SHARE / len(counts))
    means = np.stack([shrunk(row, std, row.size) for row in totals]) / shares[:, None]
    return Classes(shares, means)


def covariances_of(sums: Sums, std: float, classes: Classes) -> Array:
    """Return the positive definite covariance of each class, shape (C, d, d), for scaled frequencies (``Frame``).

    First the common covariance of all classes is shrunk towards a diagonal matrix, then the covariance of each class
    towards the common covariance. ``sums``: the noisy sums of step 3. ``std``: standard deviation of the noise on each
    number of ``sums``.
    """
    num_classes, size = classes.means.shape
    dimension = math.comb(size + 1, 2)
    between = (classes.shares[:, None] * classes.means**2).sum(axis=0) / classes.shares.sum()
    within = np.maximum(1 / size - between, _LEAST_WITHIN / size)
    independent = np.diag(within)
    common = symmetric(_array(sums["common"]) / COMMON, size)
    common = _positive(independent + shrunk(common - independent, std / COMMON, dimension), within)
    own = np.empty((num_classes, size, size))
    for label, (triangle, share) in enumerate(zip(_array(sums["own"]), classes.shares, strict=True)):
        found = symmetric(triangle, size) / share
        own[label] = _positive(common + shrunk(found - common, std / share, dimension), within)
    return own


def drawn_images(
    settings: PrivateStart,
    shape: tuple[int, ...],
    frame: Frame,
    classes: Classes,
    covariances: Array,
    generator: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return synthetic images (n, *shape) in [-1, 1] and their labels (n,).

    The number of images of a class is in proportion to its share of records, at least 1. After clamping to [-1, 1] the
    images have the mean and covariance of their class.
    """
    order, _ = lowest_frequencies(shape, len(frame.centre))
    basis = images_of(np.eye(len(order)), order, shape).reshape(len(order), -1).astype(np.float64)
    numbers = np.maximum(1, np.round(settings.images * classes.shares / classes.shares.sum()).astype(np.int64))
    made = []
    for number, mean, covariance in zip(numbers, classes.means, covariances, strict=True):
        root = np.linalg.cholesky(covariance * np.outer(frame.width, frame.width))
        mean, root = before_clamping(frame.centre + mean * frame.width, root, partial(clamped, basis))  # noqa: PLW2901
        made.append(images_of(mean + generator.standard_normal((number, len(order))) @ root.T, order, shape))
    return warped(np.concatenate(made), settings.warp, generator), np.repeat(np.arange(len(numbers)), numbers)


def _positive(covariance: Array, within: Array) -> Array:
    """Return ``covariance`` made positive definite: small variances are raised to a share of ``within``.

    ``within``: the variances within classes, shape (d,).
    """
    scale = np.sqrt(np.outer(within, within))
    values, vectors = np.linalg.eigh(covariance / scale)
    found: Array = (vectors * np.maximum(values, _LEAST_DIRECTION)) @ vectors.T * scale
    return found


def _array(value: object) -> Array:
    return np.asarray(value, dtype=np.float64)
