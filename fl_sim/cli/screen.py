"""Lines on the screen: all that the command line prints passes here, names from files included."""

import typer

from fl_sim.printable import printable


def say(text: object = "", *, err: bool = False) -> None:
    """Print ``text`` and a line break to standard output, or to standard error with ``err``."""
    typer.echo(printable(str(text)), err=err)
