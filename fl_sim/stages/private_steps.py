"""The privacy bill of DP-SGD on clients: the costs of the clients' private steps, as forecast and as statement.

The settings are in ``strategies.dp_sgd``. The module ``clients.private_steps`` writes the costs into the clients'
privacy ledgers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dp_accounting import dp_event

from clients.policy import open_ledger
from clients.private_steps import RoundCost, num_charged, round_cost
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.params import detached, trainable
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.bill import payment_of
from fl_sim.privacy.loss_distribution import NoTimeError
from fl_sim.privacy.mechanisms import clipping_norm_on_grid
from fl_sim.privacy.statement import Coverage, statement
from fl_sim.privacy.terms import Adjacency, Terms, delta_advice, none_if_infinite, rounded_up
from fl_sim.simulation.client_ledgers import JointCost, joint_cost, joint_cost_in_words, ledger_path
from fl_sim.simulation.client_runtime import local_settings
from fl_sim.simulation.stage import Run, Stage
from fl_sim.training.private_steps import num_private_steps
from fl_sim.types import Params
from strategies.dp_sgd import DPSGD
from strategies.layer import found_in
from strategies.private_steps import PrivateTraining, digest_of, models_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

_COVERS: Final = (
    "everything that a client sends in the rounds, its client state and what is computed from them, such as the model "
    "of every round, also against the server. The clients are disjoint: the figure is that of the client with the "
    "highest cost, and holds for each record of every client."
)
_DOES_NOT_COVER: Final = (
    "How many records a client holds, and which clients take part in a round, are treated as public: sampling clients "
    "does not reduce the cost."
)


@dataclass(frozen=True)
class _Group:
    """The clients with the same number of records, and so with the same cost of a round."""

    num_records: int
    clients: tuple[int, ...]
    cost: RoundCost


class PrivateStepsBill(Stage):
    """The stage at the server: it asks clients for nothing, and only states the cost of the rounds."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer: PrivateTraining | None = None
        self._run = ""
        self._together: JointCost | None = None

    def before(self, run: Run) -> None:
        """Remember the round layer, which counts the rounds of each client.

        Raises UserError if the budget does not allow a client's first round, or if noise is too coarse for the model.
        """
        self._layer, self._run = found_in(run.strategy.layer, PrivateTraining), run.order.run
        norm, size = self._settings.clipping_norm, sum(value.numel() for value in self._params.values())
        for group in self._groups:
            clipping_norm_on_grid(norm, group.cost.noise_multiplier * norm, size, summands=group.num_records)
            if group.cost.most_rounds == 0:
                spent = epsilon_of_counts({group.cost.charge: 1}, self._settings.delta)
                raise UserError(
                    f"local.privacy.epsilon={self._settings.epsilon:g} does not allow the first round of clients with "
                    f"{group.num_records:,} records, which costs epsilon {rounded_up(spent)} at delta "
                    f"{self._settings.delta:g}: take a larger epsilon or noise_multiplier, or leave noise_multiplier "
                    "out, and the noise is found from epsilon"
                )

    def after(self, run: Run) -> None:
        """Compute the joint cost of everything in the clients' privacy ledgers, if the ledgers are on this machine."""
        del run
        with suppress(RunError, UserError):
            self._together = joint_cost(self.job, self._settings.delta) if self._is_charged_here() else None

    def _is_charged_here(self) -> bool:
        """Return True if the privacy ledgers on this machine contain all rounds in which clients trained."""
        assert self._layer is not None
        run = digest_of(self.job.experiment) if self._settings.noise == "seeded" else self._run
        paths = {client: ledger_path(self.job, client) for client in self._layer.counts}
        return all(
            path.exists() and num_charged(open_ledger(path), run, client) >= self._layer.counts[client]
            for client, path in paths.items()
        )

    def payments(self) -> "Iterator[Payment]":
        """Yield the planned cost of all rounds, for a record of the client with the highest cost."""
        if (worst := self._worst) is not None:
            is_simulated = self._settings.noise == "seeded"
            yield payment_of(self._terms, self._planned(worst), "", is_simulated=is_simulated)

    def warnings(self) -> list[str]:
        """Return sentences on the noise of the clients and on the cost, and a warning if delta is too large."""
        if (worst := self._worst) is None:
            return []
        noises = sorted(group.cost.noise_multiplier for group in self._groups)
        rates = sorted(group.cost.rate for group in self._groups)
        spent = epsilon_of_counts(self._planned(worst), self._settings.delta)
        said = (
            f"local.privacy=dp-sgd: {_range(noises)} times the clipping norm is the noise on a sum of gradients, and "
            f"{_range(rates)} the probability with which a record joins a batch; {self._rounds_of(worst):,} rounds of "
            f"{worst.cost.num_steps:,} steps cost each record at most epsilon {rounded_up(spent)} at delta "
            f"{self._settings.delta:g}"
        )
        advice = delta_advice(self._settings.delta, min(group.num_records for group in self._groups))
        return [said, *([advice] if advice else [])]

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the privacy statements ``others``, and the statement of the rounds with unit "record"."""
        if (worst := self._worst) is None:
            return list(others)
        counts = self._layer.counts if self._layer else {}
        trained = max((counts.get(client, 0) for client in worst.clients), default=0)
        charges = [(f"round {number}", worst.cost.charge) for number in range(1, trained + 1)]
        coverage = Coverage(_COVERS, _DOES_NOT_COVER, self._settings.noise == "seeded")
        said, together = statement(self._terms, charges, self._planned(worst), coverage), self._together
        if together is None or together.shares > trained:  # other releases about the same records
            said["guarantee"] = f"{said['guarantee']}{joint_cost_in_words(together, self._settings.delta)}"
        joint = together and none_if_infinite(together.epsilon)
        return [*others, {"ledger": self._run, **said, "epsilon_together": joint}]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``local_privacy`` for ``result.json``: noise and steps for each number of records."""
        groups = sorted(self._groups, key=lambda group: group.num_records)
        listed = [
            {
                "records": group.num_records, "clients": len(group.clients), "steps": group.cost.num_steps,
                "noise_multiplier": group.cost.noise_multiplier, "sampling_rate": group.cost.rate,
                "rounds": self._rounds_of(group),
            }
            for group in groups
        ]  # fmt: skip
        return {"local_privacy": {"kind": self._settings.kind, "by_records": listed}}

    @property
    def _settings(self) -> DPSGD:
        assert isinstance(self.job.experiment.local.privacy, DPSGD)
        return self.job.experiment.local.privacy

    @property
    def _terms(self) -> Terms:
        return Terms("record", Adjacency.ADD_OR_REMOVE_ONE, self._settings.delta)

    @cached_property
    def _params(self) -> Params:
        return detached(trainable(self.job.model()).items())

    @cached_property
    def _groups(self) -> list[_Group]:
        from fl_sim.simulation.rounds import procedure_of  # noqa: PLC0415 (it asks all stages)

        job, experiment = self.job, self.job.experiment
        settings = local_settings(job, experiment.local.learning_rate)
        plan = procedure_of(job).typical_plan()
        further = models_of(experiment.algorithm, self._params) - 1

        def steps_of(size: int) -> int:
            return num_private_steps(plan, settings, size) + further * settings.num_steps(size)

        sizes: dict[int, list[int]] = {}
        for client, size in enumerate(np.asarray(job.shards.sizes).tolist()):
            sizes.setdefault(size, []).append(client)
        protection, rounds = self._settings.protection, experiment.rounds
        try:
            round_cost(protection, settings, max(sizes), rounds, steps_of(max(sizes)))
        except NoTimeError:  # a forecast in a hurry: the RDP accountant's noise costs at most as much
            protection = replace(protection, accountant="rdp")
        return [
            _Group(size, tuple(clients), round_cost(protection, settings, size, rounds, steps_of(size)))
            for size, clients in sizes.items()
            if size
        ]

    def _rounds_of(self, group: _Group) -> int:
        rounds, most = self.job.experiment.rounds, group.cost.most_rounds
        return rounds if most is None else min(rounds, most)

    def _planned(self, group: _Group) -> Mapping[dp_event.DpEvent, int]:
        return {group.cost.event: group.cost.num_steps * self._rounds_of(group)}

    @cached_property
    def _worst(self) -> _Group | None:
        """Return the clients with the highest planned cost; None if no client has records."""
        delta = self._settings.delta
        return max(self._groups, key=lambda group: epsilon_of_counts(self._planned(group), delta), default=None)


def _range(values: Sequence[float]) -> str:
    least, most = f"{values[0]:.4g}", f"{values[-1]:.4g}"
    return least if least == most else f"{least} to {most}"
