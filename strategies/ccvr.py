"""CCVR (Luo et al. 2021): after the last round, the head is trained on features drawn from one Gaussian per class.

All other layers stay fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from clients.moments import LONGEST, Array, moments_of, num_moments
from fl_sim.errors import UserError
from fl_sim.kinds import Choices, hides_clients, kind_of, replaces_records
from strategies.algorithm import Central
from strategies.feature_sums import MOST_BYTES, SumsOfFeatures
from strategies.head_training import HeadTraining

if TYPE_CHECKING:
    from fl_sim.privacy.mechanisms import Noise


class CCVR(SumsOfFeatures):
    """Clients send moments of each class's features; the server trains the head on samples from class Gaussians.

    The moments of a class are the number, the sum and the sum of outer products of its features (the inputs of the
    head). ``samples_per_class``: the number of sampled features per class (M_c in Luo et al. 2021); 200 as in the
    benchmark FL-bench. The server trains the head by plain SGD, from its values after the last round. ``epochs``: the
    number of passes over the samples. ``learning_rate``: the learning rate of SGD. ``batch_size``: the number of
    samples in a step.

    ``epsilon`` (None: moments are sent without noise) and ``delta``: the privacy cost of the moments, for each record
    of a client. With ``epsilon``, features are clipped to ``clipping_norm``, and a client sends its moments with
    Gaussian noise, as one release. ``noise``: the source of the noise. "secret" gives real protection; the noise
    differs from run to run. "seeded" gives repeatable noise, which protects nothing and is for simulations only.
    """

    kind: Literal["ccvr"] = "ccvr"
    title: ClassVar[str] = "CCVR"
    stage: ClassVar[str] = "fl_sim.stages.ccvr:Calibration"
    released: ClassVar[str] = "class moments"
    sensitivity: ClassVar[float] = LONGEST
    of_initial_model: ClassVar[bool] = False
    samples_per_class: int = Field(200, ge=1, le=10**6)
    learning_rate: float = Field(0.01, gt=0)
    epochs: int = Field(1, ge=1, le=10**6)
    batch_size: int = Field(64, ge=1)
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    clipping_norm: float = Field(10.0, gt=0)
    noise: Literal["secret", "seeded"] = "secret"

    @model_validator(mode="after")
    def _no_dead_settings(self) -> CCVR:
        fields = type(self).model_fields
        dead = [name for name in ("delta", "clipping_norm", "noise") if getattr(self, name) != fields[name].default]
        if self.epsilon is None and dead:
            raise ValueError(
                f"calibrate.{dead[0]} = {getattr(self, dead[0])} changes nothing without calibrate.epsilon, because "
                f"the moments then have no noise: set calibrate.epsilon, or leave {dead[0]} out"
            )
        return self

    @classmethod
    def captions(cls, chosen: Sequence[CCVR], values: Callable[[Iterable[Any]], str]) -> list[str]:
        """Return a table caption that describes the sampled features on which the head is trained."""
        samples, rates, epochs = (
            values([getattr(one, name) for one in chosen]) for name in ("samples_per_class", "learning_rate", "epochs")
        )
        line = (
            f"CCVR: after the last round the head is trained again on {samples} features a class, drawn from normal "
            f"distributions, at learning rate {rates}, epochs {epochs}; last is the accuracy after that."
        )
        return [line]

    @property
    def training(self) -> HeadTraining:
        """The settings of the head's training: learning rate, epochs and batch size."""
        return HeadTraining("calibrate", self.learning_rate, self.epochs, self.batch_size)

    def shape(self, num_features: int, num_classes: int) -> tuple[int, int]:
        """Return the shape of the moments that a client sends, (classes, numbers per class)."""
        return num_classes, num_moments(num_features)

    def summed(self, features: Array, labels: NDArray[np.int64], num_classes: int, noise: Noise | None) -> Array:
        """Return a client's class moments, with noise if ``epsilon`` is set."""
        if self.protection is None or noise is None:
            return moments_of(features, labels, num_classes)
        from clients.private_moments import private_moments  # noqa: PLC0415 (the accountants load slowly)

        return private_moments(features, labels, num_classes, self.protection, noise)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if clients do not train a common head, or if other settings forbid clients' moments."""
        algorithm, preprocess = experiment.algorithm, experiment.preprocess
        if isinstance(algorithm, Central) and algorithm.is_central:
            raise ValueError(
                f"calibrate ccvr corrects the head of a model that clients train together, but algorithm "
                f"{kind_of(algorithm)} has no such model: leave calibrate out"
            )
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"calibrate ccvr cannot run under aggregator {kind_of(experiment.aggregator)}, which protects all "
                "records of a client together: each client sends its own moments, and their noise hides only single "
                "records; set calibrate=none or another aggregator"
            )
        if experiment.attack.clients:
            raise ValueError(
                f"calibrate ccvr cannot run with attack {kind_of(experiment.attack)}: moments are summed, and one "
                "hostile client could change the sum arbitrarily; set calibrate=none or attack=none"
            )
        if replaces_records(preprocess) and self.epsilon is None:
            raise ValueError(
                "calibrate ccvr sends moments of the clients' own features without noise, and preprocess.train_on="
                "synthetic promises that only synthetic records leave the clients: set calibrate.epsilon, or "
                "calibrate=none"
            )

    def check_head(self, num_features: int, num_classes: int) -> None:
        """Raise UserError if a client's moments are too large for one message, or if ``epsilon`` is too small."""
        if (size := 8 * num_classes * num_moments(num_features)) > MOST_BYTES:
            raise UserError(
                f"calibrate ccvr: moments of {num_features} features and {num_classes} classes are {size >> 20} MiB a "
                f"client, more than {MOST_BYTES >> 20} MiB: use a model with fewer units before its last layer"
            )
        if self.protection is None:
            return
        from clients.private_moments import check_noise  # noqa: PLC0415 (the accountants load slowly)

        try:
            check_noise(self.protection, num_classes * num_moments(num_features))
        except UserError as error:
            raise UserError(f"calibrate.epsilon={self.epsilon:g} is too small to send moments: {error}") from error
