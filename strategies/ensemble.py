"""Methods whose server trains on the ensemble of a round's models: base classes, and the ensemble's logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from fl_sim.importing import torch
from fl_sim.kinds import Choices, Supplying, hides_clients, is_none, kind_of, path_in
from fl_sim.types import Dataset, Params
from strategies.algorithm import Averaging, check_proxy

if TYPE_CHECKING:
    from fl_sim.training.records import Source

LogitsOf = Callable[[Params, "torch.Tensor"], "torch.Tensor"]
"""A function (model weights, normalised records (n, *input shape)) -> logits (n, classes)."""

POOL = "pool"
"""The name of the run's pool of synthetic records. It is used in place of the name of a data set."""

UPPER_BOUND = "the ensemble's accuracy is an upper bound that needs the models of all clients"


class Norms(Protocol):
    """The forward passes of a model with BatchNorm layers. The model's weights include its running statistics.

    ``statistics``: the names of the running statistics.
    """

    @property
    def statistics(self) -> frozenset[str]:
        """Return the names of the running statistics."""

    def training_logits_of(self, params: Params, records: torch.Tensor) -> torch.Tensor:
        """Return the logits in training mode, and update the running statistics in ``params`` in place."""

    def distances_of(self, params: Params, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and the distance between the records' statistics and the running statistics, shape ()."""


@dataclass(frozen=True)
class Lesson:
    """All that the server needs for its own training after a round, except the models.

    ``logits_of``: a function that computes the model's logits. ``dataset``: the experiment's data set, for shapes and
    public constants; its records are not used. ``public``: unlabelled records for the server, if any. ``device``: the
    device of the computation. ``generator``: the random numbers of the round. ``norms``: the forward passes of a model
    with BatchNorm layers; None if the model has no running statistics.
    """

    logits_of: LogitsOf
    dataset: Dataset
    public: Source | None
    device: torch.device
    generator: np.random.Generator
    norms: Norms | None = None


@dataclass(frozen=True)
class Taught:
    """The result of the server's training: the model after the round, and the weights of clients in the ensemble.

    ``params``: the parameters of the model and, if any, its running statistics. ``weights``: one weight for each
    client; empty for equal weights.
    """

    params: Params
    weights: tuple[float, ...] = ()


class SeesModels(Averaging):
    """Base class of methods whose server sees the model of each client of a round."""

    kind: str = ""
    title: ClassVar[str] = ""
    layer: ClassVar[str] = "strategies.server_step:StepOnModels"
    keeps_statistics: ClassVar[bool] = False
    """True if the method supports models with BatchNorm layers, each with its client's running statistics."""

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for unsupported settings, such as an aggregator that hides single models."""
        seen, reason = f"algorithm {self.kind} needs the model of each client", ""
        if hides_clients(experiment.aggregator):
            reason = f"aggregator {kind_of(experiment.aggregator)} hides these models: set aggregator=mean"
        elif path_in(type(experiment.server), "procedure"):
            reason = f"with server={kind_of(experiment.server)} clients begin from different models: leave server out"
        elif experiment.local.batch_norm not in (("none", "average") if self.keeps_statistics else ("none",)):
            reason = (
                "its models need running statistics that the server averages: set local.batch_norm=average"
                if self.keeps_statistics
                else "its ensemble uses no running statistics: leave local.batch_norm out"
            )
        elif not is_none(experiment.local.privacy):
            reason = "no privacy statement covers both: leave local.privacy out"
        if reason:
            raise ValueError(f"{seen}, and {reason}")

    def joint(
        self, models: Sequence[Params], records: torch.Tensor, logits_of: LogitsOf, weights: Sequence[float] = ()
    ) -> torch.Tensor:
        """Return the logits of the ensemble, (n, classes): by default the mean of the models' logits."""
        return ensemble_logits(models, records, logits_of, weights)

    def mean_only(self) -> str:
        """Return the reason why this method cannot use robust aggregators."""
        return "its server keeps all models of the round, also those that a robust aggregator leaves out"


class OnEnsemble(SeesModels):
    """Base class of methods whose server trains on the models of all clients of a round."""

    stage: ClassVar[str] = "fl_sim.stages.distillation:EnsembleDistillation"

    @property
    @abstractmethod
    def learns(self) -> bool:
        """Return True if the server trains after a round. Otherwise the method is exactly FedAvg."""

    @abstractmethod
    def taught(self, student: Params, models: Sequence[Params], lesson: Lesson) -> Taught:
        """Train the ``student``, the mean model, and return the trained model and the clients' weights.

        ``models``: the models of the round's clients with records.
        """

    @property
    def public_records(self) -> str:
        """Return the name of the data set with public records, "pool" for the run's synthetic records, or "none"."""
        return "none"

    @property
    def uses_pool(self) -> bool:
        """Return True if the server trains on the run's synthetic records."""
        return self.public_records == POOL

    def further_data(self) -> str:
        """Return the name of the data set with the public records, or "" if there is none or the run's pool is used."""
        return "" if self.public_records in {"none", POOL} else self.public_records

    def check(self, experiment: Choices) -> None:
        """Raise ValueError as ``SeesModels`` does, and for unsuitable public records."""
        super().check(experiment)
        check_proxy(self, self.public_records, experiment)
        if self.uses_pool and not isinstance(experiment.preprocess, Supplying):
            raise ValueError(
                f"algorithm {self.kind}: algorithm.proxy=pool needs a pool of synthetic records, but this run makes "
                "none: take preprocess=da-fl, or a data set as proxy"
            )


def ensemble_logits(
    models: Sequence[Params], records: torch.Tensor, logits_of: LogitsOf, weights: Sequence[float] = ()
) -> torch.Tensor:
    """Return the mean of the models' logits, (n, classes).

    If all models are equal, the mean is exactly the logits of one model. ``weights``: the weights of the models in the
    mean, if given; their sum need not be 1.
    """
    logits = [logits_of(model, records) for model in models]
    stacked = torch.stack([one.double() for one in logits])
    if weights:
        shares = torch.tensor(weights, dtype=torch.float64, device=stacked.device)[:, None, None]
        return ((shares * stacked).sum(0) / shares.sum()).to(logits[0].dtype)
    return stacked.mean(0).to(logits[0].dtype)
