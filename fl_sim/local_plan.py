"""Local plans: data that describe an algorithm's local objective, for every trainer (C++, stacked, PyTorch)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fl_sim.clipping import FLAT, Clipping
from fl_sim.errors import RunError, UserError
from fl_sim.importing import torch
from fl_sim.params import body_names
from fl_sim.types import ClientUpdate, LocalSettings, LocalTask, Params, Trained


@dataclass(frozen=True)
class Mix:
    """The loss of FedMix and NaiveMix: each batch is mixed with one averaged record from a pool shared by all clients.

    ``inputs``: (pool size, *input shape), normalised. ``labels``: (pool size, classes), the class proportions of each
    averaged record. ``linearise``: True selects FedMix's first-order expansion, False NaiveMix's plain interpolation.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    weight: float
    linearise: bool

    def __post_init__(self) -> None:
        """Raise RunError unless the pool has one row of labels for each averaged record."""
        if len(self.inputs) != len(self.labels):
            raise RunError(
                f"the mixing pool holds {len(self.inputs)} averaged records and {len(self.labels)} rows of class "
                "proportions: a client shared different numbers of averaged records and of rows"
            )


@dataclass(frozen=True)
class Batch:
    """The inputs of a loss term: one SGD step of one client on a batch of n records.

    ``inputs``: (n, *input shape), normalised. ``labels``: (n,). ``weights``: (n,), the weight of each record in a mean
    over the batch. The weights sum to 1. Clients that train as a stack have batches of one size: a smaller batch is
    padded with records of weight 0. ``logits``: (n, classes), the model's output in training mode. ``params``: the
    parameters of that model, to be differentiated. ``anchor``: the parameters of the model that the client received.
    ``data``: the tensors of ``LossTerm.data``. ``logits_of(params, inputs)``: a function that returns the logits of the
    same architecture with other parameters, without dropout. ``features``: (n, d), the d inputs of the model's last
    linear layer, if ``LossTerm.features`` is True. ``features_of(params, inputs)``: a function that returns these
    features with other parameters. ``compiled_slopes``: a faster function for ``input_slopes``; None if there is none.
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
    compiled_slopes: Callable[[Params, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def input_slopes(self, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each record's cross-entropy with respect to the record, in the shape of ``inputs``.

        The gradient of the loss treats the result as a constant. ``inputs``: (n, *input shape). ``labels``: (n,).
        """
        fixed = {name: value.detach() for name, value in params.items()}
        if self.compiled_slopes is not None:
            return self.compiled_slopes(fixed, inputs, labels)

        def total(records: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.logits_of(fixed, records), labels, reduction="sum")

        slopes: torch.Tensor = torch.func.grad(total)(inputs)
        return slopes


@dataclass(frozen=True)
class LossTerm:
    """A loss term of an algorithm: ``function(batch)`` is added to the cross-entropy (or to the ``mix`` loss).

    ``function``: differentiable torch operations. No branch may depend on numbers in tensors, because many clients are
    computed at once. All clients must use the same object, such as a module-level function or a method of the
    algorithm. The function returns one number for each record, shape (n,), or a single number, shape (). In the first
    case, the mean over the records is added to the loss. ``data``: this client's tensors for the function; each has the
    same shape for all clients. The stacked trainer first tries the function on a batch of one record, with ``data``
    unchanged. So if a tensor of ``data`` has a row for each record of a batch, the function may read only its first
    ``len(batch.labels)`` rows. ``features``: True if the function reads ``Batch.features``, for which the model needs a
    last linear layer. ``first_order``: True if the function reads no features and needs no second derivative of the
    model. A term that differentiates a gradient, such as a gradient with respect to the inputs, needs second
    derivatives. If True, the compiled trainer can compute the model's forward and backward passes on a CPU, which is
    faster.
    """

    function: Callable[[Batch], torch.Tensor]
    data: Params = field(default_factory=dict)
    features: bool = False
    first_order: bool = False


