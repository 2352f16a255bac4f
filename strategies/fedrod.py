"""FedRoD: each client predicts by a generic head and a personal head (Chen and Chao 2022, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from fl_sim.kinds import Choices
from fl_sim.local_plan import LocalPlan
from fl_sim.params import add, head_names, zeros_like
from fl_sim.types import ClientUpdate, LocalTask, Params, Trained
from strategies.algorithm import check_sgd
from strategies.balanced_softmax import BalancedSoftmax

if TYPE_CHECKING:
    from fl_sim.training.courses import Course
    from fl_sim.training.trainer import LocalJob

_HEAD = "personal-head"


class FedRoD(BalancedSoftmax):
    """The body and a generic head are trained with balanced softmax and averaged. Each client also has a personal head.

    A client predicts by the sum of both heads' logits. Each local step computes two losses on one batch. The loss with
    balanced softmax changes the body and the generic head. The plain cross-entropy of the summed logits changes only
    the personal head. Both gradients are computed at the parameters before the step. Heads are linear layers, so the
    client's own model is the body with one head, whose parameters are the sum of both heads' parameters. The personal
    head is initially 0, so the client's own model is initially the received model. In PFLlib the personal head begins
    as a copy of the initial generic head. The paper's variant with personal heads from a hypernetwork is not
    implemented.
    """

    kind: Literal["fedrod"] = "fedrod"  # type: ignore[assignment]  # another kind than its base class
    title: ClassVar[str] = "FedRoD"
    needs_head: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the optimizer is not SGD, if ``local.personal`` is set, or if the head has an adapter."""
        check_sgd(self, experiment, "each local step is an SGD step of both heads")
        if (personal := experiment.local.personal) != "none":
            raise ValueError(
                f"algorithm fedrod cannot run with local.personal={personal}: it sends the body and the generic head, "
                "and already has a personal head; leave local.personal out"
            )
        if {*experiment.model.trainable.split(",")} & {"lora", "head"} == {"lora"}:
            raise ValueError(
                "algorithm fedrod adds the outputs of two heads, and the sum of two adapters' factors is not the "
                "sum of their outputs: train the head itself (model.trainable=lora,head), or take fedper"
            )

    def course(self, job: LocalJob) -> Course:
        """Train the received model and the client's personal head: each makes one step on every batch."""
        from fl_sim.training.courses import at, gradient_in, gradient_job, steps_of  # noqa: PLC0415 (it loads torch)

        generic, statistics, settings = job.task.params, job.task.statistics, job.task.settings
        personal, losses = self._personal(job.task), list[float]()
        velocity, buffers = zeros_like(personal), job.plan.momentum_buffers
        head_only = LocalPlan(trained=frozenset(personal))
        for step in steps_of(job):
            continued = at(step, generic, replace(step.plan, momentum_buffers=buffers), statistics=statistics)
            own = gradient_job(step, _joined(generic, personal), head_only, statistics=statistics)
            stepped, summed = yield [continued, own]
            found = gradient_in(summed)
            gradient = {name: found[name] for name in personal}
            velocity = add(add(gradient, personal, settings.weight_decay), velocity, settings.momentum)
            personal = add(personal, velocity, -settings.learning_rate)
            generic, statistics, buffers = stepped.params, stepped.statistics, stepped.momentum_buffers or None
            losses.append(stepped.loss or 0.0)
        loss = sum(losses) / len(losses) if losses else None
        head = Trained(personal, {}, len(losses), None)
        return Trained(generic, buffers or {}, len(losses), loss, statistics=statistics, further={_HEAD: head})

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update of the body and the generic head. The personal head is stored as client state."""
        update = super().finish(task, trained)
        head = trained.further[_HEAD].params if _HEAD in trained.further else self._personal(task)
        return ClientUpdate(update.payloads, update.num_examples, update.loss, {_HEAD: head})

    def own_model(self, task: LocalTask) -> Params:
        """Return the received model with the sum of both heads as its head."""
        return _joined(task.params, self._personal(task))

    def _personal(self, task: LocalTask) -> Params:
        head = head_names(task.params)
        return task.state.get(_HEAD) or {name: value * 0 for name, value in task.params.items() if name in head}


def _joined(generic: Params, personal: Params) -> Params:
    """Return the model ``generic`` with the personal head added to the generic head."""
    return {name: value + personal[name] if name in personal else value for name, value in generic.items()}
