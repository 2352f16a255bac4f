"""The settings of distributed differential privacy: clients add noise to rounded updates, and the server sees the sum.

The arithmetic is in ``fl_sim.privacy.modular_sums``, and the layer in ``strategies.distributed_sums``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fl_sim.errors import UserError
from fl_sim.kinds import Choices, is_none, is_own_kind, kind_of, path_in
from fl_sim.local_plan import Sharing
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort
from strategies.samplers import Cyclic, Everyone

if TYPE_CHECKING:
    from fl_sim.privacy.modular_sums import NoisyGrid, SumGrid


class NoisySums(Settings):
    """Base class of the aggregators whose clients add noise, and whose server sees only sums."""

    kind: str = ""
    is_private: ClassVar[bool] = True
    unit: ClassVar[str]
    epsilon: float | None = Field(None, gt=0)
    delta: float = Field(1e-5, ge=1e-12, lt=1)
    clipping_norm: float = Field(1.0, gt=0)
    noise_multiplier: float | None = Field(None, gt=0, le=1e6)

    @model_validator(mode="after")
    def _has_noise(self) -> Self:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                f"aggregator={self.kind} needs aggregator.epsilon, from which the noise is computed, or "
                "aggregator.noise_multiplier: set one of them, for example aggregator.epsilon=8"
            )
        return self

    @abstractmethod
    def grid(self, dimension: int, shares: int, noise_multiplier: float) -> NoisyGrid:
        """Return the rounding grid and the noise of a sum.

        ``dimension``: the length of the summed vectors. ``shares``: the number of clients whose noise adds up to
        ``noise_multiplier``.
        """

    def mean(self, cohort: Cohort, weighting: object) -> Aggregate:
        """Raise AssertionError: the layer ``DistributedSums`` computes the mean, from sums modulo 2^bits."""
        del cohort, weighting
        raise AssertionError("the layer DistributedSums computes the mean")

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings with which the stated guarantee would not hold."""
        if is_own_kind(self):
            raise UserError(
                f"aggregator {kind_of(self)} changes {self.kind}, so its privacy guarantee is not known and no "
                f"epsilon can be computed: take {self.kind} itself"
            )
        what = f"cannot run under aggregator {self.kind}"
        self._check_sampler(experiment.sampler, what)
        algorithm, reason = experiment.algorithm, ""
        if path_in(type(algorithm), "procedure"):
            reason = "it has no rounds of local training"
        elif isinstance(algorithm, Sharing):
            reason = "its clients share averages of their records without noise before the first round"
        elif hasattr(algorithm, "weigh"):
            reason = "it weighs clients, but the server sees only the sum of equal weights"
        if reason:
            raise ValueError(
                f"algorithm {kind_of(algorithm)} {what}: {reason}; take another algorithm, such as fedavg, fedprox or "
                "scaffold"
            )
        for name in ("preprocess", "calibrate"):
            if not is_none(value := getattr(experiment, name)):
                raise ValueError(
                    f"{name} {kind_of(value)} {what}: {name} also reads the clients' records, and no privacy "
                    f"statement covers both settings; leave {name} or the aggregator out"
                )
        if not is_none(experiment.compress):
            raise ValueError(
                f"compress {kind_of(experiment.compress)} {what}: compressed messages cannot be summed modulo "
                "2^bits; leave compress out, and for fewer bytes lower aggregator.bits"
            )
        if (stack := getattr(experiment.engine, "stack", 0)) > 1:
            raise ValueError(
                f"engine.stack={stack} {what}: a stack is a group of clients trained in one computation, so the "
                "rounding errors of a client's update depend on the other clients' records, and noise does not hide "
                "this; leave engine.stack out"
            )

    def _check_sampler(self, sampler: Any, what: str) -> None:
        if not (type(sampler) is Everyone or (type(sampler) is Cyclic and sampler.sampling_rate == 1)):
            raise ValueError(
                f"sampler {kind_of(sampler)} {what}: the server sees the cohort, so random sampling does not reduce "
                "the privacy cost, and the number of clients that add noise to a sum must be known; take sampler=full, "
                "or sampler=cyclic, with which a client takes part in one of every sampler.groups rounds, and has a "
                "privacy cost only in these rounds"
            )


class DistributedDP(NoisySums):
    """Clients add noise to their updates, and secure aggregation shows the server only the noisy sum.

    All payloads of a client in a round form one vector. The client clips this vector, and rotates it by public random
    signs and a Hadamard matrix. The client scales the vector and rounds it at random to whole numbers. The client adds
    integer noise and sends the numbers modulo 2^``bits`` (Kairouz, Liu, Steinke 2021; Agarwal, Kairouz, Liu 2021). The
    server adds the messages modulo 2^``bits``, reverses scaling and rotation, and divides by the number of messages.
    Secure aggregation is simulated: this program computes the same sum, without the random masks of the protocol.

    Privacy unit: one client. Adjacency: all data of one client are removed, but the client still takes part. It is
    public which clients take part in a round, and which drop out. So the sampling of clients does not reduce the
    privacy cost. The sum contains only the noise of the clients that answer, so dropouts raise the cost of a round.

    ``epsilon``: the largest epsilon of the whole run. The server does not open (see) a sum that would exceed this
    epsilon. ``delta``: the delta of the guarantee with this epsilon. ``clipping_norm``: the largest L2 norm of a
    client's vector. ``noise_multiplier``: the standard deviation of the noise on the sum, divided by the clipping norm,
    if all clients of a round answer. By default, it is the smallest value for which all rounds together cost at most
    the given epsilon. ``mechanism``: the distribution of a client's noise. ``bits``: the number of bits of each sent
    number. ``headroom``: a number of standard deviations of a sum; numbers are scaled so that it corresponds to half of
    2^``bits``. ``noise``: "secret" noise differs from run to run. "seeded" noise is repeatable, protects nothing, and
    is for simulations only.
    """

    kind: Literal["distributed-dp"] = "distributed-dp"
    unit: ClassVar[str] = "client"
    title: ClassVar[str] = "distributed DP"
    layer: ClassVar[str] = "strategies.distributed_sums:DistributedSums"
    stage: ClassVar[str] = "fl_sim.stages.distributed_sums:DistributedSumsBill"
    mechanism: Literal["skellam", "discrete-gaussian"] = "skellam"
    bits: int = Field(16, ge=8, le=20)
    headroom: float = Field(4.0, ge=1)
    noise: Literal["secret", "seeded"] = "secret"

    def grid(self, dimension: int, shares: int, noise_multiplier: float) -> SumGrid:
        """Return the rounding grid and the noise of a sum of ``shares`` vectors of ``dimension`` numbers."""
        from fl_sim.privacy.modular_sums import SumGrid  # noqa: PLC0415 (the accountants load slowly)

        return SumGrid(
            dimension, shares, self.clipping_norm, noise_multiplier, self.mechanism, self.bits, self.headroom
        )
