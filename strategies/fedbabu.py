"""FedBABU: clients train and average the body only; the head keeps its initial values (Oh et al. 2022, algorithm 1)."""

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_sim.kinds import Choices
from fl_sim.local_plan import LocalPlan
from fl_sim.params import body_names
from fl_sim.types import LocalTask, Params
from strategies.algorithm import Averaging


class FedBABU(Averaging):
    """FedAvg on the body (all layers except the head). The head (the last linear layer) keeps its initial values.

    After the last round each client fine-tunes the whole model, head included, for ``evaluate.fine_tune_epochs`` epochs
    (5 in the paper).
    """

    kind: Literal["fedbabu"] = "fedbabu"
    title: ClassVar[str] = "FedBABU"
    needs_head: ClassVar[bool] = True

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark if clients do not fine-tune the model: the evaluated head then has its initial values."""
        if experiment.evaluate.fine_tune_epochs:
            return []
        why = "the head keeps its initial values; set evaluate.clients=class-shares and evaluate.fine_tune_epochs=5"
        return [f"algorithm fedbabu needs each client to fine-tune its model after the last round, otherwise {why}"]

    def sends(self, params: Params) -> Collection[str]:
        """Return the parameter names of the body, which clients send."""
        return body_names(params)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``). It trains the body; the head is frozen."""
        return LocalPlan(trained=body_names(task.params))
