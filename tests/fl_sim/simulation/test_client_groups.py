"""What clients of a group train on, validate on and are tested on, and what stays as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fl_sim.simulation.client_runtime as wiring
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.kinds import short_form
from fl_sim.simulation.client_runtime import evaluation_records, runtime_for, validation_records
from fl_sim.simulation.run import run
from fl_sim.stages.own_models import ClientRecords
from fl_sim.tables.labels import label
from partitions import Iid
from strategies.attacks import LabelFlip, hostile_clients

KINDS = ["rotate:4", "invert:2", "colour:3", "permute-labels:4"]
CLIENTS = 8


def made(kind: str, **settings: Any) -> Experiment:
    table = {"data": "digits", "partition": kind, "clients": CLIENTS, "model": "logistic", "rounds": 2, **settings}
    over = ["partition.over=dirichlet:0.3"] if ":" in kind and not kind.startswith("dirichlet") else []
    return experiment_from(with_overrides(table, over))


def seen(experiment: Experiment, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    job = job_of(experiment)
    return runtime_for(job, experiment.algorithm, {}).records(client, "").tensors()


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_splits(kind: str) -> None:
    experiment = made(kind)
    assert short_form(experiment.partition) == f"{kind} dirichlet:0.3"
    assert label(experiment.partition) == f"{kind} Dir(0.3)"
    assert experiment_from(experiment.model_dump()) == experiment
    assert short_form(made(kind.partition(":")[0]).partition).startswith(kind.partition(":")[0])
    job, plain = job_of(experiment), job_of(made("dirichlet:0.3"))
    assert np.array_equal(job.shards.records, plain.shards.records)
    assert np.array_equal(job.shards.bounds, plain.shards.bounds)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_see_their_group_in_memory_or_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, plain = made(kind), made("dirichlet:0.3")
    for client in range(CLIENTS):
        found, before = seen(experiment, client), seen(plain, client)
        with monkeypatch.context() as changed:
            changed.setattr(wiring, "_room", lambda device: 0)
            again = seen(experiment, client)
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
        same = all(torch.equal(*pair) for pair in zip(found, before, strict=True))
        groups = int(kind[-1])
        unchanged = client % groups != groups - 1 if kind == "invert:2" else client % groups == 0
        assert same == unchanged
        if kind == "rotate:4":
            assert torch.equal(found[0], torch.rot90(before[0], client % 4, (-2, -1)))
        if kind == "permute-labels:4":
            assert torch.equal(found[0], before[0])
            assert len(set(zip(before[1].tolist(), found[1].tolist(), strict=True))) == len(set(before[1].tolist()))


def test_tests_and_validation_of_a_client_are_of_its_group_and_the_global_test_set_stays() -> None:
    for kind in ("rotate:4", "permute-labels:4"):
        evaluate = {"clients": "class-shares", "validation": 0.2}
        job, plain = (job_of(made(one, evaluate=evaluate)) for one in (kind, "dirichlet:0.3"))
        records, before = ClientRecords(job), ClientRecords(plain)
        trained = {
            client: dict(zip(seen(plain_run, client)[1].tolist(), seen(own_run, client)[1].tolist(), strict=True))
            for own_run, plain_run in [(job.experiment, plain.experiment)]
            for client in range(CLIENTS)
        }
        validated = validation_records(job)
        place = 0
        for client in range(CLIENTS):
            for own, old in (
                (records.tests(client).tensors(), before.tests(client).tensors()),
                (records.validation(client).tensors(), before.validation(client).tensors()),
            ):
                turns = client % 4 if kind == "rotate:4" else 0
                assert torch.equal(own[0], torch.rot90(old[0], turns, (-2, -1)))
                known = trained[client]
                assert all(known.get(a, b) == b for a, b in zip(old[1].tolist(), own[1].tolist(), strict=True))
            size = int(job.validation.sizes[client])
            assert torch.equal(validated.inputs[place : place + size], own[0])
            assert torch.equal(validated.labels[place : place + size], own[1])
            place += size
        tested, as_before = evaluation_records(job), evaluation_records(plain)
        assert torch.equal(tested.inputs, as_before.inputs)
        assert torch.equal(tested.labels, as_before.labels)


def test_one_client_and_the_upper_bound_change_nothing() -> None:
    for settings in ({"clients": 1}, {"algorithm": "centralized"}):
        found, plain = (seen(made(one, **settings), 0) for one in ("rotate:4", "iid"))
        assert torch.equal(found[0], plain[0])


def test_attackers_change_the_labels_of_their_group() -> None:
    attack = {"kind": "label-flip", "clients": CLIENTS - 1}
    hostile_ones = sorted(hostile_clients(LabelFlip(clients=CLIENTS - 1), CLIENTS, 0))
    for client in hostile_ones:
        honest, hostile = (seen(made("permute-labels:4", **one), client)[1] for one in ({}, {"attack": attack}))
        assert torch.equal(hostile, 9 - honest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_measures_clients_and_is_the_same_with_threads(kind: str, tmp_path: Path) -> None:
    evaluate = {"clients": "class-shares", "validation": 0.2}
    found = []
    for workers in (1, 2):
        engine = {"kind": "inprocess", "workers": workers}
        result = run(made(kind, evaluate=evaluate, engine=engine), tmp_path / str(workers))
        assert result["partition"] == f"{kind} dirichlet:0.3"
        assert "changes of its inputs and labels" in result["measures"]["client_accuracy_is"]
        found.append((result["final_accuracy"], result["personal"]))
    assert found[0] == found[1]


def test_what_records_cannot_be_changed_is_said() -> None:
    with pytest.raises(UserError, match=r"partition rotate of digits over 3 clients: rotate:4 has 4 groups for 3"):
        job_of(made("rotate:4", clients=3))


class Wrong(Iid):
    """Gives other shapes, or labels that are none."""

    how = "shape"

    def check_records(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Accepts all."""

    def held_by(self, client: int, inputs: Any, labels: Any, num_classes: int, rng: Any) -> tuple[Any, Any]:
        return (inputs[1:], labels) if self.how == "shape" else (inputs, labels + 10)


def test_records_of_an_own_partition_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment(partition=Wrong(), clients=4)
    with pytest.raises(UserError, match=r"Wrong: held_by gave uint8 of shape .* it must keep type and shape"):
        seen(experiment, 1)
    monkeypatch.setattr(Wrong, "how", "labels")
    with pytest.raises(UserError, match="Wrong: held_by gave labels outside 0 to 9"):
        seen(experiment, 1)
