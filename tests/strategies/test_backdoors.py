"""Backdoors: triggers and poisoned records by hand, model replacement, and the attack success rate of a run."""

import json
from dataclasses import replace
from pathlib import Path
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
from fl_sim.report.measures import measures
from fl_sim.seeding import rng
from fl_sim.simulation.rounds import Rounds, procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.stage import stages_of, titles_of
from fl_sim.training.loop import train
from fl_sim.types import ClientUpdate, Cohort, Dataset, Examples, LocalSettings, LocalTask, Reply, ServerState, Trained
from strategies.aggregators import WeightedMean
from strategies.algorithm import ONE_STEP
from strategies.attacks import HostilePlans, Seen, hostile_clients
from strategies.backdoors import Backdoor, SemanticBackdoor
from strategies.fedavg import FedAvg
from strategies.neurotoxin import mask_of

IID: dict[str, Any] = {"partition": "iid", "model": "mlp", "clients": 10}


def images(count: int, dtype: Any = np.uint8) -> Any:
    return np.zeros((count, 1, 5, 6), dtype)


@pytest.mark.parametrize(("dtype", "white"), [(np.uint8, 255), (np.float32, 1.0)])
def test_the_trigger_is_a_white_square_and_its_parts_make_the_whole(dtype: Any, white: float) -> None:
    attack, plain = Backdoor(size=3), images(2, dtype)
    whole = attack.stamped(plain)
    assert not plain.any()
    assert (whole[:, :, 2:, 3:] == white).all()
    assert (whole == white).sum() == 2 * 9
    parts = [attack.stamped(plain, part) for part in range(4)]
    assert [int((part[0] == white).sum()) for part in parts] == [4, 2, 2, 1]
    assert (sum(part.astype(np.float64) for part in parts) == whole).all()


def test_a_share_of_the_records_is_poisoned_always_the_same_and_the_rest_is_untouched() -> None:
    own = Examples(images(10), np.arange(10) % 5)
    attack = Backdoor(target=4, size=2, poisoned_share=0.25)
    made = attack.tampered(own, 0, np.random.default_rng(3))
    changed = np.flatnonzero(made.inputs.any(axis=(1, 2, 3)))
    assert len(changed) == 3
    assert (made.labels[changed] == 4).all()
    rest = np.setdiff1d(np.arange(10), changed)
    assert (made.labels[rest] == own.labels[rest]).all()
    assert not own.inputs.any()
    again, other = (attack.tampered(own, 0, np.random.default_rng(seed)).inputs for seed in (3, 4))
    assert (again == made.inputs).all()
    assert (other != made.inputs).any()


def test_hostile_clients_take_turns_in_stamping_parts() -> None:
    own = Examples(images(2), np.arange(2))
    attack = Backdoor(size=2, parts=4, poisoned_share=1)
    corners = [
        np.argwhere(attack.tampered(own, number, np.random.default_rng(0)).inputs[0, 0])[0] for number in range(5)
    ]
    assert [corner.tolist() for corner in corners] == [[3, 4], [3, 5], [4, 4], [4, 5], [3, 4]]


def test_the_clients_of_a_run_train_on_the_trigger_wherever_their_records_are() -> None:
    attack = {"kind": "backdoor", "clients": 2, "poisoned_share": 1, "target": 7, "size": 3}
    attacked, plain = (job_of(experiment_from({**IID, **more})) for more in ({"attack": attack}, {}))
    hostile = hostile_clients(attacked.experiment.attack, 10, 0)
    for job, one in ((attacked, True), (plain, False)):
        runtime = Rounds(job, FedAvg()).runtime()
        for client in range(10):
            inputs, labels = runtime.records(client, "").tensors()
            is_white = bool((inputs[:, :, -3:, -3:] == inputs.max()).all())
            assert is_white is (one and client in hostile)
            assert bool((labels == 7).all()) is is_white
    assert (attacked.dataset.train.labels == plain.dataset.train.labels).all()
    assert (attacked.dataset.train.inputs == plain.dataset.train.inputs).all()


