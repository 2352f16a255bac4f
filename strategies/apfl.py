"""APFL: each client uses a mixture of the global model and its own model (Deng et al. 2020, algorithm 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.params import add, inner_product, mixture, scale, subtract
from fl_sim.types import ClientUpdate, LocalTask, Params, Payloads, Trained
from strategies.algorithm import Averaging, check_plain_sgd

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob

_OWN, _MIXING, _ALPHA = "own-model", "mixing", "alpha"


class APFL(Averaging):
    """FedAvg trains the global model w. Each client uses m = alpha v + (1 - alpha) w, with its own model v.

    F is the client's loss, and eta the local learning rate. In each local step, on one batch: w <- w - eta grad F(w),
    and v <- v - eta alpha grad F(m). Both gradients are computed with the models before the step. ``adaptive``: if
    true, a step also changes alpha <- alpha - eta <grad F(m), v - w>, limited to [0, 1]. ``alpha``: the weight of v in
    m, or the initial weight if ``adaptive`` is true; Deng et al. 2020 try 0.25, 0.5 and 0.75. v begins at the run's
    initial model. A client keeps v and alpha between its rounds, and mixes v with the global model that it receives.

    The released code updates w first, and then mixes v with the new w. It changes alpha only in the first step of a
    round, and adds 0.02 alpha to the gradient of alpha. Two common benchmarks differ from the paper. PFLlib has alpha 1
    by default, replaces v by the mixture after each round, and computes v's gradient at v. FL-bench mixes the outputs
    of the models, not the parameters.
    """

    kind: Literal["apfl"] = "apfl"
    title: ClassVar[str] = "APFL"
    starts_with: ClassVar[dict[str, dict[str, float]]] = {"local": {"momentum": 0.0}}
    alpha: float = Field(0.5, ge=0, le=1)
    adaptive: bool = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for local momentum, or for a local optimizer other than SGD."""
        check_plain_sgd(self, experiment)

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        if self.adaptive or 0 < self.alpha < 1:
            return []
        why = (
            "each client's own model is that of algorithm local-only"
            if self.alpha
            else "every client uses the model of fedavg"
        )
        return [off(f"algorithm.alpha={self.alpha:g} with algorithm.adaptive=false", why)]

    def course(self, job: LocalJob) -> Course:
        """Yield the training jobs of one client.

        On each batch, the global model w and the client's own model v are updated by one step.
        """
        from fl_sim.training.courses import at, gradient_in, gradient_job, steps_of  # noqa: PLC0415 (it loads torch)

        w, settings, losses = job.task.params, job.task.settings, list[float]()
        (v, alpha), rate, statistics = self._kept(job.task), settings.learning_rate, job.task.statistics
        for step in steps_of(job):
            at_mixture = gradient_job(step, mixture(v, w, alpha), statistics=statistics)
            stepped, mixed = yield [at(step, w, statistics=statistics), at_mixture]
            gradient = gradient_in(mixed)
            change = inner_product(gradient, subtract(v, w)) if self.adaptive else 0.0
            v = add(scale(v, 1 - rate * settings.weight_decay), gradient, -rate * alpha)
            alpha = min(1.0, max(0.0, alpha - rate * change))
            w, statistics = stepped.params, stepped.statistics
            losses.append(stepped.loss or 0.0)
        kept = {name: Trained(group, {}, len(losses), None) for name, group in _state(v, alpha).items()}
        loss = sum(losses) / len(losses) if losses else None
        return Trained(w, {}, len(losses), loss, statistics=statistics, further=kept)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update of the global model w. The own model v and its weight alpha become the client state."""
        update, state = super().finish(task, trained), _state(*self._kept(task))
        state |= {name: one.params for name, one in trained.further.items()}
        return ClientUpdate(update.payloads, update.num_examples, update.loss, state)

    def own_model(self, task: LocalTask) -> Params:
        """Return the mixture of the received model and the client's own model v.

        Before the client's first round, v is the initial model.
        """
        v, alpha = self._kept(task)
        return mixture(v, task.params, alpha)

    def _kept(self, task: LocalTask) -> tuple[Params, float]:
        """Return the client's own model v and the weight alpha of v, from the client state."""
        mixing = task.state.get(_MIXING)
        return task.state.get(_OWN, task.initial), self.alpha if mixing is None else float(mixing[_ALPHA])


def _state(v: Params, alpha: float) -> Payloads:
    return {_OWN: v, _MIXING: {_ALPHA: torch.tensor([alpha])}}
