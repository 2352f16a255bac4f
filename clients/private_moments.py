"""Private class moments of a client's features, by one Gaussian mechanism over all classes.

The features are the inputs of a model's last layer. The moments of a class are the number, the sum and the sum of outer
products of its features. The privacy unit is one record, which is in one class. Adjacency is zero-out: one record is
replaced by nothing, while the numbers of clients and of their records stay public. The features of all other records do
not change: the caller computes the feature of each record separately, and puts the record at the same position of a
batch each time.
"""

import json
import math
from collections.abc import Callable
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

from clients.moments import LONGEST, Array, moments_of, num_moments
from clients.policy import KEY, PaidNoise, Policy, open_ledger, pay
from fl_sim.errors import RunError
from fl_sim.privacy.accounting import noise_multiplier
from fl_sim.privacy.ledger import Receipt
from fl_sim.privacy.mechanisms import Noise, add_noise, clip_factor, clipping_norm_on_grid
from fl_sim.store.tensors import write_private

_RELEASE: Final = "moments.safetensors"


@dataclass(frozen=True)
class Protection:
    """The privacy parameters of moments: ``epsilon`` and ``delta`` per record, and the ``clipping_norm`` of features.

    ``noise``: "secret", or "seeded" for simulations only. ``sensitivity``: the largest L2 norm of one record's
    contribution to the sums.
    """

    epsilon: float
    delta: float
    clipping_norm: float
    noise: Literal["secret", "seeded"]
    sensitivity: float = LONGEST

    @property
    def noise_multiplier(self) -> float:
        """Return the smallest noise multiplier that epsilon and delta allow.

        The noise multiplier is the standard deviation of the noise divided by the sensitivity.
        """
        return _least_noise(self.epsilon, self.delta)

    @property
    def std(self) -> float:
        """Return the standard deviation of the noise on each number of the moments. The unit is the clipping norm."""
        return self.noise_multiplier * self.sensitivity

    @property
    def event(self) -> dp_event.DpEvent:
        """Return the privacy event of one client's noisy moments."""
        return dp_event.GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True)
class MomentsRelease:
    """The name and the files of one client's noisy moments.

    Each ledger covers one client's records. Two sets of noisy moments with the same ``name`` in a ledger have the same
    settings. They can differ only if their noise keys (the secret seeds of the noise) differ. ``folder``: the folder of
    the noise key, and later of the moments. ``ledger``: the privacy ledger for the privacy cost. If the client's owner
    has set a ``policy``, the policy's privacy ledger is used instead. ``seed``: the seed of seeded noise. ``what``: the
    type of the sums, such as "class moments", for the privacy ledger. ``setting``: the name of the noise setting, for
    error messages.
    """

    name: str
    folder: Path
    ledger: Path
    policy: Policy | None
    seed: int
    what: str = "class moments"
    setting: str = "calibrate.noise"

    @property
    def charged_as(self) -> str:
        """The name under which the privacy ledger lists the noisy moments."""
        return charge_name(self.name, self.what)


def check_noise(protection: Protection, size: int) -> None:
    """Raise UserError if no noise is enough for epsilon, or if the rounding grid is too coarse for ``size`` numbers."""
    clipping_norm_on_grid(LONGEST, protection.std, size, summands=1)


def charge_name(name: str, what: str = "class moments") -> str:
    """Return the name of noisy sums in the ledger: their type ``what``, such as "class moments", and ``name``."""
    return f"{what} {name}"


def released_moments(
    make: Callable[[Noise], Array],
    num_records: int,
    shape: tuple[int, int],
    protection: Protection,
    release: MomentsRelease,
) -> Array:
    """Return the noisy moments, after their privacy cost was written into the privacy ledger.

    ``make``: a function from the noise to the noisy moments of ``num_records`` records, of shape ``shape``. The result
    is also stored. A second call with the same folder returns the stored moments, at no privacy cost. For a client
    without records, the result is zeros, at no privacy cost. (The number of records is public.) Raises RunError if the
    client's policy forbids the noisy moments. Raises UserError or RunError if the privacy cost cannot be written.
    """
    begun = begin_release(num_records, shape, protection, release)
    return finish_release(release, begun, make(begun.noise)) if isinstance(begun, PaidNoise) else begun


def begin_release(
    num_records: int, shape: tuple[int, int], protection: Protection, release: MomentsRelease
) -> Array | PaidNoise:
    """Write the privacy cost of the moments into the privacy ledger, and return the noise and a receipt.

    The receipt is the ledger's proof that the cost is charged. The function reads no record. If the noisy moments exist
    already, it returns them, at no privacy cost. For a client without records, it returns zeros, at no privacy cost.
    ``shape``: the shape of the moments. Raises the errors of ``released_moments``.
    """
    if release.policy:
        release.policy.check_noise(protection.noise, release.setting)
    if not num_records:
        return np.zeros(shape)
    path = release.folder / _RELEASE
    if path.exists():
        return _read(path, shape, release)
    name = release.charged_as
    seeded = f"{release.seed}/{name}" if protection.noise == "seeded" else ""
    return pay({name: protection.event}, release.folder, release.ledger, release.policy, seeded=seeded)


def finish_release(release: MomentsRelease, paid: PaidNoise, moments: Array) -> Array:
    """Store the noisy ``moments``, delete the noise key (the secret seed of the noise), and return ``moments``."""
    said = {"receipt": json.dumps(paid.receipt.to_json())}
    write_private(release.folder / _RELEASE, save({"moments": torch.from_numpy(moments)}, said))
    (release.folder / KEY).unlink(missing_ok=True)
    return moments


def private_moments(
    features: Array, labels: NDArray[np.int64], num_classes: int, protection: Protection, noise: Noise
) -> Array:
    """Return the class moments of ``features`` (n, d) with noise, in units of the clipping norm.

    The noise on each number has the standard deviation ``protection.std``. A record adds v = (1, u, uu') to the moments
    of its class, and nothing to other classes. Here u is the record's feature in units of the clipping norm, clipped to
    norm 1. The triangle form of uu' preserves norms (``clients.moments``), so |v|^2 = 1 + |u|^2 + |u|^4 <= 3. The
    sensitivity is therefore sqrt 3. Then v is clipped to a norm slightly below sqrt 3, so that the sensitivity also
    holds after rounding. The function ``clipping_norm_on_grid`` computes this slightly smaller norm. It allows for the
    rounding of a product of three rounded numbers. A record whose feature is not finite is ignored.
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
    """Return the stored moments.

    Raises RunError if the file is damaged, or if the privacy ledger lacks the privacy cost of the moments.
    """
    try:
        with safe_open(path, "pt") as file:
            receipt = Receipt.from_json(json.loads(file.metadata()["receipt"]))
            moments: Array = file.get_tensor("moments").numpy()
        if moments.shape != shape or moments.dtype != np.float64 or not np.isfinite(moments).all():
            raise ValueError(moments.shape)  # noqa: TRY301
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError, RunError) as error:
        raise RunError(f"{path} is damaged: delete it; a new release is then made, and charged again") from error
    ledger = release.policy.ledger if release.policy else release.ledger
    open_ledger(ledger, receipt, f"the release in {release.folder}")
    return moments
