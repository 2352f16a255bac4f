"""The settings of DP-SGD on clients (Abadi et al. 2016, algorithm 1): every local step is private for each record.

``ClientPrivacy`` is the base class of all privacy mechanisms whose cost clients charge to their own ledgers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from fl_sim.clipping import Clipping
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, Promising, Supplying, hides_clients, is_none, kind_of, path_in
from fl_sim.local_plan import Sharing
from fl_sim.privacy.terms import Accountant
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from clients.paid_rounds import ClientProtection


ANOTHER: Final = "take another algorithm, such as fedavg, fedprox or scaffold"
"""The advice in error messages about an algorithm that cannot run with a privacy mechanism."""


class NoLocalPrivacy(Settings):
    """No local privacy: local steps and updates have no noise."""

    kind: Literal["none"] = "none"
    covers_own_models: ClassVar[bool] = False


class ClientPrivacy(Settings):
    """Base class of privacy mechanisms: each client charges its privacy cost to its own ledger, round by round."""

    kind: str = ""
    is_private: ClassVar[bool] = True
    covers_own_models: ClassVar[bool] = False
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    clipping_norm: float = Field(1.0, gt=0)
    noise_multiplier: float | None = Field(None, gt=0)
    noise: Literal["secret", "seeded"] = "secret"
    accountant: Accountant = "rdp"

    @model_validator(mode="after")
    def _has_noise(self) -> Self:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                f"local.privacy={self.kind} needs local.privacy.epsilon, from which the noise is computed, or "
                "local.privacy.noise_multiplier: set one of them, for example local.privacy.epsilon=8"
            )
        return self

    @property
    def protection(self) -> ClientProtection:
        """Return the parameters from which clients compute their noise and privacy cost, such as epsilon and delta."""
        from clients.paid_rounds import ClientProtection  # noqa: PLC0415 (the accountants load slowly)

        return ClientProtection(
            self.epsilon, self.delta, self.clipping_norm, self.noise_multiplier, self.noise, self.accountant
        )

    def allows(self, stage: object) -> bool:
        """Return True if this mechanism allows ``stage``, which reads records before or after the rounds."""
        del stage
        return False

    def check_hostile(self, attack: str, *, sees_honest: bool) -> None:
        """Accept every attack: each client adds noise to its update before sending, so attacks break no guarantee."""

    def despite_hostile(self) -> str:
        """Return the reason why the guarantee is valid despite hostile clients: a clause that begins with "because"."""
        return "because a client adds its noise itself, before it sends"

    def check_alone(self, experiment: Choices) -> None:
        """Raise ValueError if another setting also reads records, or has its own privacy guarantee."""
        what = f"cannot run with local.privacy={self.kind}"
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"aggregator {kind_of(experiment.aggregator)} {what}: its privacy costs hold only without another "
                "privacy mechanism in the rounds; leave one of the two out"
            )
        for name in ("preprocess", "calibrate"):
            value = getattr(experiment, name)
            if not (is_none(value) or self.allows(value)):
                raise ValueError(
                    f"{name} {kind_of(value)} reads the clients' records in addition to local.privacy={self.kind}, and "
                    "no privacy statement covers both: leave one of the two out"
                )
        algorithm, reason = experiment.algorithm, ""
        if path_in(type(algorithm), "procedure"):
            reason = "it has no rounds of local training"
        elif isinstance(algorithm, Sharing):
            reason = "its clients share facts about their records without noise before the first round"
        if reason:
            raise ValueError(f"algorithm {kind_of(algorithm)} {what}: {reason}; {ANOTHER}")


class DPSGD(ClientPrivacy):
    """Each client trains by DP-SGD, so its messages protect each of its records, also from the server.

    Let n be the client's number of records. In every local step, each record joins the batch independently, with
    probability q = ``local.batch_size`` / n. The gradient of each record is clipped. Gaussian noise is added to the sum
    of these gradients, and the noisy sum is divided by q n. Then the terms of the algorithm, such as FedProx's proximal
    term, are added.

    ``clipping_norm``: the largest L2 norm C of a record's gradient, over all trained parameters together. ``clipping``:
    the rule that bounds a gradient g by C. "flat" scales g down to the norm C if its norm is larger. "per-layer" clips
    the gradient of each of L layers to the norm C / sqrt(L), or to the norms in ``layer_norms``. "automatic" changes
    every g to C g / (|g| + ``stability``) (AUTO-S, Bu et al. 2023), so that C only scales the learning rate. The noise
    and the privacy cost are the same for all three rules. ``layer_norms``: the norms of per-layer clipping, one for
    each layer with trained parameters, in the model's order; then C is the root of the sum of the squares of all norms.

    Privacy unit: one record of one client. Adjacency: one record is removed, but the public number of the client's
    records does not change. A client's cost is the cost of all steps of all rounds in which the client takes part. The
    sampling of clients does not reduce this cost.

    ``epsilon``: the largest epsilon for each record of each client, over the whole run. ``delta``: the delta of the
    guarantee with this epsilon. ``noise_multiplier``: the standard deviation of the noise on the sum, divided by C. By
    default, each client computes the smallest value for which all its rounds together cost at most the given epsilon.
    If epsilon and noise multiplier are both set, a client trains until its next round would exceed the epsilon. After
    that, the client is treated as one without records. ``noise``: "secret" noise gives real protection, and differs
    from run to run. "seeded" noise is repeatable, protects nothing, and is for simulations only. ``accountant``: the
    accountant that computes the noise, and compares costs with ``epsilon``. "pld" allows less noise than "rdp", but its
    computation takes seconds for each different number of records.
    """

    kind: Literal["dp-sgd"] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD"
    layer: ClassVar[str] = "strategies.private_steps:PrivateTraining"
    stage: ClassVar[str] = "fl_sim.stages.private_steps:PrivateStepsBill"
    covers_own_models: ClassVar[bool] = True
    clipping: Literal["flat", "per-layer", "automatic"] = "flat"
    layer_norms: tuple[Annotated[float, Field(gt=0)], ...] = ()
    stability: float = Field(0.01, gt=0)

    @model_validator(mode="after")
    def _has_no_dead_clipping(self) -> Self:
        fields = type(self).model_fields
        if self.layer_norms and self.clipping != "per-layer":
            raise ValueError(
                "local.privacy.layer_norms needs local.privacy.clipping=per-layer: set it, or leave layer_norms out"
            )
        if self.layer_norms and self.clipping_norm != fields["clipping_norm"].default:
            raise ValueError(
                "local.privacy.clipping_norm follows from local.privacy.layer_norms, as the root of the sum of their "
                "squares: leave one of the two out"
            )
        if self.stability != fields["stability"].default and self.clipping != "automatic":
            raise ValueError(
                "local.privacy.stability needs local.privacy.clipping=automatic: set it, or leave stability out"
            )
        return self

    @classmethod
    def captions(cls, chosen: Sequence[DPSGD], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return a table caption that says how gradients are clipped."""
        rules = values(one.clipping_in_words for one in chosen)
        return [f"DP-SGD: the gradient of each record is clipped ({rules}) before noise is added."]

    @property
    def clipping_in_words(self) -> str:
        """Return the clipping rule in words, such as "flat, norm 1"."""
        norms = f"norms {', '.join(f'{norm:g}' for norm in self.layer_norms)}"
        words = norms if self.layer_norms else f"norm {self.clipping_norm:g}"
        return f"{self.clipping}, {words}" + (f", stability {self.stability:g}" * (self.clipping == "automatic"))

    @property
    def protection(self) -> ClientProtection:
        """Return the parameters from which clients compute their noise and privacy cost, such as epsilon and delta."""
        whole = math.hypot(*self.layer_norms) if self.layer_norms else self.clipping_norm
        return replace(super().protection, clipping_norm=whole)

    def rule(self, names: Sequence[str]) -> Clipping:
        """Return the clipping rule for a model whose trained parameters are ``names``, in the model's order.

        Raises UserError if ``layer_norms`` does not have one norm for each layer with trained parameters.
        """
        if self.clipping == "automatic":
            return Clipping(stability=self.stability)
        by_layer = Clipping(by_layer=self.clipping == "per-layer")
        if not self.layer_norms:
            return by_layer
        layers = by_layer.parts(names)
        if len(layers) != len(self.layer_norms):
            raise UserError(
                f"local.privacy.layer_norms has {len(self.layer_norms)} norms, and the model has {len(layers)} layers "
                f"with trained parameters ({', '.join(layers)}): give one norm for each, in this order"
            )
        return replace(by_layer, layer_norms=dict(zip(layers, self.layer_norms, strict=True)))

    def allows(self, stage: object) -> bool:
        """Return True if ``stage`` releases synthetic records under its own privacy guarantee."""
        return isinstance(stage, Supplying) and isinstance(stage, Promising) and stage.is_private

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if another setting reads records without noise, or does not support private steps."""
        algorithm, local = experiment.algorithm, experiment.local
        reasons = {
            "local.batch_norm": ("none", local.batch_norm, "running statistics are means over records without noise"),
            "local.augment": ("none", local.augment, "its random numbers do not come from the client's secret source"),
        }
        for name, (default, value, reason) in reasons.items():
            if value != default:
                raise ValueError(f"{name}={value} cannot run with local.privacy=dp-sgd: {reason}; leave {name} out")
        supplied = experiment.preprocess
        if isinstance(supplied, Supplying) and supplied.supplies_rounds:
            raise ValueError(
                f"preprocess {kind_of(supplied)} gives records to clients that train with local.privacy=dp-sgd, whose "
                "privacy costs cover only a client's own records: let only the server train on them, with "
                "preprocess.train_on=own preprocess.server_epochs=5, or leave one of the two out"
            )
        self.check_alone(experiment)
        methods = {
            "course": "its local steps are not the steps of one SGD",
            "trainers": "it uses its own trainer, which adds no noise",
            "own_scores": "its clients predict by their records",
        }
        if reason := next((reason for name, reason in methods.items() if hasattr(algorithm, name)), ""):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with local.privacy={self.kind}: {reason}; {ANOTHER}"
            )
