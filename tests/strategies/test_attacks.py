"""Hostile clients: who they are, what they train on and send, and where an attack has no place."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.local_plan import LocalPlan
from fl_sim.simulation.rounds import Rounds
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import kept_path
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.types import Cohort, LocalTask, Reply, ServerState
from strategies.algorithm import ONE_STEP
from strategies.attacks import ALittleIsEnough, HostilePlans, HostileUpdates, LabelFlip, Seen, SignFlip, hostile_clients
from strategies.backdoors import Backdoor
from strategies.fedavg import FedAvg

IID = {"partition": "iid", "rounds": 2, "model": "mlp"}


def _replies(rows):
    return [Reply(client, {"delta": {"w": torch.tensor(row)}}, 5, 1.0) for client, row in enumerate(rows)]


def _seen(cohort_size, honest=()):
    return Seen(_replies(honest), cohort_size, np.random.default_rng(0))


def _sent(replies):
    return [reply.payloads["delta"]["w"].tolist() for reply in replies]


def _aggregated(layer, rows, server_round=1):
    cohort = Cohort(server_round, tuple(_replies(rows)), len(rows), len(rows))
    return _sent(layer.aggregate(cohort, FedAvg(), ServerState({})).replies)


@dataclass
class Passing:
    """A layer's inner layer, which passes on what it is given."""

    hides_clients: bool = False

    def begin(self, server_round: int) -> None:
        pass

    def received(self, replies: Any) -> Any:
        return replies

    def aggregate(self, cohort: Any, *_: Any) -> Any:
        return cohort

    def remarks(self) -> list[str]:
        return []


def test_as_many_as_were_asked_for_are_hostile_and_always_the_same():
    one = hostile_clients(LabelFlip(clients=3), 10, seed=5)
    assert len(one) == 3
    assert one == hostile_clients(SignFlip(clients=3), 10, seed=5) <= set(range(10))
    assert len({hostile_clients(LabelFlip(clients=3), 10, seed) for seed in range(20)}) > 10


def test_flipped_signs_and_forged_means_by_hand():
    honest = [[1.0, -2.0], [3.0, 2.0]]
    assert _sent(SignFlip(strength=2.0).forged(_replies(honest), _seen(10))) == [[-2.0, 4.0], [-6.0, -4.0]]
    forged = _sent(ALittleIsEnough(deviations=1.5).forged(_replies(honest), _seen(10)))
    assert forged == [[2.0 - 1.5 * 1.0, 0.0 - 1.5 * 2.0]] * 2
    everybody = ALittleIsEnough(knows="all").forged(_replies([[9.0, 9.0]]), _seen(10, honest))
    assert _sent(everybody) == [[0.5, -3.0]]
    assert _sent(ALittleIsEnough().forged(_replies(honest[:1]), _seen(10))) == honest[:1]


def test_the_papers_distance_from_the_mean():
    # Baruch et al., section 3.3: of 50 clients 24 are hostile, s = 2, and z is 1.43.
    rows = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
    [sent, *_] = _sent(ALittleIsEnough(deviations="formula").forged(_replies(rows.tolist()), _seen(50)))
    z = (rows.mean(axis=0) - np.array(sent)) / rows.std(axis=0)
    assert z == pytest.approx(NormalDist().inv_cdf(24 / 26), rel=1e-4)
    assert z == pytest.approx(1.43, abs=0.01)


def test_hostile_clients_train_on_flipped_labels_and_others_on_their_own():
    attacked, plain = (job_of(experiment_from({**IID, **more})) for more in ({"attack": "label-flip:3"}, {}))
    hostile = hostile_clients(attacked.experiment.attack, 10, 0)
    runtimes = [Rounds(job, FedAvg()).runtime() for job in (attacked, plain)]
    for client in range(10):
        flipped, own = (runtime.records(client, "").tensors()[1] for runtime in runtimes)
        assert torch.equal(flipped, 9 - own if client in hostile else own)
    assert plain.dataset.train.labels.min() == 0


