"""The commands (verbs) that run or plan experiments, with their options and help, and options that verbs share.

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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the runs and their time, as 'fl-sim plan' does.")]
Track = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="Also send every round to tensorboard, mlflow, wandb, trackio, or to your MODULE:NAME."
    ),
]
Stale = Annotated[
    bool,
    typer.Option("--again", help="Repeat runs whose records or code have changed; the old runs are moved away."),
]
ArgumentList = Annotated[list[str] | None, typer.Argument(metavar="[FILE or PRESET] [KEY=VALUE]...")]


def run(
    arguments: ArgumentList = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the results (default: results/NAME, named by the settings). An unfinished run is "
            "resumed, a finished run is extended by further rounds."
        ),
    ] = None,
    data_root: DataRoot = None,
    track: Track = "",
    again: Annotated[
        bool, typer.Option("--again", help="Run from the beginning; the old run in DIR is moved to another directory.")
    ] = False,
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Run one experiment. Without arguments: FedAvg on the digits that come with the package, one label per client.

    The settings come from a TOML file or a preset (digits, mnist), and KEY=VALUE changes one of them. The name of a
    preset always means the preset; for a file of the same name, write ./NAME.

    Settings: data, features, normalise, partition, clients, model, model.name, model.others, model.weights,
    model.digest, model.trainable, model.rank, model.alpha, model.dropout, model.target_modules, algorithm, sampler,
    local.epochs, local.steps, local.batch_size, local.optimizer, local.learning_rate, local.momentum,
    local.weight_decay, local.clip_norm, local.label_smoothing, local.augment, local.batch_norm, local.schedule,
    local.precision, local.personal, local.privacy, rounds, evaluate_every, evaluate.validation, evaluate.test,
    evaluate.test_is_public, evaluate.patience, evaluate.target_accuracy, evaluate.clients, evaluate.personal_every,
    evaluate.fine_tune_epochs, evaluate.held_out_clients, evaluate.count_noise, evaluate.metrics, seed, partition_seed,
    model_seed, sampling_seed, forgotten, keep_every, left_out, device, engine, round_timeout, aggregator, attack,
    calibrate, compress, preprocess, preprocess.epsilon, preprocess.gamma, preprocess.generator, preprocess.labels,
    preprocess.train_on, preprocess.server_epochs, devices, server, server.deadline, server.late. 'fl-sim settings'
    explains the settings. 'fl-sim settings fedprox' explains the parameters of the kind fedprox.

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
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of parallel runs (default: one per core).")] = None,
    data_root: DataRoot = None,
    *,
    budget: Budget = None,
    again: Stale = False,
    track: Track = "",
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Compare methods in a table: rows are methods, columns are data sets and partitions, seeds are averaged.

    Without arguments, the table compares many methods on the digits that come with the package. Presets:
    dafl-paper, dafl-paper-cifar10, dafl-paper-fashion-mnist, dafl-paper-mnist, dafl-paper-svhn, digits, mnist. The name
    of a preset always means the preset; for a file of the same name, write ./NAME.

    After a crash or Ctrl-C, the same command resumes the table and repeats no finished run. After a run, the command
    writes table.md, table.csv (one line per run), table.tex (for a paper) and table.json; files of large tables are
    written less often. At the end it writes rounds.csv (one line per round). Each run has a directory in DIR/cells.
    Bold marks the significantly best method. With fewer than three seeds, bold marks the highest mean.

    A FILE has a section [base] and a section [grid]. [base] has settings as for 'fl-sim run'. [grid] has lists of
    values for algorithm, data, partition, seed or any other setting. Several sections [[grid]] make one table with the
    runs of all grids. An entry of algorithm may set more than the algorithm, such as {algorithm = "fedavg", preprocess
    = {kind = "da-fl", epsilon = 10}}. The label of an entry is the name of its row. reference = "FedAvg" names the row
    with which other rows are compared. The default is the row with the highest mean. centralized = false leaves out the
    row Centralized. On the command line, KEY=VALUE takes a list of values for a setting in [grid].

    [tune] searches for good settings of every method before the runs, at the same cost for each method and without the
    test records. Its settings are trials, rounds, halving, validation, search, seed, data and partial. The search
    spaces are in [tune.space] and [tune.spaces.METHOD], as lists or ranges {low = 0.001, high = 0.1, log = true}.

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
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of parallel runs (default: one per core).")] = None,
    data_root: DataRoot = None,
    *,
    budget: Budget = None,
    again: Stale = False,
    track: Track = "",
    dry_run: DryRun = False,
    json_output: AsJson = False,
) -> None:
    """Run all combinations of the values of settings (KEY=A,B,C). This needs no file that defines a table.

    The command makes a table of the runs, as 'fl-sim table' does, and averages over seeds. Other settings, FILE and
    PRESET are as for 'fl-sim run'. The same command resumes the table; with further values, it runs only the new
    combinations.

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
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results (default: as for 'fl-sim run' or 'fl-sim table').")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of parallel runs of a table (default: one per core).")
    ] = None,
    data_root: DataRoot = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Estimate no time, so that the forecast is fast.")] = False,
    json_output: AsJson = False,
) -> None:
    """Forecast one run or the runs of a table: time, bytes, and the total privacy cost.

    The command shows finished rounds, the remaining time on this machine, the bytes of messages, and the total privacy
    cost of all runs. For the times, it trains a few steps on public test records, for each different model and method.
    Nothing else is trained, and no file is written. FILE has the settings of a run, or defines a table (with [base] or
    [grid]).

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
    """Show the partition of a training set: the number of records of each class on every client.

    A run with the same settings has the same partition.

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
    """The arguments of a command (verb).

    ``name``: the argument FILE or PRESET; None if it is missing. ``path`` and ``table``: the path of this file, and its
    content. ``overrides``: the ``key=value`` arguments as text.
    """

    name: str | None
    path: Path | None
    table: dict[str, Any]
    overrides: list[str]


def read_arguments(arguments: list[str] | None, default: str | None = None) -> RunArguments:
    """Parse the arguments ``[FILE or PRESET] [key=value ...]``, and read the file.

    ``default``: the preset if there is no FILE or PRESET. Prints a message if a preset and a file have the same name,
    and for each setting that a later argument replaces. Raises UserError for two files, and for a file that cannot be
    read.
    """
    files = [argument for argument in arguments or [] if "=" not in argument]
    if len(files) > 1:
        raise UserError(f"give at most one FILE or PRESET, got {', '.join(files)}; settings are given as key=value")
    overrides = [argument for argument in arguments or [] if "=" in argument]
    last = {override.partition("=")[0]: override for override in overrides}
    for override in overrides:
        if override not in last.values():
            say(f"{override} has no effect: the later {last[override.partition('=')[0]]} replaces it", err=True)
    name = files[0] if files else default
    if name is None:
        return RunArguments(None, None, {}, overrides)
    path, which = tables_code.file_or_preset(name)
    if which:
        say(which, err=True)
    return RunArguments(name, path, settings_code.read_table(path), overrides)
