"""The settings of DP-SGD without a trusted server: the server sees only noisy sums over all clients' records.

The arithmetic is in ``fl_sim.privacy.record_sums``, and the layer in ``strategies.distributed_gradients``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from fl_sim.kinds import Choices, kind_of
from strategies.distributed_dp import NoisySums

if TYPE_CHECKING:
    from fl_sim.privacy.record_sums import RecordGrid

EVERY_RECORD: Final = 2**20
"""A batch size that no client's number of records exceeds: ``MOST_RECORDS`` of all clients together is the limit."""

_STEP: Final = "a round is one gradient step on all records, which the server takes"


class DistributedDPSGD(NoisySums):
    """A round is one step of DP-SGD on the records of all clients together, and no client sees another's records.

    Each client clips the gradient of each of its records, and adds the gradients up. It rounds the sum at random to
    whole numbers, adds integer noise and sends the result modulo 2^40. The server adds the messages modulo 2^40 and
    divides the noisy sum by the number of records. The mean update is this mean gradient times the negative learning
    rate, so ``algorithm=fedavg`` is gradient descent, and ``fedavgm`` or ``fedadam`` change the server's step. The
    noises of the clients add up to the noise of one server that has all records, for any number of clients and any
    split. With ``local.privacy=dp-sgd``, on the contrary, each client adds all this noise itself. Secure aggregation is
    simulated: this program computes the same sum, without the random masks of the protocol.

    Privacy unit: one record of one client. Adjacency: one record is removed, but the public number of the client's
    records does not change. It is public which clients take part in a round, and which drop out. All records of a
    client are in every batch, so no sampling reduces the privacy cost. The sum contains only the noise of the clients
    that answer, so dropouts raise the cost of a round.

    ``epsilon``: the largest epsilon for each record, over the whole run. The server does not open (see) a sum that
    would exceed this epsilon. ``delta``: the delta of the guarantee with this epsilon. ``clipping_norm``: the largest
    L2 norm of a record's gradient, over all trained parameters together. ``noise_multiplier``: the standard deviation
    of the noise on the sum, divided by the clipping norm, if all clients of a round answer. By default, it is the
    smallest value for which all rounds together cost at most the given epsilon. ``noise``: "secret" noise differs from
    run to run. "seeded" noise is repeatable, protects nothing, and is for simulations only.
    """

    kind: Literal["distributed-dp-sgd"] = "distributed-dp-sgd"
    title: ClassVar[str] = "distributed DP-SGD"
    layer: ClassVar[str] = "strategies.distributed_gradients:DistributedGradients"
    stage: ClassVar[str] = "fl_sim.stages.distributed_sums:DistributedGradientsBill"
    starts_with: ClassVar[Mapping[str, Any]] = {
        "local": {"steps": 1, "batch_size": EVERY_RECORD, "momentum": 0.0, "weight_decay": 0.0}
    }
    unit: ClassVar[str] = "record"
    noise: Literal["secret", "seeded"] = "secret"

    def grid(self, dimension: int, shares: int, noise_multiplier: float) -> RecordGrid:
        """Return the rounding grid and the noise of a sum of gradients of ``dimension`` numbers."""
        from fl_sim.privacy.record_sums import RecordGrid  # noqa: PLC0415 (the accountants load slowly)

        return RecordGrid(dimension, shares, self.clipping_norm, noise_multiplier)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings with which the stated guarantee would not hold, or that have no effect."""
        super().check(experiment)
        local, batches = experiment.local, "the gradient of every record is clipped, and no batch is drawn"
        unused = {
            "steps": (1, _STEP), "batch_size": (EVERY_RECORD, "every record is in every step"),
            "momentum": (0.0, f"{_STEP}: take algorithm=fedavgm"), "weight_decay": (0.0, _STEP),
            "clip_norm": (0.0, batches), "optimizer": ("sgd", f"{_STEP}: take algorithm=fedadam"),
            "augment": ("none", "its random numbers do not come from the client's secret source"),
            "batch_norm": ("none", "running statistics are means over records without noise"),
            "personal": ("none", _STEP),
        }  # fmt: skip
        for name, (wanted, reason) in unused.items():
            if (value := getattr(local, name)) != wanted:
                raise ValueError(
                    f"local.{name}={value} cannot run under aggregator {kind_of(self)}: {reason}; leave local.{name} "
                    "out"
                )
