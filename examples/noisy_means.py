"""A generator of your own: every class is its noisy mean image. Simple, private, and its bill is one Gaussian release.

    fl-sim run preprocess=da-fl preprocess.generator=noisy_means:NoisyMeans

It says what it will cost before it looks at a record (``bill``), and ``generate`` adds just the noise that was billed.
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
    """Release the sum and the number of each class's records once; draw images around their mean, ``spread`` apart."""

    spread: float = Field(0.2, ge=0)

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Price one Gaussian release; epsilon inf means no noise."""
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
        """Return ``counts`` images of each class. All that touches ``records`` goes through ``ClassSums``."""
        shape = records.inputs.shape[1:]
        points = records.inputs.numpy().reshape(len(records.inputs), -1).astype(np.float64)
        one = math.sqrt(points.shape[1])  # as long as the longest record, so that counts are about as exact as pixels
        features = np.concatenate([np.full((len(points), 1), one), points], axis=1)
        release = ClassSums(bill.noise_multiplier, noise, "sums and counts")
        sums, _ = release.sums(features, math.sqrt(2) * one, records.labels.numpy(), records.num_classes)
        means = sums[:, 1:] / np.maximum(sums[:, :1] / one, 1.0)
        around = np.repeat(means, counts, axis=0)
        made = around + self.spread * generator.standard_normal(around.shape)
        return torch.from_numpy(made.clip(-1, 1).astype(np.float32)).reshape(-1, *shape)
