"""After the last round: clients send moments of their features, and the server trains the head again (CCVR)."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from flwr.serverapp import Grid

from clients.class_moments import num_moments
from fl_sim.errors import Diverged
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.run_log import Calibration, RunLog
from fl_sim.types import Params
from strategies.ccvr import CCVR, with_trained_head
from strategies.class_gaussians import class_gaussians, draw_features
from strategies.flower import FederatedStrategy, summarise_after_training


def calibrate(
    job: Job,
    settings: CCVR,
    strategy: FederatedStrategy,
    grid: Grid,
    log: RunLog,
    evaluate: Callable[[Params], tuple[float, float]],
) -> None:
    """Train the head of the model in ``log`` again. Raises RunError where a client fails, Diverged for a bad rate.

    The checkpoint keeps the model of the last round: a run that is killed here does all of this again.
    """
    params, seed = log.server.params, job.experiment.seed
    num_classes, num_features = job.dataset.num_classes, job.num_features
    shape = (num_classes, num_moments(num_features))
    moments = summarise_after_training(strategy, grid, shape, job.experiment.round_timeout)
    classes = class_gaussians(np.sum(moments, axis=0), num_features)
    if classes:
        features, labels = draw_features(classes, settings.samples_per_class, rng(seed, "class gaussians"))
        generator = rng(seed, "calibration batches")
        params = with_trained_head(settings, job.model(), params, features, labels, generator)
    calibrated = replace(log.server, params=params)
    accuracy, loss = evaluate(calibrated.model)
    if not math.isfinite(loss):
        raise Diverged(f"the test loss is {loss} after the calibration; try a smaller calibrate.learning_rate")
    before = log.rounds[-1].test_accuracy
    assert before is not None  # the last round is evaluated, whatever evaluate_every is
    skipped = sorted(set(range(num_classes)) - {one.label for one in classes})
    log.calibration = Calibration(before, accuracy, loss, tuple(skipped))
    log.server = calibrated
