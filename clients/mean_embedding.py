"""DP mean embedding: noisy moments of low frequencies, and images drawn from them (after Harder et al. 2021, DP-MERF).

A record is its d lowest frequencies in the cosine basis, which nobody's data had a say in. Two sums over the records
are released, once each: first count, mean and variances of every class, then the second moments about that mean. All
else is post-processing: images are drawn from the normal distribution with these moments, the one of largest entropy.
"""

import math
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from clients.generation import Bill, PrivateRecords
from fl_sim.config import Settings
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid

Array: TypeAlias = NDArray[np.float64]


class MeanEmbedding(Settings):
    """Draw images from noisy moments: seconds where a GAN takes minutes, and no training that could collapse.

    ``frequencies``: d. ``mean_share``: the share of the budget (of 1 / noise multiplier squared) that goes to count,
    mean and variances. ``whitening``: 0 leaves the frequencies as they are, 1 scales all to unit variance, before
    clipping. ``radius``: where the second release clips, in root mean square distances from the mean.
    """

    kind: Literal["mean-embedding"] = "mean-embedding"
    frequencies: int = Field(80, ge=1)
    mean_share: float = Field(0.1, gt=0, lt=1)
    whitening: float = Field(0.5, ge=0, le=1)
    radius: float = Field(1.2, gt=0)

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> Bill:  # noqa: ARG002 (slot's)
        """Price both releases as one Gaussian release: of noise z_1 and z_2, they are one of z^-2 = z_1^-2 + z_2^-2.

        Refused where the noise on the mean is as long as the longest possible mean, even of all records together.
        (Dong, Roth, Su 2022, corollary 3.3 for the sum, which holds when the second is chosen after the first is seen.)
        """
        from dp_accounting import dp_event  # noqa: PLC0415 (loads slowly, and most runs need no generator)

        from fl_sim.privacy.planning import noise_multiplier  # noqa: PLC0415 (loads dp_accounting)

        if math.isinf(epsilon):
            return Bill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0, "" if num_records else "no records")
        z = noise_multiplier(lambda event: event, 1, epsilon, delta)
        least = math.ceil(z / math.sqrt(self.mean_share) * math.sqrt(3 * self.frequencies))
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
        order = lowest_frequencies(shape, self.frequencies)
        points, labels = frequencies_of(records.inputs, order), records.labels.numpy()
        first_noise = bill.noise_multiplier / math.sqrt(self.mean_share)
        second_noise = bill.noise_multiplier / math.sqrt(1 - self.mean_share)
        diameter = math.sqrt(math.prod(shape))

        features = np.concatenate([np.full((len(points), 1), diameter), points, points**2 / diameter], axis=1)
        sums, std = noisy_sums(
            features, labels, records.num_classes, math.sqrt(3) * diameter, first_noise, noise, "moments"
        )
        number = np.maximum(sums[:, 0] / diameter, 1.0)[:, None]
        means = _shrunk(sums[:, 1 : 1 + len(order)], std) / number
        variances = sums[:, 1 + len(order) :] * diameter / number - means**2
        variances = np.maximum(variances, np.maximum(2 * std * diameter / number, 1e-9))
        scale = variances ** (-self.whitening / 2)
        radius = self.radius * np.sqrt((variances * scale**2).sum(axis=1))

        centred = (points - means[labels]) * scale[labels] / radius[labels][:, None]
        if bill.noise_multiplier:
            centred = _clipped(centred, 1.0)
        products, _ = noisy_sums(
            _products(centred), labels, records.num_classes, 1.0, second_noise, noise, "second moments"
        )
        made = []
        for label in np.flatnonzero(counts):
            root = _root(_symmetric(products[label], len(order)) / number[label]) * radius[label]
            drawn = generator.standard_normal((counts[label], len(order))) @ root.T
            made.append(images_of(means[label] + drawn / scale[label], order, shape))
        return torch.from_numpy(np.concatenate([np.zeros((0, *shape), dtype=np.float32), *made]))


