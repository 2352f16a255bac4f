"""What the page on the user's own data tells is true: its files are read, its commands run, one after another."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_sim.cli.verbs import app
from fl_sim.data.naming import OPTIONS, own_name
from fl_sim.experiment.experiment import experiment_from, with_overrides

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patients.csv").write_text(blocks("csv")[0])
    rows = [f"a {('good', 'bad')[i % 2]} film,{('glad', 'sad')[i % 2]},{('tv', 'web')[i // 2 % 2]}" for i in range(16)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,mood,source", *rows]))
    return tmp_path


def test_every_command_runs(folder: Path) -> None:
    commands = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 2
    for words in commands:
        assert words[0] == "fl-sim"
        done = CliRunner().invoke(app, words[1:] + (["rounds=2"] if words[1] == "run" else []))
        assert done.exit_code == 0, (words, done.output, done.exception)


def test_the_table_of_settings_says_what_the_command_says() -> None:
    typed = shlex.split(blocks("sh")[0])[2:]
    assert own_name(experiment_from(tomllib.loads(blocks("toml")[0])).data) == own_name(
        experiment_from(with_overrides({}, typed)).data
    )


def test_every_setting_is_explained() -> None:
    for settings in OPTIONS.values():
        assert [name for name in settings if f"`data.{name}" not in PAGE] == []
