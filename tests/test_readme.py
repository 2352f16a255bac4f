"""What the README tells is true: its commands, one after another in one folder."""

import re
import shlex
from pathlib import Path

import pytest

from fl_sim.cli.arguments import read
from fl_sim.cli.run import run_experiment
from fl_sim.interface import RESULTS
from fl_sim.store.run_directory import read_rounds

pytestmark = pytest.mark.usefixtures("quick_accounting")

README = (Path(__file__).parents[1] / "README.md").read_text()
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SMALL = ["data=digits", "model=logistic", "rounds=2", "engine=inprocess", "local.epochs=1", "clients=20"]
"""What makes every command of the README one of seconds."""


def commands(verb: str) -> list[list[str]]:
    """Return the README's commands of ``verb``, without the verb."""
    lines = [shlex.split(line, comments=True) for block in SHELL for line in block.splitlines()]
    return [words[2:] for words in lines if words[:2] == ["fl-sim", verb]]


def test_runs_without_out_have_a_directory_each_and_find_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [words for words in commands("run") if "--out" not in words]
    assert len(runs) >= 5
    first, again = (_directories(runs, capsys) for _ in range(2))
    assert len(set(first)) == len(runs)
    assert again == first
    assert [path.name for path in sorted(RESULTS.iterdir())] == sorted(path.name for path in first)
    assert all(read_rounds(path) for path in first)


@pytest.mark.usefixtures("cells_in_threads")
def test_the_example_in_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    small = '"rounds": 1, "model": "logistic"'
    quick = example.replace('"rounds": 5', small).replace('{"partition"', f'{{{small}, "partition"')
    assert quick.count(small) == 2
    exec(compile(quick.replace("]}})", "]}}, jobs=1)"), "README.md", "exec"), {})
    assert (tmp_path / "results").is_dir()


def test_links_and_paths_lead_somewhere() -> None:
    top = Path(__file__).parents[1]
    for page in (top / "README.md", top / "CONTRIBUTING.md", *sorted((top / "docs").glob("*.md"))):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    named = re.findall(r"`((?:fl_sim|strategies|clients|partitions|docs|benchmarks|examples)/[\w/.]+)`", README)
    assert [path for path in named if not (top / path).exists()] == []


def _directories(runs: list[list[str]], capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """Run each, and return the directories in which it says it will put its results, and in which it says they are."""
    found = []
    for words in runs:
        student = ["algorithm.student.steps=20"] if "algorithm=pate" in words else []
        run_experiment(read([*words, *SMALL, *student]), None, None, again=False, json_output=False)
        printed = capsys.readouterr()
        beforehand = re.findall(r"^results go to (.*)$", printed.err, re.MULTILINE)
        assert re.findall(r"^results in (.*)$", printed.out, re.MULTILINE) == beforehand
        found.append(Path(beforehand[0]))
    return found
