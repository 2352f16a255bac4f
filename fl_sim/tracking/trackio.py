"""Trackio: a local database, or the server that ``$TRACKIO_SERVER_URL`` names, for ``trackio show``."""

import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO

from fl_sim.tracking.subject import PROJECT, Subject


class Tracker:
    """The run of Trackio, which is found again by its name: that of the directory and the run's identity."""

    def __init__(self, subject: Subject) -> None:
        import trackio  # noqa: PLC0415 (an extra)

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{subject.name}-{subject.mark.identity}"
        with redirect_stdout(StringIO()):  # it tells how to open the dashboard: --json prints nothing but JSON
            self._run = trackio.init(
                project, name=name, config=dict(subject.settings), resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
        self.last_round = subject.mark.sent
        self.place = f"trackio show --project {project}"

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Log the rounds' numbers."""
        for step, numbers in rounds.items():
            self._run.log(dict(numbers), step=step)

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Log the results beside the last round, and wait until all is written."""
        self._run.log({**results, "status": status}, step=last_round)
        with redirect_stdout(StringIO()):
            self._run.finish()
