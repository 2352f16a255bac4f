"""The process of a command ends with the command's exit code, and not before what it prints is out."""

import io
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_sim import __main__ as program
from fl_sim.errors import RunError, UserError


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], int]:
    """Return the exit code of a process whose command does what is given."""

    def leave(code: int) -> None:
        raise Ended(code)

    def ended(main: Callable[[], None]) -> int:
        monkeypatch.setattr(program, "main", main)
        monkeypatch.setattr(program.os, "_exit", leave)
        with pytest.raises(Ended) as end:
            program.command()
        return int(end.value.args[0])

    return ended


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (1, 1), (2, 2), (130, 130)])
def test_the_process_ends_with_the_commands_code(
    end_of: Callable[[Callable[[], None]], int], given: int | None, code: int
) -> None:
    assert end_of(lambda: sys.exit(given)) == code
    assert end_of(lambda: None) == 0


def test_a_reader_that_has_gone_is_a_failure(
    end_of: Callable[[Callable[[], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert end_of(lambda: None) == 1


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(program, "main", broken)
    monkeypatch.setattr(program.os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    with pytest.raises(RuntimeError, match="a fault"):
        program.command()


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&-", "0<&- 1>&- 2>&-"])
def test_a_command_whose_standard_files_are_closed_ends_as_usual(tmp_path: Path, closed: str) -> None:
    command = f"exec {sys.executable} -m fl_sim data list --json {closed}"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("digits" in done.stdout) is ("1>&-" not in closed)


def test_what_is_opened_next_takes_no_closed_standard_file(tmp_path: Path) -> None:
    code = (
        "import os; from fl_sim.__main__ import _open_standard_files as opened; opened(); "
        f"file = open({str(tmp_path / 'ledger')!r}, 'w'); print('to nobody', flush=True); os.write(1, b'to nobody'); "
        "os._exit(file.fileno())"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -c {shlex.quote(code)} 1>&-"], check=False, timeout=60
    )
    assert done.returncode > 2
    assert (tmp_path / "ledger").read_text() == ""


def test_a_refusal_is_one_line_that_steers_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def refused(*_: object, **__: object) -> None:
        raise UserError("column 'a\x1b[2J\nb' is none; take another")

    monkeypatch.setattr(program, "app", refused)
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: column 'a\\x1b[2J b' is none; take another\n"


MINE = """
from strategies.fedavg import FedAvg


class LatePlan(FedAvg):
    def plan(self, task):
        return [][1] if task.server_round == 2 else super().plan(task)


class LateFinish(FedAvg):
    def finish(self, task, trained):
        return [][1] if task.server_round == 2 else super().finish(task, trained)


class WrongPlan(FedAvg):
    def plan(self, task):
        return 3


class WrongInit(FedAvg):
    def init(self, params):
        return params


class WrongMerge(FedAvg):
    def merge(self, server, aggregate):
        return None


class LateWrongFinish(FedAvg):
    def finish(self, task, trained):
        return 3 if task.server_round == 2 else super().finish(task, trained)
"""


@pytest.mark.parametrize("more", [(), ("local.label_smoothing=0.1", "model=mlp")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LatePlan", r"client 0 in round 2 failed: IndexError: list index out of range \(\S+mine.py:7, in plan\)"),
        ("LateFinish", r"client 0 in round 2 failed: IndexError: list index out of range \(\S+mine.py:12, in finish\)"),
        ("WrongPlan", r"WrongPlan.plan \(\S+mine.py:16\) returned an object of type int, not a LocalPlan"),
        ("WrongInit", r"WrongInit.init \(\S+mine.py:21\) returned an object of type dict, not a ServerState"),
        ("WrongMerge", r"WrongMerge.merge \(\S+mine.py:26\) returned an object of type NoneType, not a ServerState"),
        (
            "LateWrongFinish",
            r"client 0 in round 2 failed: LateWrongFinish.finish \(\S+mine.py:31\) returned an object of type int",
        ),
    ],
)
def test_an_error_in_a_method_of_ones_own_names_file_and_line_and_debug_shows_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, name: str, said: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    command = ["fl-sim", "run", f"algorithm=mine:{name}", "model=logistic", "rounds=2", "engine=inprocess", *more]
    monkeypatch.setattr("sys.argv", [*command, "--out", "run"])
    with pytest.raises(SystemExit, match=r"^1$"):
        program.main()
    told = capsys.readouterr().err
    assert re.search(rf"^error: {said}", told, re.MULTILINE)
    assert "Traceback" not in told
    monkeypatch.setattr("sys.argv", [*command, "--out", "again", "--debug"])
    logger = logging.getLogger("fl_sim")
    with pytest.raises(RunError, match=said):
        program.main()
    logger.removeHandler(logger.handlers[-1])
    logger.setLevel(logging.NOTSET)
    if name.startswith("Late"):
        assert "Traceback (most recent call last)" in capsys.readouterr().err
