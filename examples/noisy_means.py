"""A generator of your own: it draws a class's images around a noisy mean image, at the cost of one Gaussian release.

    fl-sim run preprocess=da-fl preprocess.generator=noisy_means:NoisyMeans

``bill`` returns the privacy cost before any record is read, and ``generate`` adds the noise with this cost.
"""

import math

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from pydantic import Field

from clients.dafl.generator import GeneratorBill, PrivateRecords
from clients.dafl.noisy_moments import ClassSums
from fl_sim.privacy.accounting import noise_multiplier
from fl_sim.privacy.mechanisms import Noise
from fl_sim.settings import Settings


class NoisyMeans(Settings):
    """Releases the sum and the number of each class's records once, and draws images around their mean.

    ``spread``: the standard deviation of each pixel of an image around the mean.
    """

    spread: float = Field(0.2, ge=0)

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the privacy cost and the noise multiplier of one Gaussian release; no noise for infinite epsilon."""
        del num_records, num_classes
        if math.isinf(epsilon):
            return GeneratorBill(NonPrivateDpEvent(), steps=1, noise_multiplier=0.0, sampling_rate=1.0)
        multiplier = noise_multiplier(lambda event: event, 1, epsilon, delta)
        return GeneratorBill(GaussianDpEvent(multiplier), steps=1, noise_multiplier=multiplier, sampling_rate=1.0)

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return ``counts`` images of each class. Only ``ClassSums``, which adds noise, reads the private records."""
        shape = records.inputs.shape[1:]
        points = records.inputs.numpy().reshape(len(records.inputs), -1).astype(np.float64)
        one = math.sqrt(points.shape[1])  # the largest norm of a record, so that noise affects counts and sums alike
        features = np.concatenate([np.full((len(points), 1), one), points], axis=1)
        release = ClassSums(bill.noise_multiplier, noise, "sums and counts")
        sums, _ = release.sums(features, math.sqrt(2) * one, records.labels.numpy(), records.num_classes)
        means = sums[:, 1:] / np.maximum(sums[:, :1] / one, 1.0)
        around = np.repeat(means, counts, axis=0)
        made = around + self.spread * generator.standard_normal(around.shape)
        return torch.from_numpy(made.clip(-1, 1).astype(np.float32)).reshape(-1, *shape)
