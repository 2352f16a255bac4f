"""The process of a command ends with the command's exit code, and not before what it prints is out."""

import io
import sys
from collections.abc import Callable

import pytest

from fl_sim import __main__ as program


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