@dataclass(frozen=True)
class Distillation:
    """A distillation term: it keeps the trained model's predictions close to the received model's predictions.

    The term adds ``weight`` * T^2 * KL(softmax(received logits / T) || softmax(own logits / T)), the mean over the
    batch. T is the ``temperature``. The received model is not differentiated. KL is the Kullback-Leibler divergence.
    Both softmaxes run over the classes that the mask ``classes``, shape (C,), marks with True. C is the number of
    classes. If ``classes`` is None, both softmaxes run over all classes. If ``exclude_true`` is True, both softmaxes
    leave out the record's own class. If no class is left, the term is 0. Logits are the raw outputs of the model:
    neither shifted nor scaled.
    """

    weight: float
    temperature: float = 1.0
    classes: torch.Tensor | None = None
    exclude_true: bool = False


@dataclass(frozen=True)
class Suppression:
    """A suppression term: it lowers the logit of a class on records of other classes (FedVLS, as in its released code).

    The term adds ``weight`` * (the sum over all C classes c of ``shares[c]`` * log(the mean of e_c over the batch)).
    For a record of class c, e_c is 1. For any other record, e_c is exp(logit c) / (C * ``shares[c]``). ``shares``:
    (C,), the share of each class in the client's records. A class with the share 0 adds nothing.
    """

    shares: torch.Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class Ascent:
    """Sharpness-aware minimisation: the gradient is taken after a step that increases the loss (Foret et al. 2021).

    Let g be the gradient of the loss at the parameters w. ``radius`` sets the distance from w to the uphill point, at
    which the loss is usually higher. The uphill point is w + ``radius`` * g / (||g|| + 1e-12). If ``adaptive`` is True,
    the uphill point is w + ``radius`` * w^2 g / (|| |w| g || + 1e-12) (Kwon et al. 2021). The gradient becomes (1 -
    ``share``) * g + ``share`` * (the gradient of the same batch at the uphill point). Norms are over all parameters.
    The reported loss is the loss at w.
    """

    radius: float
    adaptive: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Contrast:
    """MOON's contrastive loss term: it compares the features of three models (Li et al. 2021, eq. 3).

    The term moves the trained model's features towards the received model's features, and away from the features of the
    model ``previous``. For example, ``previous`` is the client's model of its last round. The features z of a record
    are the inputs of the last linear layer, flattened. The term adds ``weight`` * softplus((cos(z, z of ``previous``) -
    cos(z, z of the received model)) / ``temperature``), the mean over the batch. Only z of the trained model is
    differentiated. If z is a vector of zeros, it has no direction: its cosines and its gradient are set to 0.
    """

    weight: float
    temperature: float
    previous: Params


@dataclass(frozen=True)
class Pull:
    """A prototype term: it moves the features of a record towards the prototype of its class (FedProto, eq. 6).

    The features z of a record are the inputs of the model's last linear layer. The term adds ``weight`` * ||z -
    ``prototypes[label]``||^2, the mean over the batch. The term is 0 for classes without a prototype. ``prototypes``:
    (C, d), one vector of d features for each of C classes. ``present``: (C,) bool, the classes that have a prototype.
    """

    prototypes: torch.Tensor
    present: torch.Tensor
    weight: float


@dataclass(frozen=True)
class Phase:
    """A phase of a client's local training that trains only some parameters, such as the head (last layer) in FedRep.

    ``names``: the names of the trained parameters; all others keep their values. ``epochs``: the number of passes over
    the client's records, in place of the setting ``local.epochs``.
    """

    names: frozenset[str]
    epochs: float

    def settings(self, local: LocalSettings) -> LocalSettings:
        """Return the settings of local training in this phase. ``local``: the round's settings of local training."""
        return replace(local, epochs=self.epochs, steps=0)


