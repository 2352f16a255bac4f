"""The ServerApp and ClientApp for Flower's own runtime.

``flwr run .`` starts both apps, in Flower's simulation or on real devices.
"""

from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fl_sim.importing import importing

with importing():  # imports torch at once, because every process of Flower's runtime needs it
    from fl_sim.errors import UserError
    from fl_sim.experiment.experiment import Experiment, experiment_from
    from fl_sim.settings import parse_table, read_table
    from fl_sim.simulation.engine_choice import client_app as build_client_app
    from fl_sim.simulation.run import run

client_app = build_client_app()
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run an experiment in Flower's own runtime. The run configuration contains ``experiment`` and ``out``.

    ``experiment``: TOML text, the path of a TOML file, or empty for the default experiment. ``out``: the absolute path
    of the run directory. Raises UserError if ``experiment`` or ``out`` is invalid. Raises RunError if the run cannot
    continue.
    """
    experiment = read_experiment(str(context.run_config["experiment"]))
    run(experiment, read_out(str(context.run_config["out"])), grid=grid)


def read_experiment(text: str) -> Experiment:
    """Return the experiment described by ``text``: TOML text, the path of a TOML file, or empty for the default."""
    return experiment_from(_table(text.strip()))


def read_out(text: str) -> Path:
    """Return the path of the run directory. Raises UserError if ``text`` is not an absolute path."""
    if not Path(text).is_absolute():
        raise UserError(
            f"out={text!r} must be an absolute path, because Flower runs the ServerApp in another directory: "
            "for example flwr run . -c 'out=\"/data/results/first\"'"
        )
    return Path(text)


def _table(text: str) -> dict[str, Any]:
    if "=" not in text:
        return read_table(Path(text)) if text else {}
    return parse_table(text, "experiment (TOML text, because it contains '=')")
