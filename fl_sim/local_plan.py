"""The local plan of an algorithm, as data: one definition for one client, a stack, and the compiled trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fl_sim.errors import RunError, UserError
from fl_sim.importing import torch
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Params, Trained


@dataclass(frozen=True)
class Mix:
    """A loss that mixes each batch with one averaged record of the pool (FedMix, NaiveMix).

    ``inputs``: (pool size, *input shape), normalised; ``labels``: (pool size, classes), class proportions.
    ``linearise`` chooses FedMix's first-order expansion over NaiveMix's plain interpolation.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weight: float
    linearise: bool

    def __post_init__(self) -> None:
        """Raise RunError where a record of the pool has no label, or a label no record."""
        if len(self.inputs) != len(self.labels):
            raise RunError(
                f"the mixing pool holds {len(self.inputs)} averaged records and {len(self.labels)} rows of class "
                "proportions: a client shared more of one than of the other"
            )


@dataclass(frozen=True)
class Batch:
    """The inputs of a loss term: one SGD step of one client, with n records.

    ``inputs``: (n, *input shape), normalised; ``labels``: (n,); ``weights``: (n,), each record's part in a mean over
    the batch. They add up to 1, and are 0 for the records that fill a smaller batch up where clients are stacked.
    ``logits``: (n, classes), what the model in training makes of the records; ``params``: that model, to be
    differentiated; ``anchor``: the model that the client received; ``data``: what the term brought along.
    ``logits_of(params, inputs)``: what the same architecture makes of records under other parameters, without dropout.
    ``features``: (n, d), what enters the last linear layer on the way to ``logits``, if ``LossTerm.features`` asks for
    it; ``features_of(params, inputs)``: the same under other parameters.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    params: Params
    anchor: Params
    data: Params
    logits_of: Callable[[Params, torch.Tensor], torch.Tensor]
    features_of: Callable[[Params, torch.Tensor], torch.Tensor]
    features: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerm:
    """An algorithm's own addition to the loss: ``function(batch)`` joins the cross-entropy (or ``mix``).

    ``function``: made of differentiable torch operations, without a choice that depends on numbers in tensors, as many
    clients go through it at once; the same object for all clients, such as a function of a module or a method of the
    algorithm. It returns one number per record, (n,), whose mean counts, or one number, (), that counts as it is.
    ``data``: this client's tensors for it, each of the same shape for all clients. ``features``: whether it looks at
    ``Batch.features``, for which the model needs a last linear layer.
    """

    function: Callable[[Batch], torch.Tensor]
    data: Params = field(default_factory=dict)
    features: bool = False


@dataclass(frozen=True)
class Distillation:
    """Pulls what the model says of a record towards what the received model said of it.

    Adds ``weight`` * T^2 * KL(softmax(received logits / T) || softmax(own logits / T)), the mean over the batch, with
    T the ``temperature``; the received model is not differentiated. Both softmaxes run over the ``classes``, (C,) bool,
    or over all where that is None, and leave out a record's own class where ``exclude_true``. Where no class is left,
    the term is 0. Logits are those of the model: neither shifted nor scaled.
    """

    weight: float
    temperature: float = 1.0
    classes: torch.Tensor | None = None
    exclude_true: bool = False


@dataclass(frozen=True)
class Suppression:
    """Lowers the logit of a class where the record is of another one (FedVLS, as its released code has it).

    Adds ``weight`` * sum over classes c of ``shares[c]`` * log(mean over the batch of e_c), where e_c is 1 for a record
    of class c, else exp(logit c) / (C * ``shares[c]``). ``shares``: (C,), what part of the client's records each class
    is; one whose share is not above 0 adds nothing.
    """

    shares: torch.Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class Ascent:
    """Takes the gradient after a step uphill: sharpness-aware minimisation (Foret et al. 2021).

    With g the gradient of the loss at w, over all parameters, uphill is w + ``radius`` * g / (||g|| + 1e-12); where
    ``adaptive``, w + ``radius`` * w^2 g / (|| |w| g || + 1e-12) (Kwon et al. 2021). The gradient becomes
    (1 - ``share``) * g + ``share`` * (that of the same batch uphill). The loss that is reported is that at w.
    """

    radius: float
    adaptive: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Contrast:
    """Draws the features of a record to those of the received model, away from those of another one (MOON, eq. 3).

    Features z are what enters the last linear layer, flattened. Adds ``weight`` * softplus((cos(z, z of ``previous``) -
    cos(z, z of the received model)) / ``temperature``), the mean over the batch; only z is differentiated. A vector of
    zeros has no direction: its cosines are 0, and nothing moves it.
    """

    weight: float
    temperature: float
    previous: Params


@dataclass(frozen=True)
class Pull:
    """Pulls the features of a record to the prototype of its class (FedProto, eq. 6).

    Adds ``weight`` * ||z - ``prototypes[label]``||^2, the mean over the batch, 0 for classes that are not ``present``.
    ``prototypes``: (C, d); ``present``: (C,) bool.
    """

    prototypes: torch.Tensor
    present: torch.Tensor
    weight: float


@dataclass(frozen=True)
class LocalPlan:
    """An algorithm's additions to local SGD, as data, so that one definition serves one client or a stack of them.

    The loss is the mean cross-entropy of ``logit_scale`` * logits + ``logit_shift`` ((C,) each; a shift of -inf takes a
    class out of the softmax), or what ``mix`` makes of the batch; ``distillation``, ``suppression``, ``contrast``,
    ``pull`` and ``loss_term`` are added to it. Its gradient is taken where ``ascent`` says. Then

    gradient <- ``gradient_scale`` * gradient + ``gradient_offset`` + ``proximal_mu`` * (w - anchor)

    before clipping (``LocalSettings.clip_norm``), weight decay and momentum; the anchor is the model the client
    received. ``step_offset`` joins what momentum makes of that: w <- w - learning rate * (buffer + step_offset).
    ``momentum_buffers`` starts the optimiser warm. ``class_features`` asks for ``Trained.feature_sums``. What has
    the strength 0 (``weight``, ``radius``, ``share``) is left out. A trainer that does not know a field that is in
    use hands the client on.

    Raises UserError for a shift or a scale beside ``mix``: its soft labels are of classes that a client may not hold,
    so what a client's own label counts say of the logits has no meaning there.
    """

    gradient_offset: Params | None = None
    step_offset: Params | None = None
    proximal_mu: float = 0.0
    gradient_scale: float = 1.0
    momentum_buffers: Params | None = None
    mix: Mix | None = None
    logit_shift: torch.Tensor | None = None
    logit_scale: torch.Tensor | None = None
    distillation: Distillation | None = None
    suppression: Suppression | None = None
    ascent: Ascent | None = None
    contrast: Contrast | None = None
    pull: Pull | None = None
    loss_term: LossTerm | None = None
    class_features: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for parts that do not go together."""
        if self.mix is not None and (self.logit_shift is not None or self.logit_scale is not None):
            raise UserError(
                "a plan that mixes records (mix) cannot shift or scale logits (logit_shift, logit_scale): mixed labels "
                "are of classes that the client may not hold; leave one of them out"
            )


