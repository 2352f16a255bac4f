"""Model attacks: hostile clients send noise, or forged updates that they compute from honest updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices, Promising, kind_of
from fl_sim.types import Reply
from strategies.aggregators import as_rows
from strategies.attacks import Forging, HostileClients, Knowing, Seen, with_row


class InnerProductManipulation(Knowing):
    """IPM: all hostile clients send -``eps`` times the mean of the known updates (Xie, Koyejo, Gupta 2019, section 4).

    With a small ``eps`` the forged update is as short as an honest one. With ``eps`` above (n - f) / f, for f hostile
    clients of n, the mean has the opposite direction. The paper uses 0.5 against aggregators that compare distances,
    and more against the median.
    """

    kind: Literal["ipm"] = "ipm"
    eps: float = Field(0.5, gt=0, le=1e6)
    title: ClassVar[str] = "IPM"
    needs_two: ClassVar[bool] = False

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return -``eps`` times the mean of the known updates, as the update of each hostile client."""
        sent = self.known(hostile, seen).mean(dim=0) * -self.eps
        return [with_row(reply, sent) for reply in hostile]


class _Farthest(Knowing):
    """Base class of Min-Max and Min-Sum: all hostile clients send mean + g p, with the largest allowed g.

    The mean is the mean of the known updates, p is a direction, and g is a number.

    ``direction``: with "deviation", p is minus the standard deviation of every coordinate. With "sign", p is minus the
    sign of the mean. With "mean", p is minus the mean. p is then scaled to length 1.
    """

    direction: Literal["deviation", "sign", "mean"] = "deviation"

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the forged update mean + g p, the same for all hostile clients."""
        rows = self.known(hostile, seen).double()
        mean = rows.mean(dim=0)
        way = mean if self.direction == "mean" else mean.sign()
        way = -(rows.std(dim=0, correction=0) if self.direction == "deviation" else way)
        if not (length := float(way.norm())):
            return [with_row(reply, mean.float()) for reply in hostile]
        sent = mean + self.largest_step(rows - mean, way / length) * (way / length)
        return [with_row(reply, sent.float()) for reply in hostile]

    @abstractmethod
    def largest_step(self, centred: torch.Tensor, way: torch.Tensor) -> float:
        """Return the largest allowed g. ``centred``: known updates minus their mean, (n, d). ``way``: unit vector p."""


class MinMax(_Farthest):
    """Min-Max: send mean + g p, with a number g that is limited by the largest distance of two known updates.

    The distance from mean + g p to any known update is at most the largest distance of two known updates. This is the
    attack of Shejwalkar and Houmansadr 2021, section 4. ``direction`` chooses p: minus the standard deviation of every
    coordinate ("deviation"), minus the sign of the mean ("sign"), or minus the mean ("mean"). The authors search for
    the largest g. Here the largest g is computed, as the smallest positive root of the equations |mean + g p - d_i|^2 =
    D^2. d_i are the known updates, and D is the largest distance between two of them.
    """

    kind: Literal["min-max"] = "min-max"
    title: ClassVar[str] = "Min-Max"

    def largest_step(self, centred: torch.Tensor, way: torch.Tensor) -> float:
        """Return the largest g with max_i |g p - c_i| <= max_ij |c_i - c_j|, for the rows c_i of ``centred``."""
        squares, along = centred.square().sum(dim=1), centred @ way
        largest = torch.pdist(centred).max().square() if len(centred) > 1 else squares.new_zeros(())
        return float((along + (along.square() - squares + largest).clamp(min=0).sqrt()).min())


class MinSum(_Farthest):
    """Min-Sum: send mean + g p, with a number g that is limited by a sum of squared distances.

    The sum of squared distances from mean + g p to all known updates is at most the largest sum of squared distances
    from one known update to all others. This is the attack of Shejwalkar and Houmansadr 2021, section 4. ``direction``
    chooses p: minus the standard deviation of every coordinate ("deviation"), minus the sign of the mean ("sign"), or
    minus the mean ("mean"). The authors search for the largest g. Here g is computed: it is the largest distance of a
    known update to the mean.
    """

    kind: Literal["min-sum"] = "min-sum"
    title: ClassVar[str] = "Min-Sum"

    def largest_step(self, centred: torch.Tensor, way: torch.Tensor) -> float:
        """Return the largest g with sum_i |g p - c_i|^2 <= max_i sum_j |c_i - c_j|^2, for rows c_i of ``centred``."""
        del way
        return float(centred.norm(dim=1).max())


class _Searched(Forging):
    """Base class of attacks that search for the strength with which the aggregate is furthest from the honest mean.

    The attackers know all honest updates, and the aggregator with its memory and its random numbers. They try out
    ``evaluations`` strengths. The first is 0, and the steps are 10, 20, 40 and so on, as long as the aggregate moves
    further from the mean of the honest updates. After that, each step starts at the best strength, and steps shrink by
    a factor of 0.8 (Allouah et al. 2023; the search of the program ByzFL). Under the plain mean every larger strength
    harms more, so training diverges.
    """

    evaluations: int = Field(20, ge=2, le=10_000)

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the aggregator is private, because each aggregate that is tried out would have a cost."""
        if isinstance(experiment.aggregator, Promising) and experiment.aggregator.is_private:
            raise ValueError(
                f"attack {kind_of(self)} cannot run with aggregator {kind_of(experiment.aggregator)}: it tries out "
                "aggregates, and here each of them would have a privacy cost; take another aggregator or attack"
            )
        super().check(experiment)

    @abstractmethod
    def line(self, honest: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the start and the direction of the forged updates: start + strength * direction, both (d,).

        ``honest``: the honest updates, float64 (n, d). ``mean``: their mean, (d,).
        """

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the most harmful forged update for each hostile client.

        If no client is honest, the updates ``hostile`` are returned unchanged.
        """
        if not seen.honest:
            return hostile
        assert seen.aggregated is not None
        honest, aggregated = as_rows(seen.honest).double(), seen.aggregated
        mean = honest.mean(dim=0)
        start, direction = self.line(honest, mean)

        def tried(strength: float) -> list[Reply]:
            sent = (start + strength * direction).float()
            return [with_row(reply, sent) for reply in hostile]

        def harm(strength: float) -> float:
            return float((aggregated(tried(strength)).double() - mean).norm())

        return tried(strongest(harm, self.evaluations))


def strongest(harm: Callable[[float], float], evaluations: int) -> float:
    """Return the most harmful strength of an attack that a line search from 0 upwards finds.

    ``harm``: a function from a strength to its harm. ``evaluations``: the number of calls of ``harm``.
    """
    best, most, step, factor = 0.0, harm(0.0), 10.0, 2.0
    for _ in range(evaluations - 1):
        found = harm(best + step)
        is_better = found > most
        if is_better:
            best, most = best + step, found
        else:
            factor = 0.8
        step *= factor
    return best


class OptimalALittleIsEnough(_Searched):
    """Opt-ALIE: ALIE against the run's own aggregator, with the number z of standard deviations that harms most.

    All hostile clients send mean - z * (standard deviation) of the honest updates, for each coordinate. This is the
    attack of Shejwalkar and Houmansadr 2021 (section 4, equation 1) on a known aggregator, with the direction
    "deviation". z is searched for with ``evaluations`` trials.
    """

    kind: Literal["opt-alie"] = "opt-alie"
    title: ClassVar[str] = "Opt-ALIE"

    def line(self, honest: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (start, direction) of forged updates: the mean, and minus the coordinates' standard deviations."""
        return mean, -honest.std(dim=0, correction=0)


class OptimalInnerProductManipulation(_Searched):
    """Opt-IPM: IPM against the run's own aggregator, with the factor eps that harms most.

    All hostile clients send -eps times the mean of the honest updates. eps is searched for with ``evaluations`` trials.
    """

    kind: Literal["opt-ipm"] = "opt-ipm"
    title: ClassVar[str] = "Opt-IPM"

    def line(self, honest: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (start, direction) of the forged updates: zeros, and minus the mean of the honest updates."""
        del honest
        return torch.zeros_like(mean), -mean


class FangTrim(Knowing):
    """Fang's attack on the trimmed mean and the median (Fang et al. 2020, section 4.3).

    In every coordinate, hostile clients send random values beyond all honest values: below the smallest honest value if
    the honest mean is positive, above the largest honest value if the mean is negative. Let v be this smallest or
    largest honest value. ``knows`` "all": the values lie between v and v times ``spread``, or between v and v /
    ``spread`` if v / ``spread`` is further out. ``knows`` "own": the values are 3 to 4 standard deviations from the
    mean of the hostile clients' own honest updates. ``spread``: the paper's b.
    """

    kind: Literal["fang-trim"] = "fang-trim"
    spread: float = Field(2.0, gt=1, le=1e6)
    title: ClassVar[str] = "Fang, trimmed mean"

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return an update of random values for each hostile client; all these updates are different."""
        rows = self.known(hostile, seen).double()
        mean = rows.mean(dim=0)
        outward = torch.where(mean < 0, 1.0, -1.0).double()  # 1: hostile values are above the honest values; -1: below
        if self.knows == "all":
            near = torch.where(mean < 0, rows.max(dim=0).values, rows.min(dim=0).values)
            far = torch.where(near * outward > 0, near * self.spread, near / self.spread)
        else:
            near, far = (mean + outward * times * rows.std(dim=0, correction=0) for times in (3, 4))
        shares = torch.from_numpy(seen.coins.random((len(hostile), len(mean))))
        return [
            with_row(reply, (near + share * (far - near)).float()) for reply, share in zip(hostile, shares, strict=True)
        ]


class Mimic(HostileClients):
    """All hostile clients send a copy of one honest client's update (Karimireddy, He, Jaggi 2022, section 3.2).

    So this client has more weight than others, although no update is forged. The paper chooses the client by the
    direction of the largest variance; here it is the client with the lowest ID in the round. The attack is effective
    under label skew, and has little effect on IID data.
    """

    kind: Literal["mimic"] = "mimic"

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return a copy of the first honest update for each hostile client.

        If no client is honest, the updates ``hostile`` are returned unchanged.
        """
        return [replace(reply, payloads=seen.honest[0].payloads) for reply in hostile] if seen.honest else hostile


class GaussianUpdates(Forging):
    """All hostile clients send normal noise in place of their updates (Blanchard et al. 2017, section 5).

    ``deviation``: the standard deviation of every number. The paper uses 200.
    """

    kind: Literal["gaussian-noise"] = "gaussian-noise"
    sees_honest: ClassVar[bool] = False
    deviation: float = Field(1.0, gt=0, le=1e6)

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return the forged updates: independent normal noise for each hostile client."""
        return _noise(hostile, seen, self.deviation)


class FreeRider(Forging):
    """Hostile clients do not train: they send the received model back (Fraboni, Vidal, Lorenzi 2021, section 3).

    So their update is 0. ``deviation``: the standard deviation of normal noise on every number, so that the zeros look
    like an update (the paper's disguised free-riding with constant noise).
    """

    kind: Literal["free-rider"] = "free-rider"
    sees_honest: ClassVar[bool] = False
    deviation: float = Field(0.0, ge=0, le=1e6)
    title: ClassVar[str] = "free rider"

    def forged(self, hostile: Sequence[Reply], seen: Seen) -> Sequence[Reply]:
        """Return an update of zeros plus independent noise for each hostile client."""
        return _noise(hostile, seen, self.deviation)


def _noise(hostile: Sequence[Reply], seen: Seen, deviation: float) -> list[Reply]:
    size = as_rows(hostile[:1]).shape[1]
    rows = torch.from_numpy(deviation * seen.coins.standard_normal((len(hostile), size), dtype=np.float32))
    return [with_row(reply, row) for reply, row in zip(hostile, rows, strict=True)]