def lowest_frequencies(shape: tuple[int, ...], number: int) -> NDArray[np.intp]:
    """Return the flat positions of the ``number`` lowest frequencies (all, where there are fewer) of ``shape``."""
    axes = np.meshgrid(*(np.arange(size) / size for size in shape), indexing="ij")
    heights = np.sum([axis**2 for axis in axes], axis=0)
    return np.argsort(heights, axis=None, kind="stable")[:number]


def frequencies_of(inputs: torch.Tensor, order: NDArray[np.intp]) -> Array:
    """Return the cosine coefficients at ``order`` of each record, (n, len(order)), in an orthonormal basis."""
    from scipy.fft import dctn  # noqa: PLC0415 (most runs need no generator)

    values = inputs.numpy().astype(np.float64)
    with np.errstate(invalid="ignore"):
        coefficients = dctn(values, axes=tuple(range(1, values.ndim)), norm="ortho")
    chosen: Array = coefficients.reshape(len(values), -1)[:, order]
    return chosen


def images_of(coefficients: Array, order: NDArray[np.intp], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the records with these coefficients and no others, clamped to [-1, 1]."""
    from scipy.fft import idctn  # noqa: PLC0415 (most runs need no generator)

    full = np.zeros((len(coefficients), math.prod(shape)))
    full[:, order] = coefficients
    images = idctn(full.reshape(-1, *shape), axes=tuple(range(1, len(shape) + 1)), norm="ortho")
    clamped: NDArray[np.float32] = np.clip(images, -1, 1).astype(np.float32)
    return clamped


def noisy_sums(
    features: Array,
    labels: NDArray[np.int64],
    num_classes: int,
    clipping_norm: float,
    noise_multiplier: float,
    noise: Noise,
    purpose: str,
) -> tuple[Array, float]:
    """Return the noisy sum of ``features`` per class, (num_classes, d), and the standard deviation of its noise.

    A record is in one class, so it moves all the sums together by at most ``clipping_norm``. Rows that are not finite
    are left out.
    """
    std, size = noise_multiplier * clipping_norm, num_classes * features.shape[1]
    norms = np.linalg.norm(features, axis=1)
    limit = clipping_norm_on_grid(clipping_norm, std, size) if std else math.inf
    factors = np.array([clip_factor(float(norm), limit) for norm in norms])
    kept = factors > 0
    sums = np.zeros((num_classes, features.shape[1]))
    for label in range(num_classes):
        rows = kept & (labels == label)
        sums[label] = (features[rows] * factors[rows, None]).sum(axis=0)
    if not std:
        return sums, 0.0
    drawn = noise.standard_normal(size, purpose=f"mean embedding: {purpose}", server_round=1)
    return add_noise(sums, std, drawn.reshape(sums.shape)), std


def _clipped(rows: Array, norm: float) -> Array:
    lengths = np.linalg.norm(rows, axis=1)
    factors = np.array([clip_factor(float(length), norm) for length in lengths])
    shorter: Array = rows * factors[:, None]
    return shorter


def _shrunk(sums: Array, std: float) -> Array:
    """Return ``sums`` shrunk row by row to zero as far as they may be noise (James and Stein's positive part)."""
    lengths = np.maximum((sums**2).sum(axis=1, keepdims=True), 1e-300)
    shrunk: Array = sums * np.maximum(1 - sums.shape[1] * std**2 / lengths, 0)
    return shrunk


def _products(rows: Array) -> Array:
    """Return the upper triangle of each row's outer product with itself, off-diagonals times sqrt 2: length |row|^2."""
    upper, right = np.triu_indices(rows.shape[1])
    products: Array = rows[:, upper] * rows[:, right] * np.where(upper == right, 1.0, math.sqrt(2))
    return products


def _symmetric(triangle: Array, size: int) -> Array:
    """Undo ``_products``: return the symmetric matrix (size, size)."""
    upper, right = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper, right] = triangle / np.where(upper == right, 1.0, math.sqrt(2))
    full: Array = matrix + np.triu(matrix, 1).T
    return full


def _root(matrix: Array) -> Array:
    """Return A with A A^T = the nearest positive semidefinite matrix to ``matrix``."""
    values, vectors = np.linalg.eigh(matrix)
    root: Array = vectors * np.sqrt(np.maximum(values, 0))
    return root
