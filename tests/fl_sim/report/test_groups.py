"""Which runs are one line of a report: those that differ in the seed alone, and no others."""

import json

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.report.groups import group, labels
from fl_sim.report.runs import find, read_run
from fl_sim.settings_file import read_table
from fl_sim.simulation.run import run as run_experiment
from fl_sim.store.run_directory import write_config

SAMPLER = {"kind": "poisson", "sampling_rate": 0.1}


def grouped(tmp_path):
    groups, problems = group(find([tmp_path]).runs)
    assert problems == []
    return groups


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sampler": SAMPLER}, {"sampler": {"kind": "full"}}),
        ({"sampler": SAMPLER}, {"sampler": SAMPLER | {"sampling_rate": 0.2}}),
        ({"aggregator": {"kind": "mean"}}, {"aggregator": {"kind": "global-dp", "noise_multiplier": 1.0}}),
        ({"model": "mlp"}, {"model": "logistic"}),
        ({"clients": 2}, {"clients": 3}),
        ({"rounds": 1}, {"rounds": 2}),
        ({"local": {"epochs": 1}}, {"local": {"epochs": 2}}),
        ({"partition": {"kind": "label-k", "k": 1}}, {"partition": {"kind": "label-k", "k": 2}}),
        ({"algorithm": {"kind": "fedavg"}}, {"algorithm": {"kind": "scaffold"}}),
    ],
)
def test_runs_that_differ_in_a_setting_are_never_averaged(write_experiment, tmp_path, one, other):
    write_experiment("a", **one)
    write_experiment("b", **other, seed=1)
    found = grouped(tmp_path)
    assert [len(each.runs) for each in found] == [1, 1]
    names = labels(found)
    assert names[0] != names[1] or found[0].partition != found[1].partition


def test_runs_that_differ_in_the_seed_or_the_engine_are_one_line(write_experiment, tmp_path):
    for seed, engine in enumerate(("inprocess", "ray")):
        write_experiment(engine, sampler=SAMPLER, seed=seed, engine=engine)
    assert [len(each.runs) for each in grouped(tmp_path)] == [2]


def test_runs_on_other_splits_by_seed_are_no_doubles(write_experiment, tmp_path):
    for number, seeds in enumerate([{}, {"partition_seed": 1}, {"partition_seed": 2}, {"model_seed": 2}]):
        write_experiment(f"run-{number}", **seeds)
    found = grouped(tmp_path)
    assert [len(one.runs) for one in found] == [1, 1, 1, 1]
    assert len(set(labels(found))) == 4


def test_what_is_not_used_of_evaluate_is_no_difference_to_runs_from_before_there_was_any(write_experiment, tmp_path):
    unused = {"validation": 0.0, "test": "rounds", "patience": 0, "target_accuracy": 0.0}
    write_experiment("old")
    write_experiment("new", seed=1, evaluate=unused)
    write_experiment("held", seed=2, evaluate=unused | {"validation": 0.1})
    found = grouped(tmp_path)
    assert sorted(len(one.runs) for one in found) == [1, 2]
    assert sorted(labels(found)) == ["FedAvg", "FedAvg, evaluate.validation=0.1"]


def test_a_server_that_does_not_wait_is_part_of_the_methods_name(write_experiment, tmp_path):
    write_experiment("waits", server={"kind": "synchronous", "deadline": 0.0})
    buffered = write_experiment("buffered", server={"kind": "fedbuff", "buffer": 10})
    assert labels(grouped(tmp_path)) == ["FedAvg, fedbuff", "FedAvg"]
    result = json.loads((buffered / "result.json").read_text())
    result["titles"]["server"] = "FedBuff"
    (buffered / "result.json").write_text(json.dumps(result))
    assert labels(grouped(tmp_path)) == ["FedAvg, FedBuff", "FedAvg"]


def test_runs_of_other_code_are_no_seeds_of_one_line(tmp_path):
    identities = [{"code": {"mine": "a"}}, {"code": {"mine": "a"}}, {"code": {"mine": "b"}}]
    folders = [tmp_path / str(seed) for seed in range(3)]
    for seed, (folder, identity) in enumerate(zip(folders, identities, strict=True)):
        run_experiment(experiment_from({"model": "logistic", "rounds": 1, "clients": 2, "seed": seed}), folder)
        settings = read_table(folder / "config.toml")
        write_config(folder, settings, identity)
    groups, _ = group([read_run(folder) for folder in folders])
    assert [len(one.runs) for one in groups] == [2, 1]
    assert all("identity.code=" in label for label in labels(groups))
