"""Trackers and observers are named, checked before anything runs, and end no run but by an observer's own mistake."""

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fl_sim
from fl_sim.__main__ import main
from fl_sim.errors import RunError, UserError
from fl_sim.store.run_directory import RoundRecord
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
        ("Broken", RunError, r"^observer \S+:Broken failed in finished_round: ValueError: two lines; mend it"),
        ("nothing", UserError, "is a str with none of the methods started, preparing, replied, finished_round, ended"),
        ("Absent", UserError, "has no 'Absent'"),
    ],
)
def test_an_observers_mistake_is_one_line(
    module: str, tmp_path: Path, name: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        fl_sim.run(QUICK, out=tmp_path / "run", progress=False, track=f"{module}:{name}")


def test_a_server_that_is_down_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = fl_sim.run(QUICK, out=tmp_path / "run", track="mlflow")
    assert result.facts["status"] == "finished"
    assert capsys.readouterr().err.count("mlflow gets no more of this run") == 1
    assert _exit_code(["export", str(tmp_path / "run"), "--to", "mlflow"]) == 1
    told = capsys.readouterr().err
    assert told.count("mlflow gets no more of this run") == 1
    assert "error: 1 of 1 runs were not sent whole" in told


def test_export_tells_where_runs_are_and_refuses_what_holds_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    fl_sim.run(QUICK, out=run, progress=False)
    for said in (f"{run}: 3 rounds; tensorboard (tensorboard --logdir {run})", f"{run}: 3 rounds; tensorboard had it"):
        assert _exit_code(["export", str(tmp_path), "--to", "tensorboard"]) == 0
        assert capsys.readouterr().out == f"{said}\n"
    assert _exit_code(["export", str(tmp_path), "--to", "tensorboard", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["there"] == ["tensorboard"]
    (run / "tracking.json").write_text("{}[")
    assert _exit_code(["export", str(tmp_path), "--to", "tensorboard"]) == 2
    assert "tracking.json is damaged: delete it" in capsys.readouterr().err
    assert _exit_code(["export", str(tmp_path), "--to", "mine:Observer"]) == 2
    assert "an observer is told of runs while they go on" in capsys.readouterr().err
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
