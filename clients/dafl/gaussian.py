"""Class Gaussians: every class's mean and covariance under noise, and vectors drawn from what was released.

For records that are vectors, such as those of ``features=scattering``, in which classes are nearly normal. Two sums
over the records of each class are released, once each. The first finds the class's centre with a small part of the
budget. The second is that of (u, uu'), where u is a record's distance from the centre in units of ``radius``, shortened
to length 1: the smaller the ball, the smaller the noise. All else is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.class_moments import num_moments, weighted_moments
from clients.dafl.generator import Bill, PrivateRecords
from clients.symmetric import Array, symmetric
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.settings import Settings

LONGEST: Final = math.sqrt(2)
"""The length of (u, uu') where u has length 1: its square is |u|^2 + |u|^4, as triangles keep lengths."""

_UP: Final = 1 + 2.0**-50  # rounding must not make noise less than what was billed


class Gaussian(Settings):
    """Draw vectors from noisy moments of each class: seconds, and nothing that is trained.

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

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> Bill:  # noqa: ARG002 (slot's)
        """Price both releases as one Gaussian release: of noise z_1 and z_2, they are one of z^-2 = z_1^-2 + z_2^-2.

        (Dong, Roth, Su 2022, corollary 3.3 for the sum, which holds when the second is chosen after the first is seen.)
        Refused where the noise on each number of a centre is as large as the radius even with all records in one class.
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

        from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

        if math.isinf(epsilon):
            return Bill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
        z = noise_multiplier(lambda event: event, 1, epsilon, delta)
        least = math.ceil(z / math.sqrt(self.centre_share) / self.radius)
        refused = f"{num_records} records are too few for epsilon {epsilon:g}: their mean would be noise below {least}"
        return Bill(dp_event.GaussianDpEvent(z), 1, z, 1.0, refused if num_records < least else "")

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: Bill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return vectors, (sum of counts, numbers), in [-1, 1]; ``generator`` draws what the moments leave open.

        How many records a class has is not released: of all, whose number is public, it has the share that it has in
        ``counts``.
        """
        vectors = records.inputs.numpy().astype(np.float64) / self.clipping_norm
        labels, size = records.labels.numpy(), vectors.shape[1]
        first = Release(_UP * bill.noise_multiplier / math.sqrt(self.centre_share), noise, len(vectors))
        second = Release(_UP * bill.noise_multiplier / math.sqrt(1 - self.centre_share), noise, len(vectors))
        made = [np.zeros((0, size), dtype=np.float32)]
        for label in np.flatnonzero(counts).tolist():
            own = vectors[labels == label]
            number = max(1.0, len(vectors) * counts[label] / counts.sum())
            centre = first.sum_of(own, len(counts), label) / number
            moments, std = second.moments_of((own - centre) / self.radius, len(counts), label)
            mean, covariance = _mean_and_covariance(moments / number, size, std / number)
            drawn = drawn_as_one(int(counts[label]), _root(covariance, std / number), generator)
            made.append(np.clip(self.clipping_norm * (centre + self.radius * (mean + drawn)), -1, 1).astype(np.float32))
        return torch.from_numpy(np.concatenate(made))


@dataclass(frozen=True)
class Release:
    """One Gaussian release of sums over the records of each class.

    ``noise_multiplier``: noise on a sum / how far a record moves it, 0: neither noise nor clipping. A record is in one
    class, so it moves the sums of all classes together by no more than that of its own. ``num_records``: of all classes
    together, a public number; what is clipped to must not depend on how many a class has.
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
        [moments] = (
            weighted_moments(shortened, weights, np.zeros(len(rows), np.int64), 1)
            if len(rows)
            else [np.zeros(1 + size)]
        )
        return self._noisy(moments[1:], std, f"gaussian: moments of class {label}"), std

    def _limit(self, longest: float, size: int) -> float:
        std = self.noise_multiplier * longest
        return clipping_norm_on_grid(longest, std, size, summands=self.num_records) if std else math.inf

    def _noisy(self, sums: Array, std: float, purpose: str) -> Array:
        return (
            add_noise(sums, std, self.noise.gaussian(sums.size, std, purpose=purpose, server_round=1)) if std else sums
        )


def clipped(rows: Array, clipping_norm: float) -> Array:
    """Return ``rows`` (n, d), each shortened to ``clipping_norm``; what is not finite counts as zero."""
    norms = np.linalg.norm(rows, axis=1)
    factors = np.array([clip_factor(float(norm), clipping_norm) for norm in norms])
    shortened = np.zeros_like(rows)
    np.multiply(rows, factors[:, None], out=shortened, where=factors[:, None] > 0)
    return shortened


def drawn_as_one(number: int, root: Array, generator: np.random.Generator) -> Array:
    """Return ``number`` draws from N(0, ``root`` root'), (number, d), whose own mean is 0.

    Where they are enough, their own covariance is exactly that, too: they carry all that was released and no more.
    """
    normal = torch.from_numpy(generator.standard_normal((number, root.shape[1])))
    if number > 1:
        normal -= normal.mean(dim=0)
    if number > 2 * root.shape[1]:
        factor = torch.linalg.cholesky(normal.T @ normal / number)
        normal = torch.linalg.solve_triangular(factor, normal.T, upper=False).T
    drawn: Array = (normal @ torch.from_numpy(root).T).numpy()
    return drawn


def _mean_and_covariance(moments: Array, size: int, std: float) -> tuple[Array, Array]:
    """Return the mean and the covariance without what noise adds to the mean's square; ``std``: of each number."""
    mean, products = np.split(moments, [size])
    return mean, symmetric(products, size) - np.outer(mean, mean) + std**2 * np.eye(size)


def _root(covariance: Array, std: float) -> Array:
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


def without_noise(values: Array, std: float) -> Array:
    """Return the eigenvalues ``values`` (d,) of a matrix without the noise whose eigenvalues have deviation ``std``."""
    width = 2 * std / math.sqrt(len(values))  # about as many of the noise's eigenvalues lie in it as should be averaged
    apart = values[:, None] - values
    cleaned: Array = values - 2 * std**2 * (apart / (apart**2 + width**2)).mean(axis=1)
    return cleaned
