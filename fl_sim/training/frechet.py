"""The Fréchet distance between two sets of vectors, each taken for one normal distribution."""

import torch


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return |mu_1 - mu_2|^2 + tr(S_1 + S_2 - 2 (S_1 S_2)^(1/2)) of (n, d) and (m, d) vectors, at least 0.

    Heusel et al. 2017 (eq. 6), whose vectors are features of a network that was trained on ImageNet (FID). Here they
    are whatever the caller gives, so figures compare with one another alone. Sums are float64; n and m are 2 or more.
    """
    (mean_1, covariance_1), (mean_2, covariance_2) = _moments(first), _moments(second)
    root = _root(covariance_1)
    between = _root(root @ covariance_2 @ root).trace()
    distance = (mean_1 - mean_2).square().sum() + covariance_1.trace() + covariance_2.trace() - 2 * between
    return max(0.0, float(distance))


def _moments(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = vectors.double()
    return exact.mean(dim=0), torch.cov(exact.T).reshape(exact.shape[1], exact.shape[1])


def _root(symmetric: torch.Tensor) -> torch.Tensor:
    """Return the root of a matrix that is symmetric and, up to rounding, has no negative eigenvalue."""
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    root: torch.Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root
