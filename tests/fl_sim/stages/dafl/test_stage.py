"""DA-FL in whole runs: one pool for all runs that would make the same, stated for what it is."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from safetensors.torch import load_file

from clients.dafl.dpcgan import nets
from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import Job, job_of
from fl_sim.native import kernel
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import from_json, to_json
from fl_sim.privacy.terms import rounded_up
from fl_sim.report.payments import with_whole_run
from fl_sim.simulation.client_ledgers import fingerprint
from fl_sim.simulation.run import Silent, run
from fl_sim.simulation.stage import stages_of
from fl_sim.stages.dafl import pool as pools
from fl_sim.stages.dafl.pool import pool_key
from fl_sim.stages.dafl.stage import settings_of
from fl_sim.store.run_directory import RoundRecord, read_rounds

pytestmark = pytest.mark.usefixtures("quick_accounting")

QUICK = ("model=logistic", "rounds=2", "engine=inprocess", "preprocess.generator=mean-embedding")

SEEDED = ("preprocess.noise=seeded", "preprocess.labels.epsilon=0.5")


class _Stop(Silent):
    def finished_round(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


def _made(*overrides: str) -> Experiment:
    is_other = any(one.startswith("preprocess.generator=") for one in overrides)
    few = () if is_other else ("preprocess.generator.frequencies=8",)  # a hundredth of the noise to draw
    return experiment_from(with_overrides({"preprocess": "da-fl"}, [*QUICK, *few, *overrides]))


def _job(*overrides: str) -> Job:
    """Return a job whose data are the digits whatever they are called."""
    return replace(job_of(_made()), experiment=_made(*overrides))


def _statement(result: dict[str, Any], unit: str) -> dict[str, Any]:
    (one,) = (statement for statement in result["privacy"] if statement["unit"] == unit)
    return one


def test_a_run_states_what_its_pool_costs_a_record_and_that_the_main_task_is_not_private(tmp_path: Path) -> None:
    result = run(_made("preprocess.epsilon=10"), tmp_path / "run")
    made, said = result["preprocess"], _statement(result, "record")
    assert made["num_synthetic"] == sum(sum(client["counts"]) for client in made["clients"]) > 0
    assert said["epsilon"] <= said["epsilon_sum"] <= 10.0
    assert said["epsilon_labels"] == 0.1
    assert said["delta"] == 1e-5
    assert said["adjacency"] == "add-or-remove-one"
    assert "main task is NOT private" in said["does_not_cover"]
    tensors = load_file(tmp_path / "run" / made["pool"])
    assert tensors["inputs"].dtype == torch.uint8
    assert len(tensors["inputs"]) == len(tensors["labels"]) == made["num_synthetic"]
    count, told = made["num_synthetic"], result["bytes"]
    assert told["before"]["synthetic_records"] == {"down": 10 * count * (64 + 8), "up": 10 * 128 + count * 64 * 4}
    assert told["total"] == {
        way: told["rounds"][way] + told["before"]["synthetic_records"][way] for way in told["total"]
    }
    assert "client_accuracy" not in result["measures"]


def test_runs_that_differ_in_the_method_share_one_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(_made(), tmp_path / "first")
    monkeypatch.setattr(pools, "ask_clients", lambda *_: pytest.fail("the pool was made again"))
    second = run(_made("algorithm=scaffold", "rounds=3"), tmp_path / "second")
    assert not first["preprocess"]["reused"]
    assert second["preprocess"]["reused"]
    assert first["preprocess"]["pool"] == second["preprocess"]["pool"]
    assert first["privacy"] == second["privacy"]


@pytest.mark.parametrize(
    "change",
    [
        "algorithm=fedprox",
        "rounds=7",
        "local.epochs=3",
        "preprocess.train_on=synthetic",
        "model=mlp",
        "preprocess.server_epochs=4",
    ],
)
def test_a_pool_does_not_depend_on_the_main_task(change: str) -> None:
    assert pool_key(_job()) == pool_key(_job(change))


@pytest.mark.parametrize(
    "change",
    [
        "seed=1", "clients=9", "partition=label-2", "preprocess.epsilon=9", "preprocess.gamma=0.06", "data=mnist",
        "preprocess.delta=1e-6", "preprocess.noise=seeded", "preprocess.labels=geometric",
        "preprocess.generator=dp-cgan",
    ],
)  # fmt: skip
def test_a_pool_is_named_by_all_that_determines_it(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "fingerprint", lambda data, root: data)
    assert pool_key(_job()) != pool_key(_job(change))


def test_a_pool_is_named_by_the_records_themselves() -> None:
    train = load("digits", None).train
    records = hashlib.sha256(train.inputs.tobytes() + train.labels.tobytes()).hexdigest()
    assert fingerprint("digits", None) == records


def test_a_damaged_pool_is_named_and_not_used(tmp_path: Path) -> None:
    run(_made(), tmp_path / "first")
    (pool,) = (tmp_path / ".pools").rglob("synthetic-*.safetensors")
    content = bytearray(pool.read_bytes())
    content[-1] ^= 1
    pool.write_bytes(content)
    with pytest.raises(UserError, match=r"the pool in .* is damaged: delete that folder"):
        run(_made(), tmp_path / "second")


def test_training_on_the_pool_alone_is_private_from_end_to_end(tmp_path: Path) -> None:
    made = _made("preprocess.train_on=synthetic", "preprocess.gamma=0.5", "preprocess.generator.frequencies=80")
    result = run(made, tmp_path / "run")
    assert _statement(result, "record")["covers"].startswith("everything this run releases")
    assert "NOT private" not in _statement(result, "record")["does_not_cover"]
    assert result["final_accuracy"] > 0.3


def test_the_server_may_begin_with_the_pool_it_holds(tmp_path: Path) -> None:
    plain = run(_made("preprocess.gamma=0.5", *SEEDED), tmp_path / "plain")
    begun = run(_made("preprocess.gamma=0.5", *SEEDED, "preprocess.server_epochs=10"), tmp_path / "begun")
    assert begun["preprocess"]["reused"]
    assert begun["preprocess"]["server_epochs"] == 10
    assert _statement(begun, "record") == _statement(plain, "record")  # post-processing
    first = [read_rounds(tmp_path / out)[0].test_accuracy for out in ("plain", "begun")]
    assert first[1] > first[0] + 0.1


def test_clients_may_leave_the_pool_to_the_server(tmp_path: Path) -> None:
    settings = ("preprocess.gamma=0.5", *SEEDED, "preprocess.server_epochs=10", "rounds=1")
    own = _made(*settings, "preprocess.train_on=own")
    result = run(own, tmp_path / "run")
    assert result["bytes"]["before"]["synthetic_records"]["down"] == 0
    assert "NOT private" in _statement(result, "record")["does_not_cover"]
    both = run(_made(*settings), tmp_path / "both")
    assert both["preprocess"]["reused"]  # the same pool
    counts = [job_of(one) for one in (own, _made(*settings))]
    assert [sum(stage.num_pooled() > 0 for stage in stages_of(job)) for job in counts] == [0, 1]
    assert result["final_accuracy"] != both["final_accuracy"]


def test_a_run_that_goes_on_does_not_begin_with_the_pool_again(tmp_path: Path) -> None:
    made = _made("preprocess.gamma=0.5", *SEEDED, "preprocess.server_epochs=3", "rounds=2")
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "broken", observer=_Stop())
    assert run(made, tmp_path / "broken")["final_accuracy"] == run(made, tmp_path / "whole")["final_accuracy"]
    models = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("broken", "whole")]
    assert models[0] == models[1]


def test_global_dp_on_top_says_that_its_clients_are_not_hidden_in_the_pool(tmp_path: Path) -> None:
    result = run(_made("aggregator=global-dp", "aggregator.noise=seeded", "sampler=poisson:0.5"), tmp_path / "run")
    assert [statement["unit"] for statement in result["privacy"]] == ["client", "record"]
    assert "protected per record, not per client" in _statement(result, "client")["does_not_cover"]
    assert "another statement covers its global models, per client" in _statement(result, "record")["does_not_cover"]


def test_pool_and_private_rounds_together_cost_a_record_the_sum(tmp_path: Path) -> None:
    private = (
        "aggregator=global-dp",
        "aggregator.noise=seeded",
        "aggregator.noise_multiplier=6",
        "sampler=full",
        "rounds=4",
    )
    result = run(_made(*private), tmp_path / "run")
    client, record = (_statement(result, unit) for unit in ("client", "record"))
    replaced = epsilon_of_counts({GaussianDpEvent(3.0): 4}, 1e-5, accountant="pld")  # it moves the sum by two norms
    assert client["epsilon"] == pytest.approx(epsilon_of_counts({GaussianDpEvent(6.0): 4}, 1e-5, accountant="pld"))
    assert record["epsilon_whole_run"] == pytest.approx(record["epsilon"] + replaced, rel=1e-3)
    assert record["delta_whole_run"] == 2e-5
    assert f"({rounded_up(record['epsilon_whole_run'])}, 2e-05)" in record["guarantee"]


def test_no_event_of_the_rounds_is_lost_where_two_become_one() -> None:
    """Two rates that are rounded up to one: the second must not take the place of the first."""
    rates = (0.5, 0.5 - 2.0**-30)
    listed = [{"event": to_json(PoissonSampledDpEvent(rate, GaussianDpEvent(4.0))), "times": 5} for rate in rates]

    def cost(*some: dict[str, Any]) -> float:
        of_client = {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "planned_events": [*some]}
        of_record = {"unit": "record", "epsilon": 0.0, "delta": 0.0, "planned_events": []}
        [_, record] = with_whole_run([of_client, of_record], {"kind": "none"})
        return float(record["epsilon_whole_run"])

    assert cost(*listed) == cost(listed[0] | {"times": 10}) > 1.2 * cost(listed[0])


def test_rounds_on_the_pool_alone_cost_a_record_nothing_more(tmp_path: Path) -> None:
    private = ("aggregator=global-dp", "aggregator.noise=seeded", "sampler=poisson:0.5")
    said = _statement(run(_made(*private, "preprocess.train_on=synthetic"), tmp_path / "run"), "record")
    assert said["epsilon_whole_run"] is None
    assert said["covers"].startswith("everything this run releases")


def test_epsilon_inf_is_no_guarantee(tmp_path: Path) -> None:
    said = _statement(run(_made(f"preprocess.epsilon={math.inf}"), tmp_path / "run"), "record")
    assert said["epsilon"] is None
    assert said["guarantee"].startswith("none")


def test_the_pool_costs_what_its_most_expensive_client_costs(tmp_path: Path) -> None:
    small = ("preprocess.generator=dp-cgan", "preprocess.generator.discriminator_steps=3")
    made = _made("clients=3", "partition=dirichlet:0.3", *small, "preprocess.generator.batch_size=20")
    result = run(made, tmp_path / "run")
    facts = [client["facts"] for client in result["preprocess"]["clients"] if client["facts"]]
    spent = []
    for one in facts:
        labels, generator, steps = from_json(one["labels"]), from_json(one["generator"]), one["generator_steps"]
        together = epsilon_of_counts({labels: 1, generator: steps}, 1e-5)
        spent.append(min(together, 0.1 + epsilon_of_counts({generator: steps}, 1e-5)))
    assert len(set(spent)) > 1
    assert _statement(result, "record")["epsilon"] == max(spent)


def test_a_result_says_who_took_the_generators_steps_when_the_pool_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("preprocess.generator=dp-cgan", "preprocess.generator.discriminator_steps=2", "clients=2")
    with monkeypatch.context() as without:
        for module in (nets, kernel):
            without.setattr(module, "load_kernel", lambda: (None, "it was not compiled"))
        first = run(_made(*small), tmp_path / "first")
    again, other = run(_made(*small), tmp_path / "again"), run(_made(*small, "seed=1"), tmp_path / "other")
    told = [result["preprocess"]["trainer"] for result in (first, again, other)]
    assert told[:2] == ["PyTorch: there is no native trainer here, it was not compiled"] * 2
    assert told[2] == settings_of(_made(*small)).generator.trainer()
    assert run(_made(), tmp_path / "one release")["preprocess"]["trainer"] is None


class _Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def preparing(self, what: str) -> None:
        self.lines.append(what)

    def finished_round(self, record: RoundRecord) -> None:
        self.lines.append(f"round {record.round}")


def test_a_pool_of_nothing_is_warned_of_before_the_first_round_with_what_helps(tmp_path: Path) -> None:
    heard = _Heard()
    result = run(_made("partition=iid", "preprocess.noise=seeded"), tmp_path / "run", observer=heard)
    assert [part["counts"] for part in result["preprocess"]["clients"]] == [(0,) * 10] * 10
    [warning] = [line for line in result["warnings"] if "released no" in line]
    assert warning.startswith("10 of 10 clients released no synthetic records; client 0: no class was selected")
    assert "if it holds about 100 records of this class or more (preprocess.labels.epsilon=0.1, gamma=0.05)" in warning
    assert warning.endswith("take a larger preprocess.labels.epsilon, or fewer clients")
    assert heard.lines.index(warning) < heard.lines.index("round 1")


@pytest.mark.parametrize(("gamma", "needed"), [("0.5", "94"), ("1", "93")])
def test_classes_of_which_a_pool_has_no_record_are_warned_of(gamma: str, needed: str, tmp_path: Path) -> None:
    chosen = ("partition=iid", "clients=2", "preprocess.noise=seeded", "preprocess.train_on=synthetic",
              f"preprocess.gamma={gamma}")  # fmt: skip
    result = run(_made(*chosen), tmp_path / "run")
    counts = np.sum([part["counts"] for part in result["preprocess"]["clients"]], axis=0)
    absent = np.flatnonzero(counts == 0)
    assert 0 < len(absent) < 10
    [warning] = [line for line in result["warnings"] if line.startswith("the pool of ")]
    assert f"{counts.sum():,} synthetic records has none of {len(absent)} of 10 classes " in warning
    assert f"({', '.join(map(str, absent))}): models train only on it and never see these classes" in warning
    assert f"about {needed} records of this class or more (preprocess.labels.epsilon=0.1, gamma={gamma})" in warning


def test_a_pool_of_all_classes_is_not_warned_of(tmp_path: Path) -> None:
    assert run(_made("preprocess.noise=seeded", "preprocess.labels.epsilon=1"), tmp_path / "run")["warnings"] == []


def test_clients_that_release_nothing_are_warned_about_and_the_run_goes_on(tmp_path: Path) -> None:
    # Epsilon 0.3 for the generator, too little for small clients; and so much for the labels that large ones pick some.
    budget = ("preprocess.epsilon=2.3", "preprocess.labels=exponential:2")
    chosen = (*budget, "preprocess.generator.discriminator_steps=50", "preprocess.generator=dp-cgan")
    result = run(_made(*chosen, "partition=quantity:0.3"), tmp_path / "run")
    refused = [client for client, part in enumerate(result["preprocess"]["clients"]) if part["refused"]]
    assert 0 < len(refused) < 10
    [warning] = [one for one in result["warnings"] if "released no synthetic records" in one]
    assert warning.startswith(f"{len(refused)} of 10 clients released no synthetic records; client {refused[0]}: ")
    assert warning.endswith("; take a larger preprocess.epsilon, or fewer clients")


def test_a_budget_within_which_no_client_can_release_anything_is_refused_beforehand(tmp_path: Path) -> None:
    chosen = ("preprocess.epsilon=0.101", "preprocess.generator.discriminator_steps=50", "preprocess.generator=dp-cgan")
    for further in ((), ("preprocess.train_on=synthetic",)):
        with pytest.raises(UserError, match=r"preprocess.epsilon=0.101 .*no client"):
            run(_made(*chosen, *further), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_an_interrupted_run_goes_on_with_the_pool_it_had(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(_made(), tmp_path / "run", observer=_Stop())
    whole = run(_made(), tmp_path / "whole")
    resumed = run(_made(), tmp_path / "run")
    assert resumed["preprocess"]["reused"]
    assert (
        load_file(tmp_path / "run" / "model.safetensors").keys()
        == load_file(tmp_path / "whole" / "model.safetensors").keys()
    )
    assert resumed["final_accuracy"] == whole["final_accuracy"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_run_whose_pool_is_gone_does_not_go_on_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made_again: bool
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(_made(), tmp_path / "run", observer=_Stop())
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / "other"))
    if is_made_again:
        run(_made(), tmp_path / "second")
    monkeypatch.setattr(pools, "ask_clients", lambda *_: pytest.fail("a second release"))
    with pytest.raises(UserError, match=r"the rounds in .*run used the pool synthetic-.*: restore that folder"):
        run(_made(), tmp_path / "run")


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold", "fednova", "fedmix", "fedadam"])
def test_every_algorithm_trains_with_the_pool(tmp_path: Path, algorithm: str) -> None:
    result = run(_made(f"algorithm={algorithm}", "rounds=1"), tmp_path / "run")
    assert result["status"] == "finished"


def test_each_client_may_have_a_gamma_of_its_own(tmp_path: Path) -> None:
    gammas = [0.0, 0.2, *[0.1] * 8]
    plain = _made("preprocess.labels=exponential:2")  # secret noise, and little of it: the counts are far apart
    made = experiment_from(
        {**plain.model_dump(), "preprocess": {**plain.preprocess.model_dump(), "client_gammas": gammas}}
    )
    counts = [sum(client["counts"]) for client in run(made, tmp_path / "run")["preprocess"]["clients"]]
    assert counts[0] == 0
    assert counts[1] > 1.5 * counts[2]
    with pytest.raises(UserError, match=r"client_gammas has 2 values for 10 clients"):
        experiment_from({"preprocess": {"kind": "da-fl", "client_gammas": [0.1, 0.2]}})


def test_settings_reach_into_the_generator_and_the_label_picker() -> None:
    made = _made("preprocess=da-fl:3", "preprocess.labels=geometric", "preprocess.labels.epsilon=0.2",
                 "preprocess.generator=dp-cgan", "preprocess.generator.batch_size=64")  # fmt: skip
    assert made.preprocess.epsilon == 3.0
    assert (made.preprocess.labels.kind, made.preprocess.labels.epsilon) == ("geometric", 0.2)
    assert (made.preprocess.generator.kind, made.preprocess.generator.batch_size) == ("dp-cgan", 64)
    again = Experiment.model_validate_json(_made(f"preprocess.epsilon={math.inf}").model_dump_json())
    assert again.preprocess.epsilon == math.inf
    with pytest.raises(UserError, match="valid: dp-cgan, mean-embedding, marginals"):
        _made("preprocess.generator=gan")


def test_a_key_inside_the_default_generator_needs_no_kind() -> None:
    table = {"preprocess": {"kind": "da-fl", "generator": {"batch_size": 64}, "labels": {"epsilon": 0.3}}}
    made = experiment_from(table)
    assert (made.preprocess.generator.kind, made.preprocess.generator.batch_size) == ("dp-cgan", 64)
    assert (made.preprocess.labels.kind, made.preprocess.labels.epsilon) == ("exponential", 0.3)
    with pytest.raises(UserError, match=r"unknown key 'preprocess.generator.batchsize' \(did you mean 'batch_size'"):
        experiment_from({"preprocess": {"kind": "da-fl", "generator": {"batchsize": 64}}})


def test_what_does_not_fit_the_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"preprocess.epsilon = 0.5 is used up by the labels \(1\)"):
        run(_made("preprocess.epsilon=0.5", "preprocess.labels.composition=sequential"), tmp_path / "run")
    features = np.random.default_rng(0).random((40, 5), dtype=np.float32)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "f.npz", x_train=features, y_train=labels, x_test=features, y_test=labels)
    table = (f"data=npz:{tmp_path / 'f.npz'}", "partition=iid", "model=mlp")
    with pytest.raises(UserError, match=r"mean-embedding .*images, .*shape \(5,\)"):
        run(_made(*table), tmp_path / "run")
    with pytest.raises(UserError, match='networks "paper" need images'):
        run(_made(*table, "preprocess.generator=dp-cgan", "preprocess.generator.networks=paper"), tmp_path / "run")
    with pytest.raises(UserError, match="marginals is for tables"):
        run(_made("preprocess.generator=marginals"), tmp_path / "run")
    np.savez(tmp_path / "wide.npz", x_train=3 * features, y_train=labels, x_test=features, y_test=labels)
    with pytest.raises(UserError, match=r"0 to 1, .*npz:.* scale each column"):
        run(_made(f"data=npz:{tmp_path / 'wide.npz'}", *table[1:], "preprocess.generator=marginals"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_is_released_by_marginals_and_trained_on_alone(tmp_path: Path) -> None:
    """One-class clients; the label follows the first column, and the pool says so."""
    labels = np.arange(1200) % 2
    features = np.random.default_rng(0).random((1200, 3), dtype=np.float32)
    features[:, 0] = 0.25 + 0.5 * labels
    np.savez(tmp_path / "f.npz", x_train=features, y_train=labels, x_test=features, y_test=labels)
    settings = ("preprocess.generator=marginals", "preprocess.train_on=synthetic", "preprocess.gamma=0.5", "clients=2")
    own = (f"data=npz:{tmp_path / 'f.npz'}", "evaluate.test_is_public=true")
    result = run(_made(*own, "partition=label-1", *settings, *SEEDED), tmp_path / "run")
    assert result["preprocess"]["generator"] == "marginals"
    (said,) = result["privacy"]
    assert said["covers"].startswith("everything this run releases")
    assert 9 < said["epsilon"] <= 10
    kinds = {one["event"]["kind"] for one in said["events"]}
    assert kinds == {"bounded-range", "zcdp"}
    pool = load_file(next((tmp_path / "run").glob("synthetic-*.safetensors")))
    means = [pool["inputs"][pool["labels"] == label][:, 0].float().mean() / 255 for label in (0, 1)]
    assert means == pytest.approx([0.25, 0.75], abs=0.1)
