"""The command line: all commands (verbs) with their options and help. The code of a verb is imported when it runs.

This module must not import torch, Flower or matplotlib, so that help and errors about arguments appear at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fl_sim
from fl_sim.cli.privacy import app as privacy_app
from fl_sim.cli.running_verbs import AnyDataRoot, AsJson, DataRoot, partition, plan, run, sweep, table
from fl_sim.cli.screen import say
from fl_sim.cli.threat_verbs import attack_app, unlearn
from fl_sim.importing import LazyModule

if TYPE_CHECKING:
    from fl_sim.cli import data as data_code
    from fl_sim.cli import doctor as doctor_code
    from fl_sim.cli import report as report_code
    from fl_sim.cli import run as run_code
else:
    data_code, doctor_code = LazyModule("fl_sim.cli.data"), LazyModule("fl_sim.cli.doctor")
    report_code, run_code = LazyModule("fl_sim.cli.report"), LazyModule("fl_sim.cli.run")

app = typer.Typer(
    name="fl-sim",
    help="Federated-learning simulation: split a data set over clients, train with several methods, compare them. "
    "Start with 'fl-sim table', which compares methods on data that come with the package.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Directories of runs or tables, or folders that contain some.")
]

data_app = typer.Typer(help="Find and check data sets.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def options_of_every_verb(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=lambda asked: _print_version(asked=asked), is_eager=True,
                     help="Print the version."),
    ] = False,
) -> None:  # fmt: skip
    """Accept the options before the name of a command, such as ``--version``."""
    del version


def init(file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The new file.")] = Path("table.toml")) -> None:
    """Write an example of a file that defines a table, with comments.

    For example:

      fl-sim init

      fl-sim init skew.toml
    """
    from fl_sim.tables import write_table_file  # noqa: PLC0415 (see the top)

    write_table_file(file)
    say(f"{file} defines a table, with comments: change the file, and run it with 'fl-sim table {file}'")


def settings(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A setting, the first part of its name, or a kind, such as fedprox."),
    ] = None,
    *,
    json_output: AsJson = False,
) -> None:
    """Explain settings: values, default and meaning. Without NAME: the most common settings.

    For example:

      fl-sim settings

      fl-sim settings local.schedule

      fl-sim settings algorithm=fedprox
    """
    run_code.show_settings(name, json_output=json_output)


def report(
    directories: Directories,
    *,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write to (default: DIR/report; results/report for several DIRs).")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Also write figures as PDF and SVG, 3.3 and 6.9 inches wide.")
    ] = False,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures", help="Find images for synthetic feature vectors: 10 s (MNIST) to 60 s (CIFAR-10) per run."
        ),
    ] = False,
    full_axis: Annotated[
        bool, typer.Option("--full-axis", help="Draw accuracies from 0 to 100 %, not only over their range.")
    ] = False,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="Also report the costs to reach this test accuracy, such as 0.8.")
    ] = None,
    gallery: Annotated[
        bool, typer.Option("--gallery", help="Write DIR/README.md: the tables in DIR and published results.")
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Draw accuracy and loss over rounds, and write a page that compares finished runs.

    Runs that differ only in the seed are averaged. The legend states all other differences between runs. The command
    writes report.html (one interactive file, to open or to send), accuracy.png and loss.png. If there are more than
    four data sets and partitions, each of them has separate figures.

    For runs with synthetic records, there are figures of the synthetic records by class and epsilon (samples-*.png). If
    such runs differ only in epsilon or gamma, there are figures of the final accuracy over epsilon or gamma
    (sweep-*.png). For runs of PATE, there are figures of noisy labels over 1/gamma, and of the student's accuracy over
    queries and epsilon (pate-*.png). If the teachers' votes were stored, there is also a figure of the teachers'
    agreement. Damaged and unfinished runs are reported, and all other runs are shown.

    Synthetic records in a public feature space (features=scattering) are vectors, not images. --pictures finds images
    whose features are close to these vectors, for four records of each of up to 20 classes. This search has no privacy
    cost, because it uses only the published synthetic vectors. The images are stored in the run directory
    (synthetic-pictures.safetensors) for later reports. If the vectors have changed, the search is repeated.

    For example:

      fl-sim report results/digits

      fl-sim report results/fedavg results/scaffold --out results/comparison

      fl-sim report results/digits --paper --target 0.8

      fl-sim report results/gaussian --pictures

      fl-sim report --gallery docs/results
    """
    if gallery:
        report_code.write_gallery(directories, out, json_output=json_output)
        return
    report_code.write_report(
        directories, out, paper=paper, pictures=pictures, target=target, json_output=json_output, full_axis=full_axis
    )


