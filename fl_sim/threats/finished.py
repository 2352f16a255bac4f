"""A finished run as an object: its experiment, the records of each client, and its model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from clients.client_task import ClientRuntime
from fl_sim.data.naming import is_own, without_settings
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_of_run
from fl_sim.experiment.frozen_body import FrozenBody
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import Job, job_of
from fl_sim.kinds import hides_clients, is_none, kind_of, replaces_records
from fl_sim.report.files import PrivacyStatement
from fl_sim.settings import read_table
from fl_sim.simulation.client_runtime import evaluation_records
from fl_sim.simulation.resuming import finished_result
from fl_sim.simulation.rounds import Rounds, procedure_of
from fl_sim.store import run_directory
from fl_sim.training.evaluation import EVALUATION_BATCH
from fl_sim.types import Params


@dataclass(frozen=True)
class FinishedRun:
    """A finished run with federated rounds whose model classifies records.

    ``out``: the run directory. ``facts``: the content of ``result.json``.
    """

    out: Path
    job: Job
    procedure: Rounds
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, out: Path, data_root: Path | None = None) -> Self:
        """Return the finished run in the directory ``out``.

        ``data_root``: the folder in which data sets are searched first. Raises UserError if there is no finished run,
        if its records or code have changed, or if it has no synchronous rounds. Also raises UserError if its model is
        no classifier or has a frozen body.
        """
        if not (out / run_directory.CONFIG).exists():
            raise UserError(
                f"{out} holds no run ({run_directory.CONFIG} is missing): give the run directory, as in --out of "
                "the run"
            )
        job = job_of(experiment_of_run(read_table(out / run_directory.CONFIG)), data_root)
        facts = finished_result(job.experiment, out, identity_of(job.experiment, data_root))
        procedure = procedure_of(job)
        if facts is None:
            raise UserError(f"{out} holds an unfinished run: repeat the run's command to finish it")
        if type(procedure) is not Rounds:
            raise UserError(
                f"{out} holds a run of algorithm {kind_of(job.experiment.algorithm)} with server "
                f"{kind_of(job.experiment.server)}, which has no synchronous rounds: give a run with such rounds"
            )
        if job.moving is not None:
            raise UserError(
                f"{out} holds a run with partition={kind_of(job.experiment.partition)}, which moves records between "
                "clients during the run, and an attack on a run needs the records of each client: give a run with "
                "fixed shards"
            )
        if not job.predicts_classes or isinstance(job.body, FrozenBody):
            raise UserError(
                f"the model {job.experiment.model.name} of {out} has its own loss function or a frozen body: give the "
                "run of a classifier whose parameters are all trained"
            )
        return cls(out, job, procedure, facts)

    @property
    def privacy(self) -> list[PrivacyStatement]:
        """The privacy statements of the run."""
        return [PrivacyStatement.model_validate(one) for one in self.facts["privacy"]]

    @property
    def covering(self) -> list[PrivacyStatement]:
        """The privacy statements with the unit "record" that cover the final model; empty if no statement covers it.

        A statement covers the model in two cases: clients add noise in training or to what the server sees of it, or
        they train only on synthetic records. If clients also train on their own records, a statement about the
        synthetic records does not cover the model.
        """
        experiment = self.job.experiment
        adds_noise = not is_none(experiment.local.privacy) or hides_clients(experiment.aggregator)
        is_covered = adds_noise or replaces_records(experiment.preprocess)
        return [one for one in self.privacy if one.unit == "record" and is_covered]

    @cached_property
    def runtime(self) -> ClientRuntime:
        """The client runtime of the run: everything that is needed to execute its clients."""
        return self.procedure.runtime()

    @cached_property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised test records (n, *input shape), and their labels (n,)."""
        return evaluation_records(self.job).whole().tensors()

    def held_by(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised training records of ``client``, (n, *input shape), and their labels, (n,)."""
        return self.runtime.own_records(client).tensors()

    def refuse_private_records(self, verb: str) -> None:
        """Raise UserError if the run promises privacy for records that are not public."""
        if self.job.experiment.is_private and is_own(self.job.experiment.data):
            raise UserError(
                f"'fl-sim {verb}' reads the records of {without_settings(self.job.experiment.data)} without noise, and "
                f"the run in {self.out} promises privacy for these records: no epsilon would cover the output of the "
                "command; try it on a run of a public data set"
            )


def logits_of(model: nn.Module, params: Params, inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of ``model`` with the parameters ``params``: float64, shape (n, classes), on the CPU.

    ``inputs``: (n, *input shape), at least one record. The tensors of ``model`` are overwritten.
    """
    model.load_state_dict(dict(params), strict=False)
    model = model.to(inputs.device).eval()
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in torch.split(inputs, EVALUATION_BATCH)]).double().cpu()


@dataclass(frozen=True, eq=False)
class Judged:
    """The predictions of a model on n records.

    ``losses``: the cross-entropy of each record, (n,). ``right``: True for each right prediction, (n,). ``labels``: the
    true classes, (n,).
    """

    losses: NDArray[np.float64]
    right: NDArray[np.bool_]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, logits: torch.Tensor, labels: torch.Tensor) -> Self:
        """Return the predictions of ``logits``, (n, classes), for records with ``labels``, (n,)."""
        labels = labels.cpu()
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return cls(losses.numpy(), (logits.argmax(1) == labels).numpy(), labels.numpy())

    def where(self, chosen: NDArray[np.bool_]) -> "Judged":
        """Return the predictions on only the records i for which ``chosen[i]`` is True. ``chosen``: a mask, (n,)."""
        return Judged(self.losses[chosen], self.right[chosen], self.labels[chosen])

    @property
    def accuracy(self) -> float:
        """The fraction of right predictions, in [0, 1]; NaN without records."""
        return float(self.right.mean()) if len(self.right) else math.nan
