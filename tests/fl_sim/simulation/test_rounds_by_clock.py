"""Rounds by the virtual clock: the same bits without a deadline, lost and partial work with one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from flwr.serverapp import Grid
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.settings import read_table
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from strategies.fednova import FedNova

BASE: dict[str, Any] = {
    "model": "logistic", "rounds": 4, "engine": "inprocess", "clients": 6, "partition": "dirichlet:0.3",
    "local": {"batch_size": 32, "learning_rate": 0.05},
}  # fmt: skip
SLOW: dict[str, Any] = {"kind": "log-normal", "sigma": 1.0, "seconds_per_step": 1.0}


def experiment(**changes: Any) -> Experiment:
    return experiment_from({**BASE, **changes})


def same(left: Path, right: Path) -> bool:
    first, second = (load_file(out / "model.safetensors") for out in (left, right))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_clock_alone_changes_no_bit(tmp_path: Path) -> None:
    run(experiment(algorithm="scaffold"), tmp_path / "plain")
    run(experiment(algorithm="scaffold", devices=SLOW), tmp_path / "clock")
    assert same(tmp_path / "plain", tmp_path / "clock")
    assert all(one.virtual_seconds is None for one in read_rounds(tmp_path / "plain"))
    timed = read_rounds(tmp_path / "clock")
    assert [one.late for one in timed] == [0] * 4
    assert len({one.virtual_seconds for one in timed}) == 1, "the slowest client is the same in every round"


def test_a_run_without_devices_is_written_as_it_was_before_there_were_any(tmp_path: Path) -> None:
    run(experiment(rounds=1), tmp_path / "run")
    assert not {"devices", "server"} & read_table(tmp_path / "run" / "config.toml").keys()
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert not {"virtual_seconds", "late", "staleness"} & line.keys()
    assert b"versions" not in (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    assert not {"devices", "server"} & experiment().chosen(*Experiment.model_fields).keys()


def test_updates_of_who_is_late_are_lost_and_their_bytes_up_are_not_counted(tmp_path: Path) -> None:
    run(experiment(devices=SLOW, server={"deadline": 4.0}), tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    for one in rounds:
        assert one.cohort is not None
        assert one.late == 6 - one.cohort
        assert 0 < one.cohort < 6
        assert one.virtual_seconds == 4.0
        assert one.bytes_up is not None
        assert one.bytes_down == 6 * one.bytes_up // one.cohort


def test_partial_work_is_the_first_steps_of_the_whole(tmp_path: Path) -> None:
    """With a deadline for three steps of equal devices, it is what local.steps=3 does, for who has more of them."""
    devices = {"kind": "constant", "seconds_per_step": 1.0, "download_mbps": 1e9, "upload_mbps": 1e9}
    chosen = {"devices": devices, "partition": "iid", "algorithm": "fednova"}
    run(experiment(**chosen, server={"deadline": 3.5, "late": "partial"}), tmp_path / "partial")
    run(experiment(**chosen, local={**BASE["local"], "steps": 3}), tmp_path / "steps")
    assert same(tmp_path / "partial", tmp_path / "steps")
    assert [one.late for one in read_rounds(tmp_path / "partial")] == [0] * 4
    assert [one.virtual_seconds for one in read_rounds(tmp_path / "partial")] == pytest.approx([3.0] * 4, abs=0.01)


def test_fednova_divides_by_the_steps_that_each_client_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    finish = FedNova.finish

    def noting(self: FedNova, task: Any, trained: Any) -> Any:
        taken.append((task.client, trained.num_steps))
        return finish(self, task, trained)

    monkeypatch.setattr(FedNova, "finish", noting)
    server = {"deadline": 7.0, "late": "partial"}
    run(experiment(devices=SLOW, algorithm="fednova", partition="iid", rounds=1, server=server), tmp_path / "run")
    steps = dict(taken[-6:])
    assert len(set(steps.values())) > 2, "clients differ in how much they get through"
    assert all(1 <= count <= 8 for count in steps.values())


@pytest.mark.parametrize("server", [{"deadline": 1e-3}, {"deadline": 1e-3, "late": "partial"}])
def test_a_round_in_which_nobody_answers_leaves_the_model_as_it_is_and_says_so(
    server: dict[str, Any], tmp_path: Path
) -> None:
    chosen = experiment(devices=SLOW, server=server)
    result = run(chosen, tmp_path / "run")
    begun = procedure_of(job_of(chosen)).beginning().params
    ended = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(begun[name], ended[name]) for name in ended)
    assert [(one.cohort, one.late, one.bytes_up) for one in read_rounds(tmp_path / "run")] == [(0, 6, 0)] * 4
    assert result["status"] == "finished"
    assert any("in 4 of 4 rounds no client was available and in time" in told for told in result["warnings"])


def test_clients_that_are_not_there_are_not_asked(tmp_path: Path) -> None:
    run(experiment(devices={**SLOW, "availability": 0.5}, rounds=12), tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    cohorts = [one.cohort or 0 for one in rounds]
    assert min(cohorts) < 3 < max(cohorts)
    assert sum(one.late or 0 for one in rounds) == 0
    assert all(one.bytes_down == one.bytes_up for one in rounds)


@pytest.mark.parametrize("algorithm", ["scaffold", "fednova"])
def test_a_stopped_run_with_lost_and_partial_work_goes_on_to_the_same_bits(
    algorithm: str, tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    devices = {**SLOW, "jitter": 0.5, "availability": 0.8}
    chosen = experiment(devices=devices, server={"deadline": 4.0, "late": "partial"}, algorithm=algorithm)
    run(chosen, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path / "stopped", observer=stop_after(2))
    run(chosen, tmp_path / "stopped")
    assert same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("server", ["synchronous", {"kind": "fedbuff", "buffer": 2, "concurrency": 3}])
def test_who_trains_on_the_released_pool_alone_takes_the_time_of_the_pool(server: Any, tmp_path: Path) -> None:
    """The pool is public, so time tells nothing of a client's own records; beside raw ones it would."""
    pool = {
        "kind": "da-fl", "generator": "gaussian", "gamma": 0.2, "train_on": "synthetic", "noise": "seeded",
    }  # fmt: skip
    devices = {"kind": "constant", "records_per_second": 100, "download_mbps": 1e9, "upload_mbps": 1e9}
    chosen = experiment(preprocess=pool, devices=devices, server=server, rounds=2, features="scattering")
    result = run(chosen, tmp_path / "pool")
    first = read_rounds(tmp_path / "pool")[0]
    made = result["preprocess"]["num_synthetic"]
    assert first.virtual_seconds == pytest.approx(made / 100, rel=1e-3)
    assert first.seconds is None
    assert result["privacy"][0]["epsilon"] <= 10
    with pytest.raises(UserError, match="No epsilon here covers this"):
        experiment(preprocess={**pool, "train_on": "own-and-synthetic"}, devices=devices)


