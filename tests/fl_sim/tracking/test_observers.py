"""Trackers and observers are named, checked before anything runs, and end no run but by an observer's own mistake."""

import importlib
import importlib.util
import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fl_sim
from fl_sim.__main__ import main
from fl_sim.errors import RunError, UserError
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.tracking.trackers import TRACKERS, chosen_trackers

QUICK = {"model": "logistic", "clients": 3, "partition": "iid", "engine": "inprocess", "rounds": 3}
TYPED = [f"{name}={value}" for name, value in QUICK.items()]


class Heard:
    """Notes what it is told."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.rounds: list[int] = []
        self.facts: list[Mapping[str, Any]] = []

    def finished_round(self, record: RoundRecord) -> None:
        self.rounds.append(record.round)

    def ended(self, facts: Mapping[str, Any]) -> None:
        self.facts.append(facts)


def test_each_tracker_has_its_class_and_its_extra() -> None:
    assert len(set(TRACKERS.values())) == len(TRACKERS) == 4
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name in TRACKERS:
        assert TRACKERS[name].__name__.lower() == name
        [needed] = project["optional-dependencies"][name]
        assert needed.startswith(name)
        assert needed in project["optional-dependencies"]["dev"]


def test_names_are_checked_and_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    assert chosen_trackers("tensorboard, mlflow,tensorboard") == ("tensorboard", "mlflow")
    assert chosen_trackers("") == chosen_trackers(()) == ()
    with pytest.raises(UserError, match=r"unknown tracker 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        chosen_trackers("mlflow,tensorbord")
    with pytest.raises(UserError, match=r"^tracker 'wandb' is not installed: pip install wandb$"):
        chosen_trackers(["wandb"])


def test_a_tracker_that_is_not_there_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["run", *TYPED], ["table", "digits"], ["sweep", "seed=0,1"], ["export", "."]):
        option = "--to" if arguments[0] == "export" else "--track"
        assert _exit_code([*arguments, option, "weights"]) == 2
        assert capsys.readouterr().err.startswith("error: unknown tracker 'weights'")
    assert list(tmp_path.iterdir()) == []


def _exit_code(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fl-sim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_an_observer_hears_every_round_and_what_result_json_says(tmp_path: Path) -> None:
    heard = Heard()
    result = fl_sim.run(QUICK, out=tmp_path / "run", progress=False, observer=heard)
    assert heard.rounds == [1, 2, 3]
    assert heard.facts == [json.loads((tmp_path / "run/result.json").read_text())] == [result.facts]


MODULE = """
class Printed:
    def __init__(self, directory):
        self.path = directory / "heard.txt"
    def finished_round(self, record):
        with self.path.open("a") as file:
            file.write(f"{record.round} ")

class Broken(Printed):
    def finished_round(self, record):
        raise ValueError("two\\nlines")

