"""What can be typed: every verb with its options and its help. What a verb does is imported when it is called.

Help and typos are answered from here, so nothing in this file may import torch, Flower or a library for figures.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fl_sim
from fl_sim.cli.privacy.verbs import app as privacy_app
from fl_sim.importing import importing

if TYPE_CHECKING:
    from fl_sim.cli.arguments import Given

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_DataRoot = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Where data sets lie (else $FL_SIM_DATA, then your cache)."),
]
_AnyDataRoot = Annotated[Path | None, typer.Option(help="Where to look first (else $FL_SIM_DATA, then your cache).")]
_Budget = Annotated[
    float | None, typer.Option(metavar="HOURS", help="Stop in time, with a table of what is there (exit code 3).")
]
_TableJson = Annotated[bool, typer.Option("--json", help="Print the table as one JSON object.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Run nothing: show what would run and how long it takes, as 'fl-sim plan'.")
]
_Track = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Also tell tensorboard, mlflow, wandb, trackio, or your own MODULE:NAME, of every round."
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE or PRESET] [KEY=VALUE]..."),
]

app = typer.Typer(
    name="fl-sim",
    help="Federated-learning simulation: split a data set, train with a list of methods, compare them. "
    "Start with 'fl-sim table', which compares all methods on embedded data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Find and check data sets.", no_args_is_help=True, rich_markup_mode=None)


def _print_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"fl-sim {fl_sim.__version__}")
        raise typer.Exit


def _read(arguments: list[str] | None, default: str | None = None) -> "Given":
    with importing():
        from fl_sim.cli.arguments import read  # noqa: PLC0415 (see above)

    return read(arguments, default)


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


@app.command("run")
def run(
    arguments: _Settings = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where results go (default: results/NAME, after the settings). An unfinished run goes on, also a "
            "finished one that gets more rounds."
        ),
    ] = None,
    data_root: _DataRoot = None,
    track: _Track = "",
    again: Annotated[
        bool, typer.Option("--again", help="Run from the beginning; what DIR holds of the run is moved beside it.")
    ] = False,
    dry_run: _DryRun = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run one experiment; with no arguments FedAvg on 1-Label digits, embedded in the package.

    Settings come from a TOML file, or from a preset (digits, mnist), and KEY=VALUE over them. A preset's name means the
    preset in every folder; a file of that name is ./NAME.

    Settings: data, features, normalise, partition, clients, model, algorithm, sampler, local.epochs, local.steps,
    local.batch_size, local.optimizer, local.learning_rate, local.momentum, local.weight_decay, local.clip_norm,
    local.label_smoothing, local.augment, local.batch_norm, local.schedule, local.precision, rounds, evaluate_every,
    evaluate.validation, evaluate.test, evaluate.patience, evaluate.target_accuracy, seed, partition_seed, model_seed,
    sampling_seed, device, engine, round_timeout, aggregator, attack, calibrate, compress, preprocess,
    preprocess.epsilon, preprocess.gamma, preprocess.generator, preprocess.labels, preprocess.train_on,
    preprocess.server_epochs, devices, server, server.deadline, server.late.
    'fl-sim settings' tells what each takes and means, and 'fl-sim settings fedprox' the parameters of a kind.

    For example:

      fl-sim run

      fl-sim run data=mnist partition=dirichlet:0.05 algorithm=scaffold rounds=50 local.epochs=10 --out results/scaffold

      fl-sim run mnist algorithm=fednova partition=label-2

      fl-sim run data=mnist preprocess=da-fl preprocess.epsilon=10 preprocess.gamma=0.05

      fl-sim run data=mnist partition=label-2 calibrate=ccvr:200

      fl-sim run data=mnist clients=100 devices=log-normal server=fedbuff:10 server.concurrency=20

      fl-sim run data=mnist clients=250 algorithm=pate algorithm.queries=100 algorithm.student=fixmatch

      fl-sim run experiment.toml algorithm=fedprox algorithm.mu=0.1 sampler=fixed-size:10 engine=ray:4

      fl-sim run rounds=50 --track tensorboard
    """
    given = _read(arguments)
    if dry_run:
        _show_plan(given, out, None, data_root, json_output=json_output)
        return
    with importing():
        from fl_sim.cli.run import run_experiment  # noqa: PLC0415 (see above)

    run_experiment(given, out, data_root, track=track, again=again, json_output=json_output)


