"""Which runs are one line of a report: those that differ in the seed alone, and no others."""

import json
from dataclasses import replace

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.report.groups import group, labels, panels
from fl_sim.report.runs import find, read_run
from fl_sim.settings import read_table
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


def test_a_bound_of_the_users_own_stays_one_where_some_of_its_seeds_have_not_finished(write_experiment):
    unfinished, finished = (write_experiment(str(seed), algorithm={"kind": "mine:Bound"}, seed=seed) for seed in (0, 1))
    result = json.loads((finished / "result.json").read_text())
    (finished / "result.json").write_text(json.dumps(result | {"partition": "centralized"}))
    (unfinished / "result.json").unlink()
    (one,), _ = group([read_run(unfinished), read_run(finished)])
    assert one.is_bound
    assert [run.config.seed for run in one.finished] == [1]


def test_a_panel_is_called_as_the_one_column_of_its_methods_and_else_by_data_and_split(write_experiment):
    first, second = (read_run(write_experiment(str(seed), seed=seed)) for seed in (0, 1))
    bound = replace(read_run(write_experiment("bound", algorithm={"kind": "centralized"})), column="Another")

    def title(*columns):
        runs = [replace(run, column=column) for run, column in zip((first, second), columns, strict=True)]
        (panel,) = panels(group([*runs, bound])[0])
        return panel.title

    assert title("Mine", "Mine") == "Mine"
    assert title("Mine", "Yours") == title("Mine", "") == title("", "") == "digits, label-1"


def test_groups_stand_in_the_order_of_their_first_runs_and_their_runs_in_that_of_seeds(write_experiment):
    places = [("a", 2), ("b", 1), ("b", 0), ("a", 0), ("a", 1)]
    clients = {"a": 3, "b": 2}
    runs = [read_run(write_experiment(f"{name}{seed}", clients=clients[name], seed=seed)) for name, seed in places]
    groups, problems = group(runs)
    assert not problems
    assert [[run.path.name for run in one.runs] for one in groups] == [["a0", "a1", "a2"], ["b0", "b1"]]


def test_a_bound_on_other_data_or_on_a_part_of_them_has_a_panel_of_its_own(write_experiment):
    bound = {"algorithm": {"kind": "centralized"}}
    paths = [
        write_experiment("whole"), write_experiment("part", note="100 of them"),
        write_experiment("other", data="mnist"),
        write_experiment("bound", **bound), write_experiment("part bound", **bound, note="50 of them"),
    ]  # fmt: skip
    shown = panels(group([read_run(path) for path in paths])[0])
    assert [(one.data, one.note, [group.method for _, group in one.lines]) for one in shown] == [
        ("digits", "", ["FedAvg", "centralized"]), ("digits", "100 of them", ["FedAvg"]), ("mnist", "", ["FedAvg"]),
        ("digits", "50 of them", ["centralized"]),
    ]  # fmt: skip


def test_rows_of_a_table_are_the_labels_where_every_line_has_one_of_its_own(write_experiment):
    runs = [read_run(write_experiment(str(clients), clients=clients)) for clients in (2, 3, 4)]

    def named(*rows, left_out=""):
        return labels(group([replace(run, row=row) for run, row in zip(runs, rows, strict=True)])[0], left_out)

    by_settings = ["FedAvg, clients=2", "FedAvg, clients=3", "FedAvg, clients=4"]
    assert named("A", "B", "C") == ["A", "B", "C"]
    assert named("A", "B", "A") == named("A", "B", "") == by_settings
    assert named("A", "B", "C", left_out="clients") == ["FedAvg"] * 3


def test_an_unfinished_run_is_on_the_data_that_all_finished_ones_tell_of_and_on_unknown_ones_where_they_differ(
    write_experiment,
):
    def notes(*finished):
        runs = [read_run(write_experiment(f"{len(finished)}{note}", note=note)) for note in finished]
        return [one.note for one in group([replace(runs[0], result=None, path=runs[0].path / "x"), *runs[1:]])[0]]

    assert notes("", "100 of them") == ["100 of them"]
    assert notes("", "100 of them", "50 of them")[0] == "no finished run says whether these are the full data"
