"""Calibration in whole runs: after the last round, said in the result, and the same again after an interruption."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fl_sim.engines import wire
from fl_sim.errors import Malformed, RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.interface import run as run_from_python
from fl_sim.report.payments import bills_of
from fl_sim.report.runs import read_all
from fl_sim.simulation.client_ledgers import ledgers_root
from fl_sim.simulation.run import run
from fl_sim.stages import ccvr
from fl_sim.store.run_directory import read_rounds
from strategies.ccvr import CCVR
from strategies.class_gaussians import class_gaussians


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
        patched.setattr(ccvr, "with_trained_head", stop)
        with pytest.raises(KeyboardInterrupt):
            run(_experiment(), tmp_path / "broken")
    broken = json.loads((tmp_path / "broken" / "result.json").read_text())
    assert broken["calibrate"] == {"kind": "ccvr"}
    result = run(_experiment(), tmp_path / "broken")
    whole, again = _model(tmp_path / "whole"), _model(tmp_path / "broken")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert result["final_accuracy"] == result["calibrate"]["accuracy_after"]


def test_a_class_that_nobody_can_tell_a_covariance_of_is_left_out_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ccvr.Calibration._moments

    def without_class_3(*given: Any, **how: Any) -> list[Any]:
        moments = asked(*given, **how)
        return [np.where(np.arange(10)[:, None] == 3, 0.0, one) for one in moments]

    monkeypatch.setattr(ccvr.Calibration, "_moments", without_class_3)
    assert run(_experiment(), tmp_path / "one")["calibrate"]["classes_skipped"] == [3]
    monkeypatch.setattr(ccvr.Calibration, "_moments", lambda *given, **how: [0 * one for one in asked(*given, **how)])
    result = run(_experiment(), tmp_path / "all")
    assert result["calibrate"]["classes_skipped"] == list(range(10))
    assert result["calibrate"]["accuracy_before"] == result["final_accuracy"]


def test_a_client_whose_moments_are_malformed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = wire.moments_content
    monkeypatch.setattr(wire, "moments_content", lambda moments: content(moments + np.inf))
    with pytest.raises(RunError, match=r"client 0, asked to summarise, .* not finite"):
        run(_experiment(), tmp_path / "run")


@pytest.mark.parametrize("wrong", [np.zeros((3, 5)), np.zeros((2, 6)), np.zeros((3, 6), np.float32), np.zeros(18)])
def test_moments_of_another_shape_or_type_are_malformed(wrong: Any) -> None:
    assert wire.read_moments(wire.moments_content(np.ones((3, 6))), (3, 6)).tolist() == np.ones((3, 6)).tolist()
    with pytest.raises(Malformed):
        wire.read_moments(wire.moments_content(wrong), (3, 6))


@pytest.mark.parametrize("counts", [(-1.0, 2.0), (0.5, 0.5), (3.0, 3.0)])
def test_without_noise_numbers_of_records_are_whole_and_no_more_than_there_are(counts: tuple[float, float]) -> None:
    sent = wire.moments_content(np.array([[count, 0.0] for count in counts]))
    assert wire.read_moments(sent, (2, 2))[:, 0].tolist() == list(counts)  # noise may make any number
    with pytest.raises(Malformed, match="not whole, or add up to more than 5"):
        wire.read_moments(sent, (2, 2), 5)


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


PRIVATE = {"kind": "ccvr", "learning_rate": 0.5, "epsilon": 8.0, "clipping_norm": 30.0}


def _charges() -> list[list[str]]:
    """Return what the clients' ledgers hold, client by client."""
    paths = sorted(ledgers_root().rglob("client-*.jsonl"))
    return [[json.loads(line)["release"] for line in path.read_text().splitlines()[1:]] for path in paths]


@pytest.mark.usefixtures("quick_accounting")
def test_private_moments_are_stated_and_charged_to_every_client_once(tmp_path: Path) -> None:
    few = {"partition": "iid", "rounds": 4}
    result = run(_experiment(calibrate=PRIVATE, **few), tmp_path / "run")
    assert result["is_private"]
    [said] = result["privacy"]
    assert (said["unit"], said["delta"], said["adjacency"]) == ("record", 1e-5, "add-or-remove-one")
    assert 7 < said["epsilon"] <= 8
    assert "Training itself is NOT private" in said["does_not_cover"]
    assert not said["simulation_only"]
    assert [len(one) for one in _charges()] == [1] * 10
    assert not (tmp_path / "run" / "state").exists()
    assert result["calibrate"]["accuracy_after"] == result["final_accuracy"]
    run(_experiment(calibrate=PRIVATE, **few), tmp_path / "run")  # a finished run is not run again
    assert [len(one) for one in _charges()] == [1] * 10
    other = run(_experiment(calibrate=PRIVATE, **few), tmp_path / "other")  # a second release about the same records
    assert [len(one) for one in _charges()] == [2] * 10
    assert other["privacy"][0]["epsilon_together"] > 8
    assert "hold up to 2 releases about the same records" in other["privacy"][0]["guarantee"]
    assert "client 3" not in json.dumps(other)


