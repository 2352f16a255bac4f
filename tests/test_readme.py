"""The README is short, and what it names is there. tests/docs/test_blocks.py runs its commands and examples."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import fl_sim
from fl_sim.cli.run import run_experiment
from fl_sim.cli.running_verbs import read_arguments
from fl_sim.interface import RESULTS
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables import file_or_preset
from fl_sim.tables.plan import plan_table, read_settings

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text()


def test_it_shows_the_way_in_under_150_lines() -> None:
    assert len(README.splitlines()) < 150
    first = README.partition("## ")[0]
    assert "FLSim" in first
    assert "not affiliated" in first


def test_the_main_job_is_the_first_command() -> None:
    first = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
    assert first.endswith(".venv/bin/fl-sim table digits --out results/digits\n")
    assert README.index("6 GB") < README.index(first)
    head, *rows = re.findall(r"^\| (\w[^|]*) \| (.*) \|$", README, re.MULTILINE)
    plan = plan_table(read_settings(file_or_preset("digits")[0], []), None)
    assert [name for name, _ in rows[: len(plan.rows)]] == list(plan.labels.values())
    assert head[1].split(" | ") == [f"{column} {what}" for column in plan.columns for what in ("last", "best")]
    assert [line for line in plan.caption if line not in README] == []


def test_the_main_table_fits_a_screen_with_its_captions() -> None:
    table, _, below = README.partition("| Method |")[2].partition("\n\n")
    captions = below.partition("\n\n")[0].splitlines()
    shown = [part for line in captions for part in textwrap.wrap(line, 140)]
    assert len(table.splitlines()) + 1 + len(shown) <= 40
    assert captions[-1].startswith("Privacy of all ")


def test_a_row_of_its_table_is_what_the_run_gives(tmp_path: Path) -> None:
    [mean] = re.findall(r"^\| NaiveMix \| ([\d.]+) ± [\d.]+ \|", README, re.MULTILINE)
    plan = plan_table(read_settings(file_or_preset("digits")[0], []), None)
    cell = next(one for one in plan.cells if "NaiveMix" in one.row and one.column == plan.columns[0])
    result = fl_sim.run(cell.experiment, out=tmp_path, progress=False)
    assert result.final_accuracy is not None
    assert abs(100 * result.final_accuracy - float(mean)) < 3  # one seed of three; across CPU types rounding differs


@pytest.mark.usefixtures("quick_accounting")
def test_runs_without_out_have_a_directory_each_and_find_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [["algorithm=fedavg"], ["algorithm=scaffold"], ["partition=label-2"], ["seed=1"], ["local.epochs=0.5"]]
    first, again = (_directories(runs, capsys) for _ in range(2))
    assert len(set(first)) == len(runs)
    assert again == first
    assert [path.name for path in sorted(RESULTS.iterdir())] == sorted(path.name for path in first)
    assert all(read_rounds(path) for path in first)


def test_links_and_paths_lead_somewhere() -> None:
    for page in (TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").rglob("*.md"))):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    named = re.findall(r"`((?:fl_sim|strategies|clients|partitions|docs|benchmarks|examples)/[\w/.]+)`", README)
    assert [path for path in named if not (TOP / path).exists()] == []


def _directories(runs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """Run each, and return the directories in which it says it will put its results, and in which it says they are."""
    found = []
    for words in runs:
        small = ["model=logistic", "rounds=2", "engine=inprocess"]
        run_experiment(read_arguments([*words, *small]), None, None, again=False, json_output=False)
        printed = capsys.readouterr()
        beforehand = re.findall(r"^results go to (.*)$", printed.err, re.MULTILINE)
        assert re.findall(r"^results in (.*)$", printed.out, re.MULTILINE) == beforehand
        found.append(Path(beforehand[0]))
    return found


def test_the_main_jobs_settings_are_among_those_its_search_tries(load_benchmark: Callable[[str], ModuleType]) -> None:
    search, found = load_benchmark("digits_tuned"), set()
    plan = plan_table(read_settings(file_or_preset("digits")[0], []), None)
    for experiment in (cell.experiment for cell in plan.cells if cell.experiment.algorithm.kind != "centralized"):
        method = "da-fl" if experiment.preprocess.kind == "da-fl" else experiment.algorithm.kind
        own, _ = search.OWN.get(method, ("kind", []))
        tried = [(one["local"], one["algorithm"][own]) for one in search.trials_of(method)]
        local = {name: getattr(experiment.local, name) for name in ("learning_rate", "momentum")}
        assert (local, getattr(experiment.algorithm, own)) in tried, method
        found.add(method)
    assert found == set(search.METHODS)
