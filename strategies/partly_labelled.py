"""Methods for federations in which only the server, or only some clients, have labels: their base class and layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from fl_sim.importing import torch
from fl_sim.kinds import Choices, is_none, kind_of, off, path_in
from fl_sim.params import add, zeros_like
from fl_sim.seeding import rng
from fl_sim.types import Aggregate, ClientUpdate, Cohort, Dataset, LocalTask, ServerState, Trained
from strategies.algorithm import Averaging, check_images, check_sgd
from strategies.fixmatch import Augmentation, pseudo_labels, view
from strategies.guided_sampler import GuidedSampler
from strategies.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from clients.client_task import OnClient
    from strategies.algorithm import Algorithm

PSEUDO = "pseudo"
"""Name of the tensors with the round's pseudo-labels in a client's task. No client state stores them."""


SERVER = 10**9
"""The server's number, in place of a client ID. It is above the largest possible number of clients."""


class PartlyLabelled(Averaging):
    """Base class of methods in which most clients have no labels, and train on the received model's pseudo-labels."""

    computes_with_records: ClassVar[bool] = True

    kind: str = ""
    layer: ClassVar[str] = "strategies.partly_labelled:LabelledServer"
    stage: ClassVar[str] = "fl_sim.stages.partly_labelled:LabelledRecords"
    server_records: int = Field(100, ge=0, le=10**9)
    labelled_clients: int = Field(0, ge=0)
    threshold: float = Field(0.95, gt=0, lt=1)
    unlabelled: bool = True
    augmentation: Augmentation = Augmentation(rotation=15, scale=0.12, shear=0.2, shift=0.1, elastic=0.05, erase=0.2)

    @model_validator(mode="after")
    def _somebody_has_labels(self) -> Self:
        if not self.server_records and not self.labelled_clients:
            raise ValueError(
                "server_records=0 and labelled_clients=0: nobody has labels, so nothing can be learned; "
                "set algorithm.server_records or algorithm.labelled_clients"
            )
        return self

    @property
    def num_set_aside(self) -> int:
        """Return the number of training records that the server gets, so that no client holds them."""
        return self.server_records

    @property
    def start_passes(self) -> int:
        """Return the number of predictions for each record before local training: one, for the pseudo-label."""
        return int(self.unlabelled)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that need labels on all clients, and for other unsuitable settings."""
        check_sgd(self, experiment, "its local steps are steps of SGD")
        if reason := self._of_labels(experiment) or (self.server_records and self._of_server(experiment)):
            raise ValueError(f"algorithm {self.kind} trains clients without labels, and {reason}")

    def _of_labels(self, experiment: Choices) -> str:
        """Return the reason why clients without labels cannot run with these settings; "" if they can."""
        evaluate, sampler, attack = experiment.evaluate, experiment.sampler, experiment.attack
        few = f"algorithm.labelled_clients={self.labelled_clients} is above clients={experiment.clients}"
        held_out = f"evaluate.validation={evaluate.validation} needs labelled records on every client"
        reasons = {
            f"{few}: set a smaller number": self.labelled_clients > experiment.clients,
            "pseudo-labels would need running statistics: leave local.batch_norm out": (
                experiment.local.batch_norm != "none"
            ),
            "pseudo-labels need the whole received model: leave local.personal out": experiment.local.personal
            != "none",
            "measures of single clients need labels, which most clients lack: leave evaluate.clients out": (
                evaluate.measures_clients or evaluate.fine_tune_epochs
            ),
            f"local.privacy {kind_of(experiment.local.privacy)} does not hide whether a client has confident records: "
            "leave local.privacy out": not is_none(experiment.local.privacy),
            f"{held_out}: leave it out": evaluate.validation not in {0, "given"},
            f"sampler {kind_of(sampler)} needs losses, which need labels: leave sampler out": (
                isinstance(sampler, GuidedSampler)
            ),
            f"attack {kind_of(attack)} changes labels, which most clients lack: take another attack": (
                _changes_labels(attack)
            ),
        }
        for name in ("preprocess", "calibrate"):
            chosen = getattr(experiment, name)
            reads = f"{name} {kind_of(chosen)} needs the labels of all clients"
            reasons[f"{reads}: leave {name} out"] = not is_none(chosen)
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _of_server(self, experiment: Choices) -> str:
        """Return the reason why a server with labels cannot run with these settings; "" if it can."""
        if experiment.is_private:
            return (
                "this run promises privacy, and no epsilon covers the server's records: set algorithm.server_records=0 "
                "and algorithm.labelled_clients"
            )
        if path_in(type(experiment.server), "procedure"):
            return (
                "the server trains on its labelled records after each round, but server "
                f"{kind_of(experiment.server)} has no rounds: leave server out"
            )
        return ""

    def check_data(self, dataset: Dataset, features: str) -> None:
        """Raise UserError for records that are not images: augmentation changes only images."""
        del features
        check_images(
            self, dataset, "learns from changed views of images",
            "take images without features, or another algorithm, such as fedavg",
        )  # fmt: skip

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a warning for each setting without effect."""
        if self.labelled_clients == experiment.clients:
            return [off("algorithm.threshold", "all clients have labels, and train as with fedavg")]
        return []

    def has_labels(self, task: LocalTask) -> bool:
        """Return True if the client of ``task`` has labels. The server, with a number above all IDs, has labels."""
        return task.client < self.labelled_clients or task.client >= task.num_clients

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the client's task. For a client without labels, add the pseudo-labels of its records."""
        if self.has_labels(task):
            return task
        inputs, _ = client.records.tensors()
        if not self.unlabelled or not len(inputs):
            nothing = {"labels": torch.zeros(0, dtype=torch.int64), "is_sure": torch.zeros(0, dtype=torch.bool)}
            return replace(task, state={**task.state, PSEUDO: nothing})
        draws = torch_generator(rng(client.seed, "weak views", task.client, task.server_round))
        logits, _ = client.trainer.outputs(task.params, view(self.augmentation.weak, inputs, draws))
        labels, is_sure = pseudo_labels(logits.softmax(dim=1), self.threshold)
        return replace(task, state={**task.state, PSEUDO: {"labels": labels, "is_sure": is_sure}})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y_i - x. Its weight is the number of records on which the client has trained."""
        update = super().finish(task, trained)
        return replace(update, num_examples=num_sure(task)) if PSEUDO in task.state else update


def num_sure(task: LocalTask) -> int:
    """Return the number of a client's records with a confident pseudo-label in this round."""
    return int(task.state[PSEUDO]["is_sure"].sum()) if PSEUDO in task.state else 0


