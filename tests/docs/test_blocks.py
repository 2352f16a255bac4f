"""Every block of code in the README and on the pages is true: commands run in order in one folder, Python runs.

What makes a command small, and what is not run and why, is said here.
"""

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import typer

from fl_sim.cli.run import parse_experiment
from fl_sim.cli.running_verbs import read_arguments
from fl_sim.cli.verbs import app
from fl_sim.store.run_directory import read_rounds
from fl_sim.tables.plan import plan_table, table_settings

pytestmark = pytest.mark.usefixtures("quick_accounting")

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
NOTEBOOK = PROJECT / "docs/notebooks/first_table.ipynb"

ELSEWHERE = {
    "docs/data.md": "tests/docs/test_data_page.py runs it",
    "docs/flower.md": "tests/fl_sim/simulation/test_flower_deployment.py runs it on SuperLink and SuperNodes",
}
"""Pages whose blocks other tests run."""

NOT_RUN = {
    **dict.fromkeys(
        ("python3 -m venv", ". .venv/bin/activate", "pip install", ".venv/bin/pip install"),
        "installs for minutes; .ci/run does it, as the README says it",
    ),
    **dict.fromkeys((".ci/check", "python -m pytest", ".venv/bin/python -m pytest"), "what CI runs, this test with it"),
    **dict.fromkeys(("export RAY_AUTH_MODE", "ray start"), "a cluster of several machines"),
    "fl-sim privacy audit": "half a minute; tests/fl_sim/privacy/test_audit.py runs its parts",
}
"""Commands by how they begin."""

SMALL = {"model": "logistic", "rounds": "1", "local.epochs": "1", "engine": "inprocess", "seed": "0"}
LEFT_OUT = {*SMALL, "normalise", "algorithm.public_records", "algorithm.student.steps"}
DATA_HERE = ("digits", "npz:", "csv:", "rings:")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of every block on a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(PROJECT).as_posix()


def commands(page: Path) -> list[str]:
    """Return the commands on a page, in order."""
    return [command for language, text in blocks(page) if language == "sh" for command in commands_in(text)]


def commands_in(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in re.sub(r"\s+#.*", "", line).split("&&") if part.strip()]


