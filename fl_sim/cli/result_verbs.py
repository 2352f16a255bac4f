"""What can be typed to look at runs, while they run and afterwards: the verbs with options and help."""

from pathlib import Path
from typing import Annotated

import typer

from fl_sim.cli.options import AsJson
from fl_sim.importing import importing


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run or table directories, or directories that hold some.")
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Where to write (default: DIR/report; results/report for several).")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Also write diagrams as PDF and SVG, 3.3 and 6.9 inches wide.")
    ] = False,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures", help="Find images for synthetic feature vectors: 10 s (MNIST) to a minute (CIFAR-10) a run."
        ),
    ] = False,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="Also tell what runs took to this test accuracy, such as 0.8.")
    ] = None,
    gallery: Annotated[
        bool, typer.Option("--gallery", help="Write DIR/README.md on the tables in DIR, beside what was published.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print what was found as one JSON object.")] = False,
) -> None:
    """Draw accuracy and loss over rounds, and write a page that compares finished runs.

    Runs that differ in the seed alone are averaged; all other differences are named in the legend. Writes
    report.html (one interactive file, to open or to send), accuracy.png and loss.png, or figures by data set and
    split where there are more than four of these. Runs with synthetic records add their samples by class and
    epsilon (samples-*.png), and where they differ in epsilon or gamma alone the final accuracy over it
    (sweep-*.png). Runs of PATE add noisy labels over 1/gamma, students over queries and epsilon, and the teachers'
    agreement where votes were kept (pate-*.png). Damaged and unfinished runs are reported; the rest is shown.

    Synthetic records in a public feature space (features=scattering) are vectors. With --pictures, pixels are changed
    until their features come close to such a vector, for four records of each of up to 20 classes. That costs no
    privacy, as the released vectors alone are looked at. The images are kept beside them
    (synthetic-pictures.safetensors), so a later report shows them at once; they are found again where the vectors
    have changed.

    For example:

      fl-sim report results/digits

      fl-sim report results/fedavg results/scaffold --out results/comparison

      fl-sim report results/digits --paper --target 0.8

      fl-sim report results/gaussian --pictures

      fl-sim report --gallery docs/results
    """
    with importing():
        from fl_sim.cli.report import write_gallery, write_report  # noqa: PLC0415 (see verbs.py)

    if gallery:
        write_gallery(directories, out, json_output=json_output)
        return
    write_report(directories, out, paper=paper, pictures=pictures, target=target, json_output=json_output)


def watch(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's or a table's directory, or one that holds some.")
    ],
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print what there is now as one JSON object.")] = False,
) -> None:
    """Look on while runs are running, from another terminal: round, accuracy, curve, time left, epsilon spent so far.

    Reads files alone, so no run is disturbed. Ends when nothing runs any more, or with Ctrl-C. A run is stopped when
    its process has gone without a result; the command that began it goes on with it.

    For example:

      fl-sim watch results/digits

      fl-sim watch results --once
    """
    with importing():
        from fl_sim.cli.watch import watch_directory  # noqa: PLC0415 (see verbs.py)

    watch_directory(directory, every=every, once=once, json_output=json_output)


def export(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run or table directories, or directories that hold some.")
    ],
    *,
    to: Annotated[str, typer.Option(metavar="NAMES", help="tensorboard, mlflow, wandb, trackio, or several: a,b.")],
    json_output: AsJson = False,
) -> None:
    """Show finished runs in TensorBoard, MLflow, Weights & Biases or Trackio, as --track does while they run.

    What a tracker has already is not sent again. Weights & Biases writes offline files unless $WANDB_MODE says
    otherwise; MLflow goes where $MLFLOW_TRACKING_URI says.

    For example:

      fl-sim export results/digits --to tensorboard

      fl-sim export results/fedavg results/scaffold --to mlflow,wandb
    """
    from fl_sim.tracking.trackers import chosen_trackers  # noqa: PLC0415 (see verbs.py)

    trackers = chosen_trackers(to)  # now: a mistake is told without waiting for torch
    with importing():
        from fl_sim.cli.report import export_runs  # noqa: PLC0415 (see verbs.py)

    export_runs(directories, trackers, json_output=json_output)
