"""PATE as a procedure: what a teacher does on a worker. The run itself is in ``run`` beside this."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray

from clients.app import Site
from clients.forest import RandomForest
from clients.teacher import forest_votes, network_votes
from fl_sim import models
from fl_sim.experiment.job import Job
from fl_sim.local_plan import LocalPlan
from fl_sim.simulation.planned_traffic import traffic_of_votes
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.site import local_settings, site_for
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.training.trainer import Trainer
from fl_sim.types import Payloads, ServerState, Traffic
from strategies.fedavg import FedAvg
from strategies.pate.public_split import PublicSplit
from strategies.pate.settings import Pate

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment


@dataclass(frozen=True)
class Voting:
    """The procedure of PATE: teachers vote once, and a student learns from the noisy labels."""

    job: Job
    settings: Pate

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Have the teachers vote, release the labels, train the student."""
        from fl_sim.simulation.pate.run import run_pate  # noqa: PLC0415 (the accountants load slowly)

        run_pate(self.job, self.settings, grid, out, log, say=observer.preparing, finished=observer.finished_round)

    @property
    def num_trainings(self) -> int:
        """Return how often a teacher trains: once."""
        return 1

    @property
    def num_measured(self) -> int:
        """Return how many votes are cast: one a teacher and record of the pool."""
        return self.job.experiment.clients * len(self._split().pool)

    @property
    def num_server_steps(self) -> int:
        """Return 0: students train after the votes, in ways of their own."""
        return 0

    @property
    def untimed(self) -> tuple[str, ...]:
        """Return what is timed by nobody: the student."""
        return ("the student's training",)

    def traffic(self) -> Traffic | None:
        """Return None: there are no rounds."""
        return None

    def traffic_once(self) -> dict[str, Traffic]:
        """Return what the teachers' votes take."""
        return {"votes": traffic_of_votes(len(self._split().pool), self.job.experiment.clients)}

    def payments(self) -> "tuple[Payment, ...] | None":
        """Return the cost of the labels, which runs that differ in the student alone share."""
        from fl_sim.simulation.pate.planned import cost_of_labels  # noqa: PLC0415 (the accountants load slowly)

        return None if self.settings.publish_cost else (cost_of_labels(self.job, self.settings),)

    def typical_plan(self) -> LocalPlan:
        """Return the plan of plain SGD."""
        return LocalPlan()

    def site(self) -> Site:
        """Return what a worker needs to play any client as a teacher."""
        site = site_for(self.job, FedAvg())
        inputs, _ = to_tensors(self._split().pool, self.job.dataset)
        pool = inputs.to(self.job.device)
        return replace(
            site, vote=partial(_vote, self.job, self.settings, lambda client: site.records(client, ""), pool)
        )

    def _split(self) -> PublicSplit:
        return self.settings.public_split(self.job.dataset, self.job.experiment.seed_of_partition)

    def beginning(self) -> ServerState:
        """Return nothing: the student is there when it has learned."""
        return ServerState({})

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return nothing: teachers are forgotten."""
        del server
        return {}

    def warnings(self, log: RunLog) -> list[str]:
        """Return what a user must know before the vote."""
        del log
        return list(filter(None, [self.settings.warning_of_noise(self.job.experiment.clients)]))


def _vote(
    job: Job, settings: Pate, own: Callable[[int], Records], pool: torch.Tensor, trainer: Trainer, client: int
) -> NDArray[np.int64]:
    """Train a client as a teacher, and return its class for each record of the ``pool``."""
    experiment, dataset = job.experiment, job.dataset
    if isinstance(settings.teachers, RandomForest):
        return forest_votes(settings.teachers, own(client), pool, client=client, seed=experiment.seed)
    local = local_settings(job, experiment.local.learning_rate)
    build = partial(models.build, experiment.model, dataset.input_shape, dataset.num_classes)
    return network_votes(
        trainer, build, local, own(client), pool,
        client=client, seed=experiment.seed, model_seed=experiment.seed_of_model,
    )  # fmt: skip
