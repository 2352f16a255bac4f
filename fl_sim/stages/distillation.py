"""The stage of FedDF: it reads the public records, distils after each round, and measures the ensemble.

The settings and the steps are in ``strategies.feddf``. The layer ``StepOnModels`` stores the clients' models.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.timing import Work
from fl_sim.training.features import Network
from fl_sim.training.loop import resident
from fl_sim.training.records import Source
from fl_sim.types import Params
from strategies.feddf import FedDF, distilled, ensemble_logits
from strategies.layer import found_in
from strategies.server_step import StepOnModels

_BATCH = 500
"""Records per forward pass of the ensemble."""


class EnsembleDistillation(Stage):
    """The stage at the server. It sends no requests to clients."""

    titles: ClassVar[Mapping[str, str]] = {
        "ensemble.accuracy_percent": "Accuracy of the ensemble of all client models of the last round, an upper bound "
        "for the distilled model"
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.experiment.algorithm, FedDF)
        self.settings = job.experiment.algorithm
        self._layer = StepOnModels()
        self._ensemble: float | None = None

    def before(self, run: Run) -> None:
        """Pass the distillation step to the layer ``StepOnModels``, if there are public records."""
        if not self.job.predicts_classes:
            raise UserError("algorithm feddf distils class predictions, and this model has none: take fedavg")
        self._layer = found_in(run.strategy.layer, StepOnModels)
        if self.settings.proxy != "none":
            self._layer.step = partial(self._distil, proxy_records(self.job, self.settings.proxy))

    def _distil(self, proxy: Source, mean: Params, models: list[Params], server_round: int) -> Params:
        student, *teachers = (_on(self.job.device, one) for one in (mean, *models))
        made = distilled(self.settings, student, teachers, self._batches(proxy, server_round), self._network.logits_of)
        return {name: value.to(mean[name].device) for name, value in made.items()}

    def _batches(self, proxy: Source, server_round: int) -> Iterator[torch.Tensor]:
        draw, size = rng(self.job.experiment.seed, "distillation", server_round), self.settings.distillation_batch
        for _ in range(self.settings.steps):
            rows = np.sort(draw.choice(len(proxy.labels), min(size, len(proxy.labels)), replace=False))
            yield proxy.normalised(proxy.inputs[torch.from_numpy(rows).to(proxy.inputs.device)])

    @property
    def _network(self) -> Network:
        return Network(self.job.model().to(self.job.device).eval())

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return the accuracy of the ensemble of this round's client models; empty if the round is not tested."""
        experiment = self.job.experiment
        due = is_last or server_round % experiment.evaluate_every == 0
        if not (due and self._layer.models and experiment.evaluate.tests(is_last=is_last)):
            return {}
        models, test, network = self._layer.models, run.measuring.test, self._network
        models = [_on(self.job.device, one) for one in models]
        right = 0
        for start in range(0, len(test.labels), _BATCH):
            rows = slice(start, start + _BATCH)
            logits = ensemble_logits(models, test.normalised(test.inputs[rows]), network.logits_of)
            right += int((logits.argmax(1) == test.labels[rows]).sum())
        self._ensemble = right / len(test.labels)
        return {"ensemble_accuracy": self._ensemble}

    def trains_model(self) -> bool:
        """Return True, because the server trains the model."""
        return True

    def work(self) -> tuple[Work, ...]:
        """Return the computation of the distillation. The time forecast lists it without a time."""
        return (Work("the distillation at the server", pieces=1.0),) if self.settings.proxy != "none" else ()

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``ensemble`` for ``result.json``: the last measured accuracy of the ensemble."""
        said = "" if self._ensemble is None else f"{100 * self._ensemble:.1f} %"
        words = f"the ensemble of the last round's client models, an upper bound for the distilled model: {said}"
        return {"ensemble": {"accuracy": self._ensemble, **({"in_words": words} if said else {})}}


def proxy_records(job: Job, name: str) -> Source:
    """Return the training records of the public data set ``name``, prepared as the job's own records.

    Raises UserError if the data set is missing, or if its records have another shape or type.
    """
    experiment, dataset = job.experiment, job.dataset
    found = load(name, job.root, experiment.features)
    if found.input_shape != dataset.input_shape or found.vocabulary != dataset.vocabulary:
        raise UserError(
            f"algorithm.proxy={name} has records of shape {found.input_shape}, and {experiment.data} has records of "
            f"shape {dataset.input_shape}: take a proxy of the same shape"
        )
    if found.train.inputs.dtype != dataset.train.inputs.dtype:
        raise UserError(
            f"algorithm.proxy={name} has {found.train.inputs.dtype} records, and {experiment.data} has "
            f"{dataset.train.inputs.dtype}: take a proxy of the same kind"
        )
    return resident(found.train, dataset, job.device)


def _on(device: torch.device, params: Params) -> Params:
    return {name: value.to(device) for name, value in params.items()}
