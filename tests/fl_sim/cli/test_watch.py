"""``fl-sim watch``: it ends when all has ended, or when the user has seen enough, and speaks JSON."""

import io
import json
import os
from datetime import UTC, datetime

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fl_sim.cli import report as watching
from fl_sim.cli.verbs import watch
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run as run_experiment
from fl_sim.simulation.run_log import Silent

app = typer.Typer()
app.command()(watch)
SETTINGS = {"clients": 2, "rounds": 3, "partition": "iid", "model": "mlp", "engine": "inprocess"}


def watched(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


class Looking(Silent):
    """Looks at the run after its second round."""

    def __init__(self, path):
        self.path, self.seen = path, {}

    def finished_round(self, record):
        if record.round == 2:
            self.seen = json.loads(watched(self.path, "--json"))


def test_a_run_is_seen_while_it_runs_and_when_it_has_ended(tmp_path):
    looking = Looking(tmp_path)
    run_experiment(experiment_from(SETTINGS), tmp_path / "one", observer=looking)
    (during,) = looking.seen["runs"]
    assert (during["state"], during["round"], during["rounds"]) == ("running", 2, 3)
    after = json.loads(watched(tmp_path, "--json"))
    assert after["states"] == {
        "running": 0, "failed": 0, "damaged": 0, "stopped": 0, "finished": 1, "waiting": 0
    }  # fmt: skip
    assert after["runs"][0]["accuracy"] == json.loads((tmp_path / "one" / "result.json").read_text())["final_accuracy"]
    text = watched(tmp_path)  # nothing runs: it is shown, and that is all
    assert "FedAvg, seed 0" in text
    assert "3/3" in text
    assert text.rstrip().endswith("1 run: 1 finished")
    assert "\x1b" not in text


class Interrupting(Silent):
    """Watches the run after its first round, until Ctrl-C."""

    def __init__(self, path):
        self.path, self.seen = path, ""

    def finished_round(self, record):
        if record.round == 1:
            self.seen = watched(self.path)


def test_ctrl_c_ends_the_watching_alone(tmp_path, fake_clock):
    def interrupt(seconds):
        raise KeyboardInterrupt

    fake_clock(watching).at_sleep = interrupt
    interrupting = Interrupting(tmp_path)
    run_experiment(experiment_from(SETTINGS), tmp_path / "one", observer=interrupting)
    assert "1 run: 1 running" in interrupting.seen
    assert json.loads((tmp_path / "one" / "result.json").read_text())["status"] == "finished"


def test_a_terminal_is_shown_what_runs_until_it_has_ended(tmp_path, monkeypatch, fake_clock):
    run_experiment(experiment_from(SETTINGS), tmp_path / "one")
    (tmp_path / "one" / "result.json").rename(tmp_path / "result.json")
    said = {"pid": os.getpid(), "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", "machine": os.uname().nodename}
    (tmp_path / "one" / ".lock").write_text(json.dumps(said))
    screen, clock = io.StringIO(), fake_clock(watching)

    def finish(seconds):
        (tmp_path / "result.json").rename(tmp_path / "one" / "result.json")
        (tmp_path / "one" / ".lock").unlink()

    monkeypatch.setattr(watching, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80, height=24))
    clock.at_sleep = finish
    watching.watch_directory(tmp_path, every=3.0, once=False, json_output=False)
    assert clock.slept == [3.0]
    first, last = screen.getvalue().split("1 run: 1 running")[0], screen.getvalue().splitlines()[-1]
    assert "fedavg, seed 0" in first
    assert last == "1 run: 1 finished"


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        watched(tmp_path / "nowhere")