def test_an_attack_hurts_the_plain_mean_and_a_median_withstands_it(tmp_path: Path) -> None:
    def accuracy(**more):
        settings = {**IID, "rounds": 4, "local": {"learning_rate": 0.05}, **more}
        name = "-".join(map(str, more.values())).replace(":", "-") or "plain"
        return fl_sim.run(settings, out=tmp_path / name, progress=False).final_accuracy

    plain = accuracy()
    harmed = accuracy(attack="sign-flip:4")
    assert harmed < plain - 0.2
    assert accuracy(attack="sign-flip:4", aggregator="median") > harmed + 0.1


def test_under_global_dp_a_forged_update_moves_the_mean_by_its_clipped_share(tmp_path: Path) -> None:
    clipped = {"kind": "global-dp", "noise_multiplier": 0, "clipping_norm": 0.1}
    settings = {**IID, "rounds": 1, "model": "logistic", "sampler": "full", "aggregator": clipped}

    def ran(name: str, **attack: object) -> dict[str, torch.Tensor]:
        attack = {"clients": 1, **attack}
        found = fl_sim.run({**settings, "attack": attack}, out=tmp_path / name, progress=False)
        result = json.loads((tmp_path / name / "result.json").read_text())
        [said] = result["privacy"]
        assert "An honest client's epsilon holds whatever they send, because the server clips" in said["does_not_cover"]
        assert not any("has no effect: no hostile client" in one for one in result["warnings"])  # the cohort is secret
        return load_file(found.directory / "model.safetensors")

    silent, loud = ran("silent", kind="free-rider"), ran("loud", kind="sign-flip", strength=1e6)
    moved = torch.cat([(loud[name] - silent[name]).flatten().double() for name in loud]).norm()
    assert float(moved) == pytest.approx(0.1 / 10, rel=1e-5)


def test_attackers_that_see_no_honest_update_get_none_and_secret_cohorts_stay_secret() -> None:
    class Spy(SignFlip):
        def forged(self, hostile: Any, seen: Seen) -> Any:
            assert (len(seen.honest), seen.cohort_size) == (0, 7)
            return super().forged(hostile, seen)

    layer = HostileUpdates(Spy(), frozenset({0}), 0, 7.2)
    layer.inner = Passing(hides_clients=True)  # type: ignore[assignment]
    assert _aggregated(layer, [[1.0], [2.0]]) == [[-1.0], [2.0]]
    layer.received(())
    assert layer.remarks() == []


def test_clients_that_add_noise_themselves_are_protected_beside_any_attack() -> None:
    for kind in ("dp-sgd", "local-dp"):
        made = experiment_from({"attack": "min-max", "local": {"privacy": {"kind": kind, "epsilon": 8}}})
        [said] = HostileUpdates.uncovered(made)
        assert "because a client adds its noise itself, before it sends" in said
        assert "assumed to know" not in said
    simulated = {"kind": "global-dp", "noise": "seeded"}
    [said] = HostileUpdates.uncovered(experiment_from({"attack": "min-max", "aggregator": simulated}))
    assert "assumed to know the updates of honest clients without noise" in said
    assert "No epsilon covers that" in said
    assert HostileUpdates.uncovered(experiment_from({"attack": "min-max"})) == []


def test_outside_its_rounds_hostile_clients_are_honest(tmp_path: Path, stop_after: Any) -> None:
    attack = {"kind": "backdoor", "boost": 5, "loss_share": 0.9, "first_round": 2, "last_round": 2}
    settings = {**IID, "rounds": 3, "keep_every": 1}

    def ran(name: str, *, cut: bool = False, **more: Any) -> list[dict[str, torch.Tensor]]:
        experiment, out = experiment_from({**settings, **more}), tmp_path / name
        if cut:
            with pytest.raises(KeyboardInterrupt):
                run(experiment, out, observer=stop_after(2))
        run(experiment, out)
        return [load_file(kept_path(out, number)) for number in (1, 2, 3)]

    honest, once, resumed = ran("honest"), ran("once", attack=attack), ran("cut", cut=True, attack=attack)
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in zip(honest, once, strict=True)]
    assert same == [True, False, False]
    assert all(torch.equal(one[name], other[name]) for one, other in zip(once, resumed, strict=True) for name in one)


