"""A generator needs a bill and a release; one client after another, and a time taken whole, are the default."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clients.dafl.generator import GeneratorBill, GeneratorRequest, PrivateRecords, generate_all
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.mechanisms import Noise
from fl_sim.settings import Settings
from fl_sim.simulation.engine_choice import seconds_of_stages


class Grey(Settings):
    """Images of one grey, whatever the records are; fails for a client without any."""

    level: float = 0.5

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        from dp_accounting import NonPrivateDpEvent  # noqa: PLC0415 (loads slowly)

        return GeneratorBill(NonPrivateDpEvent(), steps=1, noise_multiplier=0.0, sampling_rate=1.0)

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        if not len(records.inputs):
            raise ValueError("no records")
        return torch.full((int(counts.sum()), *records.inputs.shape[1:]), self.level)


def request(num_records: int, count: int) -> GeneratorRequest:
    records = PrivateRecords(torch.zeros(num_records, 1, 2, 2), torch.zeros(num_records, dtype=torch.int64), 1)
    bill = Grey().bill(num_records, 1, math.inf, 1e-5)
    return GeneratorRequest(records, np.array([count]), bill, Noise.seeded(0), np.random.default_rng(0))


def test_of_a_generator_that_shares_nothing_each_client_is_made_alone_and_a_failure_is_one_clients() -> None:
    checked: list[int] = []
    first, second, third = generate_all(
        Grey(), [request(4, 2), request(0, 1), request(4, 3)], lambda: checked.append(len(checked))
    )
    assert isinstance(first, torch.Tensor)
    assert isinstance(third, torch.Tensor)
    assert (first.shape, third.shape) == ((2, 1, 2, 2), (3, 1, 2, 2))
    assert isinstance(second, ValueError)
    assert checked == [0, 1, 2]


def test_what_a_check_raises_ends_all() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_all(Grey(), [request(4, 2)], stop)


def test_an_engine_is_chosen_for_a_generator_that_cannot_be_shortened() -> None:
    chosen = {"kind": "da-fl", "generator": f"{__name__}:Grey"}
    assert 0 < seconds_of_stages(job_of(experiment_from({"preprocess": chosen}))) < 60