@app.command("table")
def table(
    arguments: _Settings = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results (default: results/NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells to run side by side (default: one a core).")] = None,
    data_root: _DataRoot = None,
    *,
    budget: _Budget = None,
    track: _Track = "",
    dry_run: _DryRun = False,
    json_output: _TableJson = False,
) -> None:
    """Compare methods: rows are methods, columns data sets and splits, seeds are averaged.

    With no arguments: all methods on 1-Label digits, embedded in the package. Presets: digits, mnist.
    A preset's name means the preset in every folder; a file of that name is ./NAME. A finished cell is not run again;
    after a crash or Ctrl-C the same command goes on where it stopped. Writes
    table.md, table.csv (a line a run), table.tex (to take into a paper) and table.json after every cell, rounds.csv (a
    line a round) at the end, and a run directory for each cell under DIR/cells. Bold is what is significantly best,
    which takes three seeds.

    A FILE has [base], settings as for 'fl-sim run', and [grid], lists of values: algorithm, data, partition, seed or
    any other setting. An entry of algorithm may set more than that, such as {algorithm = "fedavg", preprocess = {kind =
    "da-fl", epsilon = 10}}. centralized = false leaves out the upper bound. A key=value takes a list where the grid has
    one. [tune] searches for the settings of every method first, at the same expense for each and without the test
    records: trials, rounds, halving, validation, search, seed, data, and the spaces [tune.space] and
    [tune.spaces.METHOD], of lists or {low = 0.001, high = 0.1, log = true}.

    For example:

      fl-sim table

      fl-sim table mnist --out results/mnist --data-root ROOT --jobs 4

      fl-sim table grid.toml rounds=50 seed=0,1,2 algorithm=fedavg,scaffold

      fl-sim table grid.toml --budget 8
    """
    given = _read(arguments, "digits")
    _fill_table(given, out, jobs, data_root, budget=budget, track=track, dry_run=dry_run, json_output=json_output)


@app.command("sweep")
def sweep(
    arguments: _Settings = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results (default: results/sweep-NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side (default: one a core).")] = None,
    data_root: _DataRoot = None,
    *,
    budget: _Budget = None,
    track: _Track = "",
    dry_run: _DryRun = False,
    json_output: _TableJson = False,
) -> None:
    """Try several values of any settings: KEY=A,B,C, all of them with all of the others; no file is needed.

    A table of the runs, with seeds averaged, as 'fl-sim table' makes it; other settings are as for 'fl-sim run', and so
    is FILE or PRESET. The same command goes on where it stopped, and with further values it runs these alone.

    For example:

      fl-sim sweep local.learning_rate=0.001,0.01,0.1 seed=0,1,2

      fl-sim sweep data=mnist partition=label-2 algorithm=fedavg,fedprox,scaffold local.epochs=1,5 --dry-run
    """
    given = _read(arguments)
    with importing():
        from fl_sim.cli.sweep import as_table  # noqa: PLC0415 (see above)

    _fill_table(
        as_table(given), out, jobs, data_root, budget=budget, track=track, dry_run=dry_run, json_output=json_output
    )


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="What to write.")] = Path("table.toml"),
) -> None:
    """Write a table's file with comments to begin with; it runs as it is.

    For example:

      fl-sim init

      fl-sim init skew.toml
    """
    from fl_sim.cli.init import write_table_file  # noqa: PLC0415 (see above)

    write_table_file(file)


@app.command("plan")
def plan(
    arguments: _Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the results are, or will be (default: as for the verb).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells of a table side by side (default: one a core).")
    ] = None,
    data_root: _DataRoot = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Time nothing.")] = False,
    json_output: _Json = False,
) -> None:
    """Look before you run: what each run of a table, or one run, takes, and what all of them cost in privacy.

    Shows which runs are finished, how far others are, about how long the rest takes on this machine, bytes on the wire,
    and the privacy bill of the whole. A few steps of each kind are timed, on public test records; nothing else is
    trained, and nothing is written. FILE is a table's (with [base] or [grid]), a preset, or a run's settings.

    For example:

      fl-sim plan digits

      fl-sim plan grid.toml rounds=50 --jobs 4

      fl-sim plan data=mnist aggregator=global-dp sampler=poisson:0.1 rounds=100 --quick
    """
    _show_plan(_read(arguments), out, jobs, data_root, quick=quick, json_output=json_output)


@app.command("settings")
def settings(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A setting, the start of one, or a kind, such as fedprox.")
    ] = None,
    *,
    json_output: _Json = False,
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


def _fill_table(
    given: "Given",
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    *,
    budget: float | None,
    track: str,
    dry_run: bool,
    json_output: bool,
) -> None:
    if dry_run:
        _show_plan(given, out, jobs, data_root, json_output=json_output)
        return
    with importing():
        from fl_sim.cli.table import fill_table  # noqa: PLC0415 (see above)

    fill_table(given, out, jobs, data_root, hours=budget, track=track, json_output=json_output)


def _show_plan(
    given: "Given",
    out: Path | None,
    jobs: int | None,
    data_root: Path | None,
    *,
    quick: bool = False,
    json_output: bool,
) -> None:
    with importing():
        from fl_sim.cli.plan import show_plan  # noqa: PLC0415 (see above)

    show_plan(given, out, jobs, data_root, quick=quick, json_output=json_output)