def typed(command: str) -> list[str]:
    """Return the words of a command of ours, after ``fl-sim``; nothing for what is not one to run."""
    if any(command.startswith(start) for start in NOT_RUN):
        return []
    words = shlex.split(command)
    return words[1:] if words[0].removeprefix(".venv/bin/") == "fl-sim" else []


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks whose first line names a file."""
    for language, text in blocks(page):
        if language in {"python", "toml"} and (named := re.match(r"# ([\w.]+)\n", text)):
            (folder / named[1]).write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder in which the commands run, with the repository's benchmarks and a file of votes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "benchmarks").symlink_to(PROJECT / "benchmarks")
    np.save(tmp_path / "COUNTS.npy", np.array([[200, 30, 20], [120, 80, 50]]))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language_and_every_command_is_known(page: Path) -> None:
    if name_of(page) in ELSEWHERE:
        pytest.skip(ELSEWHERE[name_of(page)])
    assert [text for language, text in blocks(page) if language not in {"sh", "python", "toml", "text"}] == []
    others = [one for one in commands(page) if not typed(one)]
    assert [one for one in others if not any(one.startswith(start) for start in NOT_RUN)] == []


def test_every_command_is_valid_as_it_stands(folder: Path) -> None:
    group = typer.main.get_command(app)
    checked = 0
    for page in PAGES:
        write_files(page, folder)
        for words in filter(None, map(typed, commands(page))):
            with group.make_context("fl-sim", list(words)) as context:
                verb, arguments = group.resolve_command(context, context._protected_args + context.args)[1:]
                parsed = verb.make_context(verb.name, list(arguments)) if not hasattr(verb, "commands") else None
            settings = (parsed.params.get("arguments") or []) if parsed else []
            if words[0] == "run":
                parse_experiment(read_arguments(settings))
            elif words[0] == "table":
                given = read_arguments(settings, "digits")
                table_settings(given.table, given.overrides, given.name or "")
            checked += 1
    assert checked > 40


def small(words: list[str]) -> list[str]:
    """Return a command that takes a second or two in place of ``words``."""
    verb = words[0]
    if verb in {"partition", "data"}:
        return [{"mnist": "digits", "cifar10": "digits", "data=mnist": "data=digits"}.get(word, word) for word in words]
    if verb not in {"run", "sweep", "table", "plan"}:
        return words
    kept = [quick for word in words[1:] if (quick := small_word(word))]
    added = [f"{key}={value}" for key, value in SMALL.items() if not any(word.startswith(f"{key}=") for word in kept)]
    if any(word.endswith(".toml") for word in kept):
        added.append("data=digits")
    if "algorithm=pate" in kept:
        added.append("algorithm.student.steps=20")
    if "preprocess=da-fl" in kept and not any("preprocess.generator=" in word for word in kept):
        added.append("preprocess.generator.discriminator_steps=2")
    return [
        verb,
        *kept,
        *added,
        *{"sweep": ["--jobs", "1"], "table": ["--jobs", "1"], "plan": ["--quick"]}.get(verb, []),
    ]


def small_word(word: str) -> str:
    """Return what stands in place of a word; nothing where it is left out."""
    key, equals, value = word.partition("=")
    if key == "clients" and int(value) > 20:
        return "clients=20"
    if key == "data" and not value.startswith(DATA_HERE):
        return "data=digits"
    is_own_model = key == "model" and ":" in value
    is_left_out = equals and (key in LEFT_OUT or key.startswith("engine"))
    return "" if is_left_out and not is_own_model else word


@pytest.mark.usefixtures("cells_in_threads")
def test_every_command_and_example_runs_in_order_in_one_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(PROJECT / "examples")
    examples = "".join(path.read_text() for path in (PROJECT / "examples").glob("*.py"))
    of_directory: dict[Path, set[str]] = {}
    for page in [page for page in PAGES if name_of(page) not in ELSEWHERE]:
        write_files(page, folder)
        for language, text in blocks(page):
            if language == "python" and text not in examples and not re.match(r"# \w+\.py\n", text):
                run_python(text)
            for words in filter(None, map(typed, commands_in(text) if language == "sh" else [])):
                if "benchmarks/" in " ".join(words) or (words[0] == "report" and not Path(words[1]).exists()):
                    continue  # a table of hours, and the report of it
                capsys.readouterr()
                app(quick := small(words), standalone_mode=False)
                if words[0] == "run":
                    [directory] = re.findall(r"^results in (.*)$", capsys.readouterr().out, re.MULTILINE)
                    of_directory.setdefault(Path(directory), set()).add(settings_of(quick))
    assert [directory for directory, runs in of_directory.items() if len(runs) > 1] == []
    assert len(of_directory) >= 15
    assert all(read_rounds(directory) for directory in of_directory)


def settings_of(words: list[str]) -> str:
    """Return the settings of a command, in order and each once."""
    return " ".join(sorted({word for word in words if "=" in word}))


def run_python(text: str) -> None:
    """Run an example in small."""
    quick = '"rounds": 1, "model": "logistic"'
    text = (
        text.replace('{"partition"', f'{{{quick}, "partition"')
        .replace('"rounds": 5', quick)
        .replace("]}})", "]}}, jobs=1)")
    )
    if "check(FedDyn(" in text:
        text = f"from feddyn import FedDyn\n{text}"
    if "check_compressor(HalfPrecision(" in text:
        text = f"from half_precision import HalfPrecision\n{text}"
    exec(compile(text, "a page", "exec"), {})


@pytest.mark.usefixtures("folder", "cells_in_threads")
def test_the_notebook_runs_from_top_to_bottom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plt, "show", lambda: None)
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        quick = cell.replace('"rounds": 15', '"rounds": 1, "model": "logistic"').replace(
            '"seed": [0, 1]', '"seed": [0]'
        )
        exec(compile(quick, NOTEBOOK.name, "exec"), names)
    plt.close("all")
    printed = capsys.readouterr().out
    assert "FedYogi" in printed
    assert "fedyogi" in printed
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert len(outputs) == 4
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", NOTEBOOK.read_text())


def test_the_notebook_shows_the_captions_of_today() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    tree = ast.parse("".join(cells[1]["source"]))
    [settings] = [ast.literal_eval(node.args[0]) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    plan = plan_table(table_settings(settings, [], "a notebook"), None)
    shown = "".join(cells[3]["outputs"][0]["data"]["text/markdown"])
    missing = [line for line in plan.caption if line not in shown]
    assert missing == [], f"run: python benchmarks/notebook.py {NOTEBOOK.relative_to(PROJECT)}"


def test_tables_and_settings_on_pages_are_valid(folder: Path) -> None:
    for page in PAGES:
        if name_of(page) in ELSEWHERE:
            continue
        for language, text in blocks(page):
            if language == "toml":
                table = tomllib.loads(text)
                grid = {"grid": {"algorithm": ["fedavg", "fedprox"]}} if "grid" not in table else {}
                assert table_settings({**table, **grid}, [], name_of(page))
