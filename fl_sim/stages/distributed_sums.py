"""The privacy bills of distributed differential privacy: the costs of noisy sums, for forecast and privacy statement.

The settings are in ``strategies.distributed_dp`` (the privacy unit is a client) and ``strategies.distributed_dp_sgd``
(a record). During the run, the layer ``DistributedSums`` writes the costs into the privacy ledger.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from dp_accounting import dp_event

from fl_sim.experiment.job import Job
from fl_sim.params import detached, trainable
from fl_sim.privacy.bill import payment_of
from fl_sim.privacy.modular_sums import NoisyGrid
from fl_sim.privacy.record_sums import RecordGrid
from fl_sim.privacy.terms import delta_advice, rounded_up
from fl_sim.simulation.stage import Run, Stage
from strategies.algorithm import first_template
from strategies.distributed_sums import DistributedSums, grid_of, num_charges, terms_of
from strategies.layer import found_in

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment

COVERS: Final = (
    "Everything that the server sees of the clients' data in the rounds: the noisy sums of all rounds together, and "
    "all results that are computed from these sums, such as every global model. The guarantee also holds against the "
    "server."
)
_SUMS_ARE_SIMULATED: Final = (
    "Secure aggregation: it is assumed to hide single messages from the server, but this simulation replaces it "
    "by a plain sum. The other clients are trusted to add their noise and to keep this noise secret. Which clients "
    "take part in a round, and which drop out, are treated as public and independent of the data: sampling clients "
    "does not reduce the cost, and the forecast of later rounds assumes no drop-outs. Choices made by looking "
    "at private data. Facts that are common to many"
)


class DistributedSumsBill(Stage):
    """The stage at the server that plans the noise of the sums and states their privacy cost."""

    does_not_cover: ClassVar[str] = f"{_SUMS_ARE_SIMULATED} clients, because the model is meant to learn them."

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer: DistributedSums | None = None

    @cached_property
    def grid(self) -> NoisyGrid:
        """Return the parameters of the noisy sums: their rounding grid and their noise."""
        experiment = self.job.experiment
        params = detached(trainable(self.job.model()).items())
        return grid_of(experiment, first_template(experiment.algorithm, params, experiment.local.personal))

    @property
    def planned(self) -> Mapping[dp_event.DpEvent, int]:
        """Return the planned privacy cost of the rounds, {privacy event: number of rounds}.

        Finished rounds in which clients dropped out are not counted here, because their privacy cost differs from the
        plan.
        """
        full, charges = self.grid.event(self.grid.shares), num_charges(self.job.experiment)
        if self._layer is None:
            return Counter({full: charges})
        apart = {one.release for one in self._layer.ledger.charges if one.event != full}
        return Counter({full: max(0, charges - len(apart))})

    def before(self, run: Run) -> None:
        """Tell the layer ``DistributedSums`` the rounding grid and the noise of the sums."""
        self._layer = found_in(run.strategy.layer, DistributedSums)
        self._layer.grid = self.grid

    def payments(self) -> "Iterator[Payment]":
        """Yield the planned privacy cost of all rounds."""
        settings: Any = self.job.experiment.aggregator
        yield payment_of(terms_of(settings), self.planned, "", is_simulated=settings.noise == "seeded")

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the given privacy statements ``others``, and the privacy statement about the rounds."""
        settings: Any = self.job.experiment.aggregator
        assert self._layer is not None, "statements are made after the rounds"
        said = self._layer.ledger.statement(
            covers=COVERS,
            does_not_cover=self.does_not_cover,
            simulation_only=settings.noise == "seeded",
            planned=self.planned,
        )
        return [*others, said]

    def warnings(self) -> list[str]:
        """Return a sentence on the noise, message size and privacy cost, and a warning if delta is too large."""
        settings: Any = self.job.experiment.aggregator
        grid, [payment] = self.grid, self.payments()
        cost = "no epsilon" if payment.epsilon is None else f"epsilon {rounded_up(payment.epsilon)}"
        length = grid.std_of_mean * grid.dimension**0.5 / grid.clipping_norm
        said = (
            f"aggregator=distributed-dp: each number of the sum has noise of {grid.noise_multiplier:.4g} clipping "
            f"norms, the total of {grid.shares:,} clients. The noise of the mean has a norm of {length:.3g} clipping "
            f"norms; a clipped update has a norm of at most 1. A client sends {grid.padded:,} numbers of "
            f"{grid.bits} bits; one rounding step is {1 / (grid.scale * grid.clipping_norm):.3g} clipping norms. All "
            f"rounds cost {cost} at delta {settings.delta:g} if no client drops out. Secure aggregation is simulated "
            "by a plain sum"
        )
        advice = delta_advice(settings.delta, self.job.experiment.num_members)
        return [said, *([advice] if advice else [])]

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``distributed_sums`` for ``result.json``.

        It contains the parameters of the noisy sums, and two lists of rounds. ``unopened``: the rounds whose sum was
        not revealed to the server, because the privacy budget did not allow the sum's cost. ``wrapped``: the rounds
        whose sum overflowed. Sums of gradients never do.
        """
        grid, layer = self.grid, self._layer
        return {
            "distributed_sums": {
                "mechanism": grid.mechanism,
                "noise_multiplier": grid.noise_multiplier,
                "bits": grid.bits,
                "numbers": grid.padded,
                "scale": grid.scale,
                "unopened": layer.unopened if layer else [],
                "wrapped": layer.wrapped if layer else [],
            }
        }


class DistributedGradientsBill(DistributedSumsBill):
    """The stage at the server that plans the noise of the sums of gradients and states their cost per record."""

    does_not_cover: ClassVar[str] = (
        "The number of each client's records is treated as public. "
        f"{_SUMS_ARE_SIMULATED} records, because the model is meant to learn them."
    )

    @cached_property
    def grid(self) -> NoisyGrid:
        """Return the parameters of the noisy sums. Raises UserError if a sum could exceed the range of 40 bits."""
        grid = super().grid
        assert isinstance(grid, RecordGrid)
        grid.check_records(self.num_records)
        return grid

    @property
    def num_records(self) -> int:
        """Return the number of training records of all clients together."""
        return int(np.asarray(self.job.shards.sizes).sum())

    def warnings(self) -> list[str]:
        """Return a sentence on the noise, message size and privacy cost, and a warning if delta is too large."""
        settings: Any = self.job.experiment.aggregator
        grid, [payment] = self.grid, self.payments()
        cost = "no epsilon" if payment.epsilon is None else f"epsilon {rounded_up(payment.epsilon)}"
        records = self.num_records
        length = grid.std_of_mean * grid.shares * grid.dimension**0.5 / grid.clipping_norm / max(1, records)
        said = (
            f"aggregator={settings.kind}: each number of the sum of gradients has noise of {grid.noise_multiplier:.4g} "
            f"clipping norms, the total of {grid.shares:,} clients. The noise of the mean over {records:,} records has "
            f"a norm of {length:.3g} clipping norms; a clipped gradient has a norm of at most 1. A client sends "
            f"{grid.padded:,} numbers of {grid.bits} bits; one rounding step is "
            f"{1 / (grid.scale * grid.clipping_norm):.3g} clipping norms. All rounds cost each record at most {cost} "
            f"at delta {settings.delta:g} if no client drops out. Secure aggregation is simulated by a plain sum"
        )
        advice = delta_advice(settings.delta, records)
        return [said, *([advice] if advice else [])]
