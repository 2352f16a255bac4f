"""What can be typed: every verb, from files that hold its options and its help. What it does is imported when called.

Help and typos are answered from these files, so nothing in them may import torch, Flower or a library for figures.
"""

from pathlib import Path
from typing import Annotated

import typer

import fl_sim
from fl_sim.cli.data_verbs import app as data_app
from fl_sim.cli.options import AsJson
from fl_sim.cli.privacy.verbs import app as privacy_app
from fl_sim.cli.result_verbs import export, report, watch
from fl_sim.cli.running_verbs import partition, plan, run, sweep, table
from fl_sim.cli.screen import say
from fl_sim.importing import importing

app = typer.Typer(
    name="fl-sim",
    help="Federated-learning simulation: split a data set, train with a list of methods, compare them. "
    "Start with 'fl-sim table', which compares all methods on embedded data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(*, asked: bool) -> None:
    if asked:
        say(f"fl-sim {fl_sim.__version__}")
        raise typer.Exit


@app.callback()
def options_of_every_verb(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=lambda asked: _print_version(asked=asked), is_eager=True,
                     help="Print the version."),
    ] = False,
) -> None:  # fmt: skip
    """Take the options that stand before a verb."""
    del version


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="What to write.")] = Path("table.toml"),
) -> None:
    """Write a table's file with comments to begin with; it runs as it is.

    For example:

      fl-sim init

      fl-sim init skew.toml
    """
    from fl_sim.tables.files import write_table_file  # noqa: PLC0415 (see above)

    write_table_file(file)
    say(f"{file} is a table's file with comments: change it, and 'fl-sim table {file}' runs it")


def settings(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A setting, the start of one, or a kind, such as fedprox.")
    ] = None,
    *,
    json_output: AsJson = False,
) -> None:
    """Tell what a setting takes, its default, and what it means; without NAME those of every experiment.

    For example:

      fl-sim settings

      fl-sim settings local.schedule

      fl-sim settings algorithm=fedprox
    """
    with importing():
        from fl_sim.cli.settings import show_settings  # noqa: PLC0415 (see above)

    show_settings(name, json_output=json_output)


for _verb in (run, table, sweep, init, plan, settings, partition, report, watch, export):
    app.command()(_verb)
app.add_typer(privacy_app, name="privacy")
app.add_typer(data_app, name="data")
