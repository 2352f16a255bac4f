"""The stage of CCVR (classifier calibration with virtual representations, Luo et al. 2021), after the last round.

Features are the inputs of the model's last layer, the head. For each class, clients send moments: the number of their
records, the sum of the features, and the sum of the features' outer products. The server draws features from normal
distributions with these moments. Then it trains the head on the drawn features. The settings are in
``strategies.ccvr``. The module ``clients.private_moments`` adds noise to the moments.
"""

import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.engines import arrays, wire
from fl_sim.experiment.job import Job
from fl_sim.kinds import replaces_records
from fl_sim.seeding import rng
from fl_sim.simulation.stage import Run, Stage
from fl_sim.stages.feature_sums import SUMMARISE, Summarise, paid_together, payments_of, statement
from fl_sim.types import Params, Traffic
from strategies.ccvr import CCVR
from strategies.class_gaussians import ClassGaussian, class_gaussians, draw_features
from strategies.head_training import with_trained_head

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

_COVERS: Final = (
    "the moments of features that each client sends once, after training, and all results that are computed from only "
    "these moments and the model of the last round. Each record of each client is protected. The clients' records are "
    "disjoint, so epsilon holds for each record."
)
_NOT_TRAINING: Final = (
    "Training itself is NOT private: clients train on their raw records and send updates without noise in every round, "
    "so the model of the last round and its features may reveal any record."
)
_TRAINING_ELSEWHERE: Final = (
    "Training on synthetic records: another statement has its cost. The joint cost is at most the sum of both epsilons."
)


def settings_of(job: Job) -> CCVR:
    """Return the settings of CCVR. The experiment of ``job`` must use CCVR."""
    assert isinstance(job.experiment.calibrate, CCVR)
    return job.experiment.calibrate


class Calibration(Stage):
    """The stage of CCVR at the server: it asks clients for moments, and retrains the head of the final model."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._found: dict[str, Any] = {}
        self._task = Summarise(job, settings_of(job), "calibrate")

    def tasks(self) -> Mapping[str, Summarise]:
        """Return the client task ``summarise``, which computes a client's moments."""
        return {SUMMARISE: self._task}

    def after(self, run: Run) -> None:
        """Retrain the head of the final model, on features drawn from the clients' moments.

        Raises RunError if a client fails; Diverged if the loss is not finite. The checkpoint contains the model of the
        last round, so a run that is interrupted here repeats this method when it resumes.
        """
        job, log, settings = self.job, run.log, settings_of(self.job)
        params, seed, num_classes = log.server.params, job.experiment.seed, job.dataset.num_classes
        with _statement_first(run):
            answers = self._moments(run)
        log.after["moments"] = self._traffic_of_moments(log.server.model)
        classes = self._classes(np.sum(answers, axis=0))
        if classes:
            features, labels = draw_features(classes, settings.samples_per_class, rng(seed, "class gaussians"))
            generator = rng(seed, "calibration batches")
            params = with_trained_head(settings.training, job.model(), params, features, labels, generator)
        calibrated = replace(log.server, params=params)
        when = "after the calibration; try a smaller calibrate.learning_rate"
        after = run.measuring.measured(calibrated.model, when, is_last=True, server_round=len(run.log.rounds))
        skipped = sorted(set(range(num_classes)) - {one.label for one in classes})
        self._found = {
            "accuracy_before": log.rounds[-1].test_accuracy,
            "accuracy_after": after.test.accuracy if after.test else None,
            "loss_after": after.test.loss if after.test else None,
            "classes_skipped": skipped,
        }
        log.server, log.measured, log.measured_again = calibrated, after, after

    def _moments(self, run: Run) -> list[NDArray[np.float64]]:
        shape, most = self._task.shape, None if settings_of(self.job).is_private else run.strategy.most_examples
        return run.ask(
            SUMMARISE,
            lambda one: wire.read_moments(one, shape, most),
            quoted=not self.job.experiment.is_private,
            params=run.strategy.server.model,
        )

    def _classes(self, moments: NDArray[np.float64]) -> list[ClassGaussian]:
        settings, num_features = settings_of(self.job), self.job.num_features
        if (protection := settings.protection) is None:
            return class_gaussians(moments, num_features)
        # each client with records adds its own noise to the sum of all moments
        std = protection.std * math.sqrt(np.count_nonzero(self.job.shards.sizes))
        return [one.scaled(settings.clipping_norm) for one in class_gaussians(moments, num_features, std)]

    def trains_model(self) -> bool:
        """Return True, because this stage trains the head of the model."""
        return True

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: all clients receive the model, and all clients send moments."""
        return {"moments": self._traffic_of_moments(params)}

    def _traffic_of_moments(self, model: Params) -> Traffic:
        down = arrays.num_bytes(wire.task_content(wire.BLANK, model, {}))
        return Traffic(down, 0) * self.job.experiment.num_clients + self._task.traffic

    def payments(self) -> "Iterator[Payment]":
        """Return the privacy cost of the clients' noisy moments; empty if the moments have no noise."""
        return payments_of(settings_of(self.job))

    def warnings(self) -> list[str]:
        """Return a warning that clients send moments after training, with or without noise."""
        with_noise = "with" if settings_of(self.job).is_private else "without"
        said = "after training, clients send for every class: the number of their records, the sum of the features and"
        return [f"{said} the sum of the features' products, {with_noise} noise"]

    def facts(self) -> Mapping[str, Any]:
        """Return fields for ``result.json``: accuracy before and after this stage, and the classes without moments."""
        return {"calibrate": {"kind": settings_of(self.job).kind, **self._found}}


@contextmanager
def _statement_first(run: Run) -> Iterator[None]:
    """Add the privacy statement of the clients' noisy moments to the log, before the ``with`` block asks any client.

    Therefore the statement exists even if the run stops in the block. After the block, the joint privacy cost of all
    private outputs about the same records is added to the statement.
    """
    log, settings = run.log, settings_of(run.job)
    if settings.protection is None:
        yield
        return
    limits = _TRAINING_ELSEWHERE if replaces_records(run.job.experiment.preprocess) else _NOT_TRAINING
    before, identity = list(log.statements), f"moments-{secrets.token_hex(8)}"
    log.statements = [*before, statement(settings, _COVERS, limits, identity, None)]
    yield
    together = paid_together(run.job, settings, log.server.model)
    log.statements = [*before, statement(settings, _COVERS, limits, identity, together)]