def doctor(*, data_root: DataRoot = None, json_output: AsJson = False) -> None:
    """Check this installation: versions, trainer, GPU, data sets, caches, privacy ledgers, and a short self-test.

    The self-test takes a few seconds. The exit code is 1 if a check fails. Attach the output of --json to a bug report;
    it contains names of your folders.

    For example:

      fl-sim doctor

      fl-sim doctor --json
    """
    doctor_code.examine(data_root, json_output=json_output)


def watch(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a run or a table, or a folder that contains some.")
    ],
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once.")] = False,
    json_output: AsJson = False,
) -> None:
    """Show the progress of runs from another terminal: round, accuracy, curve, time left, epsilon so far.

    The command only reads files, so that no run is disturbed. It ends when all runs have ended, or with Ctrl-C. A run
    is shown as stopped if its process ended without a result. The command that started a stopped run resumes it.

    For example:

      fl-sim watch results/digits

      fl-sim watch results --once
    """
    report_code.watch_directory(directory, every=every, once=once, json_output=json_output)


def export(
    directories: Directories,
    *,
    to: Annotated[str, typer.Option(metavar="NAMES", help="tensorboard, mlflow, wandb, trackio, or several (a,b).")],
    json_output: AsJson = False,
) -> None:
    """Send finished runs to TensorBoard, MLflow, Weights & Biases or Trackio. --track does this during a run.

    No run is sent to the same tracker twice. Weights & Biases writes offline files unless $WANDB_MODE is set. MLflow
    uses $MLFLOW_TRACKING_URI.

    For example:

      fl-sim export results/digits --to tensorboard

      fl-sim export results/fedavg results/scaffold --to mlflow,wandb
    """
    from fl_sim.tracking.trackers import chosen_trackers  # noqa: PLC0415 (see the top)

    # the names of trackers are checked before torch is imported, so that a wrong name is reported at once
    trackers = chosen_trackers(to)
    report_code.export_runs(directories, trackers, json_output=json_output)


@data_app.command("list")
def list_data(*, data_root: AnyDataRoot = None, json_output: AsJson = False) -> None:
    """Show the data sets that are found, and the folders that are searched.

    For example:

      fl-sim data list --data-root ROOT
    """
    data_code.show_found(data_root, json_output=json_output)


@data_app.command("verify")
def verify_data(
    *,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Data sets (default: all on this machine).")
    ] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Compare data sets with their published checksums, shapes, numbers of records and labels.

    The exit code is 1 if a file is damaged or a named data set is missing.

    For example:

      fl-sim data verify

      fl-sim data verify mnist npz:my.npz --data-root ROOT
    """
    data_code.verify_all(names or [], data_root, json_output=json_output)


@data_app.command("show")
def show_data(
    arguments: Annotated[
        list[str], typer.Argument(metavar="NAME [KEY=VALUE]...", help="A data set, and the settings for reading it.")
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
    """Describe a data set: numbers of records, classes, clients, columns with their roles, and a few records.

    If the data cannot be read, the error message is the same as that of 'fl-sim run'.

    For example:

      fl-sim data show digits --sheet digits.png

      fl-sim data show csv:patients.csv data.label=outcome data.client=hospital data.test=0.2
    """
    data_code.show_card(arguments, sheet, data_root, with_records=records, json_output=json_output)


def _print_version(*, asked: bool) -> None:
    if asked:
        say(f"fl-sim {fl_sim.__version__}")
        raise typer.Exit


for _verb in (run, table, sweep, init, plan, settings, partition, report, watch, export, unlearn, doctor):
    app.command()(_verb)
app.add_typer(privacy_app, name="privacy")
app.add_typer(attack_app, name="attack")
app.add_typer(data_app, name="data")
