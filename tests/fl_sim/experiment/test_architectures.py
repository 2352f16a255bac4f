"""Clients with different architectures: each trains as with its model alone, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.tensors import load_state

SETTINGS: dict[str, Any] = {
    "data": "digits", "partition": "label-3", "clients": 5, "model": "mlp,2nn", "rounds": 3, "sampler": "fixed-size:4",
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares", "fine_tune_epochs": 1},
}  # fmt: skip


def ran(out: Path, observer: Any = None, **settings: Any) -> dict[str, Any]:
    run(experiment_from({**SETTINGS, **settings}), out, observer=observer)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())["personal"]["by_client"]
    return found


def test_one_name_per_client_is_written_in_three_ways() -> None:
    written = [{"model": "mlp,2nn"}, {"model": ["mlp", "2nn"]}, {"model": {"name": "mlp", "others": ["2nn"]}}]
    found = [experiment_from({**SETTINGS, "algorithm": "local-only", **one}) for one in written]
    assert found[0] == found[1] == found[2] == experiment_from(found[0].as_written())
    assert str(found[0].model) == "mlp + 2nn"
    assert experiment_from({"model": ["mlp"]}) == experiment_from({"model": "mlp"})


def test_a_client_alone_trains_its_own_architecture_to_the_bit(tmp_path: Path) -> None:
    """Also after further training, and with client states of different sizes in one file."""
    mixed = ran(tmp_path / "mixed", algorithm="local-only")
    for place, name in enumerate(("mlp", "2nn")):
        alone = ran(tmp_path / name, algorithm="local-only", model=name)
        for model, accuracies in alone.items():
            assert mixed[model][place::2] == accuracies[place::2]
        ours = load_state(tmp_path / "mixed" / "clients", place, 4)["own"]["vector"]
        theirs = [value.flatten() for value in load_state(tmp_path / name / "clients", place, 4)["own"].values()]
        assert torch.equal(ours[: len(torch.cat(theirs))], torch.cat(theirs))
        assert not ours[len(torch.cat(theirs)) :].any()


def test_equal_architectures_are_the_run_of_one_to_the_bit(tmp_path: Path) -> None:
    one, other = (ran(tmp_path / name, algorithm="fedgh", model=name) for name in ("mlp", "mlp,mlp"))
    assert one == other
    for client in range(5):
        ours, theirs = (load_state(tmp_path / name / "clients", client, 4)["own"] for name in ("mlp", "mlp,mlp"))
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_an_interrupted_run_ends_in_the_same_measures(tmp_path: Path, stop_after: Any) -> None:
    whole = ran(tmp_path / "whole", algorithm="local-only")
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path / "broken", stop_after(2), algorithm="local-only")
    assert ran(tmp_path / "broken", algorithm="local-only") == whole


def test_the_plan_has_the_bytes_of_the_messages_and_the_work_of_each_architecture() -> None:
    mixed, alone = (
        procedure_of(job_of(experiment_from({**SETTINGS, "algorithm": "fd", "model": name})))
        for name in ("mlp,2nn", "mlp")
    )
    assert mixed.traffic() == alone.traffic()
    steps = [work for work in mixed.work() if work.turns]
    plain = [work for work in alone.work() if work.turns]
    assert [("mlp" in one.what, "2nn" in one.what) for one in steps] == [(True, False), (False, True)] * 2
    assert sum(one.pieces for one in steps) == pytest.approx(sum(one.pieces for one in plain))
    assert steps[0].pieces / steps[1].pieces == pytest.approx(3 / 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"algorithm": "fedavg"}, "algorithm fedavg averages their parameters: .*use"),
        ({"algorithm": "local-only", "local": {"batch_norm": "personal"}}, "local.batch_norm=personal .*leave"),
        (
            {"algorithm": "local-only", "model": {"name": "mlp,2nn", "trainable": "head"}},
            "model.trainable=head .*leave",
        ),
        ({"algorithm": "local-only", "model": {"name": "mlp,2nn", "weights": "a"}}, "model.weights=a .*leave"),
        ({"algorithm": "local-only", "attack": "label-flip"}, "attack=label-flip .*leave"),
        ({"algorithm": "local-only", "model": {"name": "mlp,2nn", "others": ["mlp"]}}, "in one place"),
        ({"algorithm": "local-only", "model": "mlp,lenet"}, "unknown model 'lenet'"),
        ({"algorithm": "fedgh"}, "exchanges 'head'.*100.*mlp.*200.*2nn; choose models"),
        ({"algorithm": "fedproto-local", "model": "mlp,logistic"}, "exchanges 'prototypes'.*; choose models"),
        ({"algorithm": "local-only", "model": "mlp,random-features"}, "random-features has a frozen body.*choose"),
    ],
)
def test_what_needs_one_architecture_is_refused(settings: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        procedure_of(job_of(experiment_from({**SETTINGS, **settings}))).beginning()
