"""Generators that draw records from noisy class moments: ``Gaussian`` for vectors, ``MeanEmbedding`` for images.

Class moments are the mean and the second moments of the records of a class. Each generator computes noisy sums twice,
by the Gaussian mechanism. The first sums give the centre of each class. The second sums give the second moments about
this centre. The privacy budget is divided between the two sums. All other computation is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.dafl.generator import GeneratorBill, PrivateRecords
from clients.images import before_clamping, clamped, frequencies_of, images_of, lowest_frequencies, warped
from clients.moments import Array, moments_of, num_moments, products, shrunk, symmetric
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.settings import Settings

LONGEST: Final = math.sqrt(2)
"""The norm of the vector (u, uu') for |u| = 1. The squared norm is |u|^2 + |u|^4 = 2.

The outer product uu' is stored as its upper triangle, in a form that preserves norms."""

# a factor that enlarges the noise, so that the rounded noise is at least as large as the bill assumes
_UP: Final = 1 + 2.0**-50
_COUNT: Final = (
    0.25  # the weight of the record count in the first noisy sums of images; the largest record norm has weight 1
)
_SPREAD: Final = 0.5  # the weight of a record's squared norm in the first noisy sums of images
_FIRST_NORM: Final = math.sqrt(_COUNT**2 + 1 + _SPREAD**2)


class Gaussian(Settings):
    """Draw vectors from a normal distribution with the noisy moments of each class, in seconds and without training.

    The generator is meant for records whose classes are nearly normally distributed, such as scattering features. First
    it computes a noisy centre of each class. Then it computes the noisy sum of the vectors (u, uu') over the records of
    a class. Here u is the difference between a record and its class's centre, divided by ``radius`` and clipped to norm
    1. A smaller radius means less noise.

    ``clipping_norm``: the norm to which records are clipped; with features=scattering, no record has a norm above 1.
    ``radius``: the radius of the ball around a class's centre, in clipping norms. Records outside the ball are moved to
    its surface. ``centre_share``: the share of the budget that goes to the centres. (The budget is 1 / z^2, with the
    noise multiplier z.)
    """

    kind: Literal["gaussian"] = "gaussian"
    clipping_norm: float = Field(1.0, gt=0)
    radius: float = Field(0.5, gt=0, le=2)
    centre_share: float = Field(0.05, gt=0, lt=1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for images, because pixels are far from normally distributed."""
        if len(shape) != 1:
            raise UserError(
                f"preprocess.generator gaussian makes vectors, and these records are images of shape {shape}: set "
                "features=scattering, or preprocess.generator=dp-cgan or mean-embedding"
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the privacy cost of the noisy centres and the noisy second moments together.

        The noise is the least that (epsilon, delta) allows. No synthetic records are made if the noise on each
        coordinate of the mean of all records would be as large as ``radius``; the bill's ``refused`` is the reason.
        """
        del num_classes
        return _joint_bill(
            num_records, epsilon, delta, lambda z: z / math.sqrt(self.centre_share) / self.radius, "mean"
        )

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return synthetic vectors, shape (sum of counts, numbers per record), in [-1, 1].

        ``generator`` draws the vectors from the distribution with the noisy moments. The client's exact number of
        records of a class must stay secret. The function estimates this number as the class's fraction of ``counts``
        times the public number of all records.
        """
        vectors = records.inputs.numpy().astype(np.float64) / self.clipping_norm
        labels, size = records.labels.numpy(), vectors.shape[1]
        first = GaussianRelease(_UP * bill.noise_multiplier / math.sqrt(self.centre_share), noise, len(vectors))
        second = GaussianRelease(_UP * bill.noise_multiplier / math.sqrt(1 - self.centre_share), noise, len(vectors))
        made = [np.zeros((0, size), dtype=np.float32)]
        for label in np.flatnonzero(counts).tolist():
            own = vectors[labels == label]
            number = max(1.0, len(vectors) * counts[label] / counts.sum())
            centre = first.sum_of(own, len(counts), label) / number
            moments, std = second.moments_of((own - centre) / self.radius, len(counts), label)
            mean, squares = np.split(moments / number, [size])
            std = std / number
            covariance = symmetric(squares, size) - np.outer(mean, mean) + std**2 * np.eye(size)
            drawn = drawn_as_one(int(counts[label]), _root_without_noise(covariance, std), generator)
            made.append(np.clip(self.clipping_norm * (centre + self.radius * (mean + drawn)), -1, 1).astype(np.float32))
        return torch.from_numpy(np.concatenate(made))


class MeanEmbedding(Settings):
    """Draw images from noisy class moments, in a second and without training; a GAN takes minutes and may collapse.

    After Harder et al. 2021 (DP-MERF). A record is represented by its d lowest frequencies in the public cosine basis.
    First the generator computes, with noise, each class's number of records, mean, and spread (the mean squared
    distance from the mean). Then it computes, with noise, the second moments about the mean. Means are shrunk towards
    zero, more strongly if they are small relative to the noise. In the same way, second moments are shrunk towards the
    public average spectrum of images. Images are drawn from a normal distribution, and their pixels are clamped to [-1,
    1]. The distribution is chosen so that the clamped images have the noisy moments.

    ``frequencies``: the number d of lowest frequencies that represent a record. ``mean_share``: the share of the budget
    for number of records, mean and spread. (The budget is 1 / z^2, with the noise multiplier z.) ``whitening``: the
    scaling of frequencies before clipping; 0 leaves them unchanged, 1 scales all to the same public variance.
    ``radius``: the clipping norm of records for the second moments, in units of the class's root mean square distance
    from the mean. ``warp``: the strength of random warps of drawn images; 1 means rotation by up to 10 degrees, scaling
    by up to a tenth, and shifts by up to a twentieth of a side. Warped images improve classifiers of digits, and impair
    classifiers of clothes.
    """

    kind: Literal["mean-embedding"] = "mean-embedding"
    frequencies: int = Field(80, ge=1)
    mean_share: float = Field(0.5, gt=0, lt=1)
    whitening: float = Field(0.5, ge=0, le=1)
    radius: float = Field(1.2, gt=0)
    warp: float = Field(0.0, ge=0, le=3)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for records that are not images: columns of a table, unlike pixels, have no neighbours."""
        if len(shape) != 3:
            raise UserError(
                f"preprocess.generator mean-embedding makes images, and these records have shape {shape}: set "
                "preprocess.generator=marginals, or dp-cgan"
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the privacy cost of the noisy means and the noisy second moments together.

        The noise is the least that (epsilon, delta) allows. No synthetic records are made if the noise on the mean of
        all records would have a norm as large as the largest possible mean; the bill's ``refused`` is the reason.
        """
        del num_classes
        length = math.sqrt(self.frequencies)
        return _joint_bill(
            num_records, epsilon, delta, lambda z: z / math.sqrt(self.mean_share) * _FIRST_NORM * length, "mean image"
        )

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return synthetic images that consist of low frequencies, clamped to [-1, 1].

        ``generator`` draws the images from the distribution with the noisy moments.
        """
        shape = tuple(records.inputs.shape[1:])
        order, spectrum = lowest_frequencies(shape, self.frequencies)
        points, labels = frequencies_of(records.inputs, order), records.labels.numpy()
        first = ClassSums(bill.noise_multiplier / math.sqrt(self.mean_share), noise, "count, mean, spread")
        number, means, spread = _first_moments(points, labels, records.num_classes, math.sqrt(math.prod(shape)), first)

        scale = spectrum ** (-self.whitening / 2)
        expected = spectrum * scale**2
        radius = self.radius * np.sqrt(spread * expected.sum())
        units = radius[:, None] / scale
        second = ClassSums(bill.noise_multiplier / math.sqrt(1 - self.mean_share), noise, "second moments")
        squares, std = second.sums(products((points - means[labels]) / units[labels]), 1.0, labels, len(means))
        prior = np.diag(expected / expected.sum() / self.radius**2)
        made = [np.zeros((0, *shape), dtype=np.float32)]
        basis = images_of(np.eye(len(order)), order, shape).reshape(len(order), -1).astype(np.float64)
        for label in np.flatnonzero(counts):
            moments = symmetric(squares[label], len(order)) / number[label]
            moments = prior + shrunk(moments - prior, std / number[label], math.comb(len(order) + 1, 2))
            values, vectors = np.linalg.eigh(moments)
            root = vectors * np.sqrt(np.maximum(values, 0))  # noise may make eigenvalues negative
            mean, root = before_clamping(means[label], units[label][:, None] * root, partial(clamped, basis))
            drawn = generator.standard_normal((counts[label], len(order))) @ root.T
            made.append(images_of(mean + drawn, order, shape))
        return torch.from_numpy(warped(np.concatenate(made), self.warp, generator))


@dataclass(frozen=True)
class GaussianRelease:
    """Noisy sums over the records of each class, by one Gaussian mechanism.

    ``noise_multiplier``: the standard deviation of the noise on a sum, divided by the sensitivity of the sum; 0 means
    neither noise nor clipping. A record is in one class. So the sums of all classes together have the same sensitivity
    as the sum of one class. ``num_records``: the public number of records of all classes together. The clipping norm
    must not depend on the number of records of a single class.
    """

    noise_multiplier: float
    noise: Noise
    num_records: int

    def sum_of(self, rows: Array, num_classes: int, label: int) -> Array:
        """Return the noisy sum of ``rows`` (n, d), each clipped to norm 1. ``label``: the class of all rows."""
        std = self.noise_multiplier
        sums = clipped(rows, self._limit(1.0, num_classes * rows.shape[1])).sum(axis=0)
        return self._noisy(sums, std, f"gaussian: centre of class {label}")

    def moments_of(self, rows: Array, num_classes: int, label: int) -> tuple[Array, float]:
        """Return the noisy sum of the vectors (u, triangle of uu') of a class, and the noise's standard deviation.

        u is a row of ``rows``, clipped to norm 1. The whole vector (u, uu') is then clipped to a norm slightly below
        ``LONGEST``, so that the sensitivity ``LONGEST`` also holds after rounding. The function
        ``clipping_norm_on_grid`` computes this slightly smaller norm. It allows for the rounding of a product of three
        rounded numbers. ``label``: the class.
        """
        std = self.noise_multiplier * LONGEST
        size = num_moments(rows.shape[1]) - 1
        limit = self._limit(LONGEST, num_classes * size)
        shortened = clipped(rows, 1.0 if self.noise_multiplier else math.inf)
        squares = (shortened**2).sum(axis=1)
        weights = np.array([clip_factor(math.sqrt(square + square**2), limit) for square in squares])
        [moments] = moments_of(shortened, np.zeros(len(rows), np.int64), 1, weights)
        return self._noisy(moments[1:], std, f"gaussian: moments of class {label}"), std

    def _limit(self, longest: float, size: int) -> float:
        std = self.noise_multiplier * longest
        return clipping_norm_on_grid(longest, std, size, summands=self.num_records) if std else math.inf

    def _noisy(self, sums: Array, std: float, purpose: str) -> Array:
        if not std:
            return sums
        return add_noise(sums, std, self.noise.gaussian(sums.size, std, purpose=purpose, server_round=1))


@dataclass(frozen=True)
class ClassSums:
    """Noisy sums of clipped feature vectors over the records of each class, by one Gaussian mechanism.

    ``noise_multiplier``: the standard deviation of the noise on a sum, divided by the clipping norm; 0 means neither
    noise nor clipping. ``purpose``: the name of the noise stream.
    """

    noise_multiplier: float
    noise: Noise
    purpose: str

    def sums(
        self, features: Array, clipping_norm: float, labels: NDArray[np.int64], num_classes: int
    ) -> tuple[Array, float]:
        """Return the noisy sums of ``features`` (n, d) per class, (num_classes, d), and the noise's standard deviation.

        A record is in one class, so the sensitivity of all sums together is ``clipping_norm``. Rows that are not finite
        count as zero.
        """
        std = self.noise_multiplier * clipping_norm
        sums = np.zeros((num_classes, features.shape[1]))
        rows = self.clipped(features, clipping_norm, sums.size)
        for label in np.unique(labels):
            sums[label] = rows[labels == label].sum(axis=0)
        if not std:
            return sums, 0.0
        drawn = self.noise.gaussian(sums.size, std, purpose=f"mean embedding: {self.purpose}", server_round=1)
        return add_noise(sums, std, drawn.reshape(sums.shape)), std

    def clipped(self, features: Array, clipping_norm: float, size: int) -> Array:
        """Return ``features`` with each row clipped to ``clipping_norm`` minus an allowance for rounding.

        The sums, of ``size`` numbers, are later rounded to a grid. With the allowance, the rounded sums still have a
        sensitivity of at most ``clipping_norm``.
        """
        std = self.noise_multiplier * clipping_norm
        limit = clipping_norm_on_grid(clipping_norm, std, size, summands=len(features)) if std else math.inf
        return clipped(features, limit)


def clipped(rows: Array, clipping_norm: float) -> Array:
    """Return ``rows`` (n, d), each clipped to the norm ``clipping_norm``; rows that are not finite become zero."""
    norms = np.linalg.norm(rows, axis=1)
    factors = np.array([clip_factor(float(norm), clipping_norm) for norm in norms])
    shortened = np.zeros_like(rows)
    np.multiply(rows, factors[:, None], out=shortened, where=factors[:, None] > 0)
    return shortened


def drawn_as_one(number: int, root: Array, generator: np.random.Generator) -> Array:
    """Return ``number`` draws from the normal distribution N(0, ``root`` root'), shifted to sample mean 0.

    The result has the shape (number, d).

    If ``number`` is more than twice the number of columns of ``root``, the sample covariance is also exactly ``root``
    root'. Sampling then adds no error to the noisy moments. A single draw is not shifted.
    """
    normal = torch.from_numpy(generator.standard_normal((number, root.shape[1])))
    if number > 1:
        normal -= normal.mean(dim=0)
    if number > 2 * root.shape[1]:
        factor = torch.linalg.cholesky(normal.T @ normal / number)
        normal = torch.linalg.solve_triangular(factor, normal.T, upper=False).T
    drawn: Array = (normal @ torch.from_numpy(root).T).numpy()
    return drawn


def without_noise(values: Array, std: float) -> Array:
    """Return an estimate of the eigenvalues that a noisy matrix would have without its noise.

    ``values``: the eigenvalues of the noisy matrix, (d,). ``std``: the standard deviation of the eigenvalues of the
    noise matrix.
    """
    # The kernel below averages over neighbouring eigenvalues. With this width, the average is over a suitable number of
    # eigenvalues.
    width = 2 * std / math.sqrt(len(values))
    apart = values[:, None] - values
    cleaned: Array = values - 2 * std**2 * (apart / (apart**2 + width**2)).mean(axis=1)
    return cleaned


def _joint_bill(
    num_records: int, epsilon: float, delta: float, fewest: Callable[[float], float], mean: str
) -> GeneratorBill:
    """Return the privacy cost of two Gaussian mechanisms, as the cost of a single one with the noise multiplier z.

    Two mechanisms with the noise multipliers z_1 and z_2 cost the same as one mechanism with z^-2 = z_1^-2 + z_2^-2.
    This is true even if the second mechanism depends on the result of the first (Dong, Roth, Su 2022, corollary 3.3).
    ``fewest``: a function from z to the least number of records with which the noise does not hide the mean. ``mean``:
    the name of this mean in error messages.
    """
    from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

    from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

    if math.isinf(epsilon):
        return GeneratorBill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
    z = noise_multiplier(lambda event: event, 1, epsilon, delta)
    least = math.ceil(fewest(z))
    refused = f"{num_records} records are too few for epsilon {epsilon:g}: a {mean} needs at least {least} records"
    return GeneratorBill(dp_event.GaussianDpEvent(z), 1, z, 1.0, refused if num_records < least else "")


def _root_without_noise(covariance: Array, std: float) -> Array:
    """Return a matrix A such that AA' is an estimate of the noisy matrix ``covariance`` (d, d) without its noise.

    ``std``: the standard deviation of the noise on the numbers of the covariance's triangle (``triangle_of``). The
    matrix of the noise is then a matrix of the Gaussian orthogonal ensemble. Its eigenvalues follow a semicircle law of
    variance s^2 = std^2 d / 2. The estimate keeps the eigenvectors. It replaces an eigenvalue x by x - 2 s^2 Re g(x),
    where g is the Stieltjes transform of all eigenvalues. For large d no estimate with the same eigenvectors is better
    (Bun, Allez, Bouchaud, Potters 2016, "Rotational invariant estimator for general noisy matrices", section V).
    """
    values, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(covariance)))
    if std:
        values = without_noise(values, std * math.sqrt(len(values) / 2))
    root: Array = vectors * np.sqrt(np.maximum(values, 0.0))
    return root


def _first_moments(
    points: Array, labels: NDArray[np.int64], num_classes: int, diameter: float, release: ClassSums
) -> tuple[Array, Array, Array]:
    """Compute the first noisy sums of ``MeanEmbedding``, and return three noisy statistics of each class.

    The first is the number of records (num_classes,), at least 1. The second is the mean (num_classes, d). The third is
    the mean squared distance from the mean (num_classes,). ``diameter``: the largest possible norm of a record.
    """
    squares = (points**2).sum(axis=1, keepdims=True) / diameter
    features = np.concatenate([np.full_like(squares, _COUNT * diameter), points, _SPREAD * squares], axis=1)
    sums, std = release.sums(features, _FIRST_NORM * diameter, labels, num_classes)
    number = np.maximum(sums[:, 0] / (_COUNT * diameter), 1.0)
    means = np.stack([shrunk(row, std, row.size) for row in sums[:, 1:-1]]) / number[:, None]
    to_square = diameter / _SPREAD / number
    spread = sums[:, -1] * to_square - (means**2).sum(axis=1)
    return number, means, np.clip(spread, np.clip(2 * std * to_square, 1e-9, diameter**2), diameter**2)
