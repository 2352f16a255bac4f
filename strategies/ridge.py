"""A linear head in closed form, by ridge regression on sums that clients send once.

Zhuang et al. 2025 (AFL, "analytic federated learning") and Fanì et al. 2024 (Fed3R).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from clients.gram import CONSTANT, MOST_RECORDS, SENSITIVITY, num_products, packed, products_of, scale_of
from clients.moments import Array
from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, kind_of
from fl_sim.types import Dataset
from strategies.feature_sums import MOST_BYTES, SumsOfFeatures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fl_sim.privacy.mechanisms import Noise


class Ridge(SumsOfFeatures):
    """The head of the model in closed form: W = (sum G_i + lambda I)^-1 sum B_i.

    Client i sends G_i = sum z z^T and B_i = sum z y^T over its records. z is a record's feature vector (the input of
    the initial model's last layer), extended by a constant for the intercept. y is the one-hot label. Every split of
    the records gives the same head, bit for bit, if a record's feature does not depend on other records.

    ``ridge``: lambda, for vectors z that are scaled to norm 1 at most. ``clipping_norm``: a feature vector of a larger
    norm is first scaled down to this norm. None means the square root of the number of features. ``epsilon`` and
    ``delta``: the privacy guarantee of a client's sums for each of its records; without ``epsilon``, there is no noise.
    The adjacency is zero-out: a record is replaced by nothing, and the number of records stays public. The L2
    sensitivity of the sums is sqrt 2, and each client adds noise for this sensitivity to its own sums. With noise,
    lambda is at least the standard deviation of the noise on each number of sum G_i, times the square root of the
    number of features. This is half of the noise's largest eigenvalue. Negative eigenvalues of sum G_i are replaced by
    0. ``noise``: the source of the noise. With "secret" the protection is real, and the noise differs from run to run.
    With "seeded" the noise is repeatable, and protects in simulation only.
    """

    kind: str = ""
    released: ClassVar[str] = "products of features"
    sensitivity: ClassVar[float] = SENSITIVITY
    of_initial_model: ClassVar[bool] = True
    ridge: float = Field(0.1, gt=0)
    clipping_norm: float | None = Field(None, gt=0)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    noise: Literal["secret", "seeded"] = "secret"

    @model_validator(mode="after")
    def _no_dead_settings(self) -> Self:
        fields = type(self).model_fields
        dead = [name for name in ("delta", "noise") if getattr(self, name) != fields[name].default]
        if self.epsilon is None and dead:
            raise ValueError(
                f"{self.kind}: {dead[0]} = {getattr(self, dead[0])} changes nothing without epsilon, as clients send "
                f"their sums without noise: set epsilon, or leave {dead[0]} out"
            )
        return self

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError if the data set has too many records for sums without rounding errors."""
        del features
        if len(dataset.train) > MOST_RECORDS:
            raise UserError(
                f"{self.kind} adds products exactly for {MOST_RECORDS:,} records at most, and {dataset.name} has "
                f"{len(dataset.train):,}: use fewer records"
            )

    def check_head(self, num_features: int, num_classes: int) -> None:
        """Raise UserError if a client's sums are too large for one message, or if ``epsilon`` is too small."""
        if (size := 8 * num_products(num_features, num_classes)) > MOST_BYTES:
            raise UserError(
                f"{self.kind}: products of {num_features} features are {size >> 20} MiB a client, more than "
                f"{MOST_BYTES >> 20}: take a model with fewer units before its last layer"
            )
        try:
            self._longest(num_features, num_classes)
        except UserError as error:
            raise UserError(f"{self.kind}: epsilon={self.epsilon} is too small to send sums: {error}") from error

    def shape(self, num_features: int, num_classes: int) -> tuple[int, int]:
        """Return the shape of the tensor with a client's sums G_i and B_i."""
        return 1, num_products(num_features, num_classes)

    def summed(self, features: Array, labels: NDArray[np.int64], num_classes: int, noise: Noise | None) -> Array:
        """Return a client's sums G_i and B_i, in the format of ``clients.gram``, with noise if ``epsilon`` is set."""
        clipping_norm = self.clipping_norm or math.sqrt(features.shape[1])
        if self.protection is None or noise is None:
            return packed(*products_of(features, labels, num_classes, clipping_norm))
        from clients.private_gram import private_products  # noqa: PLC0415 (the accountants load slowly)

        return private_products(features, labels, num_classes, clipping_norm, self.protection, noise)

    def _longest(self, num_features: int, num_classes: int) -> float:
        """Return the largest norm of a feature vector z. Raises UserError if the noise is rounded too coarsely."""
        if self.protection is None:
            return 1.0
        from clients.private_gram import longest_private  # noqa: PLC0415 (the accountants load slowly)

        return longest_private(num_features, num_classes, self.protection)

    def strength(self, num_clients: int, size: int) -> float:
        """Return lambda. ``num_clients``: the number of clients with records. ``size``: the length of z."""
        if (protection := self.protection) is None:
            return self.ridge
        return max(self.ridge, protection.std * math.sqrt(num_clients / 2 * size))

    def head(self, gram: Array, by_class: Array, num_clients: int) -> tuple[Array, Array]:
        """Return the weights (classes, d) and the intercepts (classes,) of the head.

        ``gram``, ``by_class``: sum G_i and sum B_i over all clients. ``num_clients``: the number of clients with
        records.
        """
        (size, num_classes), protection = by_class.shape, self.protection
        both, strength = (
            (torch.from_numpy(gram), torch.from_numpy(by_class)),
            self.strength(num_clients, size=len(gram)),
        )
        if protection is None:
            found = torch.linalg.solve(both[0] + strength * torch.eye(size, dtype=torch.float64), both[1])
        else:
            values, vectors = torch.linalg.eigh(both[0])
            found = vectors @ (vectors.T @ both[1] / (values.clamp(min=0) + strength)[:, None])
        scale = scale_of(size - 1, self._longest(size - 1, num_classes))
        clipping_norm = self.clipping_norm or math.sqrt(size - 1)
        weights: Array = scale * math.sqrt(1 - CONSTANT**2) / clipping_norm * found[:-1].T.numpy()
        return weights, scale * CONSTANT * found[-1].numpy()


class RidgeStart(Ridge):
    """Before the first round the server sets the model's head in closed form. Rounds of any method follow."""

    kind: Literal["ridge-start"] = "ridge-start"
    title: ClassVar[str] = "ridge start"
    stage: ClassVar[str] = "fl_sim.stages.ridge:RidgeHead"
    computes_with_records: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for privacy or attack settings under which a client must not send sums of its features."""
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"preprocess ridge-start cannot run under aggregator {kind_of(experiment.aggregator)}, which protects "
                "all records of a client together: each client sends its own sums, whose noise hides single records "
                "at most; set preprocess=none or another aggregator"
            )
        if experiment.attack.clients:
            raise ValueError(
                f"preprocess ridge-start cannot run with attack {kind_of(experiment.attack)}: one hostile client could "
                "change the sums arbitrarily; set preprocess=none or attack=none"
            )
        if not is_none(experiment.local.privacy) and not self.is_private:
            raise ValueError(
                "preprocess ridge-start sends sums that local.privacy does not cover: leave preprocess or "
                "local.privacy out"
            )
