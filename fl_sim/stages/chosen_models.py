"""The stage that reports the clients' choices in IFCA, where every client chooses one of several models.

For each client it reports the choice in the client's last round.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_sim.experiment.job import Job
from fl_sim.simulation.stage import Run, Stage
from strategies.layer import found_in
from strategies.several_models import OneUpdate


class ChosenModels(Stage):
    """The stage at the server. After the last round, it reads the models that clients chose in the rounds."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._chosen, self._count = dict[int, int](), 0

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if there are several models."""
        return OneUpdate.applies(experiment)

    def after(self, run: Run) -> None:
        """Read the last choice of each client among the models."""
        layer = found_in(run.strategy.layer, OneUpdate)
        self._chosen, self._count = layer.chosen, len(layer.counts)

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return the number of the model that each client chose, from 0; NaN for clients that never trained."""
        if not self._chosen:
            return {}
        clients = range(self.job.experiment.num_clients)
        return {"chosen_model": np.array([self._chosen.get(client, np.nan) for client in clients])}

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``clients_of_models`` for ``result.json``: the number of clients that chose each model."""
        counts = np.bincount(list(self._chosen.values()), minlength=self._count)
        return {"clients_of_models": counts.tolist()} if self._chosen else {}
