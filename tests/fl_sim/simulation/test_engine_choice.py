"""Which trainer is said to take an experiment: the one that takes its clients' plans."""

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.native.kernel import load_kernel
from fl_sim.simulation.engine_choice import trainer_line, trains_natively


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize(
    ("algorithm", "model", "native"),
    [("fedavg", "resnet", True), ("scaffold", "resnet", True), ("naivemix", "resnet", True),
     ("fedmix", "resnet", False),  # its second derivatives do not go through GroupNorm
     ("fedmix", "dafl-cnn", True), ("pate", "dafl-cnn", True)],
)  # fmt: skip
def test_the_native_trainer_is_named_where_it_takes_the_plans(algorithm: str, model: str, *, native: bool) -> None:
    job = job_of(experiment_from({"data": "digits", "device": "cpu", "algorithm": algorithm, "model": model}))
    assert trains_natively(job) is native
    assert trainer_line(job, 2) == ("native trainer, 2 threads" if native else "PyTorch trains, 2 threads")
