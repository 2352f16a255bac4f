"""What can be typed behind ``fl-sim data``: the verbs with options and help."""

from pathlib import Path
from typing import Annotated

import typer

from fl_sim.cli.options import AnyDataRoot, AsJson, DataRoot
from fl_sim.importing import importing

app = typer.Typer(help="Find and check data sets.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_data(*, data_root: AnyDataRoot = None, json_output: AsJson = False) -> None:
    """Show which data sets are found, and where the others are looked for.

    For example:

      fl-sim data list --data-root ROOT
    """
    with importing():
        from fl_sim.cli.data import show_found  # noqa: PLC0415 (see verbs.py)

    show_found(data_root, json_output=json_output)


@app.command("verify")
def verify_data(
    *,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all that are found.")] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Compare data sets with what is published: checksums, shapes, counts, labels.

    Exits with 1 when a file is damaged or a data set asked for is missing.

    For example:

      fl-sim data verify

      fl-sim data verify mnist npz:my.npz --data-root ROOT
    """
    with importing():
        from fl_sim.cli.data import verify_all  # noqa: PLC0415 (see verbs.py)

    verify_all(names or [], data_root, json_output=json_output)


@app.command("show")
def show_data(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME [KEY=VALUE]...", help="A data set, and settings of how it is read.")
    ],
    *,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw some images of each class to a .png.")
    ] = None,
    records: Annotated[
        bool, typer.Option(help="Show the first records of a table, and the ranges of its numbers.")
    ] = True,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Show what a data set is: sizes, classes, clients, columns and how they are read, and a few records.

    Whatever cannot be read is told as 'fl-sim run' tells it, without a run.

    For example:

      fl-sim data show digits --sheet digits.png

      fl-sim data show csv:patients.csv data.label=outcome data.client=hospital data.test=0.2
    """
    with importing():
        from fl_sim.cli.data import show_card  # noqa: PLC0415 (see verbs.py)

    show_card(arguments, sheet, data_root, with_records=records, json_output=json_output)
