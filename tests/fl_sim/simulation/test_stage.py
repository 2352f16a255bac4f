"""What clients are asked by the stages of a run, what these say, and where they fail."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from clients.client_task import ClientTask
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation.run import run
from fl_sim.simulation.stage import RESULT, Run, Stage, tasks_of
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
    with pytest.raises(UserError, match=r"Calibration has a client task '.+', and so has another stage of the run"):
        tasks_of(_job(algorithm=f"{__name__}:Asking"))


class Telling(Stage):
    """Says what its algorithm wants it to say."""

    def facts(self) -> Mapping[str, Any]:
        said: Any = self.job.experiment.algorithm
        return {"its name": {"noted": 1}, "a name of the result": {"privacy": []}, "another's": {"calibrate": {}},
                "a tensor": {"noted": torch.zeros(1)}, "a number as name": {1: 2}}[said.says]  # fmt: skip


class Teller(FedAvg):
    """FedAvg with that stage."""

    stage: ClassVar[str] = f"{__name__}:Telling"
    says: str = "its name"


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            "a name of the result",
            "facts of Telling returned the field 'privacy', which the result itself has, too: rename the field",
        ),
        ("another's", "facts of Calibration returned the field 'calibrate', which Telling has, too"),
        ("a tensor", r"facts of Telling returned .*tensor.*: return a dict from field names to JSON values"),
        ("a number as name", "facts of Telling returned {1: 2}: return a dict"),
    ],
)
def test_facts_of_a_stage_that_the_result_cannot_hold_are_refused(says: str, told: str, tmp_path: Path) -> None:
    job = _job(algorithm=Teller(says=says))
    with pytest.raises(RunError, match=told):
        run(job.experiment, tmp_path / "run")


def test_what_a_stage_says_is_in_the_result_and_no_name_of_that_is_free(tmp_path: Path) -> None:
    result = run(_job(algorithm=Teller(), evaluate={"validation": 0.2}).experiment, tmp_path / "run")
    assert result["noted"] == 1
    assert result.keys() - {"noted", "preprocess", "calibrate"} <= RESULT


class Raising(Stage):
    """Fails before the rounds, or after them."""

    def before(self, run: Run) -> None:
        said: Any = self.job.experiment.algorithm
        if said.when == "before":
            raise ZeroDivisionError("no way on")

    def after(self, run: Run) -> None:
        raise ZeroDivisionError("no way on")


class Raiser(FedAvg):
    """FedAvg with that stage."""

    stage: ClassVar[str] = f"{__name__}:Raising"
    when: str = "before"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stage_that_raises_is_told_with_its_place(when: str, tmp_path: Path) -> None:
    told = rf"{when} of Raising failed with ZeroDivisionError: no way on \(.*test_stage.py:\d+, in {when}\)"
    with pytest.raises(RunError, match=told):
        run(_job(algorithm=Raiser(when=when)).experiment, tmp_path / "run")
