"""TSTR as a run: classifiers learn from the pool alone, and the test records choose nothing."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim import data
from fl_sim.experiment import job as jobs
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.seeding import rng
from fl_sim.simulation.forecast import estimate_of
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.run import run
from fl_sim.training.discriminant import QuadraticDiscriminant, linear_discriminant
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset, Examples


def quick(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "algorithm": {"kind": "tstr", "classifiers": ["discriminant", "model"]},
        "model": "logistic",
        "local": {"epochs": 2},
        "preprocess": {"generator": "mean-embedding", "gamma": 0.5, "noise": "seeded"},
        "engine": "inprocess",
    }
    return experiment_from({**settings, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tstr")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FL_SIM_POOLS", str(folder / "pools"))
        return folder / "run", run(quick(), folder / "run")


def test_the_one_that_does_best_on_held_out_synthetic_records_is_the_result(finished: Any) -> None:
    out, result = finished
    tried = result["tstr"]["classifiers"]
    best = max(tried, key=lambda one: one["held_out_accuracy"])
    assert [one["name"] for one in tried] == ["discriminant", "logistic"]
    assert result["tstr"]["chosen"] == best["name"]
    assert result["final_accuracy"] == result["best_accuracy"] == best["test_accuracy"] > 0.6
    assert result["best_chosen_on"] == "last"
    assert len((out / "rounds.jsonl").read_text().splitlines()) == result["rounds"] == 1


def test_the_discriminant_is_that_of_nine_tenths_of_the_pool(finished: Any) -> None:
    out, result = finished
    pool, dataset = load_file(out / result["preprocess"]["pool"]), data.load("digits", None)
    rows = rng(0, "holdout").permutation(len(pool["labels"]))[round(0.1 * len(pool["labels"])) :]
    own = Examples(pool["inputs"].numpy()[rows], pool["labels"].numpy()[rows])
    expected = linear_discriminant(*to_tensors(own, dataset), dataset.num_classes)
    found = load_file(out / "model.safetensors")
    assert result["tstr"]["chosen"] == "discriminant"
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_quadratic_discriminant_is_a_model_as_others_are(tmp_path: Path) -> None:
    tried = quick(algorithm={"kind": "tstr", "classifiers": ["quadratic-discriminant"]}, features="scattering",
                  preprocess={"generator": "gaussian", "gamma": 1, "noise": "seeded", "epsilon": math.inf})  # fmt: skip
    result = run(tried, tmp_path / "run")
    assert result["tstr"]["chosen"] == "quadratic-discriminant"
    assert result["final_accuracy"] > 0.9
    found, dataset = load_file(tmp_path / "run" / "model.safetensors"), data.load("digits", None, "scattering")
    model = QuadraticDiscriminant(dataset.input_shape[0], dataset.num_classes)
    model.load_state_dict(found)
    inputs, labels = to_tensors(dataset.test, dataset)
    assert float((model(inputs).argmax(dim=1) == labels).double().mean()) == result["final_accuracy"]


def test_test_records_choose_nothing(finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other labels on every test record the same classifier is chosen, with the same weights."""
    out, result = finished

    def other_labels(*asked: Any) -> Dataset:
        dataset = data.load(*asked)
        return replace(dataset, test=replace(dataset.test, labels=(dataset.test.labels + 1) % dataset.num_classes))

    monkeypatch.setattr(jobs, "load", other_labels)
    changed = run(quick(), tmp_path / "run")
    assert changed["tstr"]["chosen"] == result["tstr"]["chosen"]
    assert changed["final_accuracy"] < 0.3 < result["final_accuracy"]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_synthetic_records_are_all_that_is_released(finished: Any) -> None:
    _, result = finished
    (promise,) = result["privacy"]
    assert promise["epsilon"] <= 10
    assert promise["covers"].startswith("everything this run releases")
    assert "client_accuracy" not in json.loads(json.dumps(result))["measures"]


def test_the_plan_tells_the_bill_and_what_is_not_timed() -> None:
    job = job_of(quick())
    procedure = procedure_of(job)
    paid, estimate = planned_bill(job), estimate_of(procedure.work(), None, procedure.traffic())
    assert not paid.bare
    assert [payment.epsilon for payment in paid.payments or ()] == [10.0]
    assert (estimate.traffic, estimate.left_out) == (None, ("the classifiers' training",))


def test_more_noise_is_farther_away(finished: Any, tmp_path: Path) -> None:
    noisy = run(quick(preprocess={"generator": "mean-embedding", "gamma": 0.5, "noise": "seeded", "epsilon": 0.5}),
                tmp_path / "run")  # fmt: skip
    near, far = (result["tstr"]["frechet"] for result in (finished[1], noisy))
    assert near["features"] == "scattering-1"
    assert near["real"] == len(data.load("digits", None).test)
    assert 0 < near["distance"] < far["distance"]


def test_tables_have_no_distance(tmp_path: Path) -> None:
    coins = np.random.default_rng(0)
    inputs = coins.random((1200, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0.5).astype(np.int64)
    np.savez(tmp_path / "own.npz", x_train=inputs[200:], y_train=labels[200:], x_test=inputs[:200], y_test=labels[:200])
    experiment = quick(
        data=f"npz:{tmp_path / 'own.npz'}", clients=2, partition="iid",
        evaluate={"test": "last", "test_is_public": True},
        preprocess={"generator": "marginals", "gamma": 1.0, "noise": "seeded"},
    )  # fmt: skip
    result = run(experiment, tmp_path / "run")
    assert result["tstr"]["frechet"] is None
    assert result["final_accuracy"] > 0.6
