"""The stage that reports which of several global models each client trains, such as the model of its cluster."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_sim.experiment.job import Job
from fl_sim.simulation.stage import Run, Stage
from strategies.layer import found_in
from strategies.several_models import SeveralModels


class ChosenModels(Stage):
    """The stage at the server that reports each client's choice of a model, from the layer ``SeveralModels``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer = SeveralModels({}, [])

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the algorithm has several global models."""
        return SeveralModels.applies(experiment)

    def after(self, run: Run) -> None:
        """Store the layer ``SeveralModels``, which has the index of each client's model, for use in the result."""
        self._layer = found_in(run.strategy.layer, SeveralModels)

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return the index of each client's model, counted from 0; NaN for clients that never trained."""
        chosen, clients = self._layer.chosen, range(self.job.experiment.num_clients)
        return {self._layer.column: np.array([chosen.get(one, np.nan) for one in clients])} if chosen else {}

    def facts(self) -> Mapping[str, Any]:
        """Return the fields for ``result.json``, such as the number of clients that chose each model."""
        return self._layer.facts()