def test_a_profile_that_changes_between_stop_and_start_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("seconds_per_step,clients\n0.1,3\n0.5,3\n")
    chosen = experiment(devices=f"profile:{path}")
    run(chosen, tmp_path / "run")
    assert len(read_table(tmp_path / "run" / "config.toml")["devices"]["digest"]) == 64
    run(chosen, tmp_path / "run")
    path.write_text("seconds_per_step,clients\n0.1,3\n0.6,3\n")
    with pytest.raises(UserError, match="holds a run with other content in a file of devices, which has changed"):
        run(chosen, tmp_path / "run")
    path.write_text("seconds_per_step,clients\n0.1,3\n0.6,2\n")
    with pytest.raises(UserError, match="is for 5 clients, but this run has 6"):
        run(chosen, tmp_path / "other")
    assert not (tmp_path / "other" / "config.toml").exists()


def test_flowers_own_runtime_is_refused_a_clock(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and Flower's own runtime cannot do that"):
        run(experiment(devices="constant"), tmp_path / "run", grid=cast("Grid", object()))


@pytest.mark.parametrize("algorithm", ["afl", "fedpft", "pate", "tstr"])
def test_what_has_no_rounds_is_refused_a_clock(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"devices=constant (does not work with|has no place in)"):
        run(experiment(algorithm=algorithm, devices="constant"), tmp_path / "run")


def test_the_result_tells_virtual_seconds_altogether_and_to_each_accuracy(tmp_path: Path) -> None:
    result = run(experiment(devices=SLOW, server={"deadline": 6.0}, rounds=8, partition="iid"), tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    assert result["virtual_seconds"] == pytest.approx(sum(one.virtual_seconds or 0 for one in rounds))
    assert result["late"] == sum(one.late or 0 for one in rounds) > 0
    reached = result["measures"]["reached"]["50"]
    assert reached["virtual_seconds"] == pytest.approx(
        sum(one.virtual_seconds or 0 for one in rounds[: reached["round"]])
    )
    plain = run(experiment(rounds=8, partition="iid"), tmp_path / "plain")
    assert not {"virtual_seconds", "late"} & plain.keys()
    assert "virtual_seconds" not in plain["measures"]["reached"]["50"]


def test_one_holder_of_all_records_has_no_clock(tmp_path: Path) -> None:
    result = run(
        experiment(algorithm="centralized", devices=SLOW, server={"deadline": 1.0}, rounds=1), tmp_path / "run"
    )
    assert "virtual_seconds" not in result
    assert read_rounds(tmp_path / "run")[0].cohort == 1
