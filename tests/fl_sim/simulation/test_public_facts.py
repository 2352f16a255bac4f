"""A private run on records of the user's own tells nothing of them that is neither paid for nor said to be told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run

SECRET = "rare-syndrome"
PUBLIC = {"test_is_public": True}
DA_FL = {"kind": "da-fl", "generator": "marginals", "gamma": 1, "epsilon": 4, "noise": "seeded"}


def table(folder: Path, last: str) -> str:
    """Write records of four clients, the last of which is ``last``; return how it is named."""
    parts = [("ill", "well")[i // 2 % 2] + (",train" if i % 5 else ",test") for i in range(40)]
    rows = [f"{(7 * i) % 100},{'fm'[i % 2]},{'abcd'[i % 4]},{part}" for i, part in enumerate(parts)]
    folder.mkdir()
    (folder / "a.csv").write_text("\n".join(["age,sex,client,label,split", *rows, last, ""]))
    return f"csv:{folder / 'a.csv'}:range.age=0..100:category.sex=f+m"


def ran(folder: Path, data: str, **settings: Any) -> dict[str, Any]:
    usual = {"partition": "natural", "clients": 4, "rounds": 1, "model": "logistic", "local": {"batch_size": 8},
             "aggregator": {"kind": "global-dp", "noise_multiplier": 20, "noise": "seeded"}, "sampler": "full",
             "evaluate": {"test": "never"}}  # fmt: skip
    return run(experiment_from({**usual, "data": data, **settings}), folder / "run")


def told(folder: Path) -> tuple[Any, Any, Any]:
    """Return what a run's directory says, without what every run says of itself, and the shapes of its model."""
    result = json.loads((folder / "run/result.json").read_text())
    assert result["identity"].keys() == {"records"}
    assert result["identity"]["records"].startswith("keyed-")  # under a secret key, as "records" is, and salted
    for own in ("chain", "seconds", "data", "versions", "records", "identity"):
        del result[own]
    for promise in result["privacy"]:
        promise.pop("ledger", None)
    rounds = [json.loads(line) for line in (folder / "run/rounds.jsonl").read_text().splitlines()]
    shapes = {name: value.shape for name, value in load_file(folder / "run/model.safetensors").items()}
    return result, [{key: value for key, value in one.items() if key != "chain"} for one in rounds], shapes


def test_one_record_changes_nothing_that_a_private_run_says_where_its_facts_are_given(tmp_path):
    worlds = {"kept": "44,f,d,well,train", "stranger": f"44,f,d,{SECRET},train", "empty": ",f,d,well,train"}
    for world, last in worlds.items():
        name = f"{table(tmp_path / world, last)}:classes=ill+well:missing=drop"
        ran(tmp_path / world, name)
    assert told(tmp_path / "kept") == told(tmp_path / "stranger") == told(tmp_path / "empty")
    assert "Read off" not in (tmp_path / "kept/run/result.json").read_text()


def test_facts_that_were_read_off_the_records_are_said_to_be_and_no_name_is_told(tmp_path):
    result = ran(tmp_path / "a", table(tmp_path / "a", f"44,f,d,{SECRET},train"))
    (promise,) = result["privacy"]
    words = "Taken from the private records and published without noise: the list of classes"
    assert words in promise["does_not_cover"]
    written = [path for path in (tmp_path / "a/run").rglob("*") if path.is_file()]
    assert len(written) > 3
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_how_many_records_are_left_out_is_told_where_nobody_is_promised_privacy(tmp_path):
    name = f"{table(tmp_path / 'a', ',f,d,well,train')}:missing=drop"
    plain = ran(tmp_path / "a", name, aggregator="mean", evaluate={})
    assert plain["warnings"] == ["1 records with an empty cell are left out"]
    private = ran(tmp_path / "b", name)
    assert private["warnings"] == []
    assert private["data_note"] == plain["data_note"]


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, "evaluate.test=rounds publishes measures on the test records of csv:"),
        ({"evaluate": {"test": "last"}}, "evaluate.test=last publishes measures on the test records of csv:"),
        ({"aggregator": "mean", "preprocess": DA_FL | {"train_on": "synthetic"}}, "evaluate.test=rounds publishes"),
        ({"aggregator": "mean", "calibrate": {"kind": "ccvr", "epsilon": 4}}, "evaluate.test=rounds publishes"),
        ({"aggregator": "mean", "algorithm": {"kind": "pate", "student": "supervised", "public": "train"}},
         "evaluate.test=rounds publishes"),
        ({"aggregator": "mean", "algorithm": {"kind": "pate", "student": "supervised"}, "evaluate": {"test": "never"}},
         "algorithm pate uses the test records of csv:.* as its public pool"),
        ({"aggregator": "mean", "algorithm": "tstr", "preprocess": DA_FL | {"train_on": "synthetic"}},
         "evaluate.test=last publishes"),
    ],
)  # fmt: skip
def test_a_private_run_measures_on_no_test_records_that_nobody_says_are_public(settings, way, tmp_path):
    name = table(tmp_path / "a", "44,f,d,well,train")
    usual = {"data": name, "partition": "natural", "clients": 4, "model": "logistic", "sampler": "full",
             "aggregator": {"kind": "global-dp", "noise_multiplier": 20}}  # fmt: skip
    with pytest.raises(UserError, match=f"{way}.*set evaluate.test_is_public=true if"):
        job_of(experiment_from({**usual, **settings}))
    job_of(experiment_from({**usual, **settings, "evaluate": settings.get("evaluate", {}) | PUBLIC}))