def test_the_trigger_is_on_images_where_only_a_head_is_trained() -> None:
    head = {**IID, "model": {"name": "mlp", "trainable": "head"}}
    assert job_of(experiment_from(head)).input_shape != (1, 8, 8)  # features of a frozen body
    job = job_of(experiment_from({**head, "attack": "backdoor"}))
    assert job.input_shape == job.dataset.input_shape == (1, 8, 8)


def test_one_client_with_a_boost_of_all_clients_replaces_the_model_exactly() -> None:
    model, wanted = {"w": torch.tensor([1.5, -2.0])}, torch.tensor([4.0, 0.25])
    hostile = Reply(0, {"delta": {"w": wanted - model["w"]}}, 6, 1.0)
    honest = [Reply(client, {"delta": {"w": torch.zeros(2)}}, 6, 1.0) for client in range(1, 8)]
    attack = Backdoor(boost=8)
    sent = attack.forged([hostile], Seen(honest, 8, np.random.default_rng(0)))
    aggregate = WeightedMean().mean(Cohort(1, (*sent, *honest), 8, 8.0), "examples")
    assert aggregate is not None
    assert FedAvg().merge(ServerState(model), aggregate).params["w"].tolist() == wanted.tolist()


def test_constrained_clients_stay_near_the_received_model(tmp_path: Path) -> None:
    honest = LocalPlan(gradient_scale=2.0, proximal_mu=0.5)
    assert Backdoor(loss_share=0.25).planned(honest) == LocalPlan(gradient_scale=0.5, proximal_mu=2.0)
    assert Backdoor().planned(honest) == honest
    half = HostilePlans(Backdoor(loss_share=0.25), frozenset({3}))
    assert [half.planned(LocalTask(1, client, 5, 9, ONE_STEP, {}), honest) == honest for client in (2, 3)] == [
        True,
        False,
    ]
    settings = {**IID, "rounds": 2, "attack": {"kind": "backdoor", "boost": 10}, "local": {"learning_rate": 0.05}}

    def ran(name: str, share: float) -> Any:
        attack = {**settings["attack"], "loss_share": share}
        return fl_sim.run({**settings, "attack": attack}, out=tmp_path / name, progress=False).facts["backdoor"]

    assert ran("free", 1.0)["success_rate"] > 0.9
    assert ran("held", 0.01)["success_rate"] < 0.5


def test_masked_steps_leave_those_parameters_that_moved_furthest() -> None:
    moved = {"a": torch.tensor([[0.0, -3.0], [1.0, 2.0]]), "b": torch.tensor([-2.0, 0.5])}
    mask = mask_of(moved, 0.5)
    assert mask is not None
    assert {name: value.tolist() for name, value in mask.items()} == {
        "a": [[True, False], [True, False]],
        "b": [False, True],
    }
    assert mask_of({"a": torch.zeros(3)}, 0.5) is None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_masked_step_moves_no_masked_number_and_others_as_before(optimizer: Any) -> None:
    model = torch.nn.Linear(3, 2)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    settings = LocalSettings(0.1, 0.9 * (optimizer == "sgd"), 0.5, batch_size=4, epochs=2, optimizer=optimizer)
    task, drift = LocalTask(1, 0, 1, 8, settings, weights), {name: value * 0 + 1 for name, value in weights.items()}
    records = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    mask = {name: torch.arange(value.numel()).view_as(value) % 2 == 0 for name, value in weights.items()}

    def trained(**more: Any) -> Any:
        plan = LocalPlan(step_offset=drift, proximal_mu=0.3, **more) if optimizer == "sgd" else LocalPlan(**more)
        return train(model, task, plan, *records, np.random.default_rng(0)).params

    free, masked = trained(), trained(step_mask=mask)
    everywhere = trained(step_mask={name: torch.ones_like(value) for name, value in mask.items()})
    for name, value in weights.items():
        assert torch.equal(everywhere[name], free[name])
        assert torch.equal(masked[name][~mask[name]], value[~mask[name]])
        assert (masked[name][mask[name]] != value[mask[name]]).all()


