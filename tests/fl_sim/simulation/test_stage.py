"""What clients are asked by the stages of a run."""

from collections.abc import Mapping
from typing import ClassVar

import pytest

from clients.client_task import ClientTask
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation.stage import Stage, tasks_of
from fl_sim.stages.ccvr import Calibration
from strategies.fedavg import FedAvg


class AsksTheSame(Stage):
    """Names its task as CCVR's stage does."""

    def tasks(self) -> Mapping[str, ClientTask]:
        return Calibration(self.job).tasks()


class Asking(FedAvg):
    """FedAvg with that stage."""

    stage: ClassVar[str] = f"{__name__}:AsksTheSame"


def _job(**settings: object) -> Job:
    calibrate = {"kind": "ccvr", "samples_per_class": 5, "epochs": 1}
    quick = {"model": "logistic", "clients": 4, "rounds": 1, "partition": "iid", "calibrate": calibrate}
    return job_of(experiment_from({**quick, **settings}))


def test_two_stages_that_name_a_task_alike_are_refused() -> None:
    assert list(tasks_of(_job())) == list(Calibration(_job()).tasks())
    with pytest.raises(UserError, match=r"Calibration asks clients for '.+', as another stage of the run does"):
        tasks_of(_job(algorithm=f"{__name__}:Asking"))
