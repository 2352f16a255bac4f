"""``fl-sim table`` as typed: files, resuming, failures, interrupts and exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fl_sim.__main__ import main
from fl_sim.tables import PRESETS

ROOT = Path(__file__).parents[3]
QUICK = ["model=logistic", "rounds=2", "algorithm=fedavg,scaffold", "partition=label-1", "seed=0"]
ONE = [*QUICK, "rounds=1", "algorithm=fedavg", "centralized=false", "--jobs", "1"]
LONG = ["model=logistic", "rounds=300", "algorithm=fedavg,scaffold", "partition=label-1", "seed=0"]
MEDIUM = [*LONG, "rounds=30", "centralized=false", "--jobs", "1"]
PATIENCE = 120.0
"""Seconds for what takes one on an idle machine."""
DYING = """
import os
import signal
import sys
from torch import nn

class Dying(nn.Linear):
    def forward(self, inputs):
        if "pytest" not in sys.modules:  # in the worker, not where the table is planned
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs.flatten(1))

def factory(input_shape, num_classes):
    return Dying(64, num_classes)
"""


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fl-sim", "table", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fl_sim", "table", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Leave no process of its session behind where a test fails."""
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_a_round(out: Path, process: subprocess.Popen[str], least: int) -> None:
    """Return once some cell has finished ``least`` rounds."""
    deadline = time.monotonic() + 240
    while not any(log.read_text().count("\n") >= least for log in out.glob("cells/*/rounds.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_the_end_of_all(session: int) -> None:
    """Return once no process of a session is left; multiprocessing's own tracker goes a moment after its parent."""
    deadline = time.monotonic() + 60
    while left := processes_of_session(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def processes_of_session(session: int) -> list[list[str]]:
    """Return the first fields (state, parent, group, session) of processes that run, or were not waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.append(path.read_text().rpartition(")")[2].split()[:4])
    return [fields for fields in found if int(fields[3]) == session]


def table_of(out: Path) -> str:
    return (out / "table.json").read_text()


@pytest.mark.usefixtures("cells_in_threads")
def test_number_of_jobs_does_not_change_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, *QUICK, "--jobs", "1", "--out", str(tmp_path / "one"), "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(table_of(tmp_path / "one"))
    assert "[3/3]" in printed.err
    assert printed.err.count("(picked on the test set)") == 3
    rounds = (tmp_path / "one" / "rounds.csv").read_text().splitlines()
    logs = [path.read_text() for path in tmp_path.glob("one/cells/*/rounds.jsonl")]
    assert len(rounds) == 1 + sum(len(log.splitlines()) for log in logs)
    runs = (tmp_path / "one" / "table.csv").read_text().splitlines()
    assert len(runs) == 1 + 3
    assert {"local.learning_rate", "partition.k", "final_accuracy_percent", "seconds.total"} <= set(runs[0].split(","))
    assert typed(monkeypatch, *QUICK, "--jobs", "2", "--out", str(tmp_path / "two")) == 0
    assert table_of(tmp_path / "two") == table_of(tmp_path / "one")
    assert capsys.readouterr().out.startswith("| Method | digits 1-Label last | digits 1-Label best |")


@pytest.mark.usefixtures("cells_in_threads")
def test_another_call_runs_what_is_missing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(monkeypatch, *QUICK, "--jobs", "1", "--out", str(tmp_path)) == 0
    logs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/rounds.jsonl")}
    assert len(logs) == 3
    assert typed(monkeypatch, *QUICK, "seed=0,1", "--jobs", "1", "--out", str(tmp_path)) == 0
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/rounds.jsonl")}
    assert {path: again[path] for path in logs} == logs
    assert len(again) == 6


@pytest.mark.usefixtures("cells_in_threads")
def test_a_diverging_cell_is_shown_as_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'centralized = false\n[base]\nmodel = "mlp"\nrounds = 2\n[grid]\nlocal.learning_rate = [1e30, 0.01]\n'
    )
    assert typed(monkeypatch, str(file), "--jobs", "1", "--out", str(tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert "| FedAvg, local.learning_rate=1e+30 | failed | failed |" in printed.out
    assert re.search(r"\| FedAvg, local.learning_rate=0.01 \| [0-9]", printed.out)
    assert "training diverged" in printed.out
    assert "error: 1 of 2 cells failed" in printed.err
    assert "Traceback" not in printed.err


def test_a_worker_that_dies_costs_one_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "grid.toml"
    file.write_text('centralized = false\n[base]\nrounds = 1\n[grid]\nmodel = ["dying:factory", "logistic"]\n')
    assert typed(monkeypatch, str(file), "--jobs", "1", "--out", str(tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert "its worker process died (killed by signal 9): the operating system does this" in printed.err
    assert re.search(r"\| FedAvg, model=logistic \| [0-9]", printed.out)


DA_FL = """
[base]
model = "logistic"
rounds = 1
partition = "label-1"
clients = 3
[grid]
algorithm = [
    "fedavg",
    {algorithm = "fedavg", preprocess = {kind = "da-fl", generator = "mean-embedding"}},
    {algorithm = "scaffold", preprocess = {kind = "da-fl", generator = "mean-embedding"}},
    {algorithm = "fedavg", preprocess = {kind = "da-fl", generator = "mean-embedding", epsilon = inf}},
]
"""


@pytest.mark.usefixtures("quick_accounting", "cells_in_threads")
def test_rows_with_synthetic_records_share_a_pool_and_say_what_is_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.toml").write_text(DA_FL)
    out = tmp_path / "out"
    assert typed(monkeypatch, str(tmp_path / "grid.toml"), "--jobs", "1", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert "| DA-FL + SCAFFOLD |" in printed.out
    assert "No privacy guarantee: FedAvg, DA-FL (epsilon=inf) + FedAvg" in printed.out
    alone = "Privacy of each single run (terms: docs/privacy.md), of a record (adding or removing one), delta 1e-05"
    (line,) = [line for line in printed.out.splitlines() if line.startswith(alone)]
    assert "DA-FL + SCAFFOLD epsilon 9.91." in line
    assert "\nCovered: the pool" in printed.out
    assert "\nNot covered: The main task is NOT private" in printed.out
    assert "before the first round clients make synthetic records" in printed.err

    results = [json.loads(path.read_text()) for path in out.glob("cells/da-fl-*/result.json")]
    finite = [result["preprocess"] for result in results if result["privacy"][0]["epsilon"] is not None]
    [finite_epsilon] = {result["privacy"][0]["epsilon"] for result in results} - {None}
    assert sorted(made["reused"] for made in finite) == [False, True]
    assert len({made["pool"] for made in finite}) == 1
    assert len(list(out.glob("cells/da-fl-*/samples.png"))) == 3
    [bill] = json.loads(table_of(out))["bill"]
    assert (bill["unit"], bill["epsilon"], bill["runs"], bill["runs_without_guarantee"]) == ("record", None, 5, 5)
    [private] = bill["private_releases"]
    assert private["releases"] == 1  # one pool, which two runs share
    assert private["epsilon_sum"] == finite_epsilon
    for text in (printed.out, (out / "table.md").read_text(), (out / "table.tex").read_text()):
        assert "Privacy of all 5 runs together, of one record of digits: none, since 5 of the 5 runs" in text
    json.loads(table_of(out), parse_constant=pytest.fail)  # inf is no JSON


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A table on its way, in a process of its own."""
    out = tmp_path_factory.mktemp("running")
    with ended(started(*LONG, "--jobs", "2", "--out", str(out))) as process:
        wait_for_a_round(out, process, 2)
        yield out, process


def test_two_commands_cannot_fill_one_directory(
    running: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, process = running
    assert typed(monkeypatch, *LONG, "--out", str(out)) == 1
    assert f"is being written by process {process.pid}, started" in capsys.readouterr().err


def test_ctrl_c_stops_at_once_prints_what_is_finished_and_leaves_no_process(
    running: tuple[Path, subprocess.Popen[str]],
) -> None:
    _, process = running
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "| FedAvg |" in out
    assert "of 3 cells are finished" in err
    assert "the same command runs the others" in err
    assert "Traceback" not in err
    wait_for_the_end_of_all(process.pid)


@pytest.mark.usefixtures("cells_in_threads")  # but not in the command that is killed
def test_after_kill_9_the_same_command_gives_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    with ended(started(*MEDIUM, "--out", str(killed))) as process:
        wait_for_a_round(killed, process, 5)
        process.kill()
        process.communicate(timeout=PATIENCE)
        wait_for_the_end_of_all(process.pid)
    assert typed(monkeypatch, *MEDIUM, "--out", str(killed)) == 0
    assert "resumes after round" in capsys.readouterr().err
    assert typed(monkeypatch, *MEDIUM, "--out", str(tmp_path / "whole")) == 0
    assert table_of(killed) == table_of(tmp_path / "whole")


@pytest.mark.usefixtures("cells_in_threads")
def test_a_cell_killed_before_its_first_file_was_whole_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed(monkeypatch, *ONE, "--out", str(tmp_path)) == 0
    before = table_of(tmp_path)
    cell = next(tmp_path.glob("cells/fedavg-*"))
    for file in cell.iterdir():
        file.unlink()
    (cell / ".config.toml.part").write_text('data = "dig')
    assert typed(monkeypatch, *ONE, "--out", str(tmp_path)) == 0
    assert table_of(tmp_path) == before


@pytest.mark.usefixtures("cells_in_threads")
def test_a_terminal_gets_a_drawn_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert typed(monkeypatch, *ONE, "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "┃" in out
    assert "No privacy guarantee: all methods." in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "no file or preset 'digit' (did you mean 'digits'?); presets: dafl-paper, dafl-paper-cifar10,"),
        (["rouds=3"], "unknown key 'rouds' (did you mean 'rounds'?)"),
        (["a.toml", "b.toml"], "give at most one FILE or PRESET, got a.toml, b.toml"),
        (["algorithm=fedavg,fedporx"], "unknown algorithm 'fedporx' (did you mean 'fedprox'?)"),
    ],
)
def test_mistakes_exit_with_2_and_run_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, *arguments, "--out", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_lists_the_presets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "--help") == 0
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines also break after a hyphen
    presets = sorted(path.stem for path in PRESETS.glob("*.toml"))
    assert f"Presets: {', '.join(presets)}." in text
