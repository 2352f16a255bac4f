"""The terms of the training loss, for the training of one client and for stacked training.

Stacked training trains many clients in one computation. It pads smaller batches with records of weight 0. These records
add nothing to the loss, and no term becomes infinite or NaN because of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.local_plan import Batch, LocalPlan, LossTerm
from fl_sim.params import check_layout, layout_of
from fl_sim.training.features import with_features
from fl_sim.types import Params

LogitsOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A function from records, (n, *input shape), to logits, (n, classes)."""

Slope: TypeAlias = Callable[
    [LogitsOf, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""A function that computes the gradient of the cross-entropy with respect to the input, such as ``by_autograd``."""

_FAR_BELOW = -1e30
"""The logit of excluded classes. It is finite, because the softmax of logits that are all minus infinity is NaN."""


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the cross-entropy of each record, (n,). ``labels``: classes, (n,), or class proportions, (n, classes).

    ``smoothing``: the share of a label that is spread evenly over all classes, as in torch.nn.CrossEntropyLoss.
    """
    return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def by_autograd(
    logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logits, cross-entropy of each record, its gradient with respect to the inputs).

    The results can be differentiated with respect to the weights. FedMix needs these derivatives, because its loss
    contains the gradient with respect to the inputs.
    """
    records = inputs.requires_grad_()
    logits = logits_of(records)
    own = cross_entropies(logits, labels, smoothing)
    # The sum is differentiated, not the mean, so that row i of the result is the gradient of the loss of record i.
    (slope,) = torch.autograd.grad(own.sum(), records, create_graph=True)
    return logits, own, slope


def mixed_losses(
    logits_of: LogitsOf,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    partner: tuple[torch.Tensor, torch.Tensor],
    weight: float,
    *,
    linearise: bool,
    slope: Slope = by_autograd,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the FedMix loss (``linearise`` True) or the NaiveMix loss of each record, (n,) (Yoon et al. 2021).

    ``partner``: an averaged record, (*input shape), and its class proportions, (classes,). ``weight``: lambda of Yoon
    et al. 2021, the share of the averaged record. ``slope``: the function that computes input gradients. ``smoothing``:
    the label smoothing, for the records' own labels and for the class proportions; see ``cross_entropies``.
    """
    mean_input, mean_label = partner
    if not linearise:
        logits = logits_of((1 - weight) * inputs + weight * mean_input)
        own = cross_entropies(logits, labels, smoothing)
        return (1 - weight) * own + weight * cross_entropies(logits, mean_label.expand_as(logits), smoothing)
    logits, own, gradient = slope(logits_of, (1 - weight) * inputs, labels, smoothing)
    expansion = (gradient * mean_input).flatten(1).sum(1)
    averaged = cross_entropies(logits, mean_label.expand_as(logits), smoothing)
    return (1 - weight) * own + weight * averaged + weight * expansion


def terms_of(plan: LocalPlan) -> tuple[LossTerm, ...]:
    """Return the local plan's loss terms whose weight is not 0.

    The algorithm's own loss term, if any, comes last.
    """
    terms = []
    if (part := plan.distillation) is not None and part.weight:
        function = _With(distilled, (part.weight, part.temperature, part.exclude_true))
        terms.append(LossTerm(function, {} if part.classes is None else {"classes": part.classes}))
    if (suppression := plan.suppression) is not None and suppression.weight:
        terms.append(LossTerm(_With(suppressed, (suppression.weight,)), {"shares": suppression.shares}))
    if (contrast := plan.contrast) is not None and contrast.weight:
        terms.append(
            LossTerm(_With(contrasted, (contrast.weight, contrast.temperature)), contrast.previous, features=True)
        )
    if (pull := plan.pull) is not None and pull.weight:
        data = {"prototypes": pull.prototypes, "present": pull.present}
        terms.append(LossTerm(_With(pulled, (pull.weight,)), data, features=True))
    return (*terms, *([] if plan.loss_term is None else [plan.loss_term]))


def outputs_for(
    terms: Sequence[LossTerm], model: nn.Module, forward: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (logits, features) of a forward pass of ``model``.

    Features are the inputs of the head (last layer). They are None if no loss term needs them.
    """
    return with_features(model, forward) if any(term.features for term in terms) else (forward(), None)


def adjusted(logits: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None) -> torch.Tensor:
    """Return ``scale`` * logits + ``shift`` for (n, classes) logits. A shift of -inf removes a class from softmax.

    If ``scale`` is None, logits are not scaled. If ``shift`` is None, logits are not shifted.
    """
    if scale is not None:
        _check("logit_scale", scale, logits.shape[1:])
        logits = logits * scale
    if shift is not None:
        _check("logit_shift", shift, logits.shape[1:])
        logits = logits + shift
    return logits


def check_smoothing(plan: LocalPlan, smoothing: float) -> None:
    """Raise UserError if labels are smoothed and the plan removes a class from the softmax.

    A smoothed label gives every class a share, also the removed class, so the loss would be infinite.
    """
    if smoothing and plan.logit_shift is not None and bool((plan.logit_shift == -torch.inf).any()):
        raise UserError(
            f"local.label_smoothing={smoothing:g} gives every class a part of each label, but the plan removes classes "
            "from the softmax (logit_shift is minus infinity): leave local.label_smoothing out"
        )


def with_terms(loss: torch.Tensor, terms: Sequence[LossTerm], data: Sequence[Params], batch: Batch) -> torch.Tensor:
    """Return ``loss``, a tensor of shape (), plus all loss ``terms``, evaluated on ``batch``.

    ``data``: the tensors of each term, on the device of the batch. Raises UserError unless each term returns a tensor
    with one number per record, or with one number for the whole batch.
    """
    count = len(batch.labels)
    for term, own in zip(terms, data, strict=True):
        value = term.function(replace(batch, data=own))
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape not in ((), (count,)):
            found = f"a {type(value).__name__}" if shape is None else f"a tensor of shape {shape}"
            name = getattr(term.function, "__qualname__", repr(term.function))
            raise UserError(
                f"the loss term {name} returned {found} for {count} records: it must return a tensor of one number "
                f"per record, ({count},), or of one number, ()"
            )
        loss = loss + (value if shape == () else (value * batch.weights).sum())
    return loss


def distilled(batch: Batch, weight: float, temperature: float, exclude_true: bool) -> torch.Tensor:  # noqa: FBT001
    """Return the loss term ``Distillation`` (a divergence from the received model's outputs) of each record, (n,)."""
    own, received = batch.logits, batch.logits_of(batch.anchor, batch.inputs).detach()
    left_out = torch.zeros_like(own, dtype=torch.bool)
    if "classes" in batch.data:
        _check("the classes of a distillation", batch.data["classes"], own.shape[1:])
        left_out = left_out | ~batch.data["classes"]
    if exclude_true:
        left_out = left_out | _of_class(batch)
    # An excluded class has probability 0 under both models. If all classes are excluded, the divergence is 0.
    log_own, log_received = (
        functional.log_softmax((logits / temperature).masked_fill(left_out, _FAR_BELOW), dim=1)
        for logits in (own, received)
    )
    return weight * temperature**2 * (log_received.exp() * (log_received - log_own)).sum(1)


def suppressed(batch: Batch, weight: float) -> torch.Tensor:
    """Return the loss term ``Suppression`` as one number for the whole batch, shape ().

    The term cannot be computed for each record, because it contains the logarithm of a mean over the batch.
    """
    shares, num_classes = batch.data["shares"], batch.logits.shape[1]
    _check("the shares of a suppression", shares, (num_classes,))
    usual = torch.where(shares > 0, shares * num_classes, 1.0).log()
    exponents = (batch.logits - usual).masked_fill(_of_class(batch), 0.0)
    means = (exponents + batch.weights.log().unsqueeze(1)).logsumexp(0)
    return torch.where(shares > 0, weight * shares * means, 0.0).sum()


def contrasted(batch: Batch, weight: float, temperature: float) -> torch.Tensor:
    """Return the loss term ``Contrast`` (MOON's loss on features) of each record, (n,)."""
    assert batch.features is not None
    check_layout("the contrast's previous weights", batch.data, layout_of(batch.anchor))
    own, previous, received = (
        _directions(features)
        for features in (
            batch.features,
            *(batch.features_of(params, batch.inputs).detach() for params in (batch.data, batch.anchor)),
        )
    )
    # One inner product with (previous - received): if these features are equal, the gradient of the loss is exactly 0.
    # A difference of two inner products would have rounding errors, and the gradient would not be exactly 0.
    return weight * functional.softplus((own * (previous - received)).sum(1) / temperature)


def pulled(batch: Batch, weight: float) -> torch.Tensor:
    """Return the loss term ``Pull`` (the squared distance of features to a class prototype) of each record, (n,)."""
    assert batch.features is not None
    prototypes, present = batch.data["prototypes"], batch.data["present"]
    shape = batch.logits.shape[1], batch.features.shape[1]
    _check("the prototypes", prototypes, shape, advice="; the head of the model must be a single nn.Linear")
    _check("the present classes", present, batch.logits.shape[1:])
    distances = (batch.features - prototypes[batch.labels]).pow(2).sum(1)
    return weight * torch.where(present[batch.labels], distances, 0.0)


@dataclass(frozen=True)
class _With:
    """A loss term: the call ``function(batch, *settings)`` with fixed settings.

    Two objects of this class are equal if their functions and settings are equal. So clients with equal loss terms can
    be trained in one stack (one computation).
    """

    function: Callable[..., torch.Tensor]
    settings: tuple[Any, ...]

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self.function(batch, *self.settings)


def _directions(features: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``features``, each scaled to length 1.

    A row of zeros (for example, the output of inactive ReLUs) stays zero and has no gradient.
    """
    lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    has_any = lengths > 0
    return torch.where(has_any, features, 0.0) / torch.where(has_any, lengths, 1.0)


def _of_class(batch: Batch) -> torch.Tensor:
    """Return a boolean mask, (n, classes). It is True at the label of each record."""
    return batch.labels.unsqueeze(1) == torch.arange(batch.logits.shape[1], device=batch.labels.device)


def _check(what: str, found: torch.Tensor, shape: Sequence[int], advice: str = "") -> None:
    if tuple(found.shape) != tuple(shape):
        raise UserError(f"{what} must have the shape {tuple(shape)} for this model, not {tuple(found.shape)}{advice}")
