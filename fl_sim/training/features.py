"""Features (the input of a model's last linear layer), and the Fréchet distance between two sets of features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call

from fl_sim.errors import UserError
from fl_sim.local_plan import Batch
from fl_sim.params import norms_in, running_in, trainable
from fl_sim.trained_part import head_of as head_of  # noqa: PLC0414 (for mypy: this module exports the name, too)
from fl_sim.types import Params

_BATCH = 500
"""Records per forward pass."""

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Passes(Protocol):
    """The interface of compiled forward and backward passes, for models without buffers and dropout.

    The results equal those of PyTorch up to rounding. ``params``: trained parameters by name. ``records``: (n, *input
    shape).
    """

    def logits(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes). The logits have first derivatives, but no second derivatives."""
        ...

    def input_slopes(self, params: Params, records: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each record's cross-entropy with respect to the record's inputs."""
        ...


@dataclass(frozen=True)
class Network:
    """A model whose logits and features can be computed with any parameters, not only with the model's own.

    Records have the shape (n, *input shape). ``passes``: faster forward and backward passes of the model, or None.
    """

    model: nn.Module
    passes: Passes | None = None

    def logits_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), without changing the model's running statistics.

        If ``params`` contains running statistics, they are used instead of the model's own running statistics.
        """
        if self.passes is not None:
            return self.passes.logits(params, records)
        copies = {name: buffer.clone() for name, buffer in running_in(self.model).items()}
        logits: torch.Tensor = functional_call(self.model, {**copies, **params}, (records,))
        return logits

    @property
    def statistics(self) -> frozenset[str]:
        """Return the names of the running statistics of BatchNorm layers."""
        return frozenset(running_in(self.model))

    def training_logits_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits, (n, classes), of BatchNorm layers in training mode, and update the running statistics.

        The running statistics in ``params`` are updated in place. Dropout is off.
        """
        norms = norms_in(self.model).values()
        try:
            for layer in norms:
                layer.train()
            return self.logits_of(params, records)
        finally:
            for layer in norms:
                layer.eval()

    def distances_of(self, params: Params, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair (logits (n, classes), distance between batch statistics and running statistics, shape ()).

        The distance is the sum over BatchNorm layers of |m - m'| + |v - v'| (L2 norms over channels). Here m and v are
        the mean and the biased variance of the layer's inputs, and m' and v' are the running statistics in ``params``.
        Without BatchNorm layers the distance is 0.
        """
        found = [records.new_zeros(())]

        def compare(norm: Any, given: tuple[torch.Tensor, ...]) -> None:
            inputs = given[0].transpose(0, 1).flatten(1)
            for kept, own in ((norm.running_mean, inputs.mean(1)), (norm.running_var, inputs.var(1, correction=0))):
                found.append(torch.linalg.vector_norm(own - kept))

        hooks = [layer.register_forward_pre_hook(compare) for layer in norms_in(self.model).values()]
        try:
            logits = self.logits_of(params, records)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack(found).sum()

    def features_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the features, (n, d), of records for weights ``params``."""
        # PyTorch computes the logits, because ``passes`` do not call the head. The features are the head's inputs.
        return with_features(self.model, partial(Network(self.model).logits_of, params, records))[1]

    def batch(
        self,
        records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        params: Params,
        anchor: Params,
    ) -> Batch:
        """Return the ``Batch`` that the loss terms receive: records, with their logits and features, and models.

        ``records``: inputs, labels and weights of the batch. ``outputs``: logits and, if a loss term needs them,
        features, computed with ``params``. The field ``data`` stays empty here, because each loss term needs different
        data. A loss term can also compute logits or features with other parameters, such as a teacher's parameters. In
        this computation, dropout is off.
        """
        logits, features = outputs
        logits_of, features_of = (partial(self._without_dropout, of) for of in (self.logits_of, self.features_of))
        slopes = None if self.passes is None else self.passes.input_slopes
        return Batch(*records, logits, params, anchor, {}, logits_of, features_of, features, slopes)

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


def with_features(model: nn.Module, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair (logits (n, classes), features (n, d)) of one forward pass of ``model``.

    ``forward``: a function that runs the forward pass and returns the logits. Raises UserError unless the forward pass
    calls the model's head exactly once.
    """
    entering: list[torch.Tensor] = []
    hook = head_of(model).register_forward_pre_hook(lambda _, given: entering.append(given[0].flatten(1)))
    try:
        logits = forward()
    finally:
        hook.remove()
    if len(entering) != 1:
        raise UserError(
            f"the head of {type(model).__name__} is called {len(entering)} times in a forward pass, but features are "
            "the inputs of exactly one call: set self.head to the module that computes logits from features"
        )
    return logits, entering[0]


def feature_sums(model: nn.Module, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the feature sum of each class, (classes, d), on the CPU. Features are computed with weights ``params``.

    ``inputs``: (n, *input shape), normalised; ``labels``: (n,). n may be 0. The function leaves ``model`` in evaluation
    mode.
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
    """Return for each class the sum of ``features`` (n, d) over its records, shape (classes, d)."""
    of_class = labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)
    # A matrix product always adds in the same order on a GPU; index_add does not.
    return of_class.T.to(features.dtype) @ features


def num_features(model: nn.Module, input_shape: tuple[int, ...], rebuilt_by: str = "") -> int:
    """Return the number of features of one record. ``input_shape``: the shape of the record.

    The features are the inputs of the model's head (last layer). The function leaves ``model`` in evaluation mode. Only
    methods that train the head separately need this number. ``rebuilt_by``: the name of the algorithm that has changed
    the architecture of the model; empty without such an algorithm. Raises UserError if the head cannot be trained
    separately: it has other inputs than the features (n, d), or no trainable parameters.
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
        cure = "set self.head to the model's last linear layer, or set another calibrate, preprocess or algorithm"
        if rebuilt_by:
            cure = f"algorithm {rebuilt_by} made this model, so leave calibrate and preprocess out, or change algorithm"
        raise UserError(
            f"the method needs a head that computes the logits from features (n, d) and has trainable weights, but the "
            f"head of {type(model).__name__} does not, or is frozen: {cure}"
        )
    return features.shape[1]


def features_of(
    model: nn.Module, params: Params, inputs: torch.Tensor, *, records_at_once: int = _BATCH
) -> torch.Tensor:
    """Return the features of all records, computed with weights ``params``: (n, d), on the CPU.

    ``inputs``: (n, *input shape), normalised; n may be 0. The function leaves ``model`` in evaluation mode.
    """
    model.eval()
    placed = {name: value.to(inputs.device) for name, value in params.items()}
    with torch.no_grad():
        return torch.cat(
            [Network(model).features_of(placed, part).cpu() for part in torch.split(inputs, records_at_once)]
        )


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the Fréchet distance between two sets of vectors, of shapes (n, d) and (m, d); at least 0.

    With the means mu and the covariances S of the two sets, the distance is |mu_1 - mu_2|^2 + tr(S_1 + S_2 - 2 (S_1
    S_2)^(1/2)) (Heusel et al. 2017, eq. 6). The results are not comparable with published values of this distance
    (FID), which use features of a network that was trained on ImageNet. Sums are float64; n and m must be at least 2.
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
    """Return the square root of a positive semidefinite matrix; eigenvalues below 0 are rounding errors."""
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    root: torch.Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root
