"""The settings of secure aggregation: the server sees the sum of the clients' updates, but no single update.

The arithmetic is in ``strategies.masking``, and the layer in ``strategies.secure_rounds``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, is_none, kind_of, path_in
from fl_sim.local_plan import Sharing
from fl_sim.settings import Settings
from fl_sim.types import Aggregate, Cohort


class SecureSum(Settings):
    """Clients round their updates to integers and add masks that cancel in the sum (Bonawitz et al. 2017).

    Numbers are scaled such that the sum over n clients cannot overflow: n times ``clipping_range`` becomes half of
    2^``bits``. A number beyond ``clipping_range`` ends the run with an error. The rounding step is 2 n
    ``clipping_range`` / 2^``bits``. ``rounding``: "nearest" has an error of at most half a step per number.
    "stochastic" has an error of less than a step, and no bias. The unmasked sum is exactly the sum of the integers.

    ``most_records``: with 0, all clients with records have the same weight. With a larger number, clients are weighted
    by records if the algorithm weights them so: a client sends its update times its number of records /
    ``most_records``. A client with more records ends the run with an error.

    ``dropout``: the probability that a client drops out of a round after it agreed on masks. Then the other clients
    send secret shares, from which the masks of this client are computed. ``threshold``: the share of a round's clients
    that must answer. With fewer answers, or only one, the sum is not unmasked, and the model does not change.

    This is a simulation: the masks come from the run's seed, and all parties are one program, so nothing is hidden from
    somebody who reads the program's memory. A sum by itself gives no privacy guarantee, so there is no epsilon; for an
    epsilon, use the aggregator distributed-dp. Bytes of keys and shares are those of a deployment with keys of 256
    bits. The time for masks grows with the square of the number of clients in a round. Messages before the first and
    after the last round have no masks.
    """

    kind: Literal["secure-sum"] = "secure-sum"
    title: ClassVar[str] = "secure sum"
    layer: ClassVar[str] = "strategies.secure_rounds:SecureRounds"
    stage: ClassVar[str] = "fl_sim.stages.secure_sum:SecureSumFacts"
    follows_moves: ClassVar[bool] = True
    bits: int = Field(32, ge=8, le=32)
    clipping_range: float = Field(8.0, gt=0, le=1e6)
    rounding: Literal["nearest", "stochastic"] = "nearest"
    most_records: int = Field(0, ge=0, le=10**6)
    dropout: float = Field(0.0, ge=0, lt=1)
    threshold: float = Field(2 / 3, gt=0.5, le=1)

    def mean(self, cohort: Cohort, weighting: object) -> Aggregate:
        """Raise AssertionError: the layer ``SecureRounds`` computes the mean, from sums modulo 2^bits."""
        del cohort, weighting
        raise AssertionError("the round layer of secure-sum computes the mean")

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that need single updates, or send anything without masks."""
        what, algorithm = "cannot run with aggregator secure-sum", experiment.algorithm
        reason = ""
        if path_in(type(algorithm), "procedure"):
            reason = "it has no rounds of local training"
        elif isinstance(algorithm, Sharing):
            reason = "its clients share averages of their records without masks before the first round"
        if reason:
            raise ValueError(f"algorithm {kind_of(algorithm)} {what}: {reason}; take another algorithm, such as fedavg")
        if not is_none(experiment.attack):
            raise ValueError(
                f"attack {kind_of(experiment.attack)} {what}: attacks change single updates at the server, which sees "
                "only masked numbers; leave attack or aggregator out"
            )
        if not is_none(experiment.compress):
            raise ValueError(
                f"compress {kind_of(experiment.compress)} {what}: masks hide which numbers are 0, and compressed "
                "messages cannot be added; leave compress out, and set fewer aggregator.bits"
            )
        if path_in(type(experiment.server), "procedure"):
            raise ValueError(
                f"server {kind_of(experiment.server)} {what}: masks cancel among the clients of one round, and this "
                "server has no such rounds; leave server out"
            )
