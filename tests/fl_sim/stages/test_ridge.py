"""Heads in closed form in whole runs: the same bits for every split, charged on the clients' ledgers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clients.gram import vectors_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.client_ledgers import ledgers_root
from fl_sim.simulation.run import run
from fl_sim.stages.ridge import RidgeHead
from fl_sim.training.features import features_of
from fl_sim.training.loop import to_tensors

QUICK = {"model": "logistic", "engine": "inprocess", "clients": 4, "partition": "label-2", "rounds": 2}
PRIVATE = {"kind": "afl", "epsilon": 8.0}


def _run(out: Path, **more: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return run(experiment_from(QUICK | more), out), load_file(out / "model.safetensors")


def test_every_split_gives_the_same_bits(tmp_path: Path) -> None:
    splits = [("iid", 1), ("iid", 5), ("label-1", 10), ("dirichlet:0.05", 7)]
    runs = [
        _run(tmp_path / str(number), algorithm="afl", partition=partition, clients=clients)
        for number, (partition, clients) in enumerate(splits)
    ]
    first, params = runs[0]
    assert first["final_accuracy"] > 0.9
    for result, others in runs[1:]:
        assert result["final_accuracy"] == first["final_accuracy"]
        assert all(torch.equal(params[name], others[name]) for name in params)


def test_random_features_of_a_record_do_not_depend_on_its_batch() -> None:
    job = job_of(experiment_from(QUICK | {"algorithm": "afl", "model": "random-features"}))
    inputs, _ = to_tensors(job.dataset.test.take(np.arange(60)), job.dataset)
    found = [features_of(job.model(), {}, inputs, records_at_once=size) for size in (60, 7, 1)]
    for one in found:
        assert one.shape == (60, 2064)
        assert np.allclose(one.norm(dim=1), math.sqrt(2064), rtol=1e-6)
        vectors = vectors_of(one.numpy().astype(np.float64), math.sqrt(2064))
        assert np.array_equal(vectors, vectors_of(found[0].numpy().astype(np.float64), math.sqrt(2064)))


def test_a_start_is_the_closed_form_and_any_method_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, head = _run(tmp_path / "afl", algorithm="afl")
    begun: list[torch.Tensor] = []
    before = RidgeHead.before

    def spied(stage: RidgeHead, given: Any) -> None:
        before(stage, given)
        begun.append(given.strategy.server.params["1.weight"].clone())

    monkeypatch.setattr(RidgeHead, "before", spied)
    result, _ = _run(tmp_path / "start", preprocess="ridge-start", local={"learning_rate": 1e-3})
    assert torch.equal(begun[0], head["1.weight"])
    assert abs(result["final_accuracy"] - alone["final_accuracy"]) < 0.05
    assert result["ridge"]["clients"] == 4
    assert result["bytes"]["before"]["products"]["up"] > 4 * 8 * 65 * 33
    plain, _ = _run(tmp_path / "plain", local={"learning_rate": 1e-3})
    assert plain["final_accuracy"] < 0.5 < result["final_accuracy"]


def test_a_resumed_run_goes_on_from_its_rounds(tmp_path: Path) -> None:
    _, whole = _run(tmp_path / "whole", preprocess="ridge-start", rounds=3)
    _run(tmp_path / "parts", preprocess="ridge-start", rounds=1)
    _, parts = _run(tmp_path / "parts", preprocess="ridge-start", rounds=3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.usefixtures("quick_accounting")
def test_noisy_sums_are_charged_to_every_client_once_and_stated(tmp_path: Path) -> None:
    result, _ = _run(tmp_path / "run", algorithm=PRIVATE, partition="iid")
    ledgers = sorted(ledgers_root().rglob("client-*.jsonl"))
    charged = [[json.loads(line)["release"] for line in path.read_text().splitlines()[1:]] for path in ledgers]
    assert [len(one) for one in charged] == [1] * 4
    assert all(one[0].startswith("products of features ") for one in charged)
    [said] = result["privacy"]
    assert said["unit"] == "record"
    assert 7 < said["epsilon"] <= 8
    assert "no client trains" in said["does_not_cover"]
    assert result["ridge"]["lambda"] > 1
    again, _ = _run(tmp_path / "again", algorithm=PRIVATE, partition="iid")
    assert again["privacy"][0]["shares_together"] == 2
    assert again["privacy"][0]["epsilon_together"] > said["epsilon"]


@pytest.mark.usefixtures("quick_accounting")
def test_a_private_start_says_that_rounds_are_not_covered(tmp_path: Path) -> None:
    result, _ = _run(tmp_path / "run", preprocess={"kind": "ridge-start", "epsilon": 8.0, "noise": "seeded"})
    [said] = result["privacy"]
    assert "The rounds after this start" in said["does_not_cover"]
    other = {"kind": "ccvr", "epsilon": 8.0, "noise": "seeded"}
    result, _ = _run(
        tmp_path / "both", preprocess={"kind": "ridge-start", "epsilon": 8.0, "noise": "seeded"}, calibrate=other
    )
    assert len(result["privacy"]) == 2


def test_methods_without_a_common_linear_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves a part of the model with each client"):
        _run(tmp_path / "a", preprocess="ridge-start", algorithm="fedper", model="mlp")
    with pytest.raises(UserError, match="cannot run with algorithm afl"):
        _run(tmp_path / "b", algorithm="afl", model={"name": "mlp", "trainable": "head"})
    stage = RidgeHead(job_of(experiment_from(QUICK | {"algorithm": "afl"})))
    assert stage.tasks()["multiply"].shape == (1, 65 * 66 // 2 + 650)
