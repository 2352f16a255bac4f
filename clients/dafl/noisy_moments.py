"""Generators that draw records from noisy class moments: of vectors (``Gaussian``), of images (``MeanEmbedding``).

Each makes two Gaussian releases of sums over the records of each class: first the centre of the class, with a part of
the budget, then the second moments about that centre. All else is post-processing.
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
"""The length of (u, uu') where u has length 1: its square is |u|^2 + |u|^4, as triangles keep lengths."""

_UP: Final = 1 + 2.0**-50  # rounding must not make the noise less than what was billed
_COUNT: Final = 0.25  # the weight of a count of one in the first release of images, in lengths of the longest record
_SPREAD: Final = 0.5  # the weight of the squared length of the longest record
_FIRST_NORM: Final = math.sqrt(_COUNT**2 + 1 + _SPREAD**2)


class Gaussian(Settings):
    """Draw vectors from noisy moments of each class: seconds, and nothing that is trained.

    For records such as those of ``features=scattering``, in which classes are nearly normal. The second release is that
    of (u, uu'), where u is a record's distance from the centre in units of ``radius``, shortened to length 1: the
    smaller the ball, the smaller the noise.

    ``clipping_norm``: records are shortened to it; features=scattering has none that is longer than 1. ``radius``: of
    the ball around a class's centre, in clipping norms, to which records are moved that lie outside. ``centre_share``:
    the share of the budget (of 1 / noise multiplier squared) that goes to the centres.
    """

    kind: Literal["gaussian"] = "gaussian"
    clipping_norm: float = Field(1.0, gt=0)
    radius: float = Field(0.5, gt=0, le=2)
    centre_share: float = Field(0.05, gt=0, lt=1)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for images, whose pixels are far from normal."""
        if len(shape) != 1:
            raise UserError(
                f"preprocess.generator gaussian makes vectors, and these records are images of shape {shape}: set "
                "features=scattering, or take preprocess.generator=dp-cgan or mean-embedding"
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Price both releases; refused where each number of a centre of all records has as much noise as the radius."""
        del num_classes
        return _priced(num_records, epsilon, delta, lambda z: z / math.sqrt(self.centre_share) / self.radius, "mean")

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return vectors, (sum of counts, numbers), in [-1, 1]; ``generator`` draws what the moments leave open.

        The number of records of a class is not released: the class is taken to have the share of all records, whose
        number is public, that it has in ``counts``.
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
    """Draw images from noisy moments: a second where a GAN takes minutes, and no training that could collapse.

    After Harder et al. 2021 (DP-MERF). A record is its d lowest frequencies in the public cosine basis. Released are
    count, mean and spread of every class, then the second moments about that mean. Both are shrunk as far as they may
    be noise, the second moments towards the falling spectrum that images have in common. Images are drawn from a normal
    distribution such that they have these moments once their pixels are clamped to [-1, 1].

    ``frequencies``: d. ``mean_share``: the share of the budget (of 1 / noise multiplier squared) that goes to count,
    mean and spread. ``whitening``: 0 leaves the frequencies as they are, 1 scales all to the same public variance,
    before clipping. ``radius``: where the second release clips, in root mean square distances from the mean. ``warp``:
    drawn images are turned, stretched and moved at random, 1 for up to 10 degrees, a tenth and a twentieth of a side;
    classifiers of digits learn more from them, and those of clothes less.
    """

    kind: Literal["mean-embedding"] = "mean-embedding"
    frequencies: int = Field(80, ge=1)
    mean_share: float = Field(0.5, gt=0, lt=1)
    whitening: float = Field(0.5, ge=0, le=1)
    radius: float = Field(1.2, gt=0)
    warp: float = Field(0.0, ge=0, le=3)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError for tables, of whose columns no two are neighbours."""
        if len(shape) != 3:
            raise UserError(
                f"preprocess.generator mean-embedding makes images, and these records have shape {shape}: take "
                "preprocess.generator=marginals, or dp-cgan"
            )

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Price both releases; refused where the noise on the mean of all records is as long as the longest mean."""
        del num_classes
        length = math.sqrt(self.frequencies)
        return _priced(
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
        """Return images of low frequencies, clamped to [-1, 1]; ``generator`` draws what the moments leave open."""
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
            root = vectors * np.sqrt(np.maximum(values, 0))  # of the nearest positive semidefinite matrix
            mean, root = before_clamping(means[label], units[label][:, None] * root, partial(clamped, basis))
            drawn = generator.standard_normal((counts[label], len(order))) @ root.T
            made.append(images_of(mean + drawn, order, shape))
        return torch.from_numpy(warped(np.concatenate(made), self.warp, generator))


@dataclass(frozen=True)
class GaussianRelease:
    """One Gaussian release of sums over the records of each class.

    ``noise_multiplier``: noise on a sum / how far a record moves it, 0: neither noise nor clipping. A record is in one
    class, so it moves the sums of all classes together by no more than that of its own. ``num_records``: of all classes
    together, a public number; the clipping norm must not depend on the number of records of a class.
    """

    noise_multiplier: float
    noise: Noise
    num_records: int

    def sum_of(self, rows: Array, num_classes: int, label: int) -> Array:
        """Return the noisy sum of ``rows`` (n, d), each shortened to length 1."""
        std = self.noise_multiplier
        sums = clipped(rows, self._limit(1.0, num_classes * rows.shape[1])).sum(axis=0)
        return self._noisy(sums, std, f"gaussian: centre of class {label}")

    def moments_of(self, rows: Array, num_classes: int, label: int) -> tuple[Array, float]:
        """Return the noisy sum of (u, uu' as a triangle) and its noise's standard deviation.

        u is a row, shortened to length 1. (u, uu') is shortened once more, as a whole, to the little less than
        ``LONGEST`` that leaves room for rounding to the noise's grid; a product of three numbers that are rounded once
        each is within what ``clipping_norm_on_grid`` allows.
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
    """One Gaussian release: ``noise_multiplier`` is noise on a sum / clipping norm, 0: neither noise nor clipping."""

    noise_multiplier: float
    noise: Noise
    purpose: str

    def sums(
        self, features: Array, clipping_norm: float, labels: NDArray[np.int64], num_classes: int
    ) -> tuple[Array, float]:
        """Return the noisy sum of ``features`` (n, d) per class, (num_classes, d), and its noise's standard deviation.

        A record is in one class, so it moves all sums together by at most ``clipping_norm``. Rows that are not finite
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
        """Return each row clipped such that the sum of ``size`` numbers, rounded to the grid, moves by no more."""
        std = self.noise_multiplier * clipping_norm
        limit = clipping_norm_on_grid(clipping_norm, std, size, summands=len(features)) if std else math.inf
        return clipped(features, limit)


def clipped(rows: Array, clipping_norm: float) -> Array:
    """Return ``rows`` (n, d), each shortened to ``clipping_norm``; rows that are not finite become zero."""
    norms = np.linalg.norm(rows, axis=1)
    factors = np.array([clip_factor(float(norm), clipping_norm) for norm in norms])
    shortened = np.zeros_like(rows)
    np.multiply(rows, factors[:, None], out=shortened, where=factors[:, None] > 0)
    return shortened


def drawn_as_one(number: int, root: Array, generator: np.random.Generator) -> Array:
    """Return ``number`` draws from N(0, ``root`` root'), (number, d), whose own mean is 0.

    If there are enough, their own covariance is exactly root root', too: they carry all that was released and no more.
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
    """Return the eigenvalues ``values`` (d,) of a matrix without the noise whose eigenvalues have deviation ``std``."""
    width = 2 * std / math.sqrt(len(values))  # about as many of the noise's eigenvalues lie in it as should be averaged
    apart = values[:, None] - values
    cleaned: Array = values - 2 * std**2 * (apart / (apart**2 + width**2)).mean(axis=1)
    return cleaned


def _priced(
    num_records: int, epsilon: float, delta: float, fewest: Callable[[float], float], mean: str
) -> GeneratorBill:
    """Price two Gaussian releases as one: of noise z_1 and z_2, they are one of z^-2 = z_1^-2 + z_2^-2.

    (Dong, Roth, Su 2022, corollary 3.3 for the sum, which holds when the second is chosen after the first is seen.)
    ``fewest``: the number of records, for a noise multiplier, below which the ``mean`` would be noise.
    """
    from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

    from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

    if math.isinf(epsilon):
        return GeneratorBill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
    z = noise_multiplier(lambda event: event, 1, epsilon, delta)
    least = math.ceil(fewest(z))
    refused = f"{num_records} records are too few for epsilon {epsilon:g}: their {mean} would be noise below {least}"
    return GeneratorBill(dp_event.GaussianDpEvent(z), 1, z, 1.0, refused if num_records < least else "")


def _root_without_noise(covariance: Array, std: float) -> Array:
    """Return A with AA' the covariance in which noise is undone as far as that can be.

    ``std``: of the noise on the triangle's numbers, so that the matrix of the noise is Gaussian orthogonal, its
    eigenvalues a semicircle of variance s^2 = std^2 d / 2. Eigenvectors are kept, and an eigenvalue x becomes
    x - 2 s^2 Re g(x), g the Stieltjes transform of all eigenvalues: the best estimate that does so for large d (Bun,
    Allez, Bouchaud, Potters 2016, "Rotational invariant estimator for general noisy matrices", section V).
    """
    values, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(covariance)))
    if std:
        values = without_noise(values, std * math.sqrt(len(values) / 2))
    root: Array = vectors * np.sqrt(np.maximum(values, 0.0))
    return root


def _first_moments(
    points: Array, labels: NDArray[np.int64], num_classes: int, diameter: float, release: ClassSums
) -> tuple[Array, Array, Array]:
    """Release and return, per class: count (at least 1), mean (num_classes, d), and mean squared distance from it.

    ``diameter``: the longest possible record.
    """
    squares = (points**2).sum(axis=1, keepdims=True) / diameter
    features = np.concatenate([np.full_like(squares, _COUNT * diameter), points, _SPREAD * squares], axis=1)
    sums, std = release.sums(features, _FIRST_NORM * diameter, labels, num_classes)
    number = np.maximum(sums[:, 0] / (_COUNT * diameter), 1.0)
    means = np.stack([shrunk(row, std, row.size) for row in sums[:, 1:-1]]) / number[:, None]
    to_square = diameter / _SPREAD / number
    spread = sums[:, -1] * to_square - (means**2).sum(axis=1)
    return number, means, np.clip(spread, np.clip(2 * std * to_square, 1e-9, diameter**2), diameter**2)
