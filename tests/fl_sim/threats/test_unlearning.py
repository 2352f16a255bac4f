"""Exact unlearning ends in the bits of the run that never knew the client, and the loss tells members as it should."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import Silent, run
from fl_sim.store.run_directory import RoundRecord, kept_rounds, read_model, read_rounds
from fl_sim.threats import unlearning
from fl_sim.threats.finished import FinishedRun, Judged, logits_of
from fl_sim.threats.membership import area_by_loss
from fl_sim.threats.unlearning import first_round, settings_without, unlearn

QUICK: dict[str, Any] = {
    "model": "logistic", "engine": "inprocess", "partition": "dirichlet:1.0", "clients": 12, "rounds": 8,
    "sampler": "fixed-size:2", "keep_every": 2, "local": {"batch_size": 32, "learning_rate": 0.05},
}  # fmt: skip


def quick(**changes: Any) -> Experiment:
    return experiment_from({**QUICK, **changes})


def finished(out: Path, **changes: Any) -> FinishedRun:
    run(quick(**changes), out)
    return FinishedRun.of(out)


def late_client(of: FinishedRun) -> int:
    """Return the client whose first round is the latest one."""
    firsts = {client: first_round(of.job, client, of.facts["rounds"]) or 0 for client in range(12)}
    return max(firsts, key=lambda client: firsts[client])


def bits(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def told(out: Path) -> list[RoundRecord]:
    left_out: dict[str, Any] = {"seconds": None, **dict.fromkeys(unlearning._OF_CLIENTS)}
    return [replace(record, **left_out) for record in read_rounds(out)]


@pytest.mark.parametrize(
    ("settings", "is_resumed"),
    [
        ({}, True), ({"algorithm": "fedadam"}, True), ({"aggregator": "centred-clipping"}, True),
        ({"sampler": "poisson:0.15", "evaluate": {"held_out_clients": 0.25, "clients": "class-shares"}}, False),
        ({"algorithm": "scaffold"}, False), ({"evaluate": {"validation": 0.2, "patience": 3}}, False),
    ],
    ids=["fedavg", "fedadam", "centred clipping", "held-out clients", "scaffold", "early stopping"],
)  # fmt: skip
def test_an_unlearned_run_has_the_bits_of_the_run_that_never_knew_the_client(
    tmp_path: Path,
    settings: dict[str, Any],
    is_resumed: bool,  # noqa: FBT001
) -> None:
    before = finished(tmp_path / "all", **settings)
    client = late_client(before)
    made = unlearn(before, client, tmp_path / "without")
    run(settings_without(before.job.experiment, client), tmp_path / "never")
    assert bits(tmp_path / "without") == bits(tmp_path / "never") != bits(tmp_path / "all")
    assert told(tmp_path / "without") == told(tmp_path / "never")
    assert (made["cost"]["rounds_saved"] > 0) == is_resumed
    assert made["cost"]["rounds"] + made["cost"]["rounds_saved"] == made["cost"]["rounds_of_retraining"]
    assert kept_rounds(tmp_path / "without") == kept_rounds(tmp_path / "never")
    first = read_rounds(tmp_path / "without")[0]
    assert (first.client_accuracy is None) == is_resumed  # a copied round tells nothing about the forgotten records
    model, job = read_model(tmp_path / "without"), before.job
    others = [before.held_by(one) for one in np.flatnonzero(job.shards.sizes).tolist() if one != client]
    logits = logits_of(job.whole_model(), model, torch.cat([inputs for inputs, _ in others]))
    kept = Judged.of(logits, torch.cat([labels for _, labels in others]))
    assert made["after"]["kept_accuracy"] == pytest.approx(kept.accuracy)


def test_a_state_that_knew_the_client_ends_in_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a state after the client's first round is planted."""
    before = finished(tmp_path / "all")
    client = int(np.argmin([first_round(before.job, one, 8) or 9 for one in range(12)]))
    monkeypatch.setattr(unlearning, "first_round", lambda *_: 8)
    assert unlearn(before, client, tmp_path / "without")["cost"]["rounds_saved"] == 6
    run(settings_without(before.job.experiment, client), tmp_path / "never")
    assert bits(tmp_path / "without") != bits(tmp_path / "never")


