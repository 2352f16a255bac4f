"""The commands (verbs) that run or plan experiments, with their options and help; and the options of all verbs.

This module does not import the code of experiments, so that help and errors about files appear at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fl_sim.cli.screen import say
from fl_sim.errors import UserError
from fl_sim.importing import LazyModule

if TYPE_CHECKING:
    from fl_sim import settings as settings_code
    from fl_sim import tables as tables_code
    from fl_sim.cli import data as data_code
    from fl_sim.cli import run as run_code
else:
    data_code, run_code = LazyModule("fl_sim.cli.data"), LazyModule("fl_sim.cli.run")
    settings_code, tables_code = LazyModule("fl_sim.settings"), LazyModule("fl_sim.tables")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Directory of data sets (default: $FL_SIM_DATA, then your cache)."),
]
AnyDataRoot = Annotated[Path | None, typer.Option(help="Directory to search first (then $FL_SIM_DATA and your cache).")]
Budget = Annotated[
    float | None, typer.Option(metavar="HOURS", help="Stop within this time, with a partial table (exit code 3).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run nothing: show the runs and their time, as 'fl-sim plan'.")]
Track = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Also send every round to tensorboard, mlflow, wandb, trackio, or your own MODULE:NAME."
    ),
]
Stale = Annotated[
    bool,
    typer.Option("--again", help="Repeat runs of other records or code of yours than now; the old runs are set aside."),
]
ArgumentList = Annotated[list[str] | None, typer.Argument(metavar="[FILE or PRESET] [KEY=VALUE]...")]


def run(
    arguments: ArgumentList = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the results (default: results/NAME, after the settings). An unfinished run is resumed, "
            "a finished one extended by further rounds."
        ),
    ] = None,
    data_root: DataRoot = None,
    track: Track = "",
    again: Annotated[
        bool, typer.Option("--again", help="Run from the beginning; the old run in DIR is set aside.")
    ] = False,
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Run one experiment; with no arguments FedAvg on 1-Label digits, embedded in the package.

    Settings come from a TOML file, or from a preset (digits, mnist), and KEY=VALUE over them. A preset's name means the
    preset in every folder; a file of that name is ./NAME.

    Settings: data, features, normalise, partition, clients, model, algorithm, sampler, local.epochs, local.steps,
    local.batch_size, local.optimizer, local.learning_rate, local.momentum, local.weight_decay, local.clip_norm,
    local.label_smoothing, local.augment, local.batch_norm, local.schedule, local.precision, rounds, evaluate_every,
    evaluate.validation, evaluate.test, evaluate.test_is_public, evaluate.patience, evaluate.target_accuracy, seed,
    partition_seed, model_seed, sampling_seed, device, engine, round_timeout, aggregator, attack, calibrate, compress,
    preprocess, preprocess.epsilon, preprocess.gamma, preprocess.generator, preprocess.labels, preprocess.train_on,
    preprocess.server_epochs, devices, server, server.deadline, server.late.
    'fl-sim settings' explains each, and 'fl-sim settings fedprox' the parameters of a kind.

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
    given = read_arguments(arguments)
    if dry_run:
        run_code.show_plan(given, out, None, data_root, json_output=json_output)
        return
    run_code.run_experiment(given, out, data_root, track=track, again=again, json_output=json_output)


def table(  # noqa: PLR0913 (one parameter per option)
    arguments: ArgumentList = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results (default: results/NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells to run side by side (default: one a core).")] = None,
    data_root: DataRoot = None,
    *,
    budget: Budget = None,
    again: Stale = False,
    track: Track = "",
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Compare methods: rows are methods, columns data sets and splits, seeds are averaged.

    With no arguments: all methods on 1-Label digits, embedded in the package. Presets: digits, mnist.
    A preset's name means the preset in every folder; a file of that name is ./NAME. The same command resumes a table
    after a crash or Ctrl-C, and repeats no finished cell. Writes table.md, table.csv (a line a run), table.tex (for a
    paper) and table.json after every cell, rounds.csv (a line a round) at the end, and a run directory for each cell
    under DIR/cells. Bold marks the significantly best method; with fewer than three seeds, the highest mean.

    A FILE has [base], settings as for 'fl-sim run', and [grid], lists of values: algorithm, data, partition, seed or
    any other setting. An entry of algorithm may set more than that, such as {algorithm = "fedavg", preprocess = {kind =
    "da-fl", epsilon = 10}}, and its label names the row. reference = "FedAvg" is the row that others are compared with,
    in place of the one with the highest mean. centralized = false leaves out the upper bound. A key=value takes a list
    where the grid has one. Several [[grid]] make one table of the runs of all of them. [tune] searches for the settings
    of every method first, at the same cost for each and without the test records: trials, rounds, halving, validation,
    search, seed, data, and the spaces [tune.space] and [tune.spaces.METHOD], of lists or {low = 0.001, high = 0.1, log
    = true}.

    For example:

      fl-sim table

      fl-sim table mnist --out results/mnist --data-root ROOT --jobs 4

      fl-sim table grid.toml rounds=50 seed=0,1,2 algorithm=fedavg,scaffold

      fl-sim table grid.toml --budget 8
    """
    given = read_arguments(arguments, "digits")
    if dry_run:
        run_code.show_plan(given, out, jobs, data_root, json_output=json_output)
        return
    run_code.fill_table(given, out, jobs, data_root, hours=budget, again=again, track=track, json_output=json_output)


