"""What a run measures of its models, by what it calls a round the best, and when it stops early."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from safetensors.torch import load_file
from scipy.stats import entropy

from fl_sim.data import Features, load
from fl_sim.errors import UserError
from fl_sim.experiment import job as wiring
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.simulation.client_runtime import evaluation_records, validation_records
from fl_sim.simulation.engine_choice import client_app
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import RunLog, Silent, result_of
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, read_rounds
from fl_sim.testing_runs import FakeEngine, played_by
from fl_sim.training.evaluation import Confusion, Holdings
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset, ServerState

QUICK = ("model=logistic", "rounds=3", "engine=inprocess", "local.batch_size=32")


def quick(*overrides: str) -> Experiment:
    return experiment_from(with_overrides({}, [*QUICK, *overrides]))


def _validated(job):
    return job.dataset.train.take(np.concatenate(job.validation))


def test_the_model_is_validated_on_what_all_clients_hold_out_with_true_labels() -> None:
    job = job_of(quick("evaluate.validation=0.1", "attack=label-flip:2", "partition=iid"))
    records = validation_records(job)
    inputs, labels = to_tensors(_validated(job), job.dataset)
    assert torch.equal(records.normalised(records.inputs).cpu(), inputs)
    assert torch.equal(records.labels.cpu(), labels)


def test_one_holder_of_all_records_has_no_worst_tenth_of_clients(tmp_path: Path) -> None:
    result = run(quick("algorithm=centralized", "rounds=2"), tmp_path / "central")
    assert not {name for name in result["measures"] if name.startswith("client_")}
    assert result["measures"]["left_out"]["client_accuracy"].startswith("one client holds all records")
    assert [record.client_worst_tenth for record in read_rounds(tmp_path / "central")] == [None, None]
    federated = run(quick("rounds=2", "partition=label-2"), tmp_path / "federated")
    measured = federated["measures"]
    assert measured["client_worst_tenth"] < measured["client_accuracy"]
    assert measured["left_out"] == {}


def test_validation_records_are_seen_with_the_clients_own_noise() -> None:
    job = job_of(quick("evaluate.validation=0.3", "partition=feature-noise:1"))
    records = validation_records(job)
    clean, _ = to_tensors(_validated(job), job.dataset)
    noise = torch.split(records.inputs.cpu() - clean, [len(part) for part in job.validation])
    assert float(noise[-1].std()) > 2.5 * float(noise[0].std()) > 0  # the variance of client i grows with i


def test_the_best_round_is_chosen_on_validation_where_there_is_one(tmp_path: Path) -> None:
    result = run(quick("evaluate.validation=0.2", "rounds=6", "local.learning_rate=0.3"), tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    best = max(rounds, key=lambda one: one.validation_accuracy or 0)
    assert (result["best_round"], result["best_chosen_on"]) == (best.round, "validation")
    assert result["best_accuracy"] == best.test_accuracy
    assert result["validation"]["best_accuracy"] == best.validation_accuracy
    assert result["validation"]["final_accuracy"] == rounds[-1].validation_accuracy
    assert all(one.validation_loss for one in rounds)


def test_without_validation_the_best_round_is_the_tests_and_said_to_be(tmp_path: Path) -> None:
    result = run(quick(), tmp_path / "run")
    assert result["best_chosen_on"] == "test"
    assert result["best_accuracy"] == max(one.test_accuracy or 0 for one in read_rounds(tmp_path / "run"))
    assert "validation" not in result
    written = [(tmp_path / "run" / name).read_text() for name in ("rounds.jsonl", "config.toml")]
    assert all("validation" not in text and "evaluate]" not in text for text in written)


def test_validation_decides_between_the_last_round_and_the_calibrated_model(tmp_path: Path) -> None:
    chosen = quick("evaluate.validation=0.2", "calibrate=ccvr:50", "partition=dirichlet:0.5", "model=mlp", "rounds=1")
    result = run(chosen, tmp_path / "run")
    (last,) = read_rounds(tmp_path / "run")
    after = result["calibrate"]["accuracy_after"]
    validated = result["validation"]["final_accuracy"]
    assert last.validation_accuracy is not None
    assert result["best_accuracy"] == (after if validated > last.validation_accuracy else last.test_accuracy)
    assert result["final_accuracy"] == after


def test_the_test_records_decide_nothing_where_there_is_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = quick("evaluate.validation=0.2")
    plain = run(chosen, tmp_path / "plain")

    def with_other_test(name: str, root: Path | None, features: Features) -> Dataset:
        dataset = load(name, root, features)
        return replace(dataset, test=replace(dataset.test, labels=dataset.test.labels[::-1].copy()))

    monkeypatch.setattr(wiring, "load", with_other_test)
    other = run(chosen, tmp_path / "other")
    assert plain["validation"] == other["validation"]
    assert plain["best_round"] == other["best_round"]
    assert plain["best_accuracy"] != other["best_accuracy"]


@pytest.mark.parametrize("calibration", ["none", "ccvr:50"])
def test_a_run_that_never_tests_reads_no_test_record_and_trains_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibration: str
) -> None:
    chosen = ("evaluate.validation=0.2", f"calibrate={calibration}", "partition=dirichlet:0.5")
    tested = run(quick(*chosen), tmp_path / "tested")

    def without_test(name: str, root: Path | None, features: Features) -> Dataset:
        dataset = load(name, root, features)
        return replace(dataset, test=replace(dataset.test, labels=dataset.test.labels + 10**6))  # no class of the model

    monkeypatch.setattr(wiring, "load", without_test)
    result = run(quick(*chosen, "evaluate.test=never"), tmp_path / "run")
    assert result["final_accuracy"] is None
    assert result["best_accuracy"] is None
    assert result["validation"] == tested["validation"]
    assert result["best_round"] == tested["best_round"]
    assert [one.test_accuracy for one in read_rounds(tmp_path / "run")] == [None] * 3
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("tested", "run")]
    assert models[0] == models[1]


def test_the_test_records_may_be_looked_at_once_after_the_last_round(tmp_path: Path) -> None:
    chosen = quick("evaluate.test=last", "evaluate.validation=0.2")
    result = run(chosen, tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    assert [one.test_accuracy is None for one in rounds] == [True, True, False]
    assert all(one.validation_accuracy is not None for one in rounds)
    assert result["final_accuracy"] == result["best_accuracy"] == rounds[-1].test_accuracy
    assert result["best_round"] == 3
    of_all_rounds = {name: result["measures"][name] for name in ("accuracy_of_last_ten", "accuracy_area", "reached")}
    assert not any(of_all_rounds.values())
    assert set(of_all_rounds) <= set(result["measures"]["left_out"])
    assert result["measures"]["balanced_accuracy"] > 0


def test_a_run_that_began_before_there_was_validation_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    settings = job_of(quick()).experiment.model_dump(exclude_none=True, exclude={"evaluate"})
    run_directory.write_config(out, settings)  # as it lies in the directories of that time
    result, new = run(quick(), out), run(quick(), tmp_path / "new")
    again = run(quick(), out)
    assert again == result
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "new" / "model.safetensors").read_bytes()
    assert result["final_accuracy"] == new["final_accuracy"]


def _curve(out: Path) -> list[tuple[float | None, ...]]:
    return [(one.test_accuracy, one.validation_accuracy, one.validation_loss) for one in read_rounds(out)]


@pytest.mark.parametrize("name", ["patience=5", "target_accuracy=0.9"])
def test_without_validation_nothing_stops_a_run_early(name: str) -> None:
    with pytest.raises(UserError, match=f"evaluate.{name} stops a run by its validation accuracy, and there are no"):
        quick(f"evaluate.{name}")


def test_patience_ends_a_run_that_many_rounds_after_its_best_validation(tmp_path: Path) -> None:
    chosen = ("evaluate.validation=0.2", "rounds=16", "local.learning_rate=0.3", "partition=iid")
    whole = run(quick(*chosen), tmp_path / "whole")
    stopped = run(quick(*chosen, "evaluate.patience=3"), tmp_path / "stopped")
    accuracies = [one.validation_accuracy or 0 for one in read_rounds(tmp_path / "whole")]
    last = next(end for end in range(4, 16) if max(accuracies[:end]) == max(accuracies[: end - 3]))
    assert stopped["rounds"] == last < whole["rounds"]
    assert stopped["best_round"] == last - 3
    assert f"of round {last - 3} in the 3 rounds after it (evaluate.patience=3)" in stopped["stopped"]
    assert _curve(tmp_path / "stopped") == _curve(tmp_path / "whole")[:last]


def test_a_target_ends_a_run_in_the_first_evaluated_round_that_reaches_it(tmp_path: Path) -> None:
    result = run(
        quick(
            "evaluate.validation=0.2", "evaluate.target_accuracy=0.8", "rounds=16", "partition=iid", "evaluate_every=2"
        ),
        tmp_path / "run",
    )
    *_, before, last = (one.validation_accuracy for one in read_rounds(tmp_path / "run") if one.validation_accuracy)
    assert before < 0.8 <= last
    assert result["rounds"] % 2 == 0
    assert "reaches the target of 80 %" in result["stopped"]


@pytest.mark.parametrize("after", [2, 100])
def test_a_run_that_is_stopped_early_ends_in_the_same_bits_after_a_kill(tmp_path: Path, after: int) -> None:
    chosen = quick(
        "evaluate.validation=0.2", "evaluate.patience=2", "rounds=16", "local.learning_rate=0.3", "partition=iid"
    )
    whole = run(chosen, tmp_path / "whole")
    last = min(after, whole["rounds"])

    class Killed(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == last:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path / "killed", observer=Killed())
    again = run(chosen, tmp_path / "killed")
    for name in ("stopped", "rounds", "best_round", "best_accuracy", "validation", "bytes"):
        assert again[name] == whole[name]
    assert {**again["measures"], "reached": None} == {**whole["measures"], "reached": None}  # which tells seconds
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_the_measures_are_those_of_the_model_that_is_saved(tmp_path: Path) -> None:
    chosen = quick("partition=label-2")
    result, job = run(chosen, tmp_path / "run"), job_of(chosen)
    test, model = evaluation_records(job), load_file(tmp_path / "run" / "model.safetensors")
    scores = job.trainer.evaluate(model, test.inputs, test.labels)
    told, confusion = result["measures"], Confusion.of(scores, 10)
    assert told["confusion"] == confusion.counts.tolist()
    assert told["balanced_accuracy"] == confusion.balanced_accuracy
    assert told["macro_f1"] == confusion.macro_f1
    assert told["recalls"] == confusion.recalls.tolist()
    assert told["majority_share"] == np.bincount(job.dataset.test.labels).max() / len(job.dataset.test)
    assert told["auc"] is None
    clients = [confusion.recalls[job.dataset.train.labels[shard]].mean() for shard in job.shards]
    assert told["client_accuracy"] == pytest.approx(np.mean(clients))
    assert told["client_worst_tenth"] == pytest.approx(min(clients))
    last = read_rounds(tmp_path / "run")[-1]
    assert told["client_entropy"] == last.client_entropy == pytest.approx(entropy(clients))
    assert (last.balanced_accuracy, last.client_accuracy) == (told["balanced_accuracy"], told["client_accuracy"])


@pytest.mark.usefixtures("quick_accounting")
def test_under_privacy_nothing_is_told_that_follows_from_whose_records_are_where(tmp_path: Path) -> None:
    private = ("aggregator=global-dp", "aggregator.noise_multiplier=1", "sampler=poisson:0.5", "rounds=2")
    results = []
    for partition in ("iid", "label-1"):
        results.append(run(quick(*private, f"partition={partition}"), tmp_path / partition))
        for one in read_rounds(tmp_path / partition):
            assert (one.client_accuracy, one.client_worst_tenth, one.client_entropy) == (None,) * 3
            assert one.bytes_down is one.bytes_up is None
            assert one.balanced_accuracy is not None
    assert results[0]["bytes"] == results[1]["bytes"]
    assert results[0]["bytes"]["total"] is results[0]["bytes"]["rounds"] is None
    assert "the cohort is secret" in results[0]["bytes"]["left_out"]["rounds"]
    assert "client_accuracy" not in results[0]["measures"]
    assert "private" in results[0]["measures"]["left_out"]["client_accuracy"]
    taken = [step for one in results for step in one["measures"]["reached"].values()]
    assert all(step["bytes"] is step["seconds"] is None for step in taken)


def _weight(message: Message) -> int:
    """Return what a message weighs, by pickling its arrays."""
    groups = [one for one in message.content.values() if isinstance(one, ArrayRecord)]
    return sum(len(pickle.loads(pickle.dumps(array)).data) for group in groups for array in group.values())


@pytest.mark.parametrize(
    "chosen",
    [
        ["algorithm=fedavg", "sampler=fixed-size:3"],
        ["algorithm=scaffold", "partition=dirichlet:0.5"],
        ["algorithm=fedmix", "partition=iid"],
        ["calibrate=ccvr:50", "partition=dirichlet:0.5", "model=mlp"],
    ],
)
def test_the_bytes_of_a_run_are_those_that_travel(tmp_path: Path, chosen: list[str]) -> None:
    experiment = quick(*chosen, "rounds=2")
    plays, travelled = played_by(client_app(), 10), Counter[str]()

    def counted(client: int, message: Message) -> RecordDict | Message | None:
        reply = plays(client, message)
        assert isinstance(reply, Message)
        travelled.update(down=_weight(message), up=_weight(reply))
        return reply

    told = run(experiment, tmp_path / "run", grid=FakeEngine(10, counted))["bytes"]
    pool = told["before"].get("shared_records", {"down": 0})["down"]  # lies on a disk, which all clients read
    assert told["total"] == {"down": travelled["down"] + pool, "up": travelled["up"]}
    each, cohort = told["each_client_in_a_round"], read_rounds(tmp_path / "run")[0].cohort or 0
    assert told["rounds"] == {way: 2 * cohort * count for way, count in each.items()}
    if "algorithm=scaffold" in chosen:
        plain = run(quick("rounds=1"), tmp_path / "plain")["bytes"]["each_client_in_a_round"]
        assert each == {way: 2 * count for way, count in plain.items()}


def test_rounds_of_an_earlier_version_leave_the_bytes_unknown(tmp_path: Path) -> None:
    out = tmp_path / "run"

    class Killed(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick(), out, observer=Killed())
    log = RunLog(ServerState({}))
    log.rounds = [replace(one, bytes_down=None, bytes_up=None) for one in read_rounds(out)]
    told = result_of(job_of(quick()), log, "finished", 1.0)
    assert told["bytes"]["total"] is None
    assert "earlier version" in told["bytes"]["left_out"]["rounds"]


def test_where_the_last_round_alone_is_tested_it_is_the_one_that_patience_ends_at(tmp_path: Path) -> None:
    chosen = ("evaluate.validation=0.2", "rounds=16", "local.learning_rate=0.3", "partition=iid", "evaluate.patience=2")
    always = run(quick(*chosen), tmp_path / "always")
    once = run(quick(*chosen, "evaluate.test=last"), tmp_path / "once")
    assert once["rounds"] == always["rounds"] < 16
    assert [one.test_accuracy is not None for one in read_rounds(tmp_path / "once")] == [False] * (
        once["rounds"] - 1
    ) + [True]
    assert once["final_accuracy"] == always["final_accuracy"]
    assert once["measures"]["confusion"] == always["measures"]["confusion"]
    assert (once["best_chosen_on"], once["best_round"]) == ("last", once["rounds"])
    assert once["validation"] == always["validation"]


def test_a_run_that_stopped_in_the_last_round_that_it_had_says_so_and_takes_no_more(tmp_path: Path) -> None:
    chosen = ("evaluate.validation=0.2", "evaluate.target_accuracy=0.5", "local.learning_rate=0.3", "partition=iid")
    last = run(quick(*chosen, "rounds=16"), tmp_path / "whole")["rounds"]
    stopped = run(quick(*chosen, f"rounds={last}"), tmp_path / "run")["stopped"]
    assert stopped.endswith("reaches the target of 50 %")
    with pytest.raises(UserError, match="it stopped by itself"):
        run(quick(*chosen, "rounds=16"), tmp_path / "run")


def test_clients_are_measured_on_their_own_test_records_where_the_data_say_whose_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train, test = [("train", i % 4, i % 2) for i in range(80)], [("test", (0, 1, 9)[i % 3], i % 2) for i in range(30)]
    rows = [f"{label + rng.normal(0, 0.3)},{label},c{client},{part}" for part, client, label in train + test]
    (tmp_path / "a.csv").write_text("x,label,client,split\n" + "\n".join(rows) + "\n")
    settings = {"data": f"csv:{tmp_path}/a.csv", "model": "logistic", "partition": "natural", "clients": 4,
                "rounds": 1, "engine": "inprocess"}  # fmt: skip
    result = run(experiment_from(settings), tmp_path / "own")
    own, tested = result["measures"], load(str(settings["data"])).test
    assert own["client_accuracy_is"] == (
        "accuracy on each client's own test records; 2 of 4 clients have none, and are left out; 10 test records "
        "belong to no client of this run, and are left out"
    )
    job = job_of(experiment_from(settings))
    model = load_file(tmp_path / "own" / "model.safetensors")
    logits = tested.inputs @ model["1.weight"].numpy().T + model["1.bias"].numpy()
    right = logits.argmax(1) == tested.labels
    accuracies = [right[tested.groups == job.dataset.train.groups[job.shards[client][0]]].mean() for client in (0, 1)]
    assert own["client_accuracy"] == pytest.approx(np.mean(accuracies))
    split = run(experiment_from({**settings, "partition": "iid"}), tmp_path / "iid")
    assert "with each class weighted by its share" in split["measures"]["client_accuracy_is"]
    private = {**settings, "aggregator": "global-dp", "sampler": "poisson:0.5", "evaluate": {"test_is_public": True}}
    assert "client_accuracy" in run(experiment_from(private), tmp_path / "private")["measures"]["left_out"]


def test_clients_are_weighed_by_all_that_they_hold_what_is_held_out_too() -> None:
    """Half of the records are held out, so that a client holds other counts with and without them."""
    job = job_of(quick("evaluate.validation=0.5", "partition=dirichlet:0.3", "clients=3"))
    holdings = Measuring.of(job).clients_by
    assert isinstance(holdings, Holdings)
    counts = np.zeros((3, job.dataset.num_classes), np.int64)
    np.add.at(counts, (holdings.owners, holdings.labels), holdings.counts)
    labels = job.dataset.train.labels
    for client in range(3):
        trained_on, held_out = (
            np.bincount(labels[part[client]], minlength=10) for part in (job.shards, job.validation)
        )
        assert counts[client].tolist() == (trained_on + held_out).tolist()
        assert held_out.sum() > 0


def test_what_it_took_to_an_accuracy_has_the_bytes_before_the_first_round(tmp_path):
    result = run(quick("algorithm=fedmix", "rounds=4", "clients=4", "partition=iid"), tmp_path / "run")
    before, rounds = result["bytes"]["before"]["shared_records"], read_rounds(tmp_path / "run")
    assert before["down"] > before["up"] > 0
    assert result["measures"]["reached"]
    for step in result["measures"]["reached"].values():
        in_rounds = sum(one.bytes_down + one.bytes_up for one in rounds[: step["round"]])
        assert step["bytes"] == before["down"] + before["up"] + in_rounds
