"""Feature noise: IID records, inputs noisier from client to client (NIID-Bench, Li et al. 2022, 4.2)."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partitions.assign import STRICT, check_finite
from partitions.iid import Iid


@dataclass(frozen=True)
class FeatureNoise:
    """Equal IID parts; client i of K sees inputs with Gaussian noise of variance ``sigma`` * i / K, i = 1..K.

    The split itself changes no input, what a client sees of it does.
    """

    kind: Literal["feature-noise"] = field(default="feature-noise", kw_only=True)
    sigma: float = 0.1

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        check_finite("sigma", self.sigma)

    @property
    def title(self) -> str:
        """Return the short form."""
        return f"feature-noise:{self.sigma}"

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Return ``num_partitions`` disjoint sorted index arrays that cover every record, sizes within 1.

        Raises ImpossibleSplit for more clients than records.
        """
        return Iid().split(labels, num_partitions, rng)

    def seen_by(
        self,
        client: int,
        num_partitions: int,
        inputs: NDArray[np.float32],
        std: NDArray[np.float32],
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        """Return ``inputs`` with the noise of ``client`` on them; see ``partitions.scheme.FeatureSkew``."""
        noise = rng.standard_normal(inputs.shape, dtype=np.float32)
        seen: NDArray[np.float32] = inputs + noise * math.sqrt(self.noise_variance(client, num_partitions)) / std
        return seen

    def noise_variance(self, client: int, num_partitions: int) -> float:
        """Return the variance of the noise on the inputs (in units of 1, before normalisation) of ``client``, from 0.

        Client 0 is the paper's i = 1, so nobody is free of noise and the last client has ``sigma``.
        """
        return self.sigma * (client + 1) / num_partitions
