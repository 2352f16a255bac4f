"""Linear discriminant analysis: normal classes of one covariance, which is a linear classifier in closed form."""

import torch

from fl_sim.types import Params

RIDGE = 0.03
"""What is added to the covariance's diagonal, in units of its mean variance."""

NEVER = -1e4
"""The logit of a class without records."""


def linear_discriminant(inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, ridge: float = RIDGE) -> Params:
    """Return the weights of the model ``logistic`` that tells (n, *shape) inputs with (n,) labels apart.

    With the mean mu_c of class c, the covariance S within classes and the share p_c of class c, the logit of class c is
    x' S^-1 mu_c - mu_c' S^-1 mu_c / 2 + log p_c (Hastie, Tibshirani and Friedman 2009, eq. 4.10). ``ridge`` keeps S
    invertible where there are fewer records than numbers in one. Sums are float64.
    """
    records = inputs.flatten(start_dim=1).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    sums = torch.zeros(num_classes, records.shape[1], dtype=torch.float64).index_add_(0, labels, records)
    means = sums / counts.clamp(min=1)[:, None]
    within = records - means[labels]
    covariance = within.T @ within / len(within)
    scale = float(covariance.diagonal().mean()) or 1.0
    covariance.diagonal().add_(ridge * scale)
    weights = torch.linalg.solve(covariance, means.T).T
    bias = (counts / counts.sum()).log() - (means * weights).sum(dim=1) / 2
    weights[counts == 0], bias[counts == 0] = 0.0, NEVER
    return {"1.weight": weights.float().contiguous(), "1.bias": bias.float()}