def test_a_schedule_is_kept_by_records_plans_and_updates() -> None:
    made = experiment_from({**IID, "rounds": 9, "attack": {"kind": "label-flip", "first_round": 3, "every": 2}})
    job, due = job_of(made), [3, 5, 7, 9]
    [hostile, *_] = hostile_clients(made.attack, 10, 0)
    runtime = Rounds(job, FedAvg()).runtime()
    own = runtime.records(hostile, "", 1).tensors()[1]
    for number in range(1, 10):
        labels = runtime.records(hostile, "", number).tensors()[1]
        assert torch.equal(labels, 9 - own if number in due else own)
        counts = runtime.class_counts(hostile, "", number)
        assert counts == tuple(torch.bincount(labels, minlength=10).tolist())
    half = HostilePlans(Backdoor(loss_share=0.5, first_round=3, every=2), frozenset({0}))
    tasks = [LocalTask(number, 0, 5, 9, ONE_STEP, {}) for number in range(1, 10)]
    assert [task.server_round for task in tasks if half.planned(task, LocalPlan()) != LocalPlan()] == due
    layer = HostileUpdates(SignFlip(first_round=3, every=2), frozenset({0}), 0)
    layer.inner = Passing()  # type: ignore[assignment]
    sent = [_aggregated(layer, [[1.0], [2.0]], number) for number in range(1, 10)]
    assert [number for number, one in enumerate(sent, 1) if one == [[-1.0], [2.0]]] == due


def test_more_hostile_clients_than_the_rule_is_set_for_are_told() -> None:
    def told(clients: int) -> list[str]:
        made = experiment_from({"attack": {"kind": "sign-flip", "clients": clients}, "aggregator": "krum:2"})
        return list(HostileUpdates.warnings(made, 0, []))

    assert told(2) == []
    [said] = told(3)
    assert "rounds have 3 hostile clients on average, and aggregator krum is set for 2: set a larger" in said


def test_a_tables_caption_names_the_attack_and_its_rows_tell_attacks_apart():
    settings = TableSettings(base=IID, grid={"aggregator": ["mean", "krum:2"], "attack": ["none", "alie:3"]})
    plan = plan_table(settings)
    assert "FedAvg, aggregator=krum:2, attack=alie:3" in plan.rows
    attacked = "'FedAvg, attack=alie:3', 'FedAvg, aggregator=krum:2, attack=alie:3'"
    assert f"attack none (alie:3 by 3 of them for {attacked})" in plan.caption[2]
    [no_attack] = {caption for caption in plan_table(TableSettings(base=IID)).caption if "attack" in caption} or {""}
    assert not no_attack


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attack": "label-flip:10"}, "leaves no honest client: set attack.clients"),
        ({"attack": "sign-flip", "aggregator": "distributed-dp:8"}, "distributed-dp: it does not check"),
        ({"attack": "min-max", "aggregator": "global-dp"}, "no epsilon would hold .*aggregator.noise=seeded"),
        ({"attack": "mimic", "aggregator": "global-dp"}, "no epsilon would hold .*aggregator.noise=seeded"),
        ({"attack": "alie", "aggregator": "global-dp", "preprocess": "private-start"}, "cannot run with attack alie"),
        ({"attack": "sign-flip", "preprocess": "da-fl"}, "cannot run with da-fl"),
        ({"attack": "alie", "algorithm": "fedmix"}, "cannot run with algorithm fedmix"),
        (
            {"attack": "alie", "algorithm": "centralized"},
            "centralized, which has one client: take another",
        ),
        ({"attack": {"kind": "sign-flip", "strength": 1e300}}, "attack.strength"),
        ({"attack": "alie", "algorithm": "pate"}, "cannot run with pate"),
        ({"attack": {"kind": "alie", "first_round": 21}}, "attack.first_round=21 is after the last of the 20 rounds"),
        ({"attack": {"kind": "alie", "first_round": 9, "last_round": 8}}, "so no round has an attack: set attack.last"),
        ({"attack": {"kind": "semantic-backdoor", "source": 0}}, "attack.source=0 is attack.target"),
        ({"attack": "aliee"}, "did you mean 'alie'"),
        ({"attack": {"kind": "alie", "deviations": -1}}, "attack.deviations"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(settings, why):
    with pytest.raises(UserError, match=why):
        experiment_from(settings)
