"""MR-MTL: clients' own models are pulled to their mean (Liu et al. 2022, mean-regularised multi-task learning)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import LocalPlan
from fl_sim.params import subtract
from fl_sim.types import ClientUpdate, LocalTask, Params, Trained
from strategies.algorithm import Averaging, Weighting
from strategies.ditto import near

if TYPE_CHECKING:
    from clients.client_task import OnClient

_OWN, _MEAN = "own-model", "mean"


class MRMTL(Averaging):
    """Each client makes steps v <- v - eta (grad F(v) + ``strength`` (v - mean)); the mean is over all v.

    F is the client's loss, v its own model, and eta the local learning rate. The server's model is the mean. A client's
    own model begins at the run's initial model. ``strength``: the paper's lambda; 0 is local-only training.
    """

    kind: Literal["mr-mtl"] = "mr-mtl"
    title: ClassVar[str] = "MR-MTL"
    weighting: ClassVar[Weighting] = "uniform"
    strength: float = Field(1.0, ge=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if ``local.personal`` is set, because clients must send their whole models."""
        if experiment.local.personal != "none":
            raise ValueError(
                f"algorithm mr-mtl cannot run with local.personal={experiment.local.personal}: the whole model "
                "of a client is its own, and the mean needs all of it; leave local.personal out"
            )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return remarks for the user: one sentence for each setting that has no effect."""
        del experiment
        why = "each client's own model is that of algorithm local-only"
        return [] if self.strength else [off("algorithm.strength=0", why)]

    def start(self, task: LocalTask, client: OnClient) -> LocalTask:
        """Return the client's task. It contains the client's own model, to be trained, and the mean as client state."""
        del client
        own = task.state.get(_OWN, task.initial)
        return replace(task, params=own, state={_MEAN: task.params})

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the local objective (``LocalPlan``), with a term that pulls the client's own model to the mean."""
        return near(task.params, task.state.get(_MEAN, task.params), self.strength)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update: the client's own model minus the mean. The own model is stored as client state."""
        update = subtract(trained.params, task.state.get(_MEAN, task.params))
        return ClientUpdate({"delta": update}, task.num_examples, trained.loss, {_OWN: trained.params})

    def own_model(self, task: LocalTask) -> Params:
        """Return the client's own model, from which the next round's training starts."""
        return task.params
