"""The stage that computes a model's head (last layer) in closed form.

This head is the initial head for any method, or the result of the method AFL (analytic federated learning). Clients
send sums of products of their features once, and the server solves for the head. The settings and the formula are in
``strategies.ridge``, the sums and their noise in ``clients.gram``.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from clients.gram import unpacked
from fl_sim.engines import wire
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.params import detached, trainable
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import Run, Stage
from fl_sim.simulation.timing import Work
from fl_sim.stages.feature_sums import Summarise, paid_together, payments_of, statement
from fl_sim.trained_part import head_of
from fl_sim.types import Params, Traffic
from strategies.afl import AFL
from strategies.ridge import Ridge

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

MULTIPLY: Final = "multiply"
"""The name of the client task that returns sums of products of a client's features."""

_COVERS: Final = (
    "the sums of products of features that each client sends once, before any training, and all results that are "
    "computed from these sums alone, such as the head in closed form. The initial model computes the features, and "
    "this model depends on no record. Each record of each client is protected. The clients' records are disjoint, so "
    "epsilon holds for each record."
)
_NO_TRAINING: Final = "Nothing else leaves a client: no client trains."
_NOT_TRAINING: Final = (
    "The rounds after this start: they are not protected by the noise of these sums. If the rounds have noise, another "
    "statement covers them."
)


class RidgeHead(Stage):
    """The stage at the server, before the first round: it sets the first model's head to the closed-form solution."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        algorithm, preprocess = job.experiment.algorithm, job.experiment.preprocess
        found, self._setting = (algorithm, "algorithm") if isinstance(algorithm, AFL) else (preprocess, "preprocess")
        assert isinstance(found, Ridge)
        self.settings: Ridge = found
        self._task = Summarise(job, found, self._setting)
        self._identity = f"products-{secrets.token_hex(8)}"

    def tasks(self) -> Mapping[str, Summarise]:
        """Return the client task ``multiply``, which computes a client's sums of products of features."""
        return {MULTIPLY: self._task}

    def preparing(self, log: RunLog) -> str:
        """Return the line that is shown while clients compute their sums; empty for a resumed run."""
        return "" if log.rounds else "clients send sums of products of their features, and the server computes a head"

    def before(self, run: Run) -> None:
        """Set the first model's head to the closed-form solution. A resumed run already has this head."""
        run.log.before["products"] = self._task.traffic
        if run.log.rounds:
            return
        weight, bias = head_names(self.job.model())
        server = run.log.server
        if not {weight, bias} <= server.params.keys():
            raise UserError(
                f"{self.settings.kind} sets the global model's head ({weight}, {bias}), but this method does not send "
                "the head to the server, or changes the names of its tensors: choose another method"
            )
        answers = run.ask(
            MULTIPLY,
            lambda one: wire.read_moments(one, self._task.shape),
            quoted=not self.job.experiment.is_private,
        )
        sums = unpacked(np.sum(answers, axis=0), self.job.num_features, self.job.dataset.num_classes)
        weights, intercepts = (torch.from_numpy(one).float() for one in self.settings.head(*sums, self._num_holders))
        made = {**server.params, weight: weights.contiguous(), bias: intercepts}
        run.log.server = run.strategy.server = replace(run.strategy.algorithm.init(made), layers=server.layers)

    def trains_model(self) -> bool:
        """Return True, because this stage sets the head of the first model."""
        return True

    def work(self) -> tuple[Work, ...]:
        """Return the computation of the clients' sums. The forecast lists it, but does not estimate its time."""
        return (Work("the products of features", pieces=1.0),)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: clients receive a request without a model, and send sums of feature products."""
        del params
        return {"products": self._task.traffic}

    def payments(self) -> "Iterator[Payment]":
        """Return the privacy cost of the clients' noisy sums; empty if the sums have no noise."""
        return payments_of(self.settings)

    def warnings(self) -> list[str]:
        """Return a warning that clients send sums of products of their features, with or without noise."""
        with_noise = "with" if self.settings.is_private else "without"
        said = "before the first round, clients send sums of products: of features, and of features with labels,"
        return [f"{said} {with_noise} noise"]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``ridge`` for ``result.json``: the penalty lambda and the number of clients with records."""
        strength = self.settings.strength(self._num_holders, self.job.num_features + 1)
        said = f"the head was computed from the sums of {self._num_holders:,} clients, with lambda {strength:.4g}"
        return {"ridge": {"lambda": strength, "clients": self._num_holders, "in_words": said}}

    @property
    def _num_holders(self) -> int:
        return int(np.count_nonzero(self.job.shards.sizes))  # each client with records adds its own noise to the sum

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the given privacy statements ``others``, and the privacy statement about the noisy sums."""
        if not self.settings.is_private:
            return list(others)
        limits = _NO_TRAINING if self._setting == "algorithm" else _NOT_TRAINING
        together = paid_together(self.job, self.settings, detached(trainable(self.job.model()).items()))
        return [*others, statement(self.settings, _COVERS, limits, self._identity, together)]


def head_names(model: nn.Module) -> tuple[str, str]:
    """Return the names of the head's weights and of its intercepts.

    Raises UserError if the head is no linear layer with an intercept.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise UserError(
            f"a head in closed form is linear with an intercept, and the head of {type(model).__name__} is {head}: "
            "choose a model whose last layer is nn.Linear"
        )
    named = {id(value): name for name, value in model.named_parameters()}
    return named[id(head.weight)], named[id(head.bias)]
