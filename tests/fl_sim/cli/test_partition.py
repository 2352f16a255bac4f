"""``fl-sim partition``: the JSON a program reads, the table a person reads, the warnings neither may miss."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of


def run(*arguments):
    result = CliRunner().invoke(app, ["partition", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_json_holds_sizes_and_label_counts_and_nothing_else_is_on_standard_output():
    result = run("--data", "digits", "--scheme", "label-1", "--clients", "10", "--seed", "3", "--json")
    told = json.loads(result.stdout)
    assert told["sizes"] == [142, 146, 142, 146, 145, 145, 145, 143, 139, 144]
    assert [row.index(max(row)) for row in told["label_counts"]] == list(range(10))
    assert [sum(row) for row in told["label_counts"]] == told["sizes"]
    assert told["left_out"] == [0] * 10
    assert (told["data"], told["scheme"], told["clients"], told["seed"]) == ("digits", "label-1", 10, 3)
    assert run("data=digits", "partition=label-1", "clients=10", "seed=3", "--json").stdout == result.stdout


def test_the_split_is_that_of_the_run_with_these_settings(tmp_path):
    (tmp_path / "run.toml").write_text('clients = 4\npartition_seed = 7\n[partition]\nkind = "dirichlet"\nbeta = 0.3\n')
    told = json.loads(run(str(tmp_path / "run.toml"), "partition.balanced=true", "--json").stdout)
    experiment = experiment_from(
        {"clients": 4, "seed": 7, "partition": {"kind": "dirichlet", "beta": 0.3, "balanced": True}}
    )
    assert told["sizes"] == [len(shard) for shard in job_of(experiment).shards]


def test_the_table_shows_every_client_up_to_thirty_and_then_a_summary():
    few = run("--scheme", "label-2", "--clients", "30").stdout
    assert "\n      29 " in few
    assert "classes a client: min 2," in few
    many = run("--scheme", "iid", "--clients", "100").stdout
    assert "... and 90 more clients" in many
    assert "records a client: min 14, p5 14, p25 14, median 14, p75 15, p95 15, max 15" in many


def test_empty_and_small_clients_and_records_left_out_are_warned_about_on_standard_error():
    result = run("--scheme", "dirichlet:0.01", "--clients", "100", "--json")
    sizes = json.loads(result.stdout)["sizes"]
    small, empty = sum(size < 10 for size in sizes), sizes.count(0)
    assert f"warning: {small} of 100 clients have fewer than 10 records; {empty} of them have no" in result.stderr
    result = run("--scheme", "label-1", "--clients", "8", "--json")
    assert "warning: 283 of 1,437 training records belong to no client: no client has" in result.stderr
    assert json.loads(result.stdout)["left_out"] == [0] * 8 + [139, 144]


def test_the_plot_is_written_where_asked(tmp_path):
    assert f"drawn to {tmp_path}/split.svg" in run("--plot", str(tmp_path / "split.svg")).stdout
    assert (tmp_path / "split.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "label-11"], "k=11 classes a client, but the data have only 10"),
        (["--scheme", "diriclet"], "did you mean 'dirichlet'"),
        (["--data", "minst"], "did you mean 'mnist'"),
        (["--clients", "2000"], "2000 clients .* 1437 records"),
        (["--plot", "split.txt"], "split.txt"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        run(*arguments)


def test_many_classes_are_summed_up_by_the_largest(tmp_path):
    labels = np.repeat(np.arange(20), 3)
    features = np.zeros((60, 2), dtype=np.float32)
    np.savez(tmp_path / "own.npz", x_train=features, y_train=labels, x_test=features, y_test=labels)
    lines = run("--data", f"npz:{tmp_path}/own.npz", "--scheme", "label-5", "--clients", "4").stdout.splitlines()
    (first,) = [line for line in lines if line.startswith("       0 ")]
    assert first.split()[2] == "5"  # classes
    assert first.count(":") == 5