@dataclass
class LabelledServer(Layer):
    """The layer of a server with labels: after each round, the server trains the merged model.

    ``train``: a function (server state, round) -> the server's change of the model; a stage sets it before round 1. It
    stays None if the server has no labels.
    """

    train: Callable[[ServerState, int], Any] | None = None
    _round: int = 0

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> LabelledServer:
        """Return the layer for a run. It has no state that a resumed run would need."""
        del experiment, out, progress
        return cls()

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate. If no client has trained and the server has labels, the aggregate is zero."""
        self._round = cohort.server_round
        found = self.inner.aggregate(cohort, algorithm, server)
        if found is None and self.train is not None:
            return Aggregate({"delta": zeros_like(server.params)}, participation=0.0)
        return found

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state after the round, with the model that the server has trained further."""
        merged = self.inner.merge(algorithm, server, aggregate)
        if self.train is None:
            return merged
        return replace(merged, params=add(merged.params, self.train(merged, self._round)["delta"]))


def _changes_labels(attack: Any) -> bool:
    """Return True if ``attack`` changes the labels of hostile clients' records."""
    labels = np.arange(2)
    return hasattr(attack, "tampered") or not np.array_equal(attack.poisoned(labels, 2), labels)


def torch_generator(generator: np.random.Generator) -> torch.Generator:
    """Return a torch generator that is seeded by the next number of ``generator``."""
    return torch.Generator().manual_seed(int(generator.integers(2**63)))
