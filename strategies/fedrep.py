"""FedRep: a client first trains its own head on the received body, and then trains the body (Collins et al. 2021)."""

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices
from fl_sim.local_plan import LocalPlan, Phase
from fl_sim.params import body_names, head_names
from fl_sim.types import LocalTask, Params
from strategies.algorithm import Averaging


class FedRep(Averaging):
    """FedAvg on the body; in every round each client trains its own head first, then the body (algorithm 1).

    The head is the last linear layer, and the body all other layers. ``head_epochs``: passes over the client's records
    with the body frozen, 10 in the paper (Collins et al. 2021). Then the head is frozen, and the body is trained for
    ``local.epochs`` epochs. The paper takes 1 epoch for the body if each client has two classes, and 5 otherwise. In
    the released code weight decay does not apply to biases, and all clients train their heads in the last round.
    """

    kind: Literal["fedrep"] = "fedrep"
    title: ClassVar[str] = "FedRep"
    needs_head: ClassVar[bool] = True
    head_epochs: float = Field(10, gt=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if local training is counted in steps, not epochs."""
        if experiment.local.steps:
            raise ValueError(
                f"algorithm fedrep trains the body for local.epochs, and local.steps={experiment.local.steps} is set: "
                "set local.epochs in its place"
            )

    def sends(self, params: Params) -> Collection[str]:
        """Return the parameter names of the body, which clients send."""
        return body_names(params)

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``) with two phases: train the head, then the body."""
        head, body = head_names(task.params), body_names(task.params)
        return LocalPlan(phases=(Phase(head, self.head_epochs), Phase(body, task.settings.epochs)))
