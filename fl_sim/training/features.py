"""Features, the input of the last linear layer of a model, and the Fréchet distance between two sets of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.func import functional_call

from fl_sim.errors import UserError
from fl_sim.local_plan import Batch
from fl_sim.params import running_in, trainable
from fl_sim.types import Params

_BATCH = 500
"""Records per forward pass."""

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Network:
    """A model's function of records, (n, *input shape), and parameters."""

    model: nn.Module

    def logits_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), and leave the model's running statistics alone.

        ``params`` may hold others, which are then those that count.
        """
        copies = {name: buffer.clone() for name, buffer in running_in(self.model).items()}
        logits: torch.Tensor = functional_call(self.model, {**copies, **params}, (records,))
        return logits

    def features_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the features, (n, d)."""
        return with_features(self.model, partial(self.logits_of, params, records))[1]

    def batch(
        self,
        records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        params: Params,
        anchor: Params,
    ) -> Batch:
        """Return the batch for loss terms: ``records`` with labels and weights, and the ``outputs`` under ``params``.

        ``outputs``: logits, and features if a term asks for them. The data of a term is not there yet. Outputs under
        other parameters are computed without dropout, as a teacher's are.
        """
        logits, features = outputs
        logits_of, features_of = (partial(self._without_dropout, of) for of in (self.logits_of, self.features_of))
        return Batch(*records, logits, params, anchor, {}, logits_of, features_of, features)

    def _without_dropout(
        self, function: Callable[[Params, torch.Tensor], torch.Tensor], params: Params, records: torch.Tensor
    ) -> torch.Tensor:
        dropping = [part for part in self.model.modules() if isinstance(part, _DROPOUT) and part.training]
        for part in dropping:
            part.eval()
        try:
            return function(params, records)
        finally:
            for part in dropping:
                part.train()


def head_of(model: nn.Module) -> nn.Module:
    """Return the module whose input is the features: the model's attribute ``head``, else its last nn.Linear.

    Raises UserError where there is neither.
    """
    head = getattr(model, "head", None)
    if isinstance(head, nn.Module):
        return head
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(
            "the algorithm needs features, which are what enters the last linear layer of a model, and "
            f"{type(model).__name__} has none: name the module that makes logits of features head (self.head = ...), "
            "or take another model"
        )
    return linear[-1]


def with_features(model: nn.Module, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of ``forward``, a forward pass of ``model``, (n, classes), and the features in it, (n, d)."""
    entering: list[torch.Tensor] = []
    hook = head_of(model).register_forward_pre_hook(lambda _, given: entering.append(given[0].flatten(1)))
    try:
        logits = forward()
    finally:
        hook.remove()
    if len(entering) != 1:
        raise UserError(
            f"the head of {type(model).__name__} is called {len(entering)} times in a forward pass: features are what "
            "enters it once; call the module that makes logits of features head"
        )
    return logits, entering[0]


def feature_sums(model: nn.Module, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, on the CPU, the sum over the records of each class of their features under ``params``, (classes, d).

    ``inputs``: (n, *input shape), normalised; ``labels``: (n,). n may be 0. ``model`` is left in evaluation mode.
    """
    model.eval()
    placed = {name: value.to(inputs.device) for name, value in params.items()}
    total = torch.zeros(())
    with torch.no_grad():
        for records, classes in zip(torch.split(inputs, _BATCH), torch.split(labels, _BATCH), strict=True):
            logits, features = with_features(model, partial(Network(model).logits_of, placed, records))
            total = total + sums_by_class(features, classes, logits.shape[1]).cpu()
    return total


def sums_by_class(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the sum over the records of each class of their (n, d) features, (classes, d)."""
    of_class = labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)
    # A product of matrices adds up in the same order each time; index_add does not on a GPU.
    return of_class.T.to(features.dtype) @ features


def num_features(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return d, how many features a record of ``input_shape`` has. ``model`` is left in evaluation mode.

    Raises UserError for a model whose head cannot be trained by itself: which does not make the logits of features
    (n, d) alone, or has no parameters that are trained.
    """
    model.eval()
    head = head_of(model)
    with torch.no_grad():
        logits, features = with_features(model, partial(model, torch.zeros(2, *input_shape)))
        try:
            alone = head(features)
        except (RuntimeError, ValueError, TypeError, IndexError):
            alone = None
    if not trainable(head) or alone is None or not torch.allclose(alone, logits):
        raise UserError(
            f"calibrate needs a head that makes the logits of features (n, d) and has weights, and that of "
            f"{type(model).__name__} is no such, or frozen: call the model's last linear layer head (self.head = ...), "
            "or take calibrate=none"
        )
    return features.shape[1]


def features_of(
    model: nn.Module, params: Params, inputs: torch.Tensor, *, records_at_once: int = _BATCH
) -> torch.Tensor:
    """Return the features of all records under ``params``, (n, d), on the CPU.

    ``inputs``: (n, *input shape), normalised; n may be 0. ``model`` is left in evaluation mode.
    """
    model.eval()
    placed = {name: value.to(inputs.device) for name, value in params.items()}
    with torch.no_grad():
        return torch.cat(
            [Network(model).features_of(placed, part).cpu() for part in torch.split(inputs, records_at_once)]
        )


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
