"""After the last round: clients send moments of their features, and the server trains the head again (CCVR)."""

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from flwr.serverapp import Grid

from clients.class_moments import num_moments
from fl_sim.engines import releases, tensor_records, wire
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.run_log import Calibration, RunLog
from fl_sim.types import Params, Traffic
from strategies.ccvr import CCVR, with_trained_head
from strategies.class_gaussians import class_gaussians, draw_features
from strategies.flower import FederatedStrategy, summarise_after_training


def calibrate(
    job: Job,
    settings: CCVR,
    strategy: FederatedStrategy,
    grid: Grid,
    log: RunLog,
    measuring: Measuring,
) -> None:
    """Train the head of the model in ``log`` again. Raises RunError where a client fails, Diverged for a bad rate.

    The checkpoint keeps the model of the last round: a run that is killed here does all of this again.
    """
    params, seed = log.server.params, job.experiment.seed
    num_classes, num_features = job.dataset.num_classes, job.num_features
    shape = (num_classes, num_moments(num_features))
    with _stated(job, settings, log):
        answers = summarise_after_training(
            strategy,
            grid,
            shape,
            job.experiment.round_timeout,
            noisy=settings.is_private,
            quoted=not job.experiment.is_private,
        )
    log.after["moments"] = traffic_of_moments(job, log.server.model)
    moments, protection = np.sum(answers, axis=0), settings.protection
    if protection is None:
        classes = class_gaussians(moments, num_features)
    else:
        std = protection.std * math.sqrt(np.count_nonzero(job.shards.sizes))  # others send no noise
        classes = [one.scaled(settings.clipping_norm) for one in class_gaussians(moments, num_features, std)]
    if classes:
        features, labels = draw_features(classes, settings.samples_per_class, rng(seed, "class gaussians"))
        generator = rng(seed, "calibration batches")
        params = with_trained_head(settings, job.model(), params, features, labels, generator)
    calibrated = replace(log.server, params=params)
    when = "after the calibration; try a smaller calibrate.learning_rate"
    after = measuring.measured(calibrated.model, when, is_last=True)
    before = log.rounds[-1].test_accuracy
    skipped = sorted(set(range(num_classes)) - {one.label for one in classes})
    log.calibration = Calibration(before, after, tuple(skipped))
    log.measured = after
    log.server = calibrated


def traffic_of_moments(job: Job, model: Params) -> Traffic:
    """Return what it takes that ``model`` goes to all clients, and the moments of their features come back."""
    shape = (job.dataset.num_classes, num_moments(job.num_features))
    down = tensor_records.num_bytes(wire.task_content(wire.BLANK, model, {}))
    up = tensor_records.num_bytes(releases.moments_content(np.zeros(shape)))
    return Traffic(down, up) * job.experiment.num_clients


@contextmanager
def _stated(job: Job, settings: CCVR, log: RunLog) -> Iterator[None]:
    """State what the clients' private releases cost before any of them is asked: a run may break off in the middle."""
    protection = settings.protection
    if protection is None:
        yield
        return
    from fl_sim.simulation.moments_bill import paid_together, statement  # noqa: PLC0415 (the accountants load slowly)

    before, identity = list(log.statements), f"moments-{secrets.token_hex(8)}"
    log.statements = [*before, statement(job, protection, identity, None)]
    yield
    together = paid_together(job, protection, log.server.model)
    log.statements = [*before, statement(job, protection, identity, together)]
