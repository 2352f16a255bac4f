"""A stage of the user's own: a kind of preprocess or calibrate by its import path, from settings to the report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from flwr.app import MetricRecord, RecordDict
from typer.testing import CliRunner

from clients.client_task import Client, ClientTask
from fl_sim.cli.verbs import report
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.settings import Settings
from fl_sim.simulation.run import run
from fl_sim.simulation.stage import Run, Stage


@dataclass(frozen=True)
class Size:
    """Asks a client how many records it holds."""

    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        return RecordDict({"size": MetricRecord({"records": len(client.records)})})


class Counting(Stage):
    """Adds up how many records clients hold."""

    total = 0

    def tasks(self) -> Mapping[str, ClientTask]:
        return {"size": Size()}

    def before(self, run: Run) -> None:
        self.total = sum(run.ask("size", lambda answer: int(str(answer["size"]["records"])), quoted=True))

    def after(self, run: Run) -> None:
        self.before(run)

    def facts(self) -> Mapping[str, Any]:
        return {"counted": self.total}


class Counts(Settings):
    """Settings of this stage."""

    stage: ClassVar[str] = f"{__name__}:Counting"
    title: ClassVar[str] = "Counts"
    doubled: bool = False


class Nothing(Settings):
    """Names no stage."""


QUICK = {"model": "logistic", "clients": 4, "rounds": 1, "partition": "iid", "engine": "inprocess"}


@pytest.mark.parametrize("part", ["preprocess", "calibrate"])
def test_a_stage_by_import_path_runs_and_says_what_it_found(part: str, tmp_path: Path) -> None:
    experiment = experiment_from({**QUICK, part: {"kind": f"{__name__}:Counts", "doubled": True}})
    assert experiment_from(experiment.model_dump(mode="json")) == experiment
    result = run(experiment, tmp_path / "run")
    assert result["counted"] == 1437
    assert result[part] == {"kind": f"{__name__}:Counts"}


def test_a_report_of_such_a_run_names_the_kind(tmp_path: Path) -> None:
    run(experiment_from({**QUICK, "preprocess": Counts()}), tmp_path / "run")
    app = typer.Typer()
    app.command()(report)
    made = CliRunner().invoke(app, [str(tmp_path / "run"), "--out", str(tmp_path / "report")])
    assert made.exit_code == 0, made.output
    assert "Counts + FedAvg" in made.output


def test_a_kind_without_a_stage_is_refused() -> None:
    with pytest.raises(UserError, match="lacks stage"):
        experiment_from({**QUICK, "preprocess": Nothing()})


def test_such_a_stage_is_refused_where_privacy_is_promised(tmp_path: Path) -> None:
    private = {"aggregator": {"kind": "global-dp", "noise": "seeded"}}
    with pytest.raises(UserError, match="Size, code of your own, asks clients for 'size'"):
        run(experiment_from({**QUICK, **private, "preprocess": Counts()}), tmp_path / "run")
    assert json.dumps([one.name for one in (tmp_path / "run").iterdir()]) == "[]"
