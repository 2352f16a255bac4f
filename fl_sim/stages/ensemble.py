"""The base class of stages that use the client models of a round. It measures the ensemble of these models.

The ensemble predicts by the mean of the models' logits. The layer ``StepOnModels`` stores the models.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.simulation.stage import Run, Stage
from fl_sim.training.evaluation import score
from fl_sim.training.features import Network
from fl_sim.types import Params
from strategies.ensemble import SeesModels
from strategies.layer import found_in
from strategies.server_step import StepOnModels


class MeasuresEnsemble(Stage):
    """A stage that measures the accuracy of the ensemble of a round's client models.

    ``weights``: the weight of each client model in the ensemble, empty for equal weights.
    """

    titles: ClassVar[Mapping[str, str]] = {
        "ensemble.accuracy_percent": "Accuracy of the ensemble of all client models of the last round (an upper bound: "
        "the server would have to store all these models)"
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.kept = StepOnModels()
        self.weights: tuple[float, ...] = ()
        self._accuracy: float | None = None

    def before(self, run: Run) -> None:
        """Find the layer that stores the client models. Raises UserError if the model does not predict classes."""
        if not self.job.predicts_classes:
            kind = kind_of(self.job.experiment.algorithm)
            raise UserError(f"algorithm {kind} needs class predictions, and this model has none: use fedavg")
        self.kept = found_in(run.strategy.layer, StepOnModels)

    @property
    def network(self) -> Network:
        """Return a ``Network``, which computes logits from given parameters, on the job's device."""
        return Network(self.job.model().to(self.job.device).eval())

    def models(self) -> list[Params]:
        """Return the models of the last round from all clients with records, on the job's device."""
        return [on_device(self.job.device, one) for one in self.kept.models]

    def measured(self, run: Run, server_round: int, *, is_last: bool) -> Mapping[str, float]:
        """Return {"ensemble_accuracy": accuracy of this round's ensemble}; empty if the round is not tested."""
        experiment = self.job.experiment
        due = is_last or server_round % experiment.evaluate_every == 0
        if not (due and self.kept.models and experiment.evaluate.tests(is_last=is_last)):
            return {}
        models, test, network = self.models(), run.measuring.test, self.network
        assert isinstance(experiment.algorithm, SeesModels)
        joint = experiment.algorithm.joint

        def logits_of(records: torch.Tensor) -> torch.Tensor:
            return joint(models, test.normalised(records), network.logits_of, self.weights)

        self._accuracy = score(logits_of, test.inputs, test.labels).accuracy
        return {"ensemble_accuracy": self._accuracy}

    def trains_model(self) -> bool:
        """Return True: the server needs the clients' whole models, so no parameters may stay on clients."""
        return True

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``ensemble`` for ``result.json``: the ensemble's last measured accuracy, and its weights."""
        found: dict[str, Any] = {"accuracy": self._accuracy}
        found |= {"weights": list(self.weights)} if self.weights else {}
        if self._accuracy is not None:
            said = (
                "the ensemble of the last round's client models (an upper bound: the server would have to store all "
                "these models)"
            )
            found["in_words"] = f"{said}: {100 * self._accuracy:.1f} %"
        return {"ensemble": found}


def on_device(device: torch.device, params: Params) -> Params:
    """Return the tensors ``params`` on the torch device ``device``."""
    return {name: value.to(device) for name, value in params.items()}
