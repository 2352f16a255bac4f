"""Gaussian mixtures of features: a client fits one mixture for each class, and sends its parameters as one row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from clients.moments import Array, symmetric, triangle_of
from fl_sim.errors import Malformed, UserError
from fl_sim.importing import torch

Covariance = Literal["full", "diag", "spherical"]
"""The form of a component's covariance: any matrix, a diagonal matrix, or a multiple of the identity."""

_SLACK: Final = 1e-6


@dataclass(frozen=True)
class ClassMixture:
    """A mixture of K Gaussians of features with d numbers.

    ``weights``: shape (K,), at least 0, with the sum 1. ``means``: shape (K, d). ``covariances``: shape (K, d, d) for
    "full", (K, d) for "diag", (K, 1) for "spherical".
    """

    weights: Array
    means: Array
    covariances: Array

    def draw(self, number: int, generator: np.random.Generator) -> Array:
        """Return ``number`` samples, shape (number, d), sorted by component. Negative variances are replaced by 0."""
        counts = generator.multinomial(number, self.weights / self.weights.sum())
        drawn = [
            mean + generator.standard_normal((count, len(mean))) @ _root(covariance)
            if covariance.ndim == 2
            else mean + generator.standard_normal((count, len(mean))) * np.sqrt(np.maximum(covariance, 0))
            for count, mean, covariance in zip(counts, self.means, self.covariances, strict=True)
        ]
        return np.concatenate(drawn)


@dataclass(frozen=True)
class MixtureForm:
    """The settings of a client's Gaussian mixtures, and the encoding of each mixture as one row of numbers.

    ``components``: the largest number of components K. ``covariance``: the type of covariances (full, diagonal or
    spherical). ``added_variance``: the number that is added to all variances.
    """

    components: int
    covariance: Covariance
    added_variance: float

    def width(self, num_features: int) -> int:
        """Return the length of a row. A row contains the number of records, and K weights, means and covariances."""
        return 1 + self.components * (1 + num_features + self._size(num_features))

    def rows(self, features: Array, labels: NDArray[np.int64], num_classes: int, seed: int) -> Array:
        """Return a row for the mixture of each class, shape (classes, width), zeros for a class without records.

        ``features``: (n, d), ``labels``: (n,); n may be 0. For a class with fewer records than K, the number of
        components is the number of records; all other components have the weight 0. ``seed``: the seed of k-means, with
        which the fit starts. Raises UserError if the variances of the features are too small for ``added_variance``.
        """
        rows = np.zeros((num_classes, self.width(features.shape[1])))
        for label in np.unique(labels):
            records = features[labels == label]
            fitted = self._fitted(records, seed)
            parts = [fitted.weights, fitted.means.ravel(), self._flat(fitted.covariances).ravel()]
            filled = [np.pad(part, (0, len(part) // len(fitted.weights) * self._missing(fitted))) for part in parts]
            rows[label] = np.concatenate([[len(records)], *filled])
        return rows

    def mixture(self, row: Array, num_features: int) -> tuple[int, ClassMixture]:
        """Return the number of records and the mixture in a row of ``rows``. The row must not be all zeros."""
        ends = np.cumsum([1, self.components, self.components * num_features])
        count, weights, means, covariances = np.split(row, ends)
        held = weights > 0
        shaped = covariances.reshape(self.components, -1)[held]
        if self.covariance == "full":
            shaped = np.array([symmetric(one, num_features) for one in shaped])
        return int(count[0]), ClassMixture(weights[held], means.reshape(self.components, -1)[held], shaped)

    def check(self, rows: Array) -> None:
        """Raise Malformed if the weights of a mixture are negative, or do not add up to 1."""
        weights = rows[rows[:, 0] > 0, 1 : 1 + self.components]
        if (weights < 0).any() or (np.abs(weights.sum(axis=1) - 1) > _SLACK).any():
            raise Malformed("sent a mixture whose weights are negative or do not add up to 1")

    def _fitted(self, records: Array, seed: int) -> ClassMixture:
        from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 (the import takes a second)
        from sklearn.mixture import GaussianMixture  # noqa: PLC0415

        components = min(self.components, len(records))
        fit = GaussianMixture(
            components, covariance_type=self.covariance, reg_covar=self.added_variance, random_state=seed
        )
        # scikit-learn refuses to fit a mixture to a single record. The record is given twice, which has the same
        # mixture.
        given = records if len(records) > 1 else np.repeat(records, 2, axis=0)
        # The fit uses one thread, because the rounding of its sums depends on the number of threads.
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a fit that has not converged is a valid mixture, too
            try:
                fit.fit(given)
            except ValueError as error:
                raise UserError(
                    f"algorithm.added_variance={self.added_variance:g} is too small for the features of a client: "
                    "their variances are not positive after rounding; set a larger value, or "
                    f"algorithm.covariance=diag or spherical ({error})"
                ) from error
        covariances = fit.covariances_ if self.covariance != "spherical" else fit.covariances_[:, None]
        return ClassMixture(fit.weights_, fit.means_, covariances)

    def _missing(self, fitted: ClassMixture) -> int:
        return self.components - len(fitted.weights)

    def _size(self, num_features: int) -> int:
        return {"full": num_features * (num_features + 1) // 2, "diag": num_features, "spherical": 1}[self.covariance]

    def _flat(self, covariances: Array) -> Array:
        return np.array([triangle_of(one) for one in covariances]) if self.covariance == "full" else covariances


def _root(covariance: Array) -> Array:
    """Return the symmetric square root of a covariance matrix. Negative eigenvalues are replaced by 0."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(covariance))
    root: Array = (vectors * values.clamp(min=0).sqrt() @ vectors.T).numpy()
    return root
