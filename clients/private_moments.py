"""Moments of a client's features as one private release: one Gaussian mechanism over all classes.

Privacy unit: one record, which is in one class. Neighbours: two worlds in which one record is replaced by nothing,
while the numbers of clients and of their records stay public (zero-out adjacency). The other records' features do not
change by that: the caller computes the features of each record by itself, at the same place in its batch.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from clients.moments import Array, moments_of, num_moments
from clients.policy import KEY, PaidNoise, Policy, open_ledger, pay
from fl_sim.errors import RunError
from fl_sim.privacy.accounting import noise_multiplier
from fl_sim.privacy.ledger import Receipt
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.store.tensors import write_private

LONGEST: Final = math.sqrt(3)
"""The length of what a record adds to the moments where its feature is as long as the clipping norm."""

_RELEASE: Final = "moments.safetensors"


@dataclass(frozen=True)
class Protection:
    """The privacy of moments: ``epsilon`` and ``delta`` per record; features are clipped to ``clipping_norm``."""

    epsilon: float
    delta: float
    clipping_norm: float
    noise: Literal["secret", "seeded"]

    @property
    def noise_multiplier(self) -> float:
        """Return z, the noise's standard deviation divided by the sensitivity: the least for epsilon and delta."""
        return _least_noise(self.epsilon, self.delta)

    @property
    def std(self) -> float:
        """Return the standard deviation of the noise on each number, in units in which the clipping norm is 1."""
        return self.noise_multiplier * LONGEST

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the cost of a client's release."""
        return dp_event.GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True)
class MomentsRelease:
    """One client's release. Two of one ``name`` differ in their noise key alone.

    ``folder`` keeps the key until the release is out, and the release. ``ledger`` pays, or else that of the client's
    ``policy``. ``seed``: of seeded noise.
    """

    name: str
    folder: Path
    ledger: Path
    policy: Policy | None
    seed: int


def check_noise(protection: Protection, size: int) -> None:
    """Raise UserError if no noise gives epsilon and delta, or it is too coarse for ``size`` moments."""
    clipping_norm_on_grid(LONGEST, protection.std, size, summands=1)


def charge_name(name: str) -> str:
    """Return the name of a release in the ledger."""
    return f"class moments {name}"


def released_moments(
    features: Array, labels: NDArray[np.int64], num_classes: int, protection: Protection, release: MomentsRelease
) -> Array:
    """Return the moments of ``private_moments``: paid before they are made, and made once.

    A second call with the same folder returns the first moments, at no cost. A client without records, whose number is
    public, sends zeros and pays nothing. Raises RunError if its policy does not allow the release, UserError or
    RunError if the ledger cannot be charged.
    """
    shape = (num_classes, num_moments(features.shape[1]))
    begun = begin_release(len(labels), shape, protection, release)
    if not isinstance(begun, PaidNoise):
        return begun
    return finish_release(release, begun, private_moments(features, labels, num_classes, protection, begun.noise))


def begin_release(
    num_records: int, shape: tuple[int, int], protection: Protection, release: MomentsRelease
) -> Array | PaidNoise:
    """Pay for a release of moments of that ``shape``; or return it, if it exists already or costs nothing.

    Reads no record. Raises as ``released_moments`` does.
    """
    if release.policy:
        release.policy.check_noise(protection.noise, "calibrate.noise")
    if not num_records:
        return np.zeros(shape)
    path = release.folder / _RELEASE
    if path.exists():
        return _read(path, shape, release)
    name = charge_name(release.name)
    seeded = f"{release.seed}/{name}" if protection.noise == "seeded" else ""
    return pay({name: protection.event}, release.folder, release.ledger, release.policy, seeded=seeded)


def finish_release(release: MomentsRelease, paid: PaidNoise, moments: Array) -> Array:
    """Store the moments, which are the release, and delete the noise key."""
    said = {"receipt": json.dumps(paid.receipt.to_json())}
    write_private(release.folder / _RELEASE, save({"moments": torch.from_numpy(moments)}, said))
    (release.folder / KEY).unlink(missing_ok=True)
    return moments


def private_moments(
    features: Array, labels: NDArray[np.int64], num_classes: int, protection: Protection, noise: Noise
) -> Array:
    """Return the moments of ``features`` (n, d), in units of the clipping norm, with noise of ``protection.std``.

    A record adds v = (1, u, uu') to its class and nothing to others, u being its feature in units of the clipping norm,
    clipped to length 1. As triangles keep lengths (``clients.moments``), |v|^2 = 1 + |u|^2 + |u|^4 <= 3: without one
    record the moments differ by at most sqrt 3, the sensitivity. v is clipped once more, as a whole, to the little less
    that leaves room for rounding to the noise's grid (``clipping_norm_on_grid``; a product of three numbers that are
    rounded once each is within what it allows). A feature that is not finite counts as no record.
    """
    size = num_classes * num_moments(features.shape[1])
    limit = clipping_norm_on_grid(LONGEST, protection.std, size, summands=len(features))
    rows = features / protection.clipping_norm
    norms = np.linalg.norm(rows, axis=1)
    there = np.isfinite(norms)
    rows, labels, norms = rows[there], labels[there], norms[there]
    rows = rows / np.maximum(norms, 1.0)[:, None]
    squares = (rows**2).sum(axis=1)
    weights = np.array([clip_factor(math.sqrt(1 + square + square**2), limit) for square in squares])
    total = moments_of(rows, labels, num_classes, weights)
    drawn = noise.gaussian(total.size, protection.std, purpose="class moments", server_round=1)
    return add_noise(total, protection.std, drawn.reshape(total.shape))


@lru_cache(maxsize=16)
def _least_noise(epsilon: float, delta: float) -> float:
    return noise_multiplier(lambda event: event, 1, epsilon, delta)


def _read(path: Path, shape: tuple[int, int], release: MomentsRelease) -> Array:
    """Return the release that was made before. Raises RunError if it is damaged, or not in the ledger."""
    try:
        with safe_open(path, "pt") as file:
            receipt = Receipt.from_json(json.loads(file.metadata()["receipt"]))
            moments: Array = file.get_tensor("moments").numpy()
        if moments.shape != shape or moments.dtype != np.float64 or not np.isfinite(moments).all():
            raise ValueError(moments.shape)  # noqa: TRY301
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError, RunError) as error:
        raise RunError(
            f"{path} is damaged: delete it, and the release is made again, which is another one and pays again"
        ) from error
    ledger = release.policy.ledger if release.policy else release.ledger
    open_ledger(ledger, receipt, f"the release in {release.folder}")
    return moments
