"""FedAsync and FedBuff as procedures: what they come to where they must come to something else, and after a stop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds

BASE: dict[str, Any] = {
    "model": "logistic", "rounds": 6, "engine": "inprocess", "clients": 8, "partition": "dirichlet:0.3",
    "local": {"batch_size": 32, "learning_rate": 0.05},
}  # fmt: skip


def experiment(**changes: Any) -> Experiment:
    return experiment_from({**BASE, **changes})


def model(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return found


def same(left: Path, right: Path) -> bool:
    first, second = model(left), model(right)
    return all(torch.equal(first[name], second[name]) for name in first)


def lines(out: Path) -> list[dict[str, Any]]:
    """Return the log without what real time has a part in."""
    read = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read]


FEDBUFF: dict[str, Any] = {"kind": "fedbuff", "buffer": 3, "concurrency": 5}


@pytest.mark.parametrize(
    ("changes", "cohort"),
    [
        ({}, 8),
        ({"devices": "log-normal"}, 8),  # nobody starts again before all have arrived
        ({"algorithm": "fedadam"}, 8),
        ({"compress": "qsgd:7"}, 8),
        ({"local": {"steps": 3, "batch_size": 32}}, 3),
        ({"local": {"steps": 3, "batch_size": 32}, "algorithm": "fedprox", "sampling_seed": 9}, 5),
    ],
)
def test_equal_speeds_and_a_buffer_of_the_cohort_are_fedavg_bit_for_bit(
    changes: dict[str, Any], cohort: int, tmp_path: Path
) -> None:
    changes = {"devices": "constant", **changes}
    server = {"kind": "fedbuff", "buffer": cohort, "concurrency": cohort, "weighting": "examples"}
    run(experiment(**changes, sampler=f"fixed-size:{cohort}"), tmp_path / "rounds")
    run(experiment(**changes, server=server), tmp_path / "buffer")
    assert same(tmp_path / "rounds", tmp_path / "buffer")
    left, right = read_rounds(tmp_path / "rounds"), read_rounds(tmp_path / "buffer")
    assert [one.virtual_seconds for one in left] == pytest.approx([one.virtual_seconds for one in right])
    assert [(one.bytes_up, one.test_loss, one.train_loss) for one in left] == [
        (one.bytes_up, one.test_loss, one.train_loss) for one in right
    ]
    assert all(one.staleness == 0 for one in right)


def test_the_papers_weighting_is_fedavg_too_where_clients_hold_the_same(tmp_path: Path) -> None:
    changes = {"clients": 3, "partition": "iid", "devices": "constant"}  # 479 records each
    run(experiment(**changes), tmp_path / "rounds")
    run(experiment(**changes, server={**FEDBUFF, "concurrency": 3}), tmp_path / "buffer")
    assert same(tmp_path / "rounds", tmp_path / "buffer")


def test_fedasync_with_one_client_at_a_time_and_whole_models_is_sequential_training(tmp_path: Path) -> None:
    """Each client trains on from the model of the one before, as FedAvg with a cohort of one does."""
    server = {"kind": "fedasync", "mixing": 1.0, "concurrency": 1}
    run(experiment(devices="log-normal", server=server), tmp_path / "async")
    run(experiment(devices="log-normal", sampler="fixed-size:1"), tmp_path / "rounds")
    assert same(tmp_path / "async", tmp_path / "rounds")
    assert [one.staleness for one in read_rounds(tmp_path / "async")] == [0] * 6


@pytest.mark.parametrize("server", [FEDBUFF, {"kind": "fedasync", "concurrency": 5}])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_that_is_stopped_and_taken_up_gives_the_same_bits(
    server: dict[str, Any], stop: int, tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    devices = {"kind": "log-normal", "sigma": 1.0, "jitter": 0.3, "availability": 0.7}
    chosen = experiment(devices=devices, server=server)
    run(chosen, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path / "stopped", observer=stop_after(stop))
    run(chosen, tmp_path / "stopped")
    assert same(tmp_path / "straight", tmp_path / "stopped")
    assert lines(tmp_path / "straight") == lines(tmp_path / "stopped")
    assert max(one.staleness or 0 for one in read_rounds(tmp_path / "straight")) > 0


def test_more_rounds_go_on_with_clients_in_flight(tmp_path: Path) -> None:
    chosen = {"devices": "log-normal", "server": FEDBUFF}
    run(experiment(**chosen), tmp_path / "straight")
    run(experiment(**chosen, rounds=3), tmp_path / "longer")
    run(experiment(**chosen), tmp_path / "longer")
    assert same(tmp_path / "straight", tmp_path / "longer")


def test_a_model_in_flight_that_is_lost_or_changed_stops_the_run_before_it_goes_on(tmp_path: Path) -> None:
    chosen = {"devices": "log-normal", "server": FEDBUFF}
    run(experiment(**chosen, rounds=3), tmp_path / "run")
    kept = sorted((tmp_path / "run" / "clients").glob("sent-in-round-*"))
    assert kept
    content = kept[0].read_bytes()
    kept[0].write_bytes(content[:-4] + b"\0\0\0\1")
    with pytest.raises(UserError, match="damaged"):
        run(experiment(**chosen), tmp_path / "run")
    kept[0].write_bytes(kept[1].read_bytes())
    with pytest.raises(UserError, match="its checksum does not match"):
        run(experiment(**chosen), tmp_path / "run")
    kept[0].unlink()
    with pytest.raises(UserError, match=r"is missing: .*after round 3"):
        run(experiment(**chosen), tmp_path / "run")
    kept[0].write_bytes(content)
    run(experiment(**chosen), tmp_path / "run")


def test_results_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    chosen = {"devices": "log-normal", "server": {**FEDBUFF, "concurrency": 8}}
    for workers in (1, 2):
        run(experiment(**chosen, engine={"kind": "inprocess", "workers": workers}), tmp_path / str(workers))
    assert same(tmp_path / "1", tmp_path / "2")
    assert lines(tmp_path / "1") == lines(tmp_path / "2")


def test_training_ahead_of_time_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment(devices="log-normal", server={**FEDBUFF, "concurrency": 8})
    run(chosen, tmp_path / "ahead")
    monkeypatch.setattr("fl_sim.stages.asynchronous.TOGETHER", 0)
    run(chosen, tmp_path / "due")
    assert same(tmp_path / "ahead", tmp_path / "due")


def test_updates_as_they_come_take_less_virtual_time_than_rounds_that_wait(tmp_path: Path) -> None:
    """24 updates each, four clients at a time; only rounds wait for the slowest of four."""
    devices = {"kind": "log-normal", "sigma": 1.0}
    waiting = run(experiment(devices=devices, sampler="fixed-size:4"), tmp_path / "rounds")
    server = {"kind": "fedbuff", "buffer": 2, "concurrency": 4}
    going_on = run(experiment(devices=devices, server=server, rounds=12), tmp_path / "buffer")
    assert going_on["bytes"]["rounds"]["up"] == waiting["bytes"]["rounds"]["up"]
    assert going_on["virtual_seconds"] < 0.7 * waiting["virtual_seconds"]
    assert going_on["titles"]["server"] == "FedBuff"
    assert "server" not in waiting["titles"]


@pytest.mark.parametrize("algorithm", ["fedcm", "mofedsam"])
def test_what_sends_more_than_the_model_is_refused_before_anything_runs(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"algorithm {algorithm} cannot run with server=fedbuff: besides the model"):
        run(experiment(algorithm=algorithm, devices="constant", server=FEDBUFF), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_model_is_counted_for_every_client_that_starts_and_an_update_for_every_one_that_comes(tmp_path: Path) -> None:
    result = run(experiment(devices="constant", server=FEDBUFF, rounds=3), tmp_path / "run")
    each = result["bytes"]["each_client_in_a_round"]
    rounds = read_rounds(tmp_path / "run")
    # Five start, and one more for each that arrives but the last, which fills the buffer and waits for the new model.
    assert [(one.bytes_down or 0) / each["down"] for one in rounds] == [7, 3, 3]
    assert [(one.bytes_up or 0) / each["up"] for one in rounds] == [3, 3, 3]
