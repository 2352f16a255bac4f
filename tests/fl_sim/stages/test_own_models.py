"""The measures of clients' own models, held against models that are evaluated by hand."""

import csv
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import entropy
from sklearn.metrics import balanced_accuracy_score, f1_score, recall_score

import fl_sim
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.experiment.node_job import own_job
from fl_sim.local_plan import sent_by
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.stage import Stage
from fl_sim.stages.own_models import OwnModels
from fl_sim.training.loop import to_tensors
from fl_sim.types import Params
from strategies.algorithm import Averaging

BASE: dict[str, Any] = {
    "data": "digits", "partition": "dirichlet:0.4", "clients": 6, "model": "mlp", "rounds": 4, "engine": "inprocess",
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares", "personal_every": 2},
}  # fmt: skip


def settings_of(**changes: Any) -> dict[str, Any]:
    nested = {name: {**BASE[name], **changes.pop(name, {})} for name in ("local", "evaluate")}
    return {**BASE, **nested, **changes}


def ran(out: Path, **changes: Any) -> dict[str, Any]:
    return run(experiment_from(settings_of(**changes)), out)


def clients_in(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "clients.csv").read_text().splitlines()))


@pytest.mark.parametrize("clients", ["class-shares", "pooled:0.3"])
def test_of_fedavg_the_own_model_is_the_servers_on_each_clients_records(clients: str, tmp_path: Path) -> None:
    result = ran(tmp_path, evaluate={"clients": clients})
    job, params = (
        job_of(experiment_from(settings_of(evaluate={"clients": clients}))),
        load_file(tmp_path / "model.safetensors"),
    )
    accuracies, labels, predicted, by_class, scores_f1 = [], [], [], dict[str, list[float]](), list[float]()
    for client, row in enumerate(clients_in(tmp_path)):
        tests = job.dataset.test.take(job.own_tests[client])
        scores = job.trainer.evaluate(params, *to_tensors(tests, job.dataset))
        assert int(row["test_records"]) == len(tests)
        assert float(row["own_accuracy"]) == float(row["received_accuracy"]) == scores.accuracy
        accuracies.append(scores.accuracy)
        held, pair = np.unique(scores.labels), (scores.labels, scores.predicted)
        recalls = recall_score(*pair, labels=held, average=None)
        scores_f1.append(float(f1_score(*pair, labels=held, average="macro")))
        assert float(row["own_macro_f1"]) == pytest.approx(scores_f1[-1])
        assert float(row["own_balanced_accuracy"]) == pytest.approx(recalls.mean())
        for label, recall in zip(held.tolist(), recalls.tolist(), strict=True):
            by_class.setdefault(str(label), []).append(recall)
        labels.append(scores.labels)
        predicted.append(scores.predicted)
    last = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["metrics"]
    measures, pooled = result["personal"], (np.concatenate(labels), np.concatenate(predicted))
    assert measures["own_recalls"] == pytest.approx(list(recall_score(*pooled, average=None)))
    assert measures["own_balanced_accuracy"] == pytest.approx(balanced_accuracy_score(*pooled))
    assert (
        measures["own_macro_f1"] == measures["received_macro_f1"] == pytest.approx(f1_score(*pooled, average="macro"))
    )
    assert measures["best_own_macro_f1"] >= measures["own_macro_f1"]
    assert measures["own_mean_macro_f1"] == pytest.approx(np.mean(scores_f1)) == last["own_mean_macro_f1"]
    assert measures["best_own_mean_macro_f1"] >= measures["own_mean_macro_f1"]
    found = {name: one["own_recall"] for name, one in measures["by_class"].items()}
    assert found == pytest.approx({name: np.mean(recalls) for name, recalls in by_class.items()})
    assert measures["own_accuracy"] == pytest.approx(np.mean(accuracies))
    assert measures["own_deviation"] == pytest.approx(np.std(accuracies))
    assert measures["own_worst_tenth"] == min(accuracies)
    assert measures["own_entropy"] == pytest.approx(entropy(accuracies))
    sizes = job.own_tests.sizes
    assert measures["own_accuracy_pooled"] == pytest.approx(np.average(accuracies, weights=sizes))
    assert measures["trained_accuracy"] > measures["own_accuracy"]
    assert measures["best_own_accuracy"] >= measures["own_accuracy"]


