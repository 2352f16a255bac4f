"""Ditto: each client also trains its own model, which stays near the global model (Li et al. 2021, algorithm 1)."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import FurtherModel, LocalPlan
from fl_sim.params import scale, subtract
from fl_sim.types import ClientUpdate, LocalTask, Params, Trained
from strategies.algorithm import Averaging

_OWN = "own-model"


def near(start: Params, centre: Params, strength: float) -> LocalPlan:
    """Return a local plan that pulls the trained model v towards ``centre``. Training starts at ``start``.

    The plan adds ``strength`` (v - ``centre``) to the gradient at v.

    The proximal term of a local plan pulls v towards ``start``. The constant ``strength`` (``start`` - ``centre``),
    added to the gradient, changes this into a pull towards ``centre``.
    """
    if not strength:
        return LocalPlan()
    return LocalPlan(gradient_offset=scale(subtract(start, centre), strength), proximal_mu=strength)


class Ditto(Averaging):
    """FedAvg trains the global model x; each client also makes steps v <- v - eta (grad F(v) + ``strength`` (v - x)).

    F is the client's loss, and eta the local learning rate. The client's own model v begins at the run's initial model.
    In each round in which the client takes part, v is trained with the same number of steps as x, on the same batches.
    ``strength``: the strength of the pull of v towards x, lambda in Li et al. 2021, where it is chosen from 0.1, 1 and
    2 with validation records; with 0, x has no effect on v. In the released code x and v are trained alternately, one
    batch each.
    """

    kind: Literal["ditto"] = "ditto"
    strength: float = Field(1.0, ge=0)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        why = "each client's own model is that of algorithm local-only"
        return [] if self.strength else [off("algorithm.strength=0", why)]

    def further(self, task: LocalTask) -> Mapping[str, FurtherModel]:
        """Return the settings of the round's second local training, which trains the client's own model."""
        own = self.own_model(task)
        return {_OWN: FurtherModel(own, near(own, task.params, self.strength))}

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update of the global model, with the client's own model as client state."""
        update = super().finish(task, trained)
        return ClientUpdate(update.payloads, update.num_examples, update.loss, {_OWN: trained.further[_OWN].params})

    def own_model(self, task: LocalTask) -> Params:
        """Return the client's own model. Before the client's first round, this is the initial model."""
        return task.state.get(_OWN, task.initial)
