"""A replayed round has the bits of the run's round; FedEraser and gradient ascent follow their papers' formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import inner_product
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_kept
from fl_sim.threats.approximate import unlearn_approximately
from fl_sim.threats.cohorts import first_round
from fl_sim.threats.federaser import FedEraser, calibrated, stored_rounds
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.gradient_ascent import GradientAscent, distance, projected
from fl_sim.threats.replay import LocalSteps, Replay, replay_of
from fl_sim.threats.unlearning import unlearn
from fl_sim.types import Params, Reply, ServerState
from strategies.attacks import hostile_clients
from strategies.backdoors import Backdoor

QUICK: dict[str, Any] = {
    "model": "logistic", "engine": "inprocess", "partition": "iid", "clients": 6, "rounds": 4,
    "sampler": "fixed-size:3", "keep_every": 1, "local": {"batch_size": 64, "learning_rate": 0.05},
}  # fmt: skip


def finished(out: Path, **changes: Any) -> FinishedRun:
    run(experiment_from({**QUICK, **changes}), out)
    return FinishedRun.of(out)


def kept(replay: Replay, server_round: int) -> ServerState:
    return read_kept(replay.finished.out, server_round, replay.finished.procedure.beginning())[1]


def same(left: Params, right: Params) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"algorithm": "fedadam", "compress": "qsgd"}, {"aggregator": "centred-clipping"},
        {"attack": "alie", "sampler": "full"},
    ],
    ids=["fedavg", "server state and compression", "memory of a rule", "attack"],
)  # fmt: skip
def test_a_replayed_round_has_the_bits_of_the_round(tmp_path: Path, settings: dict[str, Any]) -> None:
    with replay_of(finished(tmp_path / "all", rounds=3, **settings)) as replay:
        before, clients = kept(replay, 1), replay.cohort(2, without=-1)
        after = replay.merged(before, replay.updates(before, clients, 2), 2)
        assert same(after.params, kept(replay, 2).params)
        assert not same(after.params, before.params)


def test_federaser_begins_with_the_exact_round_and_takes_lengths_from_the_run(tmp_path: Path) -> None:
    """The first calibrated round is that of the run that never knew the client; later ones follow the paper's eq. 5."""
    before = finished(tmp_path / "all")
    client = max(range(6), key=lambda one: first_round(before.job, one, 4) or 0)
    first = first_round(before.job, client, 4) or 0
    assert 1 < first < 4
    unlearn(before, client, tmp_path / "never")
    rounds = stored_rounds(before, first)
    assert rounds == [*range(first - 1, 4)]
    with replay_of(before) as replay:
        states = list(FedEraser(calibration=0.5).states(replay, client, rounds))
        assert same(states[0][0].params, read_kept(tmp_path / "never", first, replay.last)[1].params)
        after = rounds[1]
        clients, server = replay.cohort(after + 1, client), states[0][0]
        stored = replay.updates(kept(replay, after), clients, after + 1)
        new = replay.updates(server, clients, after + 1, {one: math.ceil(replay.num_steps(one) / 2) for one in clients})
    wanted = {name: torch.zeros_like(value) for name, value in server.params.items()}
    total = sum(one.num_examples for one in new)
    for old, short in zip(stored, new, strict=True):
        lengths = [math.sqrt(inner_product(one.payloads["delta"], one.payloads["delta"])) for one in (old, short)]
        for name, value in short.payloads["delta"].items():
            wanted[name] += value * (lengths[0] / lengths[1]) * (short.num_examples / total)
    for name, value in server.params.items():
        torch.testing.assert_close(states[1][0].params[name], value + wanted[name], rtol=1e-5, atol=1e-6)
    done = sum((work for _, work in states), LocalSteps())
    assert done.rounds == len(rounds)
    assert 0 < done.steps < done.recomputed
    reply = Reply(0, {"delta": {"w": torch.tensor([3.0, 4.0])}}, 1, None)
    assert calibrated(reply, Reply(0, {"delta": {"w": torch.zeros(2)}}, 1, None), "delta") is reply


