"""``fl-sim report``: real runs in, a page and figures out; damage is named and costs nothing else."""

import json
import re
import shutil

import pytest
import typer
from typer.testing import CliRunner

from fl_sim.cli.verbs import report
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run as run_experiment

app = typer.Typer()
app.command()(report)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two seeds of FedAvg on digits."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        settings = {"clients": 2, "rounds": 2, "partition": "iid", "model": "mlp", "engine": "inprocess", "seed": seed}
        run_experiment(experiment_from(settings), folder / "deep" / "down" / f"seed-{seed}")
    return folder


@pytest.fixture
def runs(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs")


def test_runs_at_any_depth_become_one_page_and_two_figures_beside_them(runs):
    told = run(runs).stdout
    out = runs / "report"
    assert "FedAvg on digits (iid)\n2 runs, 2 finished; clients 2; rounds 2; model mlp; seeds 0, 1.\n" in told
    for name in ("report.html", "accuracy.png", "loss.png"):
        assert f"{out / name}\n" in told
        assert (out / name).stat().st_size > 5000
    page = (out / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert not re.search(r"https?:|//[a-z]+\.", page.replace("application/json", ""))
    assert "No privacy guarantee: updates leave the clients without noise" in page


def test_accuracies_are_drawn_over_their_range_or_on_request_from_0_to_100_on_the_page_and_in_pictures(runs):
    run(runs)
    page, picture = (runs / "report" / name for name in ("report.html", "accuracy.png"))
    own_range, pixels = page.read_text(), picture.read_bytes()
    run(runs, "--full-axis")
    assert '"full":false' in own_range
    assert '"full":true' in page.read_text()
    assert picture.read_bytes() != pixels


def test_the_page_has_styles_for_paper_and_draws_what_no_screen_has_shown_before_it_prints(runs):
    run(runs)
    page = (runs / "report" / "report.html").read_text()
    assert "@media print" in page
    assert "@media screen and (prefers-color-scheme: dark)" in page, "paper is light"
    assert 'addEventListener("beforeprint"' in page
    assert ".wide.scrolls::before" in page, "a table that is wider than the screen says so"


def test_what_it_took_to_a_target_is_told_on_the_screen_on_the_page_and_in_json(runs):
    told = run(runs, "--target", "0.05").stdout
    assert "to 5 %: FedAvg on digits, iid: rounds 1.0 ± 0.0, MB " in told
    assert "(2 of 2 runs reached it)" in told
    assert "<h2>To a test accuracy of 5 %</h2>" in (runs / "report" / "report.html").read_text()
    target = json.loads(run(runs, "--target", "1", "--json").stdout)["target"]
    assert target == {"accuracy": 1.0, "rows": [{"method": "FedAvg", "where": "digits, iid", "runs": 2, "reached": []}]}


def test_json_is_one_object_with_the_means_of_the_results(runs, tmp_path):
    told = json.loads(run(runs, "--json", "--out", tmp_path / "elsewhere").stdout)
    results = [json.loads(path.read_text()) for path in sorted(runs.rglob("result.json"))]
    (row,) = told["rows"]
    assert row["mean"] == pytest.approx(sum(50 * result["final_accuracy"] for result in results))
    assert row["best_chosen_on"] == ["test", "test"]
    assert (row["method"], row["data"], row["partition"], row["seeds"]) == ("FedAvg", "digits", "iid", [0, 1])
    assert told["report"] == str(tmp_path / "elsewhere" / "report.html")
    assert (told["runs"], told["finished"], told["problems"]) == (2, 2, [])


def test_a_directory_named_twice_counts_once(runs):
    told = json.loads(run(runs, runs / "deep" / "down" / "seed-0", "--json", "--out", runs / "out").stdout)
    assert (told["runs"], told["problems"]) == (2, [])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.toml", None, "config.toml is missing"),
        ("config.toml", "data = ", "config.toml is damaged"),
        ("config.toml", 'data = "digits"', "config.toml is damaged: seed: Field required"),
        ("result.json", '{"status": "fin', "result.json is damaged"),
        ("result.json", "{}", "result.json is damaged: status: Field required"),
        ("result.json", None, "no result.json: the run is still running, or was killed after 2 of 2 rounds"),
        ("rounds.jsonl", None, "rounds.jsonl is missing or has no readable round"),
        ("rounds.jsonl", b"\xff\xfe\n", "rounds.jsonl is damaged"),
    ],
)
def test_one_damaged_run_is_named_and_the_rest_is_shown(runs, file, content, message):
    damaged = runs / "deep" / "down" / "seed-1" / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(runs, "--json")
    told = json.loads(result.stdout)
    assert told["finished"] == 1
    assert [problem["dir"] for problem in told["problems"]] == [str(damaged.parent)]
    assert message in told["problems"][0]["error"]
    assert message in result.stderr
    assert message in (runs / "report" / "report.html").read_text()


def test_a_log_cut_short_is_told(runs):
    log = runs / "deep" / "down" / "seed-1" / "rounds.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n{half")
    assert "rounds.jsonl has 1 of 2 rounds" in run(runs).stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist: give a directory that 'fl-sim run --out'"),
        (lambda path: path.write_text("x"), "is no directory"),
        (lambda path: path.mkdir(), r"no config.toml, rounds.jsonl, result.json or table.json up to 6 folders deep"),
        (lambda path: (path.mkdir(), (path / "result.json").write_text("{}")), "config.toml is missing"),
        (lambda path: (path.mkdir(), (path / "table.json").write_text("{}")), "table.json is damaged: rows"),
        (
            lambda path: (path.mkdir(), (path / "table.json").write_text('{"version": 3}')),
            "table.json has format version 3, and this fl-sim reads versions 1 to 2: use the fl-sim that wrote",
        ),
    ],
)
def test_with_nothing_to_show_the_message_names_what_is_missing(tmp_path, make, message):
    make(tmp_path / "place")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "place")