def test_rounds_have_the_measures_when_they_are_due(tmp_path: Path) -> None:
    ran(tmp_path, rounds=5, evaluate={"personal_every": 2})
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    due = [line["round"] for line in lines if "own_accuracy" in line.get("metrics", {})]
    assert due == [2, 4, 5]
    assert ["trained_accuracy" in line.get("metrics", {}) for line in lines] == [False] * 4 + [True]


def test_early_stopping_and_the_best_round_go_by_own_validation_records(tmp_path: Path) -> None:
    evaluate = {"validation": 0.2, "patience": 2, "personal_every": 1}
    result = ran(tmp_path, algorithm="fedper", rounds=30, evaluate=evaluate)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    validated = [line["validation_accuracy"] for line in lines]
    assert validated == [line["metrics"]["own_validation_accuracy"] for line in lines]
    assert "validation_loss" not in lines[0]
    best = int(np.argmax(validated))
    assert result["best_round"] == best + 1
    assert len(lines) < 30
    assert result["personal"]["best_own_accuracy"] == lines[best]["metrics"]["own_accuracy"]


def test_records_for_testing_are_not_looked_at_where_they_must_not_be(tmp_path: Path) -> None:
    never = ran(tmp_path / "never", evaluate={"validation": 0.2, "test": "never", "personal_every": 1})["personal"]
    assert {name for name in never if name.endswith("accuracy")} == {
        f"{model}_validation_accuracy" for model in ("received", "own", "trained")
    }
    ran(tmp_path / "last", evaluate={"test": "last", "personal_every": 1})
    lines = [json.loads(line) for line in (tmp_path / "last" / "rounds.jsonl").read_text().splitlines()]
    assert ["metrics" in line for line in lines] == [False, False, False, True]


def test_held_out_clients_never_train_and_fine_tune_at_the_end(tmp_path: Path) -> None:
    changes = {"held_out_clients": 0.5, "fine_tune_epochs": 3}
    result = ran(tmp_path, algorithm="fedper", evaluate=changes, sampler="fixed-size:2")
    job = job_of(experiment_from(settings_of(evaluate=changes)))
    assert len(job.members) == result["personal"]["clients_held_out"] == 3
    rows = clients_in(tmp_path)
    held_out = [client for client in range(6) if client not in job.members]
    found = [float(rows[client]["fine_tuned_accuracy"]) for client in held_out]
    assert result["personal"]["held_out_fine_tuned_accuracy"] == pytest.approx(np.mean(found))
    others = [float(rows[client]["own_accuracy"]) for client in job.members.tolist()]
    assert result["personal"]["own_accuracy"] == pytest.approx(np.mean(others))
    assert np.mean(found) > np.mean([float(rows[client]["received_accuracy"]) for client in held_out])
    states = {int(path.stem.split("-")[1]) for path in (tmp_path / "state").glob("**/client-*")}
    assert not states & set(held_out)


def test_a_resumed_run_ends_in_the_same_measures(tmp_path: Path, stop_after: Any) -> None:
    whole = ran(tmp_path / "whole", algorithm="ditto", evaluate={"fine_tune_epochs": 1})
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(settings_of(algorithm="ditto", evaluate={"fine_tune_epochs": 1})), tmp_path / "cut",
            observer=stop_after(3))  # fmt: skip
    resumed = ran(tmp_path / "cut", algorithm="ditto", evaluate={"fine_tune_epochs": 1})
    assert resumed["personal"] == whole["personal"]
    assert clients_in(tmp_path / "cut") == clients_in(tmp_path / "whole")


