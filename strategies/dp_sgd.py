"""The settings of DP-SGD on clients (Abadi et al. 2016, algorithm 1): every local step is private for each record."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from fl_sim.kinds import Choices, Promising, Supplying, hides_clients, is_none, kind_of, path_in
from fl_sim.local_plan import Sharing
from fl_sim.privacy.terms import Accountant
from fl_sim.settings import Settings

if TYPE_CHECKING:
    from clients.private_steps import StepProtection


class NoLocalPrivacy(Settings):
    """Local steps without noise."""

    kind: Literal["none"] = "none"


class DPSGD(Settings):
    """Each client trains by DP-SGD, so what it sends protects each of its records, also from the server.

    Let n be the client's number of records. In every local step, each record joins the batch independently, with
    probability q = ``local.batch_size`` / n. The gradient of each record is clipped to the L2 norm ``clipping_norm``,
    over all trained parameters together. Gaussian noise is added to the sum of these gradients. Its standard deviation
    is ``noise_multiplier`` times ``clipping_norm``. The noisy sum is divided by q n. Terms of the algorithm, such as
    FedProx's, are added afterwards.

    Privacy unit: one record of one client. Adjacency: one record is replaced by nothing, while the client's number of
    records stays public. A client's cost is the cost of all steps of all rounds in which it takes part. The sampling of
    clients does not reduce it.

    ``epsilon``: the largest epsilon at ``delta`` for each record of each client, over the whole run. Without
    ``noise_multiplier``, each client's noise is the least one with which all rounds cost at most ``epsilon``. With
    both, a client trains until its next round would exceed ``epsilon``. From then on it counts as a client without
    records.
    ``noise``: with "secret" the protection is real, and the noise differs from run to run. With "seeded" the noise is
    repeatable, and protects in simulation only. ``accountant``: the accountant that finds the noise, and compares costs
    with ``epsilon``. "pld" allows less noise than "rdp", and takes seconds for each number of records.
    """

    kind: Literal["dp-sgd"] = "dp-sgd"
    title: ClassVar[str] = "DP-SGD"
    layer: ClassVar[str] = "strategies.private_steps:PrivateTraining"
    stage: ClassVar[str] = "fl_sim.stages.private_steps:PrivateStepsBill"
    is_private: ClassVar[bool] = True
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    clipping_norm: float = Field(1.0, gt=0)
    noise_multiplier: float | None = Field(None, gt=0)
    noise: Literal["secret", "seeded"] = "secret"
    accountant: Accountant = "rdp"

    @model_validator(mode="after")
    def _has_noise(self) -> DPSGD:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "local.privacy=dp-sgd needs local.privacy.epsilon, from which the noise is found, or "
                "local.privacy.noise_multiplier: set one of them, for example local.privacy.epsilon=8"
            )
        return self

    @property
    def protection(self) -> StepProtection:
        """Return the privacy parameters for clients."""
        from clients.private_steps import StepProtection  # noqa: PLC0415 (the accountants load slowly)

        return StepProtection(
            self.epsilon, self.delta, self.clipping_norm, self.noise_multiplier, self.noise, self.accountant
        )

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if another setting reads records without noise, or has no private counterpart yet."""
        algorithm, local = experiment.algorithm, experiment.local
        reasons = {
            "local.batch_norm": ("none", local.batch_norm, "running statistics are means over records without noise"),
            "local.augment": ("none", local.augment, "its random numbers do not come from the client's secret source"),
        }
        for name, (default, value, reason) in reasons.items():
            if value != default:
                raise ValueError(f"{name}={value} cannot run with local.privacy=dp-sgd: {reason}; leave {name} out")
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"aggregator {kind_of(experiment.aggregator)} cannot run with local.privacy=dp-sgd, whose privacy "
                "costs are stated for rounds without another mechanism: leave one of the two out"
            )
        supplied = experiment.preprocess
        if isinstance(supplied, Supplying) and supplied.supplies_rounds:
            raise ValueError(
                f"preprocess {kind_of(supplied)} gives records to clients that train with local.privacy=dp-sgd, whose "
                "costs are stated for a client's own records: let the server alone train on them, as by "
                "preprocess.train_on=own preprocess.server_epochs=5, or leave one of the two out"
            )
        for name in ("preprocess", "calibrate"):
            value = getattr(experiment, name)
            is_paid = isinstance(value, Supplying) and isinstance(value, Promising) and value.is_private
            if not (is_none(value) or is_paid):
                raise ValueError(
                    f"{name} {kind_of(value)} reads the clients' records beside local.privacy=dp-sgd, and no statement "
                    f"covers both: leave one of the two out"
                )
        if reason := _reads_records(algorithm):
            raise ValueError(
                f"algorithm {kind_of(algorithm)} cannot run with local.privacy=dp-sgd: {reason}; take another "
                "algorithm, such as fedavg, fedprox or scaffold"
            )


def _reads_records(algorithm: object) -> str:
    """Return the reason why ``algorithm`` does not fit private steps; empty if it may fit."""
    if path_in(type(algorithm), "procedure"):
        return "it has no rounds of local training"
    if isinstance(algorithm, Sharing):
        return "its clients share facts about their records without noise before the first round"
    methods = {
        "course": "its local steps are not the steps of one SGD",
        "trainers": "it has a trainer of its own, which adds no noise",
        "own_scores": "its clients predict by their records",
    }
    return next((reason for name, reason in methods.items() if hasattr(algorithm, name)), "")