def sweep(  # noqa: PLR0913 (one parameter per option)
    arguments: ArgumentList = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results (default: results/sweep-NAME).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side (default: one a core).")] = None,
    data_root: DataRoot = None,
    *,
    budget: Budget = None,
    again: Stale = False,
    track: Track = "",
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Run all combinations of several values of any settings, KEY=A,B,C, without a table file.

    Makes a table of the runs, with seeds averaged, as 'fl-sim table' does; other settings, FILE and PRESET are as for
    'fl-sim run'. The same command resumes the table; with further values it runs only these.

    For example:

      fl-sim sweep local.learning_rate=0.001,0.01,0.1 seed=0,1,2

      fl-sim sweep data=mnist partition=label-2 algorithm=fedavg,fedprox,scaffold local.epochs=1,5 --dry-run
    """
    given = read_arguments(arguments)
    given = run_code.as_table(given)
    if dry_run:
        run_code.show_plan(given, out, jobs, data_root, json_output=json_output)
        return
    run_code.fill_table(given, out, jobs, data_root, hours=budget, again=again, track=track, json_output=json_output)


def plan(
    arguments: ArgumentList = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the results (default: as for the verb).")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells of a table side by side (default: one a core).")
    ] = None,
    data_root: DataRoot = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Time nothing.")] = False,
    json_output: AsJson = False,
) -> None:
    """Forecast the runs of a table, or one run: time, bytes, and the privacy cost of all of them.

    Shows finished rounds, the remaining time on this machine, the bytes of messages, and the privacy bill. A few steps
    of each kind are timed, on public test records; nothing else is trained, and nothing is written. FILE is a table's
    (with [base] or [grid]), a preset, or a run's settings.

    For example:

      fl-sim plan digits

      fl-sim plan grid.toml rounds=50 --jobs 4

      fl-sim plan data=mnist aggregator=global-dp sampler=poisson:0.1 rounds=100 --quick
    """
    given = read_arguments(arguments)
    run_code.show_plan(given, out, jobs, data_root, quick=quick, json_output=json_output)


def partition(
    arguments: ArgumentList = None,
    *,
    data: Annotated[str | None, typer.Option(help="The same as data=TEXT.")] = None,
    scheme: Annotated[str | None, typer.Option(help="The same as partition=TEXT.")] = None,
    clients: Annotated[int | None, typer.Option(help="The same as clients=INTEGER.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same as seed=INTEGER.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw clients x classes to a .png, .svg or .pdf.")
    ] = None,
    data_root: DataRoot = None,
    json_output: AsJson = False,
) -> None:
    """Show the partition of a training set: sizes and label counts of every client.

    The settings are those of 'fl-sim run', and the partition is that of the run.

    For example:

      fl-sim partition data=digits partition=label-2 clients=10

      fl-sim partition data=mnist partition=dirichlet:0.05 clients=100 seed=3 --plot split.png --data-root ROOT

      fl-sim partition run.toml
    """
    typed = {"data": data, "partition": scheme, "clients": clients, "seed": seed}
    given = read_arguments(
        [*(arguments or []), *(f"{key}={value}" for key, value in typed.items() if value is not None)]
    )
    data_code.show_partition(given, plot, data_root, json_output=json_output)


class RunArguments(NamedTuple):
    """The arguments of a verb. ``name``: FILE or PRESET, or None. ``path`` and ``table``: path and content of the file.

    ``overrides``: the ``key=value`` arguments as text.
    """

    name: str | None
    path: Path | None
    table: dict[str, Any]
    overrides: list[str]


def read_arguments(arguments: list[str] | None, default: str | None = None) -> RunArguments:
    """Read the arguments ``[FILE or PRESET] [key=value ...]``. ``default``: used if there is no FILE or PRESET.

    Prints a message if a preset hides a file, and for each setting that a later argument replaces. Raises UserError for
    two files, and for a file that cannot be read.
    """
    files = [argument for argument in arguments or [] if "=" not in argument]
    if len(files) > 1:
        raise UserError(f"one FILE or PRESET at most, got {', '.join(files)}; settings are given as key=value")
    overrides = [argument for argument in arguments or [] if "=" in argument]
    last = {override.partition("=")[0]: override for override in overrides}
    for override in overrides:
        if override not in last.values():
            say(f"{override} has no effect: {last[override.partition('=')[0]]} comes after it", err=True)
    name = files[0] if files else default
    if name is None:
        return RunArguments(None, None, {}, overrides)
    path, which = tables_code.file_or_preset(name)
    if which:
        say(which, err=True)
    return RunArguments(name, path, settings_code.read_table(path), overrides)
