"""Shards that depend on the round: what follows the round, and what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.engines.remote import Signer
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.experiment.node_job import own_job, public_facts
from fl_sim.simulation import client_runtime
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.remote_workers import WorkerSetup
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.threats.finished import FinishedRun
from fl_sim.training.evaluation import Holdings
from partitions import MovingParts, Parts
from partitions.scheme import Indices
from strategies.fedavg import FedAvg

DRIFT = {"kind": "drift", "over": "iid", "to": "label-1", "first_round": 1, "last_round": 4}


def made(**settings: Any) -> Experiment:
    usual = {"data": "digits", "model": "logistic", "clients": 5, "rounds": 5, "partition": DRIFT, "seed": 3}
    return experiment_from({**usual, "engine": "inprocess", **settings})


def output(experiment: Experiment, out: Path, **more: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    run(experiment, out, **more)
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    dropped = {"seconds", "chain"}
    return load_file(out / "model.safetensors"), [{k: v for k, v in one.items() if k not in dropped} for one in lines]


def same(left: Any, right: Any) -> bool:
    return left[1] == right[1] and all(torch.equal(value, right[0][name]) for name, value in left[0].items())


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_drift_from_a_partition_to_itself_is_the_plain_run(algorithm: str, tmp_path: Path) -> None:
    drift = DRIFT | {"over": "dirichlet:0.1", "to": "dirichlet:0.1"}
    plain = output(made(algorithm=algorithm, partition="dirichlet:0.1"), tmp_path / "plain")
    assert same(plain, output(made(algorithm=algorithm, partition=drift), tmp_path / "drift"))
    other = output(made(algorithm=algorithm, partition=drift | {"to_seed": 1}), tmp_path / "other")
    assert other[1][0] == plain[1][0]  # round 1 is before the drift
    assert other[1][1]["train_loss"] != plain[1][1]["train_loss"]


def test_resumed_threaded_stacked_and_unstored_runs_follow_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: Callable[[int], Any]
) -> None:
    """Client 4 has no records at first, and client 0 none at last: SCAFFOLD counts the clients with records."""
    ends = {"over": f"{__name__}:Lacking", "to": {"kind": f"{__name__}:Lacking", "client": 0}}
    base = {"algorithm": "scaffold", "partition": DRIFT | ends, "attack": {"kind": "label-flip", "clients": 1}}
    whole = output(made(**base), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(made(**base), tmp_path / "part", observer=stop_after(2))
    assert same(whole, output(made(**base), tmp_path / "part"))
    assert same(whole, output(made(**base, engine={"kind": "inprocess", "workers": 3}), tmp_path / "threads"))
    stacked = output(made(**base, engine={"kind": "inprocess", "stack": 5}), tmp_path / "stacked")
    assert stacked[1][-1]["train_loss"] == pytest.approx(whole[1][-1]["train_loss"], rel=1e-3)
    monkeypatch.setattr(client_runtime, "_room", lambda _: 0)
    assert same(whole, output(made(**base), tmp_path / "unstored"))


@dataclass(frozen=True)
class Lacking:
    """Divides the records among all clients but one."""

    client: int = 4

    def split(self, labels: Indices, num_partitions: int, rng: np.random.Generator) -> Sequence[Indices]:
        parts = np.array_split(rng.permutation(len(labels)), num_partitions - 1)
        return [*map(np.sort, parts[: self.client]), np.zeros(0, np.int64), *map(np.sort, parts[self.client :])]


class Sizes(FedAvg):
    """FedAvg that notes the records of each training."""

    seen: ClassVar[dict[tuple[int, int], tuple[int, tuple[int, ...]]]] = {}

    def plan(self, task: Any) -> Any:
        self.seen[task.server_round, task.client] = (task.num_examples, task.class_counts)
        return super().plan(task)


def test_clients_train_on_the_shards_of_the_round_and_are_measured_by_them(tmp_path: Path) -> None:
    experiment = made(algorithm=f"{__name__}:Sizes")
    job = job_of(experiment)
    Sizes.seen.clear()
    _, lines = output(experiment, tmp_path / "run")
    labels = job.dataset.train.labels
    for (server_round, client), found in Sizes.seen.items():
        shard = job.shards_in(server_round)[client]
        assert found == (len(shard), tuple(np.bincount(labels[shard], minlength=10).tolist()))
    assert len(Sizes.seen) == 25
    runtime = procedure_of(job).runtime()
    for server_round in (4, 0, 2, 2):
        inputs, _ = runtime.own_records(3, server_round).tensors()
        scale = runtime.own_records(3, 2).parts[0][0]
        assert len(inputs) == job.shards_in(server_round).sizes[3]
        assert scale.labels is not None
    deviations = [one["client_deviation"] for one in lines]
    assert deviations[0] < 0.05
    assert deviations[-1] > 0.1
    measured = Measuring.of(job).measured(job.model().state_dict(), "", is_last=True, server_round=4)
    expected = Holdings.of((job.shards_in(4),), labels)
    assert isinstance(measured.clients_by, Holdings)
    assert np.array_equal(measured.clients_by.counts, expected.counts)


def test_other_workers_get_all_rounds_and_check_them() -> None:
    job = job_of(made())
    assert job.moving is not None
    setup = WorkerSetup.of(job, Signer.fresh())
    for server_round in (1, 3, 5):
        sent, own = (one.own_records(2, server_round).tensors() for one in (setup.runtime, procedure_of(job).runtime()))
        assert torch.equal(sent[0], own[0])
    other = MovingParts(job.moving.first, job.moving.last, job.moving.rounds + 1)
    with pytest.raises(RunError, match="differ from those that were sent"):
        replace(setup, moving=other).runtime  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1.0}}, "promises privacy: an epsilon for a client"),
        ({"local": {"privacy": {"kind": "dp-sgd", "noise_multiplier": 1.0}}}, "promises privacy"),
        ({"algorithm": "pate"}, "promises privacy"),
        ({"preprocess": "da-fl"}, "promises privacy"),
        (
            {"evaluate": {"clients": "class-shares"}},
            r"evaluate.clients=class-shares measures .*: leave evaluate.clients",
        ),
        ({"evaluate": {"validation": 0.1}}, r"evaluate.validation=0.1 takes records .*: leave evaluate.validation out"),
        ({"left_out": 0.5}, "left_out=0.5 takes records"),
        ({"forgotten": [1, 2]}, r"forgotten=1\+2 removes the records"),
        ({"keep_every": 2}, "keep_every=2 keeps server states for 'fl-sim unlearn'"),
        ({"devices": "log-normal"}, "devices=log-normal computes times"),
        ({"algorithm": "fedmix"}, "algorithm=fedmix runs code outside of the usual rounds"),
        ({"algorithm": "feddf"}, "algorithm=feddf runs code"),
        ({"algorithm": "semifl"}, "algorithm=semifl runs code"),
        ({"algorithm": "afl"}, "algorithm=afl runs code"),
        ({"calibrate": "ccvr"}, "promises privacy|calibrate=ccvr runs code"),
        ({"sampler": "oort:3"}, "sampler=oort runs code"),
        ({"attack": {"kind": "backdoor", "clients": 1}}, "attack=backdoor runs code"),
    ],
)
def test_what_needs_fixed_shards_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"partition=drift moves records between clients during the run.*({message})"):
        made(**settings)


def test_clusters_secure_sums_and_centralized_training_are_allowed() -> None:
    for settings in ({"algorithm": "ifca:2"}, {"algorithm": "cfl"}, {"aggregator": "secure-sum"}):
        assert job_of(made(**settings)).moving is not None
    assert job_of(made(algorithm="centralized", left_out=0.5)).moving is None


def test_threats_and_nodes_with_their_own_records_are_refused(tmp_path: Path) -> None:
    run(made(rounds=1, partition=DRIFT), tmp_path / "run")
    with pytest.raises(UserError, match="partition=drift, which moves records between clients during the run"):
        FinishedRun.of(tmp_path / "run")
    facts = public_facts(job_of(made()).dataset)
    with pytest.raises(UserError, match="partition=drift moves records of the server's data set"):
        own_job(made(), "digits", 0, facts)


@dataclass(frozen=True)
class Turning:
    """A partition of the user's own whose shards swap in round 2; ``fault`` plants a mistake."""

    fault: str = ""

    def split(self, labels: Indices, num_partitions: int, rng: np.random.Generator) -> Parts:
        return self.moving(labels, None, num_partitions, rng).first

    def moving(self, labels: Indices, groups: Indices | None, num_partitions: int, rng: Any) -> MovingParts:
        del groups
        drawn = np.random.default_rng() if self.fault == "random" else rng
        parts = np.array_split(drawn.permutation(len(labels)), num_partitions)
        rounds = np.full(len(labels) - (self.fault == "short"), 2)
        if self.fault == "type":
            return parts  # type: ignore[return-value]
        last = [parts[0], *parts[:-1]] if self.fault == "twice" else parts[::-1]
        return MovingParts(Parts.of(parts), Parts.of(last), rounds)


