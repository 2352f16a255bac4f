"""What a run and a table show: few lines, the last round always, and no time that is private."""

import io
import re
from dataclasses import replace

import pytest

from fl_sim.report import progress
from fl_sim.report.progress import RunProgress, TableProgress
from fl_sim.store.run_directory import RoundRecord
from fl_sim.testing_fixtures import FakeClock


@pytest.fixture
def clock(fake_clock) -> FakeClock:
    return fake_clock(progress)


def _record(number: int) -> RoundRecord:
    return RoundRecord(number, 0.5, 1.0, None, None, None, 0.01, 2.0)


def _shown(clock: FakeClock, seconds_between_calls: float) -> str:
    stream = io.StringIO()
    with RunProgress("title", 3, stream) as shown:
        shown.started(1)
        shown.preparing("clients make synthetic records")
        for replies in (1, 2):
            clock.now += seconds_between_calls
            shown.replied(replies)
        for number in (1, 2, 3):
            clock.now += seconds_between_calls
            shown.finished_round(_record(number))
            shown.replied(1)
    return stream.getvalue()


def test_every_step_is_a_line_where_there_is_time(clock: FakeClock) -> None:
    text = _shown(clock, 2.1)
    assert text.splitlines() == [
        "before the first round: clients make synthetic records",
        "1 clients are done",
        "2 clients are done",
        *(f"round {number}/3  accuracy 0.5000  2.00 s/round" for number in (1, 2, 3)),
    ]


def test_fast_rounds_are_left_out_but_for_the_last(clock: FakeClock) -> None:
    first, client, last = _shown(clock, 0.3).splitlines()
    assert first == "before the first round: clients make synthetic records"
    assert client == "1 clients are done"
    assert last == "round 3/3  accuracy 0.5000  2.00 s/round"


def test_what_is_held_out_is_shown_beside_the_test_or_alone(clock: FakeClock) -> None:
    stream, both = io.StringIO(), replace(_record(1), validation_accuracy=0.25)
    with RunProgress("title", 3, stream) as shown:
        clock.now += 2.1
        shown.finished_round(both)
        clock.now += 2.1
        shown.finished_round(replace(both, round=2, test_accuracy=None))
    assert stream.getvalue().splitlines() == [
        "round 1/3  accuracy 0.5000  validation 0.2500  2.00 s/round", "round 2/3  validation 0.2500  2.00 s/round",
    ]  # fmt: skip


def test_where_time_is_private_none_is_shown_and_it_does_not_choose_the_lines(clock: FakeClock) -> None:
    stream = io.StringIO()
    with RunProgress("title", 70, stream, timed=False) as shown:
        shown.started(1)
        for number in range(1, 71):
            shown.finished_round(replace(_record(number), seconds=None))
    assert stream.getvalue().splitlines() == [
        f"round {number}/70  accuracy 0.5000" for number in (*range(3, 70, 3), 70)
    ]


def test_a_terminal_shows_no_clock_where_time_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    for timed in (True, False):
        stream = io.StringIO()
        with RunProgress("title", 3, stream, timed=timed) as shown:
            shown.started(1)
            shown.finished_round(replace(_record(1), seconds=2.0 if timed else None))
            shown._bars.refresh()
        assert ("so far" in stream.getvalue()) == timed
        assert (" left" in stream.getvalue()) == timed
        assert ("s/round" in stream.getvalue()) == timed


def _live_line(monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    """Return what a terminal of this width shows after a round."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    with RunProgress("DA-FL + FedAvg on fashion-mnist (dirichlet:0.05), seed 0", 120, stream) as shown:
        shown.started(58)
        shown.finished_round(replace(_record(58), validation_accuracy=0.25))
        shown.replied(7)
        shown._bars.refresh()
        drawn = stream.getvalue()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).replace("\n", "").split("\r")[-1]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_round_accuracy_and_time_left_are_shown_at_every_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    line = _live_line(monkeypatch, width)
    assert len(line) < width
    assert "58/120  accuracy 0.5000" in line
    assert "2:04 left" in line  # 62 rounds of 2 s
    for text, needed in (("━━━━", 60), ("DA-FL + Fed", 80), ("validation 0.2500", 120), ("2.00 s/round", 120),
                         ("7 clients in", 200), ("seed 0", 200)):  # fmt: skip
        assert (text in line) or width < needed, (text, line)


def test_a_stream_of_the_callers_is_written_to_in_a_notebook_as_well(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert len(_shown(clock, 2.1).splitlines()) == 6


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
    assert second == "b resumes after round 1"
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