@app.command("partition")
def partition(
    arguments: _Settings = None,
    *,
    data: Annotated[str | None, typer.Option(help="The same as data=TEXT.")] = None,
    scheme: Annotated[str | None, typer.Option(help="The same as partition=TEXT.")] = None,
    clients: Annotated[int | None, typer.Option(help="The same as clients=INTEGER.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same as seed=INTEGER.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw clients x classes to a .png, .svg or .pdf.")
    ] = None,
    data_root: _DataRoot = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print sizes and label counts as one JSON object.")
    ] = False,
) -> None:
    """Show how a training set is split: sizes and label counts of every client.

    Takes the settings that 'fl-sim run' takes, and shows the very split of that run.

    For example:

      fl-sim partition data=digits partition=label-2 clients=10

      fl-sim partition data=mnist partition=dirichlet:0.05 clients=100 seed=3 --plot split.png --data-root ROOT

      fl-sim partition run.toml
    """
    typed = {"data": data, "partition": scheme, "clients": clients, "seed": seed}
    given = _read([*(arguments or []), *(f"{key}={value}" for key, value in typed.items() if value is not None)])
    with importing():
        from fl_sim.cli.partition import show_partition  # noqa: PLC0415 (see above)

    show_partition(given, plot, data_root, json_output=json_output)


@app.command("report")
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

    For example:

      fl-sim report results/digits

      fl-sim report results/fedavg results/scaffold --out results/comparison

      fl-sim report results/digits --paper --target 0.8

      fl-sim report --gallery docs/results
    """
    if gallery:
        from fl_sim.cli.gallery import write_gallery  # noqa: PLC0415 (see above)

        write_gallery(directories, out, json_output=json_output)
        return
    with importing():
        from fl_sim.cli.report import write_report  # noqa: PLC0415 (see above)

    write_report(directories, out, paper=paper, target=target, json_output=json_output)


@app.command("watch")
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
        from fl_sim.cli.watch import watch_directory  # noqa: PLC0415 (see above)

    watch_directory(directory, every=every, once=once, json_output=json_output)


@app.command("export")
def export(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run or table directories, or directories that hold some.")
    ],
    *,
    to: Annotated[str, typer.Option(metavar="NAMES", help="tensorboard, mlflow, wandb, trackio, or several: a,b.")],
    json_output: _Json = False,
) -> None:
    """Show finished runs in TensorBoard, MLflow, Weights & Biases or Trackio, as --track does while they run.

    What a tracker has already is not sent again. Weights & Biases writes offline files unless $WANDB_MODE says
    otherwise; MLflow goes where $MLFLOW_TRACKING_URI says.

    For example:

      fl-sim export results/digits --to tensorboard

      fl-sim export results/fedavg results/scaffold --to mlflow,wandb
    """
    from fl_sim.tracking.names import chosen_trackers  # noqa: PLC0415 (see above)

    trackers = chosen_trackers(to)  # now: a mistake is told without waiting for torch
    with importing():
        from fl_sim.cli.export import export_runs  # noqa: PLC0415 (see above)

    export_runs(directories, trackers, json_output=json_output)


@data_app.command("list")
def list_data(*, data_root: _AnyDataRoot = None, json_output: _Json = False) -> None:
    """Show which data sets are found, and where the others are looked for.

    For example:

      fl-sim data list --data-root ROOT
    """
    with importing():
        from fl_sim.cli.data import show_found  # noqa: PLC0415 (see above)

    show_found(data_root, json_output=json_output)


@data_app.command("verify")
def verify_data(
    *,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all that are found.")] = None,
    data_root: _DataRoot = None,
    json_output: _Json = False,
) -> None:
    """Compare data sets with what is published: checksums, shapes, counts, labels.

    Exits with 1 when a file is damaged or a data set asked for is missing.

    For example:

      fl-sim data verify

      fl-sim data verify mnist npz:my.npz --data-root ROOT
    """
    with importing():
        from fl_sim.cli.data import verify_all  # noqa: PLC0415 (see above)

    verify_all(names or [], data_root, json_output=json_output)


@data_app.command("show")
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
    data_root: _DataRoot = None,
    json_output: _Json = False,
) -> None:
    """Show what a data set is: sizes, classes, clients, columns and how they are read, and a few records.

    Whatever cannot be read is told as 'fl-sim run' tells it, without a run.

    For example:

      fl-sim data show digits --sheet digits.png

      fl-sim data show csv:patients.csv data.label=outcome data.client=hospital data.test=0.2
    """
    with importing():
        from fl_sim.cli.data_card import show_card  # noqa: PLC0415 (see above)

    show_card(arguments, sheet, data_root, with_records=records, json_output=json_output)


app.add_typer(privacy_app, name="privacy")
app.add_typer(data_app, name="data")
