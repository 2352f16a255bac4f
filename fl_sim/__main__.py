"""The command line: ``fl-sim VERB``. The user's mistake exits with 2, a failed run with 1, an interrupt with 130."""

import os
import sys

import click

from fl_sim.cli.screen import say
from fl_sim.cli.verbs import app
from fl_sim.errors import RunError, UserError, in_a_line

INTERRUPTED = 130
"""What a shell reports for Ctrl-C, and what typer returns for it."""


def main() -> None:
    """Run the command line. ``--debug`` anywhere lets tracebacks through."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:
            say("interrupted: what is finished is kept; the same command goes on from there", err=True)
        sys.exit(code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        _leave(error, 2, debug=debug)
    except (RunError, OSError) as error:
        _leave(error, 1, debug=debug)


def command() -> None:
    """Run the command line as a process of its own, which ends at once: taking torch apart takes a fifth of a second.

    All files are closed then, and a Ray or workers that the command started have been stopped.
    """
    code: object = 0
    _open_standard_files()
    try:
        main()
    except SystemExit as end:
        code = end.code
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # whoever read has gone
        code = 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def _open_standard_files() -> None:
    """Open what the shell closed (``>&-``): otherwise the next file that is opened takes its place, and its output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so this one
            file = open(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, file)


def _leave(error: Exception, code: int, *, debug: bool) -> None:
    if debug:
        raise error
    said = in_a_line(str(error)) if isinstance(error, UserError) else str(error)
    say(f"error: {said}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    command()
