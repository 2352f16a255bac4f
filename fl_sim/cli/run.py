"""``fl-sim run``: one experiment."""

import json
from pathlib import Path
from typing import Any

import typer

from fl_sim.data import load
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import resolved
from fl_sim.kinds import kind_of, short_form
from fl_sim.report.progress import RunProgress
from fl_sim.settings_file import read_table
from fl_sim.simulation.preparation import is_private
from fl_sim.simulation.run import run
from fl_sim.tables.names import run_name
from fl_sim.tables.plan import PRESETS, preset_names

RESULTS = Path("results")


def run_experiment(arguments: list[str], out: Path | None, data_root: Path | None, *, json_output: bool) -> None:
    """Run what ``[FILE or PRESET] [key=value ...]`` describes, and print what came of it."""
    experiment = parse_experiment(arguments)
    experiment = resolved(experiment, data_root)
    out = out or RESULTS / run_name(experiment, load(experiment.data, data_root))
    with RunProgress(title_of(experiment), experiment.rounds, timed=not is_private(experiment)) as progress:
        progress.say(f"results go to {out}")
        result = run(experiment, out, data_root, _Shown(progress))
    if json_output:
        typer.echo(json.dumps(result))
    else:
        _print(result, out)


def parse_experiment(arguments: list[str]) -> Experiment:
    """Return the experiment that ``[FILE or PRESET] [key=value ...]`` describes; of a table's file, its [base]."""
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise typer.BadParameter(f"one FILE at most, got {', '.join(files)}; settings are given as key=value")
    table = _table_of(files[0]) if files else {}
    return experiment_from(
        with_overrides(table.get("base", table), [argument for argument in arguments if "=" in argument])
    )


def _table_of(name: str) -> dict[str, Any]:
    preset = PRESETS / f"{name}.toml"
    return read_table(preset if name in preset_names() and not Path(name).exists() else Path(name))


def title_of(experiment: Experiment) -> str:
    """Return a run's short name for people."""
    return f"{kind_of(experiment.algorithm)} on {experiment.data} {short_form(experiment.partition)}"


class _Shown:
    """Passes what a run says on to its progress display."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self.preparing = progress.preparing
        self.replied = progress.replied
        self.finished_round = progress.finished_round

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        del experiment
        self._progress.say(engine)
        self._progress.started(first_round)


def _print(result: dict[str, Any], out: Path) -> None:
    note = f" ({result['data_note']})" if result["data_note"] else ""
    typer.echo(
        f"{result['algorithm']} on {result['data']}{note}, {result['partition']}, {result['clients']} clients, "
        f"{result['model']}: accuracy {_percent(result['final_accuracy'])} after {result['rounds']} rounds, "
        f"best {_percent(result['best_accuracy'])}, {took(result)} on engine {result['engine']}"
    )
    if result["stopped"]:
        typer.echo(result["stopped"])
    if result["preprocess"]["kind"] != "none":
        typer.echo(_in_words(result["preprocess"]))
    if "pate" in result:
        typer.echo(_votes_in_words(result["pate"]))
    if not result["privacy"]:
        typer.echo("privacy: none - updates leave the clients without noise")
    for promise in result["privacy"]:
        typer.echo(f"privacy of a {promise['unit']}: {promise['guarantee']}")
        typer.echo(f"  covers: {promise['covers']}")
        typer.echo(f"  does not cover: {promise['does_not_cover']}")
    typer.echo(f"results in {out}")


def took(result: dict[str, Any]) -> str:
    """Return how long a run took; of a private one it is known only roughly."""
    seconds = result["seconds"]["total"]
    return f"at most {seconds:g} s" if result["privacy"] else f"{seconds:.1f} s"


def _in_words(made: dict[str, Any]) -> str:
    origin = "from an earlier run with the same settings" if made["reused"] else "made in this run"
    return (
        f"{made['kind']}: {made['num_synthetic']} synthetic records by {made['generator']} (gamma {made['gamma']:g}, "
        f"trained on: {made['train_on']}), {origin}; look at them in samples.png"
    )


def _votes_in_words(facts: dict[str, Any]) -> str:
    return (
        f"{facts['teachers']} teachers answered {facts['queries_answered']} of {facts['queries_asked']} queries about "
        f"{facts['public_records']} public records; noisy labels right: {_percent(facts['label_accuracy'])}; student "
        f"{facts['student']}, evaluated on {facts['evaluation_records']} other records"
    )


def _percent(accuracy: float | None) -> str:
    return "not evaluated" if accuracy is None else f"{100 * accuracy:.2f} %"
