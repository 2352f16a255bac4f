"""The stage of FedPFT: clients send Gaussian mixtures of their features, and the server trains the head on samples.

The head is the model's last layer. The settings are in ``strategies.fedpft``, the mixtures in ``clients.mixtures``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from clients.mixtures import MixtureForm
from fl_sim.engines import wire
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.timing import Work
from fl_sim.stages.feature_sums import Summarise
from fl_sim.types import Params, Traffic
from strategies.fedpft import FedPFT
from strategies.head_training import with_trained_head

DESCRIBE: Final = "describe"
"""The name of the client task that returns mixtures of a client's features."""


@dataclass(frozen=True)
class Mixtures:
    """The Gaussian mixtures that a client fits to its features and sends once. ``seed``: the seed of the fit."""

    form: MixtureForm
    seed: int
    released: ClassVar[str] = "mixtures of features"
    of_initial_model: ClassVar[bool] = True
    protection: ClassVar[None] = None

    def shape(self, num_features: int, num_classes: int) -> tuple[int, int]:
        """Return the shape of the array with a client's mixtures: a row for each class."""
        return num_classes, self.form.width(num_features)

    def summed(
        self, features: NDArray[np.float64], labels: NDArray[np.int64], num_classes: int, noise: object
    ) -> NDArray[np.float64]:
        """Fit mixtures to ``features``, (n, d), with ``labels``, (n,); return their parameters, one row for each class.

        ``noise`` is not used.
        """
        del noise
        return self.form.rows(features, labels, num_classes, self.seed)

    def model_dump(self, *, include: set[str]) -> dict[str, Any]:
        """Return no settings for a privacy ledger, because mixtures have no noise and no entry in the ledger."""
        del include
        return {}


class HeadFromMixtures(Stage):
    """The stage at the server: it trains the head of the initial model on features drawn from the mixtures."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.experiment.algorithm, FedPFT)
        self.settings: FedPFT = job.experiment.algorithm
        seed = int(rng(job.experiment.seed, "mixtures").integers(2**31))
        self._task = Summarise(job, Mixtures(self.settings.form, seed), "algorithm")
        self._found: dict[str, Any] = {}

    def tasks(self) -> Mapping[str, Summarise]:
        """Return the client task ``describe``."""
        return {DESCRIBE: self._task}

    def preparing(self, log: RunLog) -> str:
        """Return the line that is shown while clients fit their mixtures."""
        del log
        return "clients send mixtures of their features, and the server trains a head"

    def before(self, run: Run) -> None:
        """Train the head of the initial model. Raises Diverged if the head is not finite."""
        job, seed, server = self.job, self.job.experiment.seed, run.log.server
        run.log.before["mixtures"] = self._task.traffic
        answers = run.ask(DESCRIBE, partial(self._read, most=run.strategy.most_examples), quoted=True)
        features, labels = self._drawn(np.concatenate(answers))
        generator = rng(seed, "head batches")
        params = with_trained_head(self.settings.training, job.model(), server.params, features, labels, generator)
        run.log.server = run.strategy.server = replace(server, params=params)

    def _read(self, content: Any, most: int) -> NDArray[np.float64]:
        rows = wire.read_moments(content, self._task.shape, most)
        self.settings.form.check(rows)
        return rows

    def _drawn(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Draw features from all mixtures, and return (features, labels).

        ``rows``: the parameters of the mixtures, one row per client and class, sorted by client.
        """
        generator, num_classes = rng(self.job.experiment.seed, "mixture samples"), self.job.dataset.num_classes
        drawn, labels = [np.zeros((0, self.job.num_features), np.float32)], [np.zeros(0, np.int64)]
        for place in np.flatnonzero(rows[:, 0]):
            count, mixture = self.settings.form.mixture(rows[place], self.job.num_features)
            drawn.append(mixture.draw(count, generator).astype(np.float32))
            labels.append(np.full(count, place % num_classes))
        self._found = {"mixtures": len(drawn) - 1, "features": sum(map(len, drawn))}
        return np.concatenate(drawn), np.concatenate(labels)

    def trains_model(self) -> bool:
        """Return True, because this stage trains the head of the model."""
        return True

    def work(self) -> tuple[Work, ...]:
        """Return the computation of this stage. The forecast lists it, but does not estimate its time."""
        return (Work("the mixtures and the training of the head", pieces=1.0),)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: clients receive the task without a model, and send their mixtures."""
        del params
        return {"mixtures": self._task.traffic}

    def warnings(self) -> list[str]:
        """Return a warning about the contents of the clients' messages."""
        return [
            "clients send for every class the number of their records and a mixture of their features, without noise"
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``fedpft`` for ``result.json``: the numbers of mixtures and of drawn features."""
        return {"fedpft": self._found}
