"""Metrics of the user's own, by import path: of the server's model, and of each client's models on its own records."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from torch import nn
from torch.utils.data import TensorDataset

import fl_sim
from clients.evaluate import answer_in
from fl_sim.errors import Malformed
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.training.own_metrics import LONGEST_NAME

BASE: dict[str, Any] = {
    "data": "digits", "partition": "dirichlet:0.4", "clients": 5, "model": "mlp", "rounds": 2, "engine": "inprocess",
    "local": {"learning_rate": 0.1, "batch_size": 32},
}  # fmt: skip

MINE = '''
"""Metrics for tests."""

import numpy as np
import torch


def seen(server_round, model, test):
    """Return the accuracy, then spoil model and records, and draw random numbers."""
    assert not model.training
    inputs, labels = test.tensors
    accuracy = (model(inputs).argmax(1) == labels).double().mean()
    np.random.rand(), torch.rand(3)
    for value in (*model.parameters(), inputs):
        value.zero_()
    return {"seen": accuracy, "after": server_round}


def of_some(server_round, model, test):
    """Return a number only if there are records of class 0."""
    return {"zeros": float(len(test))} if (test.tensors[1] == 0).any() else {}


def drawn(server_round, model, test):
    return {"drawn": torch.rand(())}


def broken(server_round, model, test):
    return {"ratio": 1 / 0}


def infinite(server_round, model, test):
    return {"loss": float("inf")}


def named_as_ours(server_round, model, test):
    return {"worst_tenth": 0.5}


def a_list(server_round, model, test):
    return [0.5]


CONSTANT = 3
'''


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    return tmp_path / "mine.py"


def ran(out: Path, metrics: str, clients: str = "class-shares", **changes: Any) -> dict[str, Any]:
    evaluate = {"clients": clients, "metrics": metrics, **changes.pop("evaluate", {})}
    return run(experiment_from({**BASE, "evaluate": evaluate, **changes}), out)


def columns(out: Path) -> Callable[[str], list[str]]:
    rows = list(csv.DictReader((out / "clients.csv").read_text().splitlines()))
    return lambda name: [row[name] for row in rows]


def metrics_in(out: Path) -> list[Mapping[str, float]]:
    return [json.loads(line)["metrics"] for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "fedper", "knn-per", "fedrod"])
def test_every_model_of_a_client_is_measured_on_its_own_records(algorithm: str, tmp_path: Path) -> None:
    """Also a client that predicts by its nearest records, and nothing else of the run changes."""
    evaluate = {"fine_tune_epochs": 1}
    result = ran(tmp_path / "run", "mine:seen", algorithm=algorithm, evaluate=evaluate)
    of = columns(tmp_path / "run")
    for model in ("received", "own", "trained", "fine_tuned"):
        right = [float(value) for value in of(f"{model}_accuracy")]
        assert [float(value) for value in of(f"{model}_seen")] == pytest.approx(right)
        assert result["personal"][f"{model}_seen"] == pytest.approx(np.mean(right))
        assert of(f"{model}_after") == ["2.0"] * 5
    assert result["personal"]["clients_with_metric"]["own_seen"] == 5
    first, last = metrics_in(tmp_path / "run")
    assert last["seen"] == pytest.approx(result["final_accuracy"])
    assert (first["after"], last["own_after"]) == (1, 2)
    plain = ran(tmp_path / "plain", "none", algorithm=algorithm, evaluate=evaluate)
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    known = {name: value for name, value in result["personal"].items() if name in plain["personal"]}
    assert known == plain["personal"]


def test_without_clients_the_servers_model_alone_is_measured(tmp_path: Path) -> None:
    ran(tmp_path / "run", "mine:drawn", "none")
    first, last = metrics_in(tmp_path / "run")
    assert [*first] == [*last] == ["drawn"]
    assert first["drawn"] != last["drawn"]
    ran(tmp_path / "again", "mine:drawn", "none", rounds=1)
    assert metrics_in(tmp_path / "again") == [first]


def test_a_metric_of_some_clients_is_their_mean_and_says_how_many_they_are(tmp_path: Path) -> None:
    result = ran(tmp_path / "run", "mine:of_some", partition="label-2")
    found = [float(value) for value in columns(tmp_path / "run")("own_zeros") if value]
    assert 0 < len(found) < 5
    assert result["personal"]["own_zeros"] == pytest.approx(np.mean(found))
    assert result["personal"]["clients_with_metric"]["own_zeros"] == len(found)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("broken", r"evaluate.metrics=mine:broken failed with ZeroDivisionError: .*mine\.py:29, in broken"),
        ("infinite", "evaluate.metrics=mine:infinite returned loss = inf after round 1; it must be a finite number"),
        ("named_as_ours", "evaluate.metrics=mine:named_as_ours returned 'worst_tenth', the name of a measure"),
        ("a_list", r"evaluate.metrics=mine:a_list returned \[0.5\]; it must return a dict from names to numbers"),
    ],
)
def test_an_error_in_the_function_names_it_and_its_line(function: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(fl_sim.RunError, match=said):
        ran(tmp_path / "run", f"mine:{function}", evaluate={"personal_every": 1})


@pytest.mark.parametrize(
    ("metrics", "changes", "said"),
    [
        ("mine:CONSTANT", {}, "must name a function .*, not an object of type int"),
        ("mine:absent", {}, "evaluate.metrics 'mine:absent' cannot be imported"),
        ("nowhere", {}, "evaluate.metrics 'nowhere' is not an import path"),
        ("mine:seen", {"algorithm": "pate", "evaluate": {"clients": "none"}}, "metrics of a round's model.*no rounds"),
        ("mine:seen", {"evaluate": {"test": "never", "validation": 0.2}}, "evaluate.test=never uses none"),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused(
    metrics: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(fl_sim.UserError, match=said):
        ran(tmp_path / "run", metrics, **changes)
    assert not (tmp_path / "run").exists()


def test_two_metrics_of_one_name_are_refused(tmp_path: Path) -> None:
    class Other:
        def metrics(self, server_round: int, model: nn.Module, test: TensorDataset) -> dict[str, float]:
            return {"seen": 1.0}

    settings = {**BASE, "evaluate": {"metrics": "mine:seen"}}
    with pytest.raises(
        fl_sim.RunError, match=r"evaluate\.metrics=mine:seen returned 'seen', as another metric function does"
    ):
        fl_sim.run(settings, out=tmp_path / "run", progress=False, observer=Other())


def test_another_code_of_the_metric_is_another_run(tmp_path: Path, mine: Path) -> None:
    ran(tmp_path / "run", "mine:seen", "none", rounds=1)
    assert "mine" in (tmp_path / "run/config.toml").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("sent", "has_metrics"),
    [
        ({"own/mine": 0.5}, False),
        ({"own/mine": float("nan")}, True),
        ({"own/mine": 1}, True),
        ({"own/mine": [0.5]}, True),
        ({"other/mine": 0.5}, True),
        ({"own/accuracy": 0.5}, True),
        ({"own/": 0.5}, True),
        ({"own/a\nb": 0.5}, True),
        ({f"own/{'a' * (LONGEST_NAME + 1)}": 0.5}, True),
    ],
)
def test_metrics_that_no_client_sends_are_refused(sent: dict[str, Any], *, has_metrics: bool) -> None:
    content = RecordDict({"counts": MetricRecord({}), "metrics": MetricRecord(sent)})
    with pytest.raises(Malformed, match="metrics of another form"):
        answer_in(content, 2, has_metrics=has_metrics)


def test_metrics_of_a_client_arrive() -> None:
    content = RecordDict({"counts": MetricRecord({}), "metrics": MetricRecord({"own/a/b": 0.5})})
    assert answer_in(content, 2, has_metrics=True).metrics == {"own/a/b": 0.5}


@pytest.mark.cluster
def test_ray_ends_in_the_same_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    found = [ran(tmp_path / engine[:3], "mine:drawn", engine=engine)["personal"] for engine in ("inprocess", "ray:2")]
    assert found[0] == found[1]
    assert found[0]["clients_with_metric"]["own_drawn"] == 5