def nothing(directory):
    return directory.name
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with observers, in the current folder."""
    (tmp_path / "watching_runs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "watching_runs"


def test_an_observer_is_named_by_its_import_path(module: str, tmp_path: Path) -> None:
    fl_sim.run(QUICK, out=tmp_path / "run", progress=False, track=f"{module}:Printed")
    assert (tmp_path / "run/heard.txt").read_text() == "1 2 3 "


def test_an_observer_of_a_table_hears_each_cell(module: str, tmp_path: Path) -> None:
    plan = {"base": {**QUICK, "rounds": 2}, "grid": {"seed": [0, 1]}, "centralized": False}
    fl_sim.table(plan, out=tmp_path / "table", jobs=1, progress=False, track=[f"{module}:Printed"])
    assert [path.read_text() for path in (tmp_path / "table/cells").glob("*/heard.txt")] == ["1 2 ", "1 2 "]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (
            "Broken",
            RunError,
            r"^observer \S+:Broken failed in finished_round: ValueError: two lines \(\S+watching_runs.py:11, in ",
        ),
        (
            "nothing",
            UserError,
            "is a str with none of the methods started, preparing, replied, finished_round, ended, metrics",
        ),
        ("Absent", UserError, "has no 'Absent'"),
    ],
)
def test_an_observers_mistake_is_one_line(
    module: str, tmp_path: Path, name: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        fl_sim.run(QUICK, out=tmp_path / "run", progress=False, track=f"{module}:{name}")


class Ends:
    """Returns ``answer`` from ``finished_round`` after the second round."""

    def __init__(self, *, answer: object) -> None:
        self.answer = answer

    def finished_round(self, record: RoundRecord) -> object:
        return self.answer if record.round == 2 else None


@pytest.mark.parametrize("more", [{}, {"evaluate_every": 3}, {"evaluate": {"test": "last"}}])
def test_an_observer_that_returns_true_ends_the_run_and_more_rounds_extend_it(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    settings = {**QUICK, **more}
    ended = fl_sim.run(settings, out=tmp_path / "run", progress=False, observer=Ends(answer=True))
    assert ended.facts["stopped"] == "observer Ends ended the run after round 2"
    assert (ended.facts["status"], len(ended.rounds)) == ("finished", 2)
    assert (
        ended.final_accuracy == fl_sim.run({**QUICK, "rounds": 2}, out=tmp_path / "two", progress=False).final_accuracy
    )
    assert fl_sim.run(settings, out=tmp_path / "run", progress=False) == ended, "finished, it is not run again"
    longer = fl_sim.run({**settings, "rounds": 4}, out=tmp_path / "run", progress=False)
    assert (longer.facts["stopped"], len(longer.rounds)) == ("", 4)
    fl_sim.run({**settings, "rounds": 4}, out=tmp_path / "whole", progress=False)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_what_no_observer_may_return_is_refused_in_words(tmp_path: Path) -> None:
    assert len(fl_sim.run(QUICK, out=tmp_path / "on", progress=False, observer=Ends(answer=False)).rounds) == 3
    with pytest.raises(
        RunError, match=r"^observer Ends returned 'stop' from finished_round: return True to end the run"
    ):
        fl_sim.run(QUICK, out=tmp_path / "run", progress=False, observer=Ends(answer="stop"))


class Measures:
    """Has metrics: ``numbers``, and the accuracy as an observer sees it. Spoils the model that it is given."""

    def __init__(self, **numbers: object) -> None:
        self.numbers = numbers

    def metrics(self, server_round: int, model: nn.Module, test: TensorDataset) -> dict[str, object]:
        assert not model.training
        torch.rand(server_round), np.random.rand()  # noqa: NPY002 (as a user may)
        inputs, labels = test.tensors
        accuracy = (model(inputs).argmax(1) == labels).double().mean()
        for value in (*model.parameters(), inputs):
            value.zero_()
        return {"seen_accuracy": accuracy, **self.numbers}


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize("more", [{}, {"aggregator": "global-dp:1", "sampler": "poisson:0.9"}])
def test_metrics_of_ones_own_lie_in_the_rounds_line_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    settings = {**QUICK, "rounds": 1, **more}
    found = fl_sim.run(settings, out=tmp_path / "run", progress=False, observer=Measures(calibration=0.25))
    [line] = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert line["metrics"] == {"seen_accuracy": pytest.approx(line["test_accuracy"]), "calibration": 0.25}
    assert read_rounds(tmp_path / "run") == list(found.rounds)
    [row] = found.to_pandas()
    assert (row["calibration"], row["seen_accuracy"]) == (0.25, line["metrics"]["seen_accuracy"])
    if not more:
        fl_sim.run({**settings, "rounds": 3}, out=tmp_path / "run", progress=False, observer=Measures())
        fl_sim.run({**settings, "rounds": 3}, out=tmp_path / "plain", progress=False)
        assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_metrics_of_ones_own_never_stand_for_a_rounds_own_number(tmp_path: Path) -> None:
    fl_sim.run({**QUICK, "rounds": 1}, out=tmp_path / "run", progress=False)
    [record] = read_rounds(tmp_path / "run")
    forged = replace(record, metrics={"test_accuracy": 1.0, "own": 0.5}).numbers()
    assert (forged["test_accuracy"], forged["own"]) == (record.test_accuracy, 0.5)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"test_loss": 1.0}, "'test_loss', a field that every round has: give the metric another name"),
        ({"ece": float("nan")}, "ece = nan after round 1; it must be a finite number"),
        ({"ece": "low"}, "ece = 'low' after round 1; it must be a finite number"),
        ({"": 1.0}, "gave a metric the name '': a name has 1 to"),
    ],
)
def test_what_is_no_metric_is_refused_in_words(tmp_path: Path, numbers: dict[str, object], said: str) -> None:
    with pytest.raises(RunError, match=f"^metrics of observer Measures .*{said}"):
        fl_sim.run(QUICK, out=tmp_path / "run", progress=False, observer=Measures(**numbers))


@pytest.mark.parametrize(
    ("more", "said"),
    [({"algorithm": "pate"}, "has no rounds"), ({"evaluate": {"test": "never", "validation": 0.1}}, "uses none")],
)
def test_metrics_that_would_never_be_measured_are_refused_before_the_run(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        fl_sim.run({**QUICK, **more}, out=tmp_path / "run", progress=False, observer=Measures())
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_down_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = fl_sim.run(QUICK, out=tmp_path / "run", track="mlflow")
    assert result.facts["status"] == "finished"
    assert capsys.readouterr().err.count("mlflow receives no further data of this run") == 1
    assert _exit_code(["export", str(tmp_path / "run"), "--to", "mlflow"]) == 1
    told = capsys.readouterr().err
    assert told.count("mlflow receives no further data of this run") == 1
    assert "error: 1 of 1 runs were not sent completely" in told


def test_export_tells_where_runs_are_and_refuses_what_holds_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    fl_sim.run(QUICK, out=run, progress=False)
    for sent in (f"(tensorboard --logdir {run})", "has this run"):
        assert _exit_code(["export", str(tmp_path), "--to", "tensorboard"]) == 0
        assert capsys.readouterr().out == f"{run}: 3 rounds; tensorboard {sent}\n"
    assert _exit_code(["export", str(tmp_path), "--to", "tensorboard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["there"] == ["tensorboard"]
    (run / "tracking.json").write_text("{}[")
    assert _exit_code(["export", str(tmp_path), "--to", "tensorboard"]) == 2
    assert "tracking.json is damaged: delete it" in capsys.readouterr().err
    assert _exit_code(["export", str(tmp_path), "--to", "mine:Observer"]) == 2
    assert "your own observer is called during a run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert _exit_code(["export", str(tmp_path / "empty"), "--to", "tensorboard"]) == 2
    assert "no run in" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy:DeprecationWarning")  # MLflow with SQLAlchemy 2.1
def test_two_workers_of_a_table_share_a_new_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own default, which both workers find missing."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    plan = {"base": QUICK, "grid": {"seed": [0, 1]}, "centralized": False}
    fl_sim.table(plan, out=tmp_path / "table", jobs=2, progress=False, track="mlflow")
    client = importlib.import_module("mlflow.tracking").MlflowClient()
    [experiment] = [one for one in client.search_experiments() if one.name == "fl-sim"]
    runs = client.search_runs([experiment.experiment_id])
    assert [(run.info.status, run.data.metrics["round"]) for run in runs] == [("FINISHED", 3.0)] * 2
    assert {run.data.params["seed"] for run in runs} == {"0", "1"}
    assert {run.info.run_name for run in runs} == {path.name for path in (tmp_path / "table/cells").iterdir()}
