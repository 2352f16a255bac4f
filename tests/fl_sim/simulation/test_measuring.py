"""What a run measures of its models, and by what it calls a round the best."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_sim.data import load
from fl_sim.experiment import job as wiring
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run
from fl_sim.simulation.site import validation_records
from fl_sim.store import run_directory
from fl_sim.store.run_directory import read_rounds
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset

QUICK = ("model=logistic", "rounds=3", "engine=inprocess", "local.batch_size=32")


def quick(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({}, [*QUICK, *overrides]))


def _validated(job):
    return job.dataset.train.take(np.concatenate(job.validation))


def test_the_model_is_validated_on_what_all_clients_hold_out_with_true_labels() -> None:
    job = job_of(quick("evaluate.validation=0.1", "attack=label-flip:2", "partition=iid"))
    records = validation_records(job)
    inputs, labels = to_tensors(_validated(job), job.dataset)
    assert torch.equal(records.normalised(records.inputs).cpu(), inputs)
    assert torch.equal(records.labels.cpu(), labels)


def test_validation_records_are_seen_with_the_clients_own_noise() -> None:
    job = job_of(quick("evaluate.validation=0.3", "partition=feature-noise:1"))
    records = validation_records(job)
    clean, _ = to_tensors(_validated(job), job.dataset)
    noise = torch.split(records.inputs.cpu() - clean, [len(part) for part in job.validation])
    assert float(noise[-1].std()) > 2.5 * float(noise[0].std()) > 0  # the variance of client i grows with i


def test_the_best_round_is_chosen_on_validation_where_there_is_one(tmp_path: Path) -> None:
    result = run(quick("evaluate.validation=0.2", "rounds=6", "local.learning_rate=0.3"), tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    best = max(rounds, key=lambda one: one.validation_accuracy or 0)
    assert (result["best_round"], result["best_chosen_on"]) == (best.round, "validation")
    assert result["best_accuracy"] == best.test_accuracy
    assert result["validation"]["best_accuracy"] == best.validation_accuracy
    assert result["validation"]["final_accuracy"] == rounds[-1].validation_accuracy
    assert all(one.validation_loss for one in rounds)


def test_without_validation_the_best_round_is_the_tests_and_said_to_be(tmp_path: Path) -> None:
    result = run(quick(), tmp_path / "run")
    assert result["best_chosen_on"] == "test"
    assert result["best_accuracy"] == max(one.test_accuracy or 0 for one in read_rounds(tmp_path / "run"))
    assert "validation" not in result
    assert all("validation" not in line for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())


def test_validation_decides_between_the_last_round_and_the_calibrated_model(tmp_path: Path) -> None:
    chosen = quick("evaluate.validation=0.2", "calibrate=ccvr:50", "partition=dirichlet:0.5", "model=mlp", "rounds=1")
    result = run(chosen, tmp_path / "run")
    (last,) = read_rounds(tmp_path / "run")
    after = result["calibrate"]["accuracy_after"]
    validated = result["validation"]["final_accuracy"]
    assert last.validation_accuracy is not None
    assert result["best_accuracy"] == (after if validated > last.validation_accuracy else last.test_accuracy)
    assert result["final_accuracy"] == after


def test_the_test_records_decide_nothing_where_there_is_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = quick("evaluate.validation=0.2")
    plain = run(chosen, tmp_path / "plain")

    def with_other_test(name: str, root: Path | None) -> Dataset:
        dataset = load(name, root)
        return replace(dataset, test=replace(dataset.test, labels=dataset.test.labels[::-1].copy()))

    monkeypatch.setattr(wiring, "load", with_other_test)
    other = run(chosen, tmp_path / "other")
    assert plain["validation"] == other["validation"]
    assert plain["best_round"] == other["best_round"]
    assert plain["best_accuracy"] != other["best_accuracy"]


@pytest.mark.parametrize("calibration", ["none", "ccvr:50"])
def test_a_run_that_never_tests_reads_no_test_record_and_trains_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: str
) -> None:
    chosen = ("evaluate.validation=0.2", f"calibrate={calibration}", "partition=dirichlet:0.5")
    tested = run(quick(*chosen), tmp_path / "tested")

    def without_test(name: str, root: Path | None) -> Dataset:
        dataset = load(name, root)
        return replace(dataset, test=replace(dataset.test, labels=dataset.test.labels + 10**6))  # no class of the model

    monkeypatch.setattr(wiring, "load", without_test)
    result = run(quick(*chosen, "evaluate.test=never"), tmp_path / "run")
    assert result["final_accuracy"] is None
    assert result["best_accuracy"] is None
    assert result["validation"] == tested["validation"]
    assert result["best_round"] == tested["best_round"]
    assert [one.test_accuracy for one in read_rounds(tmp_path / "run")] == [None] * 3
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("tested", "run")]
    assert models[0] == models[1]


def test_the_test_records_may_be_looked_at_once_after_the_last_round(tmp_path: Path) -> None:
    chosen = quick("evaluate.test=last", "evaluate.validation=0.2")
    result = run(chosen, tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    assert [one.test_accuracy is None for one in rounds] == [True, True, False]
    assert all(one.validation_accuracy is not None for one in rounds)
    assert result["final_accuracy"] == result["best_accuracy"] == rounds[-1].test_accuracy
    assert result["best_round"] == 3


def test_a_run_that_began_before_there_was_validation_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    settings = job_of(quick()).experiment.model_dump(exclude_none=True, exclude={"evaluate"})
    run_directory.write_config(out, settings)  # as it lies in the directories of that time
    result, new = run(quick(), out), run(quick(), tmp_path / "new")
    again = run(quick(), out)
    assert again == result
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "new" / "model.safetensors").read_bytes()
    assert result["final_accuracy"] == new["final_accuracy"]
