"""What one client sends after training: moments of its features, with noise where the experiment says so."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import nn

from clients.class_moments import moments_of
from fl_sim.engines.wire import Ticket
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.training.features import features_of
from fl_sim.training.records import Records
from fl_sim.types import Params
from strategies.ccvr import CCVR

if TYPE_CHECKING:
    from clients.policy import Policy
    from clients.private_moments import Release


def summarise(
    job: Job,
    model: nn.Module,
    own: Callable[[int], Records],
    client: int,
    params: Params,
    folder: Path,
    policy: "Policy | None",
    ticket: Ticket | None,
) -> NDArray[np.float64]:
    """Return the moments of one client's features under ``params``: as they are, or privately where that is asked for.

    ``own``: its records; ``folder``, ``policy`` and ``ticket``: see ``clients.app.Site``.
    """
    settings, num_classes = job.experiment.calibrate, job.dataset.num_classes
    assert isinstance(settings, CCVR)
    protection = settings.protection
    if policy and protection is None:
        policy.check_training(own_records=True)
    inputs, labels = own(client).tensors()
    # A model of the user's own may let records look at each other: one alone then, where each is to be hidden.
    at_once = {} if protection is None or job.trainer.is_stackable() else {"records_at_once": 1}
    features = features_of(model, params, inputs, **at_once).numpy().astype(np.float64)
    classes = labels.cpu().numpy()
    if protection is None:
        return moments_of(features, classes, num_classes)
    from clients.private_moments import private_moments, released_moments  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

    if ticket:
        noise = Noise(ticket.key, ticket.simulation_only)
        return private_moments(features, classes, num_classes, protection, noise)
    release = moments_release(job, client, params, folder, policy)
    return released_moments(features, classes, num_classes, protection, release)


def moments_release(job: Job, client: int, params: Params, folder: Path, policy: "Policy | None" = None) -> "Release":
    """Return the release of one client's moments under ``params``: what it is called, and where it is kept and paid."""
    from clients.private_moments import Release  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.simulation.client_ledgers import ledger_path  # noqa: PLC0415

    name = release_name(job.experiment, client, params)
    # What is private stays where the client wants it, not where the server says.
    place = (policy.home if policy else folder) / f"moments-{name}"
    return Release(name, place, ledger_path(job, client), policy, job.experiment.seed)


def release_name(experiment: Experiment, client: int, params: Params) -> str:
    """Return the name of the moments that ``client`` releases under ``params``: a digest of all that they depend on."""
    names = ("data", "normalise", "features", "model", "partition", "clients", "seed", "partition_seed")
    asked = experiment.chosen(*names)
    calibrate = experiment.calibrate.model_dump(include={"epsilon", "delta", "clipping_norm", "noise"})
    digest = hashlib.sha256(json.dumps([asked, calibrate, client], sort_keys=True).encode())
    for value in params.values():
        digest.update(value.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]