def test_gradient_ascent_stays_in_its_ball_and_forgets(tmp_path: Path) -> None:
    before = finished(tmp_path / "all", sampler="full", partition="label-2", local={"batch_size": 16})
    method = GradientAscent(rounds=0, epochs=2)
    with replay_of(before) as replay:
        reference = method.reference(replay, 0)
        [reply] = replay.updates(replay.last, [0], 5)
        weight = before.job.shards.sizes[0] / before.job.shards.sizes.sum()
        for name, value in replay.last.params.items():  # (N w - w_u) / (N - 1), with weights
            theirs = (value - weight * (value + reply.payloads["delta"][name])) / (1 - weight)
            torch.testing.assert_close(reference[name], theirs, rtol=1e-4, atol=1e-6)
        narrow, steps = GradientAscent(radius=1e-3, epochs=1).ascended(replay, 0, reference)
        wide, _ = method.ascended(replay, 0, reference)
        assert steps > 1
        assert 0 < distance(narrow, reference) < distance(wide, reference)
        assert GradientAscent(radius=0).ascended(replay, 0, reference)[0].keys() == reference.keys()
    centre, far = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    torch.testing.assert_close(projected(far, centre, 1.0)["w"], torch.tensor([0.6, 0.8]))
    assert projected(far, centre, 5.0) is far
    made = unlearn_approximately(before, 0, method, "gradient-ascent", tmp_path / "ascent", tmp_path / "never")
    assert made["after"]["forgotten_accuracy"] < made["before"]["forgotten_accuracy"]
    assert "exact" not in made


def test_the_command_compares_an_approximation_with_the_exact_model_and_a_backdoor(tmp_path: Path) -> None:
    """The attack's own measure of success stands beside the accuracies; the file has what the command prints."""
    settings = {"attack": {"kind": "backdoor", "size": 2}, "keep_every": 2, "sampler": "full"}
    finished(tmp_path / "all", **settings)
    [client] = hostile_clients(Backdoor(size=2), 6, 0)
    typed = ["unlearn", str(tmp_path / "all"), "--client", str(client)]
    assert CliRunner().invoke(app, typed).exit_code == 0
    found = CliRunner().invoke(app, [*typed, "--method", "federaser", "--calibration", "1"])
    assert found.exit_code == 0, found.output
    assert "backdoor success rate" in found.stdout
    assert "approximation without any guarantee" in found.stdout
    made = json.loads((tmp_path / f"all-federaser-{client}" / "unlearning.json").read_text())
    for model in ("before", "after", "exact"):
        assert 0 <= made[model]["further"]["backdoor_success_rate"] <= 1
    assert made["distance_to_exact"] > 0
    assert made["settings"] == {"calibration": 1.0}
    again = json.loads(
        CliRunner().invoke(app, [*typed, "--method", "federaser", "--calibration", "1", "--json"]).stdout
    )
    assert again["after"] == made["after"]
    ascended = CliRunner().invoke(app, [*typed, "--method", "gradient-ascent", "--rounds", "1", "--json"])
    assert json.loads(ascended.stdout)["cost"]["rounds"] == 2
    refused = CliRunner().invoke(app, [*typed, "--radius", "1"])
    assert refused.exit_code == 2
    assert "--method gradient-ascent" in refused.output


def test_what_cannot_be_replayed_is_refused_in_words(tmp_path: Path) -> None:
    stateful = finished(tmp_path / "scaffold", algorithm="scaffold", rounds=1, sampler="full")
    bare = finished(tmp_path / "bare", keep_every=0, rounds=2, sampler="full")
    for where, method, why in (
        (stateful, GradientAscent(), "client states of earlier rounds are not kept.*--method exact"),
        (bare, FedEraser(), "keeps no server state after round 0.*keep_every=2"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            unlearn_approximately(where, 0, method, "x", tmp_path / "out", tmp_path / "never")
    with pytest.raises(UserError, match="already contains other files"):
        unlearn_approximately(bare, 0, GradientAscent(), "x", bare.out, tmp_path / "never")
    (bare.out / "checkpoint.safetensors").unlink()
    with pytest.raises(UserError, match="has not kept the server state after its last round"):
        unlearn_approximately(bare, 0, GradientAscent(), "x", tmp_path / "out", tmp_path / "never")
    assert not (tmp_path / "out").exists()
