"""Weights & Biases: offline files in the run's directory, unless ``$WANDB_MODE`` says otherwise."""

import os
from collections.abc import Mapping

from fl_sim.tracking.subject import PROJECT, Subject


class Tracker:
    """The run of wandb. What it says of the machine, the program and the code by itself is switched off."""

    def __init__(self, subject: Subject) -> None:
        import wandb  # noqa: PLC0415 (an extra)

        os.environ.setdefault("WANDB_MODE", "offline")
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
            x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, reinit="create_new",
        )  # fmt: skip
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=subject.name, id=subject.mark.identity,
            resume="allow", dir=subject.directory, settings=quiet,
        )  # fmt: skip
        self._run.config.update(dict(subject.settings), allow_val_change=True)
        self.last_round = subject.mark.sent
        self.place = f"wandb sync {subject.directory}/wandb/offline-run-*" if self._run.offline else str(self._run.url)

    def send(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Log the rounds' numbers."""
        for step, numbers in rounds.items():
            self._run.log(dict(numbers), step=step)

    def end(self, status: str, results: Mapping[str, float], last_round: int) -> None:
        """Put the results into the summary, and close the run."""
        del last_round
        self._run.summary.update({**results, "status": status})
        self._run.finish(exit_code=int(status != "finished"))