class NoiseSource(Protocol):
    """The interface of the source of a client's secret random numbers (``fl_sim.privacy.mechanisms.Noise``)."""

    @property
    def key(self) -> bytes:
        """The secret key of this client. All its secret random numbers are derived from this key."""

    @property
    def simulation_only(self) -> bool:
        """True if the key is derived from a seed. Anybody who knows the seed can then subtract the noise."""

    def taking_part(
        self, count: int, sampling_rate: float, *, purpose: str, server_round: int
    ) -> npt.NDArray[np.bool_]:
        """Draw a batch from ``count`` records by Poisson sampling, and return its mask, shape (``count``,)."""

    def gaussian(self, count: int, std: float, *, purpose: str, server_round: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent random numbers from N(0, std^2), rounded to the points of a grid.

        The results are whole numbers: multiples of the grid spacing, ``fl_sim.privacy.mechanisms.grid_spacing(std)``.
        """


@dataclass(frozen=True)
class PrivateSteps:
    """DP-SGD (Abadi et al. 2016, algorithm 1): each local step clips the gradient of every record and adds noise.

    ``clipping_norm``: the largest L2 norm of a record's gradient, over all trained parameters together.
    ``noise_multiplier``: the standard deviation of the noise on the sum of the clipped gradients, divided by
    ``clipping_norm``. ``noise``: the source of the client's random batches and noise. The cost of the steps is already
    charged to the client's privacy ledger. ``stream``: a name of this training. Two trainings that use the same source
    must have different names, so that they get different random numbers. ``clipping``: the rule that bounds the norm.
    ``sums_only``: True to take no step and draw no random number: the model stays as it came, and
    ``Trained.gradient_sum`` is the sum of the clipped gradients of all records, without noise.
    """

    clipping_norm: float
    noise_multiplier: float
    noise: NoiseSource
    stream: str
    clipping: Clipping = FLAT
    sums_only: bool = False


@dataclass(frozen=True)
class LocalPlan:
    """The local plan: an algorithm's additions to local SGD, as data, for one client or a stack of clients.

    The loss is the mean cross-entropy of ``logit_scale`` * logits + ``logit_shift``, or the loss of ``mix``.
    ``logit_scale`` and ``logit_shift`` have one number for each class; a shift of -inf removes its class from the
    softmax. The terms ``distillation``, ``suppression``, ``contrast``, ``pull`` and ``loss_term`` are added to the
    loss. With ``ascent``, the gradient of the loss is the gradient of sharpness-aware minimisation. Before clipping
    (``LocalSettings.clip_norm``), weight decay and momentum, the gradient is changed as follows (w: the parameters):

    gradient <- ``gradient_scale`` * gradient + ``gradient_offset`` + ``proximal_mu`` * (w - anchor)

    The anchor is the model that the client received. ``step_offset`` is added to the momentum buffer in each step, that
    is, w <- w - learning rate * (buffer + step_offset). ``step_mask``: {name: bool tensor}. Where the mask is False, a
    step changes no parameter, and these entries do not count in the norm of a gradient. ``momentum_buffers``: the
    initial momentum buffers. ``class_features``: True if the result must contain the sums of each class's features
    (``Trained.feature_sums``). ``trained``: the names of the parameters that local steps change, None for all. All
    other parameters are frozen and left out of norms. ``phases``: parts of the training, one after another, in place of
    the setting ``local.epochs``. In each phase, the anchor is the model at the beginning of this phase. ``private``:
    makes the steps private for each record. In this case, all other fields act on the noisy gradient. A term of
    strength 0 (``weight``, ``radius``, ``share``) is left out. A trainer that does not support a field in use passes
    the client to another trainer.

    Raises UserError for a shift or a scale of logits together with ``mix``. The shift corrects logits by the client's
    own label counts. But with ``mix``, the averaged record in a batch may come from another client and have other
    classes.
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
    trained: frozenset[str] | None = None
    phases: tuple[Phase, ...] = ()
    private: PrivateSteps | None = None
    step_mask: Params | None = None

    def __post_init__(self) -> None:
        """Raise UserError if ``mix`` is set together with a shift or a scale of logits."""
        if self.mix is not None and (self.logit_shift is not None or self.logit_scale is not None):
            raise UserError(
                "a plan that mixes records (mix) cannot shift or scale logits (logit_shift, logit_scale): the record "
                "that is mixed in may come from another client, with other classes; leave one of them out"
            )

    @cached_property
    def in_use(self) -> frozenset[str]:
        """Return the names of the plan's fields that differ from their defaults, for the choice of a trainer.

        Only a trainer that supports all these fields can train the client.
        """
        kind: Any = type(self)
        used, held = [], vars(self)
        # Most values are the default object itself, so the fast ``is`` is tried before ``==``.
        for name, default in _defaults(kind):
            # for a tensor, ``==`` returns a tensor and not a bool, so its result is compared with True
            if held[name] is not default and (held[name] == default) is not True:
                used.append(name)
        return frozenset(used)


class LocalAlgorithm(Protocol):
    """The client's part of a federated algorithm: how it trains in a round, and the update that it returns."""

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local plan of this client and round: the algorithm's additions to local SGD."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the client's update after its training: the payload for the server, and the client's new state."""


@dataclass(frozen=True)
class FurtherModel:
    """The local training of a client's further model, such as a personal model, in addition to the sent model.

    ``params``: the initial parameters of the further model. ``plan``: its local plan. ``settings``: its settings of
    local training; None means the settings of the round.
    """

    params: Params
    plan: LocalPlan = LocalPlan()
    settings: LocalSettings | None = None


@runtime_checkable
class FurtherModels(Protocol):
    """An algorithm whose clients also train further models in a round, such as personal models, on the same batches."""

    def further(self, task: LocalTask) -> Mapping[str, FurtherModel]:
        """Return a client's further models for this round, by name.

        After the training, the method ``finish`` receives their results as ``Trained.further``.
        """


@runtime_checkable
class Sharing(Protocol):
    """An algorithm whose clients share tensors with all clients before the first round: FedMix's averaged records."""

    def share(
        self, inputs: torch.Tensor, labels: torch.Tensor, num_classes: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that one client shares, by name. The server concatenates the tensors of all clients."""


@runtime_checkable
class Sending(Protocol):
    """An algorithm whose clients send a part of the model. The other parameters stay on each client (personal layers).

    The client trains the whole model. ``finish``, the server, the mean, clipping and noise handle the sent part only.
    If clients send no parameter at all, the algorithm declares it by the class attribute ``sends_nothing = True``.
    """

    def sends(self, params: Params) -> Collection[str]:
        """Return the names of the parameters that a client sends, a subset of the trained ``params``."""


def sent_by(algorithm: object, params: Params, personal: str = "none") -> Params:
    """Return the parameters in ``params`` that clients send. By default all are sent; for some algorithms none is sent.

    ``params``: a model's trained parameters. ``personal``: the setting ``local.personal``. Raises UserError for unknown
    names, and for an algorithm that sends no parameters without declaring it.
    """
    names = set(params)
    if isinstance(algorithm, Sending):
        names = set(algorithm.sends(params))
        if unknown := names - set(params):
            raise UserError(
                f"the method sends of {type(algorithm).__name__} returned {', '.join(sorted(unknown))}, but the model "
                f"trains {', '.join(params)}: return some of these names"
            )
        if not names and not getattr(algorithm, "sends_nothing", False):
            raise UserError(
                f"the method sends of {type(algorithm).__name__} returned no name, and the model trains "
                f"{', '.join(params)}: return some of these names, or declare sends_nothing = True if clients "
                "send no parameters"
            )
    names -= personal_names(personal, params)
    return {name: value for name, value in params.items() if name in names}


def personal_names(personal: str, params: Params) -> frozenset[str]:
    """Return the names of the personal parameters: each client has its own, and does not send them.

    The setting ``local.personal`` selects these parameters.

    Raises UserError for names that no trained parameter of the model has.
    """
    if personal == "none":
        return frozenset()
    if personal in {"head", "body"}:
        body = body_names(params)
        return body if personal == "body" else frozenset(params) - body
    names = frozenset(personal.split(","))
    if unknown := sorted(names - set(params)):
        raise UserError(
            f"local.personal names {', '.join(unknown)}, and the model trains {', '.join(params)}: give some of these "
            "names, separated by commas, or head, or body"
        )
    return names


def sends_a_part(algorithm: object, personal: str) -> bool:
    """Return True if clients may send only some of the model's parameters.

    ``personal``: the setting ``local.personal``.
    """
    return isinstance(algorithm, Sending) or personal != "none"


def fields_in_use(values: LocalPlan | LocalSettings) -> frozenset[str]:
    """Return the names of the fields of ``values`` that differ from their defaults (fields in use).

    ``values``: a local plan or local settings. Fields without a default are always in use. A trainer compares these
    names with the fields that it supports.
    """
    return _settings_in_use(values) if isinstance(values, LocalSettings) else values.in_use


@lru_cache(maxsize=64)  # the result is cached, because all clients of a round have equal settings
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
    """Raise UserError for momentum or momentum buffers if the optimiser is Adam or AdamW, which do not use momentum."""
    if settings.optimizer == "sgd":
        return
    if settings.momentum or plan.momentum_buffers:
        raise UserError(
            f"momentum={settings.momentum:g} or momentum_buffers cannot be used with optimizer={settings.optimizer}, "
            "which uses neither: leave them out"
        )