class StopAtOnce(Silent):
    def finished_round(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_unlearning_and_an_extended_run_end_in_the_same_bits(tmp_path: Path) -> None:
    run(quick(rounds=6), tmp_path / "all")
    before = finished(tmp_path / "all")  # the run gets two more rounds, and keeps its states
    assert kept_rounds(tmp_path / "all") == [2, 4, 6, 8]
    client = late_client(before)
    with pytest.raises(KeyboardInterrupt):
        unlearn(before, client, tmp_path / "without", StopAtOnce())
    assert unlearn(before, client, tmp_path / "without")["cost"]["rounds_saved"] > 0
    run(settings_without(before.job.experiment, client), tmp_path / "never")
    assert bits(tmp_path / "without") == bits(tmp_path / "never")


def test_a_forgotten_client_alone_loses_its_records() -> None:
    whole, without = job_of(quick()), job_of(quick(forgotten="3+5"))
    assert without.experiment.forgotten == (3, 5)
    for client in range(12):
        wanted = [] if client in {3, 5} else whole.shards[client].tolist()
        assert without.shards[client].tolist() == wanted
    with pytest.raises(UserError, match="removes the records of all clients"):
        job_of(quick(clients=2, forgotten=[0, 1]))
    for changes, why in (({"forgotten": 12}, "the clients are 0 to 11"), ({"forgotten": "x"}, "forgotten")):
        with pytest.raises(UserError, match=why):
            quick(**changes)
    private = {"aggregator": "global-dp", "sampler": "poisson:0.1"}
    with pytest.raises(UserError, match=r"keep_every=2 keeps the server states.*promises privacy"):
        quick(**private)


@pytest.mark.usefixtures("quick_accounting")
def test_what_cannot_be_unlearned_is_refused_in_words(tmp_path: Path) -> None:
    before = finished(tmp_path / "all", rounds=1)
    idle = next(client for client in range(12) if first_round(before.job, client, 1) is None)
    took = next(client for client in range(12) if client != idle and first_round(before.job, client, 1))
    for client, out, why in (
        (12, "without", "the clients of .* are 0 to 11"), (idle, "without", "took part in none of the 1 rounds"),
        (took, "all", "is the directory of the run"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            unlearn(before, client, tmp_path / out)
    unlearn(before, took, tmp_path / "without")
    with pytest.raises(UserError, match="was trained without client"):
        unlearn(FinishedRun.of(tmp_path / "without"), took, tmp_path / "again")
    private = finished(
        tmp_path / "private", aggregator="global-dp", sampler="poisson:0.2", keep_every=0, rounds=1, evaluate_every=1
    )
    with pytest.raises(UserError, match="no privacy ledger is refunded"):
        unlearn(private, took, tmp_path / "never")
    with pytest.raises(UserError, match="holds no run"):
        FinishedRun.of(tmp_path / "nowhere")


def test_the_command_prints_measures_before_and_after(tmp_path: Path) -> None:
    run(quick(rounds=4), tmp_path / "all")
    client = late_client(FinishedRun.of(tmp_path / "all"))
    typed = ["unlearn", str(tmp_path / "all"), "--client", str(client)]
    made = json.loads(CliRunner().invoke(app, [*typed, "--json"]).stdout)
    assert made["out"] == str(tmp_path / f"all-without-{client}")
    assert 0 <= made["after"]["membership"]["low"] <= made["after"]["membership"]["area"] <= 1
    said = CliRunner().invoke(app, typed).stdout
    assert f"bit-identical to retraining without client {client}" in said
    assert "accuracy on forgotten records" in said


def test_the_area_is_the_share_of_pairs_of_one_class_in_the_right_order() -> None:
    """Two classes, unequal numbers: each other record counts by the share of its class among the members."""
    generator = np.random.Generator(np.random.Philox(0))
    members = Judged(generator.random(40).round(1), np.ones(40, bool), np.repeat([0, 1], [30, 10]))
    others = Judged(generator.random(60).round(1), np.ones(60, bool), np.repeat([0, 1, 2], [20, 20, 20]))
    weights = np.array([30 / 20, 10 / 20, 0.0])[others.labels]
    pairs = (members.losses[:, None] < others.losses) + (members.losses[:, None] == others.losses) / 2
    found = area_by_loss(members, others)
    assert found is not None
    assert found.area == pytest.approx(float((pairs * weights).sum() / weights.sum() / 40))
    assert found.low < 0.5 < found.high
    separated = area_by_loss(replace(members, losses=members.losses - 2), others)
    assert separated is not None
    assert separated.area == 1
    assert area_by_loss(replace(members, labels=np.full(40, 3)), others) is None


def test_losses_are_those_of_torch_and_accuracy_counts_right_predictions() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 0])
    judged = Judged.of(logits, labels)
    assert judged.losses == pytest.approx([np.log1p(np.exp(-2)), np.log1p(np.exp(1))])
    assert judged.accuracy == 0.5
