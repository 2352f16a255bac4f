"""What several verbs take, with the help that is shown for it."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Where data sets lie (else $FL_SIM_DATA, then your cache)."),
]
AnyDataRoot = Annotated[Path | None, typer.Option(help="Where to look first (else $FL_SIM_DATA, then your cache).")]
Budget = Annotated[
    float | None, typer.Option(metavar="HOURS", help="Stop in time, with a table of what is there (exit code 3).")
]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print the table as one JSON object.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Run nothing: show what would run and how long it takes, as 'fl-sim plan'.")
]
Track = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Also tell tensorboard, mlflow, wandb, trackio, or your own MODULE:NAME, of every round."
    ),
]
Stale = Annotated[
    bool,
    typer.Option(
        "--again", help="Run again what is of other records or code of yours than now; what it was is moved beside it."
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE or PRESET] [KEY=VALUE]..."),
]
