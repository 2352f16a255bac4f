"""One normal distribution of the features of each class, from the clients' moments (Luo et al. 2021, eq. 3, 4)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from clients.moments import Array, shrunk, symmetric

# A class is left out if its noisy count is at most 1 plus this number of standard deviations of the noise.
_TELLABLE: Final = 4.0


@dataclass(frozen=True)
class ClassGaussian:
    """The normal distribution of the features of class ``label`` over all clients.

    ``count``: the number of records, not an integer if it is noisy. ``mean``: shape (d,). ``covariance``: shape (d, d),
    symmetric; with noise it may have negative eigenvalues.
    """

    label: int
    count: float
    mean: Array
    covariance: Array

    def scaled(self, unit: float) -> "ClassGaussian":
        """Return the distribution of the features after multiplication by the number ``unit``."""
        return ClassGaussian(self.label, self.count, unit * self.mean, unit**2 * self.covariance)

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Return ``number`` sampled features, shape (number, d). Negative eigenvalues of the covariance become 0."""
        # torch, not numpy: rounding depends on the number of threads, and a run sets this number only for torch.
        values, vectors = torch.linalg.eigh(torch.from_numpy(self.covariance))
        root = vectors * values.clamp(min=0).sqrt()
        normal = torch.from_numpy(generator.standard_normal((number, len(self.mean))))
        drawn: Array = (torch.from_numpy(self.mean) + normal @ root.T).numpy()
        return drawn


def class_gaussians(moments: Array, num_features: int, std: float = 0.0) -> list[ClassGaussian]:
    """Return the distribution of each class that has two records or more.

    ``moments``: the sum of the moments of all clients (``clients.moments.moments_of``). n_ic, mu_ic and Sigma_ic are
    the number, the mean and the covariance of client i's features of class c, and n_c = sum_i n_ic. The sum of outer
    products of client i is (n_ic - 1) Sigma_ic + n_ic mu_ic mu_ic', where ' is the transpose. So the result has the
    mean and the covariance of Luo et al. 2021: mu_c = sum_i n_ic mu_ic / n_c, and [sum_i (n_ic - 1) Sigma_ic + sum_i
    n_ic mu_ic mu_ic' - n_c mu_c mu_c'] / (n_c - 1).

    ``std``: the standard deviation of the noise on each number. With noise, a class is used only if it almost certainly
    has more than one record, and each covariance is shrunk towards a multiple of the identity matrix. The shrinkage is
    strong if noise alone can explain the difference between the covariance and this multiple.
    """
    found = []
    for label, (count, *rest) in enumerate(moments):
        if count <= max(1.0, 1.0 + _TELLABLE * std):
            continue
        sums, products = np.split(np.array(rest), [num_features])
        mean = sums / count
        covariance = (symmetric(products, num_features) - count * np.outer(mean, mean)) / (count - 1)
        found.append(ClassGaussian(label, float(count), mean, _without_noise(covariance, std / (count - 1))))
    return found


def draw_features(
    classes: list[ClassGaussian], samples_per_class: int, generator: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return ``samples_per_class`` sampled features for each class, shape (n, d), and their labels, shape (n,)."""
    drawn = np.concatenate([one.draw(samples_per_class, generator) for one in classes])
    return drawn.astype(np.float32), np.repeat([one.label for one in classes], samples_per_class)


def _without_noise(covariance: Array, std: float) -> Array:
    if not std:
        return covariance
    size = len(covariance)
    round_one = np.eye(size) * max(0.0, float(np.trace(covariance)) / size)
    return round_one + shrunk(covariance - round_one, std, size * (size + 1) // 2)
