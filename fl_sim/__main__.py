"""The command line: ``fl-sim VERB``. The user's mistake exits with 2, a failed run with 1, an interrupt with 130."""

import sys

import click
import typer

from fl_sim.cli.data import app as data_app
from fl_sim.cli.partition import partition
from fl_sim.cli.privacy.verbs import app as privacy_app
from fl_sim.cli.report import report
from fl_sim.cli.run import run_command
from fl_sim.cli.table import table
from fl_sim.types import RunError, UserError

INTERRUPTED = 130
"""What a shell reports for Ctrl-C, and what typer returns for it."""

app = typer.Typer(
    name="fl-sim",
    help="Federated-learning simulation: split a data set, train with a list of methods, compare them. "
    "Start with 'fl-sim table', which compares all methods on embedded data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run_command)
app.command("table")(table)
app.command("partition")(partition)
app.command("report")(report)
app.add_typer(privacy_app, name="privacy")
app.add_typer(data_app, name="data")


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


def _leave(error: Exception, code: int, *, debug: bool) -> None:
    if debug:
        raise error
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
