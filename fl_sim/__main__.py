"""The command line ``fl-sim VERB``.

Its exit code is 2 after a user's mistake, 1 after a failed run, and 130 after Ctrl-C.
"""

import logging
import os
import sys

import click

from fl_sim.cli.screen import say
from fl_sim.cli.verbs import app
from fl_sim.errors import RunError, UserError, in_a_line
from fl_sim.other_words import elsewhere

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells and in typer."""


def main() -> None:
    """Run the command line. With ``--debug`` anywhere among the arguments, errors are shown with their tracebacks."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if debug:
        logging.getLogger("fl_sim").setLevel(logging.DEBUG)
        logging.getLogger("fl_sim").addHandler(logging.StreamHandler())
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:
            say("interrupted: finished work is kept; the same command resumes the work", err=True)
        sys.exit(code)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption):
            meant = elsewhere(error.option_name.lstrip("-")) or " (for example rounds=50)"
            say(f"settings are written as key=value, without dashes before them{meant}", err=True)
        sys.exit(error.exit_code)
    except UserError as error:
        _exit_with(error, 2, debug=debug)
    except (RunError, OSError) as error:
        _exit_with(error, 1, debug=debug)


def command() -> None:
    """Run the command line as a process, and exit without torch's cleanup, which takes a fifth of a second.

    The cleanup is not needed: all files are closed, and the command has stopped its Ray instance and its workers.
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
    except OSError:  # the program that reads the output has ended, such as ``head``
        code = 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def _open_standard_files() -> None:
    """If the shell has closed stdin, stdout or stderr (``>&-``), open it on the null device.

    If stdout stayed closed, the next file that the program opens would get the file number of stdout. Printed text
    would then go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the null device gets the lowest free file number, here ``number``
            file = open(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, file)


def _exit_with(error: Exception, code: int, *, debug: bool) -> None:
    if debug:
        raise error
    said = in_a_line(str(error)) if isinstance(error, UserError) else str(error)
    say(f"error: {said}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    command()