@pytest.mark.parametrize("own", [{}, {"client_test": np.repeat(np.arange(2), 5)}], ids=["one test part", "by client"])
def test_nor_on_those_of_an_npz_file_be_they_of_all_or_of_each_client(own, tmp_path):
    drawn = np.random.default_rng(0)
    x, labels = drawn.random((50, 4), dtype=np.float32), np.arange(50) % 2
    clients = {"client_train": np.repeat(np.arange(2), 20)} if own else {}
    np.savez(tmp_path / "own.npz", x_train=x[:40], y_train=labels[:40], x_test=x[40:], y_test=labels[40:],
             **clients, **own)  # fmt: skip
    split = {"partition": "natural", "clients": 2} if own else {"partition": "iid", "clients": 2}
    private = {"data": f"npz:{tmp_path / 'own.npz'}:classes=2", "model": "logistic", "sampler": "full", **split,
               "aggregator": {"kind": "global-dp", "noise_multiplier": 20}}  # fmt: skip
    with pytest.raises(UserError, match=r"publishes measures on the test records of npz:.*test_is_public=true"):
        job_of(experiment_from(private))
    job_of(experiment_from({**private, "evaluate": PUBLIC}))


def test_a_private_run_that_measures_nothing_writes_no_measure(tmp_path):
    result = ran(tmp_path / "a", table(tmp_path / "a", "44,f,d,well,train"))
    assert (result["final_accuracy"], result["best_accuracy"], result["best_chosen_on"]) == (None, None, "nothing")
    assert "confusion" not in result["measures"]
    assert "test_records" not in result["measures"]
    assert "test records" not in result["privacy"][0]["does_not_cover"]


def test_every_statement_says_that_test_records_are_taken_to_be_public(tmp_path):
    own = ran(tmp_path / "own", table(tmp_path / "own", "44,f,d,well,train"), evaluate=PUBLIC)
    words = "a.csv, as evaluate.test_is_public=true says, count as public, so measures on them have no privacy cost."
    assert own["privacy"][0]["does_not_cover"].endswith(words)
    both = {"preprocess": DA_FL | {"labels": {"kind": "exponential", "epsilon": 1}}, "evaluate": PUBLIC}
    pool = ran(tmp_path / "pool", table(tmp_path / "pool", "44,f,d,well,train"), **both)
    assert [one["unit"] for one in pool["privacy"]] == ["client", "record"]
    assert all(one["does_not_cover"].endswith(words) for one in pool["privacy"])
    known = ran(tmp_path / "known", "digits", partition="iid", evaluate={"test": "last"})
    assert "The test records of digits count as public" in known["privacy"][0]["does_not_cover"]


def test_a_student_of_pate_is_not_measured_where_nothing_is_to_be(tmp_path):
    pate = {
        "kind": "pate",
        "student": {"kind": "supervised", "steps": 2},
        "queries": 4,
        "labelling": {"noise": "seeded"},
    }
    result = ran(tmp_path, "digits", partition="iid", aggregator="mean", algorithm=pate, rounds=2)
    assert result["final_accuracy"] is None
    assert "confusion" not in result["measures"]
    assert (
        "The public pool, the first test records: its records are treated as public"
        in (result["privacy"][0]["does_not_cover"])
    )


def test_settings_without_the_declaration_are_written_as_before_there_was_one():
    experiment = experiment_from({"evaluate": {"test": "last"}})
    assert "test_is_public" not in experiment.model_dump()["evaluate"]
    declared = experiment_from({"evaluate": {"test": "last", "test_is_public": True}})
    assert declared.as_written()["evaluate"]["test_is_public"] is True


def test_a_refusal_of_numbers_beyond_0_to_1_quotes_none(tmp_path):
    name = table(tmp_path / "a", "44,f,d,well,train").replace(":range.age=0..100", "")
    with pytest.raises(UserError, match=r"0 to 1, .*csv:.* scale each column") as no:
        job_of(experiment_from({"data": name, "preprocess": DA_FL | {"generator": "gaussian"}, "partition": "iid",
                                "model": "logistic", "evaluate": PUBLIC}))  # fmt: skip
    assert "99" not in str(no.value).replace(str(tmp_path), "")
