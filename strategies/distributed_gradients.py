"""Rounds of DP-SGD without a trusted server: clients send noisy sums of clipped per-record gradients as integers.

The settings are in ``strategies.distributed_dp_sgd``, and the arithmetic in ``fl_sim.privacy.record_sums``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from clients.private_steps import CLASS_COUNTS, RECORDS
from fl_sim.errors import RunError, UserError
from fl_sim.kinds import kind_of
from fl_sim.local_plan import LocalPlan, PrivateSteps
from fl_sim.params import layout_of, vector_in
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.record_sums import RecordGrid, opened, record_share
from fl_sim.training.records import Records
from fl_sim.types import ClientUpdate, Cohort, LocalTask, Trained
from strategies.distributed_sums import ClientShares, DistributedSums
from strategies.layer import Beginning, Workload

_DELTA: Final = "delta"
_OWN_TRAINING: Final = ("course", "further", "own_scores", "sends", "start", "trainers")
"""Methods of an algorithm that change what a client trains, sends, or predicts with."""


@dataclass
class DistributedGradients(DistributedSums):
    """Charges each round's noisy sum of gradients to the privacy ledger, and turns it into the mean update.

    ``rate_in``: a function from a round to its learning rate. ``sizes``: the public numbers of the clients' records.
    """

    rate_in: Callable[[int], float] = lambda server_round: 0.0  # noqa: ARG005 (named for callers)
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> DistributedGradients:
        """Open the privacy ledger in the run directory ``out``, and return the layer of the new or resumed run."""
        layer = super().of(experiment, out, progress)
        assert isinstance(layer, cls)
        local, rounds = experiment.local, experiment.rounds
        layer.rate_in = lambda server_round: local.rate_in(server_round, rounds)
        return layer

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: Any, model: Callable[[], nn.Module]) -> ClientGradients:
        """Return the layer's code on clients (``ClientGradients``), which sums clipped gradients and adds noise."""
        half = super().on_clients(experiment, algorithm, model)
        return ClientGradients(half.grid, half.template, half.seed, half.run_digest)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for an algorithm whose local steps are not plain SGD, or that needs more than the mean."""
        algorithm = experiment.algorithm
        changed = [one.name for one in fields(LocalPlan) if getattr(beginning.plan, one.name) != one.default]
        changed += [name for name in _OWN_TRAINING if hasattr(algorithm, name)]
        if set(beginning.sent) != {_DELTA} or beginning.kept or [name for name in changed if name != "private"]:
            raise UserError(
                f"algorithm {kind_of(algorithm)} cannot run under aggregator {kind_of(experiment.aggregator)}: a round "
                "is one gradient step on all records, so clients have no local training that the algorithm could "
                "change, and no state; take fedavg, fedavgm, fedadam, fedadagrad or fedyogi"
            )
        super().check(experiment, beginning)

    def ready(self, work: Workload) -> None:
        """Store the numbers of the clients' records."""
        self.sizes = work.sizes
        super().ready(work)

    def mean_of(self, total: NDArray[np.int64], cohort: Cohort) -> NDArray[np.float64]:
        """Return the mean update, shape (dimension,): minus the learning rate times the noisy mean gradient."""
        assert isinstance(self.grid, RecordGrid)
        num_records = int(self.sizes[[reply.client for reply in cohort.replies]].sum())
        return -self.rate_in(cohort.server_round) / max(1, num_records) * opened(total, self.grid)


@dataclass(frozen=True)
class ClientGradients(ClientShares):
    """Turns the sum of the clipped gradients of a client's records into noisy integers modulo 2^40."""

    def received(self, task: LocalTask) -> LocalTask:
        """Return ``task`` without class counts and number of records, which would reveal facts about records."""
        return replace(task, class_counts=CLASS_COUNTS, num_examples=min(1, task.num_examples))

    def shown(self, records: Records) -> Records:
        """Return a placeholder instead of the records, because the algorithm's own code must not read them."""
        del records
        return RECORDS

    def planned(self, came: LocalTask, plan: LocalPlan) -> LocalPlan:
        """Return ``plan`` for the sum of the clipped gradients of all records. ``share`` adds noise to this sum."""
        del came
        return self.typical(plan)

    def typical(self, plan: LocalPlan) -> LocalPlan:
        """Return a typical local plan of a client: every client has the same."""
        # nothing is drawn from this source of noise
        private = PrivateSteps(self.grid.clipping_norm, 0.0, Noise.seeded(0), "sum", sums_only=True)
        return replace(plan, private=private)

    def share(self, came: LocalTask, trained: Trained, update: ClientUpdate) -> NDArray[np.int64]:
        """Return the noisy numbers of a message. A client without records sends only noise."""
        del update
        assert isinstance(self.grid, RecordGrid)
        total, [layout] = np.zeros(self.grid.dimension), map(layout_of, self.template.values())
        if came.num_examples:
            if trained.gradient_sum is None:
                raise RunError("the trainer did not add up the gradients of the records: take another algorithm")
            total = vector_in(trained.gradient_sum, layout).numpy()
        return record_share(total, self.grid, self._noise(came.client, came.server_round), came.server_round)
