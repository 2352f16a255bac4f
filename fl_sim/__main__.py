"""The command line: ``fl-sim VERB``. The user's mistake exits with 2, a failed run with 1, an interrupt with 130."""

import os
import sys

import click
import typer

from fl_sim.cli.verbs import app
from fl_sim.errors import RunError, UserError

INTERRUPTED = 130
"""What a shell reports for Ctrl-C, and what typer returns for it."""


def main() -> None:
    """Run the command line. ``--debug`` anywhere lets tracebacks through."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:
            typer.echo("interrupted: what is finished is kept; the same command goes on from there", err=True)
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


def _leave(error: Exception, code: int, *, debug: bool) -> None:
    if debug:
        raise error
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    command()
