"""DP mean embedding: noisy moments of low frequencies, and images drawn from them (after Harder et al. 2021, DP-MERF).

A record is its d lowest frequencies in the cosine basis, which nobody's data had a say in. Two sums over the records
are released, once each: first count, mean and spread of every class, then the second moments about that mean. All else
is post-processing: both are shrunk as far as they may be noise, the second moments towards the falling spectrum that
images have in common. Images are drawn from a normal distribution such that they have these moments once their pixels
are clamped to [-1, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.clamped import before_clamping
from clients.dafl.generator import Bill, PrivateRecords
from clients.frequencies import clamped, frequencies_of, images_of, lowest_frequencies
from clients.symmetric import Array, products, shrunk, symmetric
from clients.warping import warped
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.settings import Settings

_COUNT: Final = 0.25  # what the first release gives a count of one, in the longest possible records
_SPREAD: Final = 0.5  # the same for the squared length of one such record
_FIRST_NORM: Final = math.sqrt(_COUNT**2 + 1 + _SPREAD**2)


class MeanEmbedding(Settings):
    """Draw images from noisy moments: a second where a GAN takes minutes, and no training that could collapse.

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

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> Bill:  # noqa: ARG002 (slot's)
        """Price both releases as one Gaussian release: of noise z_1 and z_2, they are one of z^-2 = z_1^-2 + z_2^-2.

        Refused where the noise on the mean is as long as the longest possible mean, even of all records together.
        (Dong, Roth, Su 2022, corollary 3.3 for the sum, which holds when the second is chosen after the first is seen.)
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

        from fl_sim.privacy.accounting import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

        if math.isinf(epsilon):
            return Bill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
        z = noise_multiplier(lambda event: event, 1, epsilon, delta)
        least = math.ceil(z / math.sqrt(self.mean_share) * _FIRST_NORM * math.sqrt(self.frequencies))
        refused = (
            f"{num_records} records are too few for epsilon {epsilon:g}: their mean image would be noise below {least}"
        )
        return Bill(dp_event.GaussianDpEvent(z), 1, z, 1.0, refused if num_records < least else "")

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: Bill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return images of low frequencies, clamped to [-1, 1]; ``generator`` draws what the moments leave open."""
        shape = tuple(records.inputs.shape[1:])
        order, spectrum = lowest_frequencies(shape, self.frequencies)
        points, labels = frequencies_of(records.inputs, order), records.labels.numpy()
        first = Release(bill.noise_multiplier / math.sqrt(self.mean_share), noise, "count, mean, spread")
        number, means, spread = _first_moments(points, labels, records.num_classes, math.sqrt(math.prod(shape)), first)

        scale = spectrum ** (-self.whitening / 2)
        expected = spectrum * scale**2
        radius = self.radius * np.sqrt(spread * expected.sum())
        units = radius[:, None] / scale
        second = Release(bill.noise_multiplier / math.sqrt(1 - self.mean_share), noise, "second moments")
        squares, std = second.sums(products((points - means[labels]) / units[labels]), 1.0, labels, len(means))
        made = [np.zeros((0, *shape), dtype=np.float32)]
        basis = images_of(np.eye(len(order)), order, shape).reshape(len(order), -1).astype(np.float64)
        clamp = partial(clamped, basis)
        for label in np.flatnonzero(counts):
            prior = np.diag(expected / expected.sum() / self.radius**2)
            moments = symmetric(squares[label], len(order)) / number[label]
            root = _root(prior + shrunk(moments - prior, std / number[label], math.comb(len(order) + 1, 2)))
            mean, root = before_clamping(means[label], units[label][:, None] * root, clamp)
            drawn = generator.standard_normal((counts[label], len(order))) @ root.T
            made.append(images_of(mean + drawn, order, shape))
        return torch.from_numpy(warped(np.concatenate(made), self.warp, generator))


@dataclass(frozen=True)
class Release:
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
        clipped = self.clipped(features, clipping_norm, sums.size)
        for label in np.unique(labels):
            sums[label] = clipped[labels == label].sum(axis=0)
        if not std:
            return sums, 0.0
        drawn = self.noise.gaussian(sums.size, std, purpose=f"mean embedding: {self.purpose}", server_round=1)
        return add_noise(sums, std, drawn.reshape(sums.shape)), std

    def clipped(self, features: Array, clipping_norm: float, size: int) -> Array:
        """Return each row clipped such that the sum of ``size`` numbers, rounded to the grid, moves by no more."""
        std = self.noise_multiplier * clipping_norm
        limit = clipping_norm_on_grid(clipping_norm, std, size, summands=len(features)) if std else math.inf
        norms = np.linalg.norm(features, axis=1)
        factors = np.array([clip_factor(float(norm), limit) for norm in norms])
        clipped = np.zeros_like(features)
        np.multiply(features, factors[:, None], out=clipped, where=factors[:, None] > 0)
        return clipped


def _first_moments(
    points: Array, labels: NDArray[np.int64], num_classes: int, diameter: float, release: Release
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


def _root(matrix: Array) -> Array:
    """Return A with A A^T = the nearest positive semidefinite matrix to ``matrix``."""
    values, vectors = np.linalg.eigh(matrix)
    root: Array = vectors * np.sqrt(np.maximum(values, 0))
    return root
