"""What a watcher tells of runs by their files: which state they are in, how far, and that nothing is touched."""

import io
import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from fl_sim.errors import UserError
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_table
from fl_sim.report.watching import Watched, Watcher, view

LINE = {
    "round": 1, "test_accuracy": 0.5, "test_loss": 1.0, "train_loss": None, "epsilon": None, "cohort": 2,
    "learning_rate": 0.1, "seconds": 2.0,
}  # fmt: skip


@pytest.fixture
def unfinished(write_experiment):
    """Write a run of ten rounds without a result: ``rounds`` of them are done."""

    def write(name, rounds=3, *, lock=None, end="", **line):
        path = write_experiment(name, seed=len(name), rounds=10)
        (path / "result.json").unlink()
        lines = [
            json.dumps(LINE | {"round": number, "test_accuracy": number / 10} | line) for number in range(1, rounds + 1)
        ]
        (path / "rounds.jsonl").write_text("".join(line + "\n" for line in lines) + end)
        if lock is not None:
            (path / ".lock").write_text(json.dumps(lock))
        return path

    return write


def living():
    return {"pid": os.getpid(), "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", "machine": os.uname().nodename}


def told(top):
    return {one.directory: one for one in Watcher(top).look()}


def test_the_state_of_every_run_follows_from_its_files(unfinished, write_experiment, tmp_path):
    unfinished("running", lock=living())
    unfinished("killed", lock=living() | {"pid": 2**22 + 1})
    unfinished("killed-before-reboot", lock=living() | {"started": "2001-01-01 00:00:00 UTC"})
    unfinished("elsewhere", lock=living() | {"machine": "another"})
    unfinished("gone")
    write_experiment("finished", seed=77)
    interrupted = write_experiment("interrupted", seed=78)
    (interrupted / "result.json").write_text(
        (interrupted / "result.json").read_text().replace("finished", "interrupted")
    )
    failed = write_experiment("failed", seed=79)
    (failed / "result.json").write_text((failed / "result.json").read_text().replace("finished", "failed"))
    (unfinished("damaged") / "config.toml").write_text("data = ")
    assert {name: one.state for name, one in told(tmp_path).items()} == {
        "running": "running", "killed": "stopped", "killed-before-reboot": "stopped", "elsewhere": "running",
        "gone": "stopped", "finished": "finished", "interrupted": "stopped", "failed": "failed", "damaged": "damaged",
    }  # fmt: skip
    long_ago = time.time() - 1000
    for name in ("config.toml", "rounds.jsonl"):
        os.utime(tmp_path / "elsewhere" / name, (long_ago, long_ago))
    assert told(tmp_path)["elsewhere"].state == "stopped"


def test_round_accuracies_pace_time_left_and_epsilon_are_told(unfinished, tmp_path):
    unfinished("a", lock=living())
    unfinished("private", 4, lock=living(), seconds=None, epsilon=1.23456)
    runs = told(tmp_path)
    one = runs["a"]
    assert (one.round, one.rounds, one.accuracies, one.round_seconds) == (3, 10, (0.1, 0.2, 0.3), 2.0)
    assert one.left == pytest.approx(14, abs=1)
    private = runs["private"]
    assert (private.round_seconds, private.left, private.epsilon) == (None, None, "1.24")


def test_a_line_that_is_being_written_counts_once_it_is_whole(unfinished, tmp_path):
    log = unfinished("a", lock=living(), end='{"round": 4, "test_acc') / "rounds.jsonl"
    watcher = Watcher(tmp_path)
    assert watcher.look()[0].round == 3
    log.write_text(log.read_text().rpartition("\n")[0] + "\n" + json.dumps(LINE | {"round": 4}) + "\n")
    assert watcher.look()[0].round == 4


def test_what_is_watched_is_not_touched(unfinished, tmp_path):
    path = unfinished("a", lock=living() | {"pid": 2**22 + 1})
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()}
    watcher = Watcher(tmp_path)
    assert not watcher.is_alive(watcher.look())
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()} == before


def test_runs_of_a_table_are_called_as_in_the_table_and_others_wait(unfinished, tmp_path):
    unfinished("t/cells/a", lock=living())
    results = tuple(
        SeedResult(row, "digits 1-Label", seed, "missing", f"cells/{name}")
        for row, seed, name in (("FedProx (mu=1)", 9, "a"), ("SCAFFOLD", 1, "b"), ("SCAFFOLD", 2, "c"))
    )
    write_table(tmp_path / "t", Table(("FedProx (mu=1)", "SCAFFOLD"), ("digits 1-Label",), frozenset(), results))
    assert [(one.method, one.place, one.state) for one in Watcher(tmp_path).look()] == [
        ("FedProx", "digits 1-Label", "running"),
        ("SCAFFOLD", "digits 1-Label", "waiting"), ("SCAFFOLD", "digits 1-Label", "waiting"),
    ]  # fmt: skip


def test_a_place_without_runs_is_told(tmp_path):
    with pytest.raises(UserError, match="yet: give a directory"):
        Watcher(tmp_path).look()
    with pytest.raises(UserError, match="does not exist"):
        Watcher(tmp_path / "nowhere").look()


ROW = Watched(
    "cells/x", "DA-FL (gamma=0.5, generator=mean-embedding, labels=exponential:0.5) + FedAvg", "fashion-mnist 2-Label",
    12, "running", 120, 1000, (0.1, 0.5, 0.93123), 12.34, 12345.0, "9.61 per record",
)  # fmt: skip


def shown(rows, width, **options):
    console = Console(width=width, file=io.StringIO())
    console.print(view(rows, **options))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_is_cut_at_80_columns(width):
    text = shown([ROW, replace(ROW, place="digits", method="x" * 60, state="finished")], width, height=None)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for whole in ("running", "finished", "120/1000", "93.1", "▁▄█", "12.34", "3:25:45"):
        assert whole in text
    first = "".join(line[: line.index("running") if "running" in line else 30] for line in text.splitlines()[:12])
    for word in ("DA-FL", "gamma=0.5", "seed"):
        assert word in first
    assert text.count("x") >= 60


def test_where_there_is_no_room_what_runs_is_shown_and_the_rest_is_counted():
    rows = [ROW, *(replace(ROW, state="finished", method=f"m{number}", epsilon="") for number in range(50))]
    text = shown(rows, 120, height=20)
    assert len(text.rstrip("\n").splitlines()) <= 20
    assert "running" in text
    assert "51 runs: 1 running, 50 finished (" in text
    assert "runs are not shown: no room)" in text


def test_a_terminal_without_blocks_gets_plain_characters():
    assert shown([ROW], 100, height=None, is_plain=True).isascii()
