"""``fl-sim sweep`` and ``--dry-run`` as typed."""

import json
import re
import sys
from pathlib import Path

import pytest

from fl_sim.__main__ import main

QUICK = ["sweep", "model=logistic", "rounds=1", "local.learning_rate=0.01,0.1", "--jobs", "1"]


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fl-sim", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.usefixtures("cells_in_threads")
def test_every_value_is_a_row_and_further_values_go_on_with_the_same_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, *QUICK) == 0
    assert "FedAvg, local.learning_rate=0.1 |" in capsys.readouterr().out
    (out,) = (tmp_path / "results").iterdir()
    assert out.name.startswith("sweep-local.learning_rate-")
    first = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/result.json")}
    assert len(first) == 2, "no upper bound was asked for"
    further = ["local.learning_rate=0.01,0.1,0.5" if "learning_rate" in argument else argument for argument in QUICK]
    assert typed(monkeypatch, *further) == 0
    assert [*(tmp_path / "results").iterdir()] == [out]
    assert len(list(out.glob("cells/*/result.json"))) == 3
    assert all(path.stat().st_mtime_ns == when for path, when in first.items()), "nothing of it was run again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no setting has several values"),
        (["rounds=3"], "no setting has several values"),
        (["rounds=3,"], "rounds=3, has a repeated or an empty value"),
        (["seed=1,1"], "seed=1,1 has a repeated"),
        (["epochs=1,2"], "here: local.epochs=5"),
        (["algorithm=fedavg,fedporx"], "did you mean 'fedprox'?"),
        (["rounds=1,2", "data=minst"], "did you mean 'mnist'?"),
    ],
)
def test_what_cannot_be_swept_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "sweep", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [["run"], ["table", "digits"], ["sweep", "seed=0,1"]], ids=lambda verb: verb[0])
def test_a_dry_run_shows_what_would_run_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["model=logistic", "rounds=2", "--dry-run", "--json"]
    if verb[0] == "table":
        small += ["algorithm=fedavg", "partition=iid", "centralized=false", "seed=0"]
    assert typed(monkeypatch, *verb, *small) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == {"run": 1, "table": 1, "sweep": 2}[verb[0]]
    assert not list(tmp_path.iterdir())


def test_a_setting_that_is_given_twice_counts_once_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "run", "rounds=3", "seed=1", "seed=1", "rounds=4", "data=nowhere") == 2
    told = capsys.readouterr().err
    assert "rounds=3 has no effect: the later rounds=4 replaces it" in told
    assert "seed" not in told.partition("unknown data set")[0]


@pytest.mark.parametrize("verb", ["run", "table", "sweep", "plan", "partition"])
def test_a_data_root_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, verb, "--data-root", "nowhere") == 2
    assert "Directory 'nowhere' does not exist" in capsys.readouterr().err


def test_a_tables_file_to_begin_with_can_be_run_and_is_never_overwritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "init", "skew.toml") == 0
    assert "run it with 'fl-sim table skew.toml'" in capsys.readouterr().out
    text = Path("skew.toml").read_text()
    assert "fl-sim report results/skew" in text
    assert typed(monkeypatch, "plan", "skew.toml", "--quick", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == 30
    assert typed(monkeypatch, "init", "skew.toml") == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("skew.toml").read_text() == text


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    ("commented", "count"), [(r"sampler|\{ algorithm", 3), (r"evaluate|\[tune[.a-z]*\]$|trials|rounds|\"local", 6)]
)
def test_what_is_commented_out_in_it_can_be_taken_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commented: str, count: int
) -> None:
    """Rows that promise privacy, and what would read private records: not both at once."""
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "init") == 0
    text, taken_in = re.subn(rf"(?m)^( *)# ({commented})", r"\1\2", Path("table.toml").read_text())
    assert taken_in == count
    Path("whole.toml").write_text(text)
    assert typed(monkeypatch, "plan", "whole.toml", "--quick") == 0
