"""What people see while a table fills."""

import io
import re
from dataclasses import replace

import pytest

from fl_sim.report.table_progress import TableProgress
from fl_sim.store.run_directory import RoundRecord


def record(server_round: int, accuracy: float | None) -> RoundRecord:
    return RoundRecord(server_round, accuracy, None, None, None, 10, 0.01, 0.5)


def test_a_plain_stream_gets_a_line_per_finished_cell() -> None:
    stream = io.StringIO()
    with TableProgress({"a": 2, "b": 2}, stream) as progress:
        progress.started("a", 1)
        progress.finished_round("a", record(1, 0.5))
        progress.finished_round("a", record(2, None))
        progress.closed("a", "last 50.0 %")
        progress.started("b", 2)
        progress.finished_round("b", record(2, 0.75))
        progress.closed("b", "failed: no")
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("[1/2] a: last 50.0 %; about 0 s left")
    assert second == "b goes on after round 1"
    assert third == "[2/2] b: failed: no"


def test_cells_finished_earlier_say_nothing_about_the_time_left() -> None:
    stream = io.StringIO()
    with TableProgress({"a": 2, "b": 2}, stream) as progress:
        progress.closed("a", "last 50.0 %")
    assert stream.getvalue() == "[1/2] a: last 50.0 %\n"


def test_a_cell_whose_time_is_private_ends_all_talk_of_time() -> None:
    stream = io.StringIO()
    with TableProgress({"a": 2, "b": 2}, stream) as progress:
        progress.started("a", 1)
        progress.finished_round("a", replace(record(1, 0.5), seconds=None))
        progress.closed("a", "last 50.0 %")
    assert stream.getvalue() == "[1/2] a: last 50.0 %\n"


def test_what_a_cell_does_before_its_first_round_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with TableProgress({"a": 2}, stream) as progress:
        progress.started("a", 1)
        progress.preparing("a", "clients make records")
    told = "clients make records"
    assert stream.getvalue() == f"a: before the first round {told}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    stream = io.StringIO()
    with TableProgress({"a": 2}, stream) as progress:
        progress.started("a", 1)
        progress.preparing("a", "clients make records")
        progress._bars.refresh()
        assert told in stream.getvalue()


def test_a_terminal_gets_a_live_view_of_running_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    with TableProgress({"FedAvg, [digits]": 4, "b": 4}, stream) as progress:
        progress.started("FedAvg, [digits]", 1)
        progress.finished_round("FedAvg, [digits]", record(1, 0.9312))
        progress._bars.refresh()
        shown = stream.getvalue()
        progress.closed("FedAvg, [digits]", "done")
    assert "FedAvg, [digits]" in shown
    assert "accuracy 0.9312" in shown
    assert "0.50 s/round" in shown
    assert "0/2 cells, about 0 s left" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_cell_and_rounds_are_told(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    with TableProgress({"FedProx (mu=0.1), dirichlet:0.05, seed 0": 40, "b": 4}, stream) as progress:
        progress.started("FedProx (mu=0.1), dirichlet:0.05, seed 0", 1)
        progress.finished_round("FedProx (mu=0.1), dirichlet:0.05, seed 0", record(1, 0.9312))
        progress._bars.refresh()
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = drawn.replace("\r", "\n").splitlines()
    assert all(len(line) < width for line in lines)
    cell = next(line for line in reversed(lines) if "FedProx (" in line)
    assert "1/40 rounds" in cell
    for text, needed in (("accuracy 0.9312", 60), ("━━━━", 80), ("0.50 s/round", 120), ("seed 0", 200)):
        assert text in cell or width < needed, (text, cell)
    assert any("0/2 cells, about" in line for line in lines)