def test_a_partition_of_the_users_own_may_move_records_too(tmp_path: Path) -> None:
    kind = f"{__name__}:Turning"
    job = job_of(made(partition=kind))
    assert np.array_equal(job.shards_in(1)[0], job.shards_in(2)[4])
    with pytest.raises(UserError, match=rf"partition={kind} moves records .* left_out=0.5"):
        made(partition=kind, left_out=0.5)
    faults = {
        "random": "gave different shards in two calls", "type": "moving gave list; it must give partitions.MovingParts",
        "short": r"rounds of shape \(1436,\)", "twice": "to several clients: shards must be disjoint",
    }  # fmt: skip
    for fault, message in faults.items():
        with pytest.raises(UserError, match=message):
            job_of(made(partition={"kind": kind, "fault": fault}))


def test_the_partition_view_shows_both_ends() -> None:
    typed = ["partition", "data=digits", "partition=drift", "partition.last_round=8", "clients=4"]
    shown = CliRunner().invoke(app, typed)
    assert "before round 6" in shown.stdout
    assert "from round 8 on" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [*typed, "--json"]).stdout)
    assert (found["moves"]["first_round"], found["moves"]["last_round"]) == (6, 8)
    assert all(0 < sum(count > 0 for count in row) <= 10 for row in found["label_counts"])
    assert [sum(count > 0 for count in row) for row in found["moves"]["label_counts"]] == [2] * 4
    assert found["moves"]["sizes"] != found["sizes"]