def test_hostile_clients_remember_the_received_model_and_honest_ones_only_if_they_have_a_state() -> None:
    half = Backdoor(masked_share=0.5).on_clients(frozenset({1}))
    old, new = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.5, 5.0])}
    kept = {"attack/received": old}
    tasks = [LocalTask(3, client, 5, 9, ONE_STEP, new, state=kept) for client in (0, 1)]
    masks = [half.planned(task, LocalPlan()).step_mask for task in tasks]
    assert masks[0] is None
    assert masks[1] is not None
    assert masks[1]["w"].tolist() == [True, False]
    assert half.planned(replace(tasks[1], state={}), LocalPlan()) == LocalPlan()
    assert [half.received(task).state for task in tasks] == [{}, {}]
    for update, who in ((ClientUpdate({}, 9), (1,)), (ClientUpdate({}, 9, state={"c": old}), (0, 1))):
        sent = [half.sent(task, task, Trained(new, {}, 1, 0.5), update).state for task in tasks]
        assert [number for number, state in enumerate(sent) if state.get("attack/received") is new] == list(who)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_neurotoxin_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path, stop_after: Any, algorithm: str) -> None:
    attack = {"kind": "backdoor", "boost": 10, "masked_share": 0.1}
    settings = {**IID, "rounds": 3, "attack": attack, "algorithm": algorithm, "local": {"momentum": 0.0}}
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(settings), tmp_path / "cut", observer=stop_after(2))
    unmasked = {**settings, "attack": {**attack, "masked_share": 0.0}}
    models = [
        load_file(fl_sim.run(one, out=tmp_path / name, progress=False).directory / "model.safetensors")
        for name, one in (("whole", settings), ("cut", settings), ("unmasked", unmasked))
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not all(torch.equal(models[0][name], models[2][name]) for name in models[0])


def test_a_semantic_backdoor_relabels_the_meant_records_and_is_counted_over_them(tmp_path: Path) -> None:
    attack = {"kind": "semantic-backdoor", "source": 4, "target": 7, "boost": 10, "clients": 1}
    job = job_of(experiment_from({**IID, "attack": attack}))
    own = Examples(images(6), np.array([4, 1, 7, 4, 0, 4]))
    assert SemanticBackdoor(source=4, target=7).tampered(own, 0, rng(0, "x")).labels.tolist() == [7, 1, 7, 7, 0, 7]
    meant = SemanticBackdoor(source=4, target=7).triggered(job.dataset)
    assert len(meant) == (job.dataset.test.labels == 4).sum()
    assert (meant.labels == 7).all()
    whole = {**IID, "rounds": 4, "attack": attack, "local": {"learning_rate": 0.05}}
    found = fl_sim.run(whole, out=tmp_path / "run", progress=False).facts["backdoor"]
    assert found["success_rate"] > 0.8
    assert f"share of the {len(meant)} test records that the attack is about" in found["in_words"]


def test_that_nobody_holds_a_meant_record_is_told() -> None:
    for source, count in ((4, 0), (5, 1)):  # with label-1, client 4 alone holds fours, and it is the hostile one
        attack = {"kind": "semantic-backdoor", "source": source, "target": 7}
        job = job_of(experiment_from({**IID, "partition": "label-1", "seed": 4, "attack": attack}))
        [stage] = stages_of(job)
        assert len(stage.warnings()) == count
        assert all("no hostile client holds a record" in one and "another seed" in one for one in stage.warnings())


class DarkFours(SemanticBackdoor):
    """Fours with little ink: a part of a class by a rule of one's own."""

    kind: str = "dark-fours"  # type: ignore[assignment]

    def is_meant(self, examples: Examples) -> Any:
        return (examples.labels == 4) & (examples.inputs.mean(axis=(1, 2, 3)) < 80)


def test_a_part_of_a_class_by_a_rule_of_ones_own() -> None:
    job = job_of(experiment_from({**IID, "attack": {"kind": f"{__name__}:DarkFours", "target": 7}}))
    meant = DarkFours(target=7).triggered(job.dataset)
    assert 0 < len(meant) < (job.dataset.test.labels == 4).sum()


def test_success_is_counted_over_records_of_other_classes_alone() -> None:
    job = job_of(experiment_from({**IID, "attack": {"kind": "backdoor", "target": 3}}))
    triggered = Backdoor(target=3).triggered(job.dataset)
    test = job.dataset.test
    assert len(triggered) == (test.labels != 3).sum()
    assert (triggered.labels == 3).all()
    assert (triggered.inputs[:, :, :4, :] == test.inputs[test.labels != 3][:, :, :4, :]).all()


def test_a_backdoor_succeeds_under_the_mean_and_not_under_a_norm_bound(tmp_path: Path) -> None:
    settings = {**IID, "rounds": 8, "local": {"learning_rate": 0.02, "epochs": 2}, "evaluate_every": 2,
                "attack": {"kind": "backdoor", "size": 2, "boost": 10}}  # fmt: skip

    def ran(name: str, **more: Any) -> tuple[float, float]:
        result = fl_sim.run({**settings, **more}, out=tmp_path / name, progress=False)
        lines = [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        rates = [(line.get("metrics") or {}).get("backdoor_success_rate") for line in lines]
        assert [rate is None for rate in rates] == [True, False] * 4
        found = json.loads((tmp_path / name / "result.json").read_text())["backdoor"]
        assert found["success_rate"] == rates[-1]
        assert found["triggered_records"] == 324
        assert result.final_accuracy is not None
        return found["success_rate"], result.final_accuracy

    under_mean, bounded = ran("mean"), ran("bounded", aggregator="norm-bound:0.25")
    assert under_mean[0] > 0.95
    assert bounded[0] < 0.1
    [title] = titles_of([experiment_from(settings)])
    assert title == "backdoor.success_rate_percent"
    assert measures(json.loads((tmp_path / "mean" / "result.json").read_text()))[title] == 100 * under_mean[0]
    assert min(under_mean[1], bounded[1]) > 0.7


def test_an_unfinished_run_has_the_rate_of_its_last_model(tmp_path: Path, stop_after: Any) -> None:
    settings = {**IID, "rounds": 3, "attack": "backdoor", "evaluate": {"test": "last"}}
    whole = fl_sim.run(settings, out=tmp_path / "whole", progress=False).facts["backdoor"]
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(settings), tmp_path / "cut", observer=stop_after(2))
    assert fl_sim.run(settings, out=tmp_path / "cut", progress=False).facts["backdoor"] == whole


def test_a_run_that_reads_no_test_record_has_no_rate(tmp_path: Path) -> None:
    measured = {"test": "never", "validation": 0.2}
    settings = {**IID, "model": "logistic", "rounds": 1, "attack": "backdoor", "evaluate": measured}
    facts = fl_sim.run(settings, out=tmp_path / "run", progress=False).facts["backdoor"]
    assert "success_rate" not in facts


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"size": 9}, "attack.size=9 does not fit.*1 to 8 pixels a side on images of 8 x 8"),
        ({"size": 1, "parts": 4}, "the trigger of 4 parts has 2 to 8 pixels"),
        ({"target": 10}, "attack.target=10: digits has 10 classes.*set another attack.target"),
        ({"kind": "semantic-backdoor", "target": 10}, "attack.target=10: digits has 10 classes"),
        ({"kind": "semantic-backdoor", "source": 10}, "no test record at which the attack aims.*another attack.source"),
    ],
)
def test_a_trigger_or_target_that_is_not_there_is_refused(settings: dict[str, Any], why: str) -> None:
    job = job_of(experiment_from({**IID, "attack": {"kind": "backdoor", **settings}}))
    with pytest.raises(UserError, match=why):
        procedure_of(job).work()


def test_records_that_are_no_images_are_refused() -> None:
    rows = Examples(np.zeros((2, 3), np.float32), np.arange(2))
    with pytest.raises(UserError, match="attack backdoor needs images"):
        Backdoor().triggered(Dataset("rows", rows, rows, 2, (0.0,), (1.0,)))


def test_parts_that_nobody_stamps_are_told() -> None:
    told = experiment_from({**IID, "attack": {"kind": "backdoor", "clients": 3, "parts": 4}}).remarks
    assert any("with 3 hostile clients: nobody stamps the other parts" in one for one in told)
