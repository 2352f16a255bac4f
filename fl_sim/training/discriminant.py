"""Linear and quadratic discriminant analysis in closed form.

Both methods model the records of each class by a normal distribution. In the linear form all classes have the same
covariance matrix; in the quadratic form each class has its own covariance matrix.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.types import Params

RIDGE = 0.03
"""The ridge: the multiple of the mean variance that is added to the diagonal of a covariance matrix to invert it."""

OWN_SHARE, OWN_RIDGE = 0.1, 0.3
"""For the quadratic form: ``OWN_SHARE`` is the weight of the covariance of a class, ``OWN_RIDGE`` is the ridge.

The pooled covariance of all classes has the weight 1 - ``OWN_SHARE``. The ridge is a multiple of the mean variance.
"""

_MOST_NUMBERS = 500_000_000  # maximum number of weights of one model, 2 GB as float32

NEVER = -1e4
"""The logit of a class without records, so low that the class is never predicted."""


@dataclass(frozen=True, eq=False)
class _Classes:
    """Statistics of labelled records with d features in C classes.

    ``counts``: (C,), the number of records of each class. ``means``: (C, d), the class means. ``within``: (n, d), the
    records minus the means of their classes.
    """

    counts: torch.Tensor
    means: torch.Tensor
    within: torch.Tensor

    def log_shares(self) -> torch.Tensor:
        return (self.counts / self.counts.sum()).log()

    def pooled(self) -> torch.Tensor:
        return self.within.T @ self.within / len(self.within)


def _classes_of(inputs: torch.Tensor, labels: torch.Tensor, num_classes: int) -> _Classes:
    records = inputs.flatten(start_dim=1).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    sums = torch.zeros(num_classes, records.shape[1], dtype=torch.float64).index_add_(0, labels, records)
    means = sums / counts.clamp(min=1)[:, None]
    return _Classes(counts, means, records - means[labels])


def linear_discriminant(inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, ridge: float = RIDGE) -> Params:
    """Return weights of the model ``logistic`` that make it a linear discriminant classifier.

    The weights are computed from inputs (n, *shape) with labels (n,). Let mu_c be the mean of class c, S the covariance
    within classes, p_c the share of class c among all records, and ' the transpose. The logit of class c for a record x
    is x' S^-1 mu_c - mu_c' S^-1 mu_c / 2 + log p_c (Hastie, Tibshirani and Friedman 2009, eq. 4.10). ``ridge`` makes S
    invertible, even with fewer records than features. Sums are float64.
    """
    classes = _classes_of(inputs, labels, num_classes)
    covariance = classes.pooled()
    covariance.diagonal().add_(ridge * _scale_of(covariance))
    weights = torch.linalg.solve(covariance, classes.means.T).T
    bias = classes.log_shares() - (classes.means * weights).sum(dim=1) / 2
    weights[classes.counts == 0], bias[classes.counts == 0] = 0.0, NEVER
    return {"1.weight": weights.float().contiguous(), "1.bias": bias.float()}


class QuadraticDiscriminant(nn.Module):
    """The model of quadratic discriminant analysis, for records of ``size`` features.

    ``quadratic_discriminant`` returns its weights.
    """

    def __init__(self, size: int, num_classes: int) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.zeros(num_classes, size))
        self.whitening = nn.Parameter(torch.zeros(num_classes, size, size))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, classes), of inputs (batch, *shape)."""
        records = inputs.flatten(start_dim=1)
        squares = [
            ((records - mean) @ whitening.T).square().sum(dim=1)
            for mean, whitening in zip(self.means, self.whitening, strict=True)
        ]
        return self.bias - torch.stack(squares, dim=1) / 2


def quadratic_discriminant(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    own_share: float = OWN_SHARE,
    ridge: float = OWN_RIDGE,
) -> Params:
    """Return the weights of a ``QuadraticDiscriminant``, computed from inputs (n, *shape) with labels (n,).

    mu_c and S_c are the mean and the covariance of class c, p_c is its share of all records, and ' means transposed.
    The logit of class c for a record x is -(x - mu_c)' S_c^-1 (x - mu_c) / 2 - log |S_c| / 2 + log p_c (Hastie,
    Tibshirani and Friedman 2009, eq. 4.12). S_c is a regularised covariance (eq. 4.13; Friedman 1989), the sum of three
    matrices: ``own_share`` times the covariance of class c, 1 - ``own_share`` times the pooled covariance, and the
    identity matrix times ``ridge`` times the mean variance. Sums are float64. Raises UserError if the matrices are too
    large for a model.
    """
    size = inputs[:1].numel()
    if num_classes * size**2 > _MOST_NUMBERS:
        raise UserError(
            f"the classifier quadratic-discriminant has {num_classes} matrices of {size:,} x {size:,} numbers here, "
            f"which is more than {_MOST_NUMBERS:,}: leave this classifier out, or set features=scattering"
        )
    classes = _classes_of(inputs, labels, num_classes)
    pooled = classes.pooled()
    whitening = torch.zeros(num_classes, size, size)
    bias = classes.log_shares()
    for label in range(num_classes):
        own = classes.within[labels == label]
        if not len(own):
            bias[label] = NEVER
            continue
        covariance = own_share * (own.T @ own) / len(own) + (1 - own_share) * pooled
        covariance.diagonal().add_(ridge * _scale_of(pooled))
        factor = torch.linalg.cholesky(covariance)
        whitening[label] = torch.linalg.solve_triangular(factor, torch.eye(size, dtype=torch.float64), upper=False)
        bias[label] -= factor.diagonal().log().sum()
    return {"means": classes.means.float(), "whitening": whitening, "bias": bias.float()}


def _scale_of(covariance: torch.Tensor) -> float:
    """Return the factor of the ridge: the mean variance of a covariance matrix, or 1 if all variances are 0."""
    return float(covariance.diagonal().mean()) or 1.0
