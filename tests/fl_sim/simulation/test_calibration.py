"""Calibration in whole runs: after the last round, said in the result, and the same again after an interruption."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.engines import wire
from fl_sim.errors import Malformed, RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.interface import run as run_from_python
from fl_sim.simulation import calibration
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds


def _experiment(**more: Any) -> Experiment:
    quick = {"model": "mlp", "partition": "label-2", "rounds": 2, "engine": "inprocess", "calibrate": "ccvr"}
    return experiment_from(quick | more)


def _model(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def test_the_head_alone_is_another_and_its_accuracy_is_the_final_one(tmp_path: Path) -> None:
    settings = {"kind": "ccvr", "learning_rate": 0.5}
    result, plain = (
        run(_experiment(calibrate=one), tmp_path / name) for name, one in (("run", settings), ("plain", "none"))
    )
    said = result["calibrate"]
    assert plain["calibrate"] == {"kind": "none"}
    assert said["accuracy_before"] == plain["final_accuracy"] == read_rounds(tmp_path / "run")[-1].test_accuracy
    assert said["accuracy_after"] == result["final_accuracy"] > plain["final_accuracy"] + 0.05
    assert result["best_accuracy"] == max(result["final_accuracy"], plain["best_accuracy"])
    assert said["classes_skipped"] == []
    before, after = _model(tmp_path / "plain"), _model(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"5.weight", "5.bias"}
    assert "without noise" in " ".join(result["warnings"])


def test_a_run_that_is_stopped_in_the_stage_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(_experiment(), tmp_path / "whole")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(calibration, "with_trained_head", stop)
        with pytest.raises(KeyboardInterrupt):
            run(_experiment(), tmp_path / "broken")
    broken = json.loads((tmp_path / "broken" / "result.json").read_text())
    assert broken["calibrate"] == {"kind": "ccvr"}
    result = run(_experiment(), tmp_path / "broken")
    whole, again = _model(tmp_path / "whole"), _model(tmp_path / "broken")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert result["final_accuracy"] == result["calibrate"]["accuracy_after"]


def test_a_class_that_nobody_can_tell_a_covariance_of_is_left_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = calibration.summarise_after_training

    def without_class_3(*given: Any) -> list[Any]:
        moments = asked(*given)
        return [np.where(np.arange(10)[:, None] == 3, 0.0, one) for one in moments]

    monkeypatch.setattr(calibration, "summarise_after_training", without_class_3)
    assert run(_experiment(), tmp_path / "one")["calibrate"]["classes_skipped"] == [3]
    monkeypatch.setattr(calibration, "summarise_after_training", lambda *given: [0 * one for one in asked(*given)])
    result = run(_experiment(), tmp_path / "all")
    assert result["calibrate"]["classes_skipped"] == list(range(10))
    assert result["calibrate"]["accuracy_before"] == result["final_accuracy"]


def test_a_client_whose_moments_are_malformed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = wire.moments_content
    monkeypatch.setattr(wire, "moments_content", lambda moments: content(moments + np.inf))
    with pytest.raises(RunError, match="client 0, asked to summarise, sent moments of features that are not finite"):
        run(_experiment(), tmp_path / "run")


@pytest.mark.parametrize("wrong", [np.zeros((3, 5)), np.zeros((2, 6)), np.zeros((3, 6), np.float32), np.zeros(18)])
def test_moments_of_another_shape_or_type_are_malformed(wrong: Any) -> None:
    assert wire.read_moments(wire.moments_content(np.ones((3, 6))), (3, 6)).tolist() == np.ones((3, 6)).tolist()
    with pytest.raises(Malformed):
        wire.read_moments(wire.moments_content(wrong), (3, 6))


def test_one_client_with_all_records_and_one_with_none_may_take_part(tmp_path: Path) -> None:
    assert run(_experiment(clients=1, partition="iid"), tmp_path / "one")["calibrate"]["classes_skipped"] == []
    few = {"kind": "dirichlet", "beta": 0.02, "min_size": 0}
    experiment = _experiment(clients=60, partition=few, rounds=1)
    assert min(map(len, job_of(experiment).shards)) == 0
    assert run(experiment, tmp_path / "many")["calibrate"]["classes_skipped"] == []


def test_a_model_without_a_head_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headless.py").write_text(
        "from torch import nn\n"
        "def make(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, num_classes, 8), nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="features"):
        run_from_python(_experiment(model="headless:make"), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