@pytest.mark.usefixtures("quick_accounting")
def test_a_private_run_that_is_killed_in_the_stage_neither_pays_nor_releases_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    content = wire.moments_content

    def four_then_killed(moments: Any) -> Any:
        sent.append(moments)
        if len(sent) == 4:
            raise KeyboardInterrupt
        return content(moments)

    with monkeypatch.context() as patched:
        patched.setattr(wire, "moments_content", four_then_killed)
        with pytest.raises(KeyboardInterrupt):
            run(_experiment(calibrate=PRIVATE), tmp_path / "run")
    assert [len(one) for one in _charges()] == [1] * 4
    broken = json.loads((tmp_path / "run" / "result.json").read_text())
    assert broken["status"] == "interrupted"
    assert 7 < broken["privacy"][0]["epsilon"] <= 8  # what was to come counts, too: four clients have released
    monkeypatch.setattr(wire, "moments_content", lambda moments: (sent.append(moments), content(moments))[1])
    run(_experiment(calibrate=PRIVATE), tmp_path / "run")
    assert [len(one) for one in _charges()] == [1] * 10
    assert all(np.array_equal(first, again) for first, again in zip(sent[:4], sent[4:], strict=False))


@pytest.mark.usefixtures("quick_accounting")
def test_seeded_noise_ends_in_the_same_bits_and_says_that_it_is_a_simulation(tmp_path: Path) -> None:
    seeded = PRIVATE | {"noise": "seeded"}
    first, second = (run(_experiment(calibrate=seeded), tmp_path / name) for name in ("one", "two"))
    assert first["final_accuracy"] == second["final_accuracy"]
    assert all(torch.equal(value, _model(tmp_path / "two")[name]) for name, value in _model(tmp_path / "one").items())
    assert first["privacy"][0]["simulation_only"]


@pytest.mark.usefixtures("quick_accounting")
def test_a_record_pays_for_its_synthetic_pool_and_its_moments_in_one_bill(tmp_path: Path) -> None:
    pool = {"kind": "da-fl", "generator": "mean-embedding", "train_on": "synthetic", "epsilon": 6}
    result = run(_experiment(model="logistic", preprocess=pool, calibrate=PRIVATE), tmp_path / "run")
    moments, pooled = result["privacy"]
    assert "but the moments of features" in pooled["covers"]
    assert "NOT private" not in moments["does_not_cover"]
    assert {len(one) for one in _charges()} == {3}  # labels, generator, moments
    assert moments["shares_together"] == 2
    [bill] = bills_of(read_all([tmp_path]))[0]
    [total] = bill["private_releases"]
    assert total["releases"] == 2
    assert total["epsilon_sum"] == pytest.approx(moments["epsilon"] + pooled["epsilon"])
    assert moments["epsilon"] < total["epsilon_joint"] < total["epsilon_sum"]
    assert moments["epsilon_together"] == pytest.approx(total["epsilon_joint"], rel=0.2)
    assert bill["runs_without_guarantee"] == 0


@dataclass(frozen=True)
class ThreeHold:
    """Three clients hold all records, and the others none."""

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        order = np.arange(len(labels))
        return [*np.array_split(order, 3), *[order[:0]] * (num_partitions - 3)]


@pytest.mark.usefixtures("quick_accounting")
def test_noise_is_expected_of_those_alone_that_hold_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without records sends no noise: the server shrinks what it has by the noise of three, not of eight."""
    told: list[float] = []

    def spy(moments: Any, num_features: int, std: float = 0.0) -> Any:
        told.append(std)
        return class_gaussians(moments, num_features, std)

    monkeypatch.setattr(ccvr, "class_gaussians", spy)
    settings = {"kind": "ccvr", "epsilon": 8.0, "noise": "seeded"}
    experiment = _experiment(calibrate=settings, partition=f"{__name__}:ThreeHold", clients=8, rounds=1)
    run(experiment, tmp_path / "run")
    assert isinstance(experiment.calibrate, CCVR)
    assert experiment.calibrate.protection is not None
    assert told == pytest.approx([experiment.calibrate.protection.std * math.sqrt(3)])