class LocalAlgorithm(Protocol):
    """The half of an algorithm that runs on a client."""

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the algorithm's additions to local SGD."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the payload and the client state."""


@runtime_checkable
class Sharing(Protocol):
    """An algorithm whose clients share tensors derived from their records before the first round."""

    def share(
        self, inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one client; the server concatenates the clients' tensors name by name."""


@runtime_checkable
class Sending(Protocol):
    """An algorithm that sends a part of its model: the rest is each client's own.

    The client trains the whole model; ``finish``, the server, its mean, clipping and noise see the sent part alone.
    """

    def sends(self, params: Params) -> Collection[str]:
        """Return the names of the sent ones among the trained ``params``."""


def sent_by(algorithm: object, params: Params) -> Params:
    """Return the sent ones among ``params``, a model's trained parameters. Raises UserError for unknown names."""
    if not isinstance(algorithm, Sending):
        return params
    names = set(algorithm.sends(params))
    if not names or not names <= set(params):
        what = ", ".join(sorted(names - set(params))) or "nothing"
        raise UserError(
            f"sends of {type(algorithm).__name__} names {what}, and the model trains {', '.join(params)}: return some "
            "of these names"
        )
    return {name: value for name, value in params.items() if name in names}


def fields_in_use(values: LocalPlan | LocalSettings) -> frozenset[str]:
    """Return the names of the fields that differ from their defaults, and of those that have none."""
    if isinstance(values, LocalSettings):
        return _settings_in_use(values)
    kind: Any = type(values)
    used, held = [], vars(values)
    for name, default in _defaults(kind):  # most are the default itself, and every client's plan is compared
        if held[name] is not default and (held[name] == default) is not True:  # tensor == number is a tensor
            used.append(name)
    return frozenset(used)


@lru_cache(maxsize=64)  # all clients of a round have the same
def _settings_in_use(settings: LocalSettings) -> frozenset[str]:
    kind: Any = type(settings)
    return frozenset(name for name, default in _defaults(kind) if getattr(settings, name) != default)


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (part.name, part.default if part.default_factory is MISSING else part.default_factory())
        for part in fields(kind)
    )


def check_optimizer(plan: LocalPlan, settings: LocalSettings) -> None:
    """Raise UserError for momentum, or a warm start for it, beside an optimiser with its own."""
    if settings.optimizer == "sgd":
        return
    if settings.momentum or plan.momentum_buffers:
        raise UserError(
            f"momentum={settings.momentum:g} or momentum_buffers have no place beside optimizer={settings.optimizer}, "
            "whose running means start anew in every round: leave them out"
        )
