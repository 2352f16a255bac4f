"""pFedMe: clients' own models minimise loss plus squared distance to a model w (T Dinh et al. 2020, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices
from fl_sim.params import add, subtract
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.algorithm import Averaging, Weighting, check_plain_sgd
from strategies.ditto import near

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob

_OWN = "own-model"


class PFedMe(Averaging):
    """In each local step, theta ~ argmin f(theta) + strength/2 |theta - w|^2, then w <- w - eta * strength (w - theta).

    f is the loss on the batch, theta the client's own model, and w its copy of the global model x. eta is the local
    learning rate. ``strength``: the paper's lambda, 15 for most of its results. ``personal_steps``: the number of steps
    of SGD on the batch that compute theta (K, 5 in the paper). ``personal_learning_rate``: the learning rate of these
    steps (0.01 to 0.1 in the paper). ``beta``: the factor of the server's step x <- (1 - beta) x + beta mean w (1 to 4
    in the paper), with the same weight for every client.

    theta begins at x in a round's first batch, and at the previous batch's solution in all later batches. Both learning
    rates have limits: eta * strength must stay below 2, and personal_learning_rate * (strength + the curvature of f)
    must stay below 2. A round of the paper has 20 steps of w (``local.steps``).

    In the released code all clients train in every round, and the server averages only the w of the cohort; here a
    client outside of the cohort does not train. In the released code the steps of theta have a fixed weight decay of
    0.001; here it is ``local.weight_decay``. PFLlib's default of beta is 0; then x never changes.
    """

    kind: Literal["pfedme"] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    weighting: ClassVar[Weighting] = "uniform"
    starts_with: ClassVar[dict[str, dict[str, float]]] = {"local": {"momentum": 0.0}}
    knobs: ClassVar[str] = (
        "pFedMe diverges if local.learning_rate * algorithm.strength or algorithm.personal_learning_rate * "
        "algorithm.strength comes near 2: set smaller rates"
    )
    strength: float = Field(15.0, gt=0)
    personal_steps: int = Field(5, ge=1)
    personal_learning_rate: float = Field(0.05, gt=0)
    beta: float = Field(1.0, gt=0)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for local momentum, or for a local optimizer other than SGD."""
        check_plain_sgd(self, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark on each learning rate that is so large that steps overshoot."""
        rates = {
            "local.learning_rate": experiment.local.learning_rate,
            "algorithm.personal_learning_rate": self.personal_learning_rate,
        }
        return [
            f"{name}={rate:g} times algorithm.strength={self.strength:g} is {rate * self.strength:.3g}: above 1 the "
            "steps of pFedMe overshoot, and at 2 they diverge"
            for name, rate in rates.items()
            if rate * self.strength > 1
        ]

    def course(self, job: LocalJob) -> Course:
        """Return a generator of local steps. For each batch: compute the own model theta, then make one step of w."""
        from fl_sim.training.courses import at, steps_of  # noqa: PLC0415 (it loads torch)

        w = theta = job.task.params
        rate, statistics, losses = job.task.settings.learning_rate, job.task.statistics, list[float]()
        for step in steps_of(job):
            pull = near(theta, w, self.strength)
            plan = replace(step.plan, gradient_offset=pull.gradient_offset, proximal_mu=pull.proximal_mu)
            inner = {"learning_rate": self.personal_learning_rate, "steps": self.personal_steps}
            [solved] = yield [at(step, theta, plan, statistics=statistics, **inner)]
            theta, statistics = solved.params, solved.statistics
            w = add(w, subtract(theta, w), rate * self.strength)
            losses.append(solved.loss or 0.0)
        kept = {_OWN: Trained(theta, {}, len(losses), None)} if losses else {}
        loss = sum(losses) / len(losses) if losses else None
        return Trained(w, {}, len(losses), loss, statistics=statistics, further=kept)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update of w. The client's own model theta is stored as client state."""
        update = super().finish(task, trained)
        own = trained.further[_OWN].params if _OWN in trained.further else self.own_model(task)
        return ClientUpdate(update.payloads, update.num_examples, update.loss, {_OWN: own})

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: x <- x + beta mean(w - x)."""
        return ServerState(add(server.params, aggregate.payloads["delta"], self.beta), server.broadcast, server.memory)

    def own_model(self, task: LocalTask) -> Params:
        """Return the client's own model theta after its last round, or the initial model before its first round."""
        return task.state.get(_OWN, task.initial)