def test_an_observer_that_ends_the_run_gets_the_last_measures(tmp_path: Path) -> None:
    class Enough:
        def finished_round(self, record: Any) -> bool:
            return bool(record.round == 2)

    result = fl_sim.run(settings_of(rounds=9), out=tmp_path, progress=False, observer=Enough())
    assert len(result.rounds) == 2
    assert result.facts["personal"]["trained_accuracy"] > 0


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize("changes", [{"algorithm": "fedper"}, {"algorithm": "ditto"}, {"local": {"personal": "head"}}])
def test_a_private_run_says_that_own_models_are_without_noise(changes: dict[str, Any], tmp_path: Path) -> None:
    noise = {"kind": "global-dp", "noise_multiplier": 5.0}
    settings = {**settings_of(**changes, aggregator=noise, rounds=1), "evaluate": {}}
    statements = run(experiment_from(settings), tmp_path)["privacy"]
    assert statements
    for statement in statements:
        assert "never leaves the client and is trained on its records without noise" in statement["does_not_cover"]
    plain = run(experiment_from({**settings, "algorithm": "fedavg", "local": {}}), tmp_path / "plain")["privacy"]
    assert "without noise: the guarantee" not in plain[0]["does_not_cover"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregator": "global-dp"}, "promises privacy"),
        ({"evaluate": {"held_out_clients": 0.05}}, "holds out 0 of 6 clients"),
        ({"evaluate": {"held_out_clients": 0.99}}, "holds out 6 of 6 clients"),
        ({"evaluate": {"held_out_clients": 0.5}, "calibrate": "ccvr:20"}, "calibrate ccvr asks all clients"),
        ({"evaluate": {"held_out_clients": 0.5}, "algorithm": "fedmix"}, "algorithm fedmix asks all clients"),
        ({"evaluate": {"clients": "own"}}, "does not name them"),
        ({"evaluate": {"clients": "none", "fine_tune_epochs": 2}}, "evaluate.clients=none measures none"),
        ({"evaluate": {"clients": "pooled:2"}}, "pooled:SHARE, a share above 0 and below 1"),
        ({"algorithm": "pate"}, "evaluate.clients=class-shares cannot run with algorithm pate"),
        ({"local": {"personal": "batch-norm"}}, "for FedBN set local.batch_norm=personal"),
        ({"local": {"personal": "no.weight"}}, "local.personal names no.weight, and the model trains"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_named_before_anything_is_written(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(fl_sim.UserError, match=message):
        ran(tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_clients_without_test_records_are_counted_and_named(tmp_path: Path) -> None:
    result = ran(tmp_path, partition="quantity:0.3", clients=60, rounds=1)
    job = job_of(experiment_from(settings_of(partition="quantity:0.3", clients=60)))
    without = np.flatnonzero(job.own_tests.sizes == 0).tolist()
    assert result["personal"]["clients_without_test_records"] == without
    rows = clients_in(tmp_path)
    assert all(rows[client]["own_accuracy"] == "" for client in without)


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn", "moon", "fedcm", "fedspeed", "fedadam", "ditto", "fedala"])
@pytest.mark.parametrize("personal", ["head", "5.bias"])
def test_a_part_of_the_model_stays_with_clients_beside_any_method(
    algorithm: str, personal: str, tmp_path: Path
) -> None:
    """What a method corrects is what is sent: the corrections have no number for the personal part."""
    result = ran(tmp_path, algorithm=algorithm, local={"personal": personal}, rounds=3)
    assert result["personal"]["trained_accuracy"] > 0.4


@pytest.mark.cluster
def test_ray_ends_in_the_same_measures(tmp_path: Path) -> None:
    one, other = (
        ran(tmp_path / engine.replace(":", "-"), algorithm="ditto", engine=engine, evaluate={"fine_tune_epochs": 1})
        for engine in ("inprocess", "ray:2")
    )
    assert one["personal"] == other["personal"]


@pytest.mark.parametrize("algorithm", ["local-only", "fedproto-local", "fedproto", "fedrod", "ifca", "scaffold"])
def test_the_plan_counts_the_bytes_of_every_method(algorithm: str) -> None:
    procedure = procedure_of(job_of(experiment_from(settings_of(algorithm=algorithm))))
    assert procedure.traffic()["own models"].up > 0


def test_the_plan_counts_the_work_and_the_bytes() -> None:
    plain, measured = (
        procedure_of(job_of(experiment_from(settings_of(evaluate={"clients": clients}))))
        for clients in ("none", "class-shares")
    )
    assert measured.traffic()["own models"].down > 0
    assert "own models" not in plain.traffic()
    total = [sum(work.turns + work.pieces for work in one.work()) for one in (plain, measured)]
    assert total[1] > total[0] + 6


class TwoOfOneName(Stage):
    """A stage whose measures have names that are taken."""

    names: ClassVar[tuple[str, ...]] = ("own_accuracy",)

    def measured(self, run: Any, server_round: int, *, is_last: bool) -> dict[str, float]:
        return dict.fromkeys(self.names, 0.5)


class NameOfARound(TwoOfOneName):
    names = ("test_accuracy",)


class NoNumber(TwoOfOneName):
    def measured(self, run: Any, server_round: int, *, is_last: bool) -> dict[str, float]:
        return {"mine": float("nan")}


class ColumnOfAnother(Stage):
    def by_client(self) -> dict[str, Any]:
        return {"own_accuracy": np.zeros(6)}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (TwoOfOneName, "measured of OwnModels returned 'own_accuracy', as another stage did"),
        (NameOfARound, "measured of NameOfARound returned 'test_accuracy', a field that every round has"),
        (NoNumber, "measured of NoNumber returned mine = nan"),
        (ColumnOfAnother, "by_client of OwnModels returned 'own_accuracy', a column that clients.csv has"),
    ],
)
def test_no_measure_of_a_stage_replaces_another_one(
    stage: type[Stage], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_sim.simulation.stage.stages_of", lambda job: (stage(job), OwnModels(job)))
    with pytest.raises(fl_sim.RunError, match=message):
        ran(tmp_path, rounds=1)


def test_an_observers_metric_does_not_replace_a_stages(tmp_path: Path) -> None:
    class Own:
        def metrics(self, server_round: int, model: Any, records: Any) -> dict[str, float]:
            return {"own_accuracy": 0.5}

    with pytest.raises(fl_sim.RunError, match="your own metric 'own_accuracy' has the name of a stage's metric"):
        fl_sim.run(settings_of(rounds=1), out=tmp_path, progress=False, observer=Own())


def test_a_node_with_records_of_its_own_says_that_the_server_cannot_choose_its_test_records() -> None:
    with pytest.raises(fl_sim.UserError, match="this node has records of its own"):
        own_job(experiment_from(settings_of()), "digits", 0, {})


def test_nothing_sent_under_global_dp_has_no_epsilon(tmp_path: Path) -> None:
    everything = ",".join(f"{layer}.{part}" for layer in (1, 3, 5) for part in ("weight", "bias"))
    settings = {**settings_of(local={"personal": everything}, aggregator="global-dp"), "evaluate": {}}
    with pytest.raises(fl_sim.UserError, match="its epsilon would protect nothing: leave aggregator out"):
        run(experiment_from(settings), tmp_path)


class Forgetful(Averaging):
    """Its ``sends`` matches no name of the model."""

    def sends(self, params: Params) -> list[str]:
        return [name for name in params if "body" in name]


def test_sends_that_matches_no_name_is_refused() -> None:
    with pytest.raises(fl_sim.UserError, match="sends of Forgetful returned no name"):
        sent_by(Forgetful(), {"1.weight": torch.zeros(2, 2)})
