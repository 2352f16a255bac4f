"""Private choices on a worst case, and versions with planted faults, for ``release_audit.py``.

The choices: the number of synthetic records of a class (DA-FL), the label that teachers vote for (PATE and Diff-RN),
and the published data-dependent cost of the labels.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal
from unittest import mock

import numpy as np
from audited_gan import Array
from dp_accounting import dp_event

from clients.dafl import labels
from clients.dafl.labels import ExponentialMechanism, Geometric
from fl_sim.privacy.audit import World
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.pate import smooth_sensitivity
from fl_sim.privacy.pate.labelling_cost import Counts, Floats, GNMaxCost
from strategies.pate.labelling import UNANSWERED, ConfidentGNMax, GNMax, Labelling, LNMax, Mechanism, label


@dataclass(frozen=True)
class PickedCount:
    """How many records of its one class a client makes, which has ``num_records`` and perhaps the audited one.

    ``noise_multiplier``: 1 / epsilon. ``range_follows``: the range ends where the client's own records would.
    ``rounded``: the target is rounded before it is scored.
    """

    name: str
    noise_multiplier: float
    kind: Literal["exponential", "geometric"] = "exponential"
    gamma: float = 0.05
    num_records: int = 10
    range_follows: bool = False
    rounded: bool = False

    def __call__(self, world: World, run: int) -> Array:
        """Return the count, (1,)."""
        build = ExponentialMechanism if self.kind == "exponential" else Geometric
        picker = build(epsilon=1 / self.noise_multiplier, false_positive=1.0, least_share=0.0)
        held = self.num_records + world
        largest = math.ceil(self.gamma * held) if self.range_follows else 50
        with mock.patch.object(labels, "_target", _rounded_target) if self.rounded else nullcontext():
            picked = picker.select(np.array([held]), self.gamma, largest, Noise.seeded(run))
        return picked.astype(np.float64)


def _rounded_target(gamma: float, num_records: int) -> tuple[int, float]:
    return round(Fraction(gamma) * num_records), 0.0


@dataclass(frozen=True)
class VotedLabels:
    """The labels of some queries on which teachers are of two opinions, half each, and one teacher changes its own.

    ``noise_multiplier``: for ``lnmax`` 1 / gamma; else sigma over what the counts move by, of answers and of tests.
    ``times``: what is wrong with the noise of the answers, and ``test_times`` with that of the tests.
    """

    name: str
    noise_multiplier: float
    kind: Literal["lnmax", "gnmax", "confident"] = "gnmax"
    times: float = 1.0
    test_times: float = 1.0
    queries: int = 8

    def __call__(self, world: World, run: int) -> Array:
        """Return the number of answered queries, and the answers for one label minus those for the other, (2,)."""
        rivals = 125 if self.kind == "confident" else 126  # labels equally likely in one world or between both
        votes = np.array([125 + world, rivals - world, 0, 0])
        labelling = Labelling(mechanism=self._mechanism, noise="seeded")
        counts, noise = np.tile(votes, (self.queries, 1)), Noise.seeded(run)
        found = label(counts, labelling, ledger=labelling.open_ledger(None), noise=noise).labels
        answered = float((found != UNANSWERED).sum())
        return np.array([answered, float((found == 0).sum()) - float((found == 1).sum())])

    def events(self) -> list[dp_event.DpEvent]:
        """Return the cost of all queries if all are answered."""
        test, answer = self._mechanism.charges()
        return [answer, *([] if test is None else [test])] * self.queries

    @property
    def _mechanism(self) -> Mechanism:
        noise = self.noise_multiplier * self.times
        match self.kind:
            case "lnmax":
                return LNMax(gamma=1 / noise)
            case "gnmax":
                return GNMax(sigma=math.sqrt(2) * noise)
            case "confident":
                test = self.noise_multiplier * self.test_times
                return ConfidentGNMax(threshold=125.5, sigma_threshold=test, sigma=math.sqrt(2) * noise)


@dataclass(frozen=True)
class PublishedCost:
    """The noisy upper bound on what 20 labels cost, whose teachers are of one opinion, but for ``behind`` each time.

    One teacher changes its own, everywhere: by as much as the cost may move within the sensitivity that is taken.
    ``noise_multiplier``: on the bound, in smooth sensitivities. ``times``: what is wrong with it. ``queries``: of how
    many the sensitivity is taken. ``local``: whether it is that of the votes themselves, whose size tells of them.
    """

    name: str
    noise_multiplier: float
    times: float = 1.0
    queries: int = 20
    local: bool = False
    behind: int = 22

    _QUERIES, _TEACHERS, _COST = 20, 100, GNMaxCost(sigma=4.0)
    _TERMS = smooth_sensitivity.PublicationTerms(order=16.0, smoothness=0.01)

    def __call__(self, world: World, run: int) -> Array:
        """Return the bound, (1,)."""
        behind = self.behind + world
        counts = np.tile([self._TEACHERS - behind, behind, 0, 0], (self._QUERIES, 1))
        terms = replace(self._TERMS, noise=self.noise_multiplier * self.times)
        true = smooth_sensitivity.smooth_sensitivity

        def taken(
            counts: Counts,
            cost: GNMaxCost,
            terms: smooth_sensitivity.PublicationTerms,
            answered: smooth_sensitivity.Answered,
        ) -> float:
            if self.local:
                return self._local(counts)
            return true(counts[: self.queries], cost, terms, answered[: self.queries])

        with mock.patch.object(smooth_sensitivity, "smooth_sensitivity", taken):
            released = smooth_sensitivity.release(counts, self._COST, 1e-5, terms, noise=Noise.seeded(run))
        return np.array([released.divergence])

    def curve(self, orders: Floats) -> Floats:
        """Return the claimed Renyi cost of the publication at each of ``orders``."""
        return replace(self._TERMS, noise=self.noise_multiplier).curve(orders)

    def _local(self, counts: Counts) -> float:
        """Return the change of the cost if one teacher changes its votes: the local sensitivity."""
        moved = counts + np.array([[-1, 1, 0, 0]])
        at_order = np.array([self._TERMS.order])
        costs = [self._COST.curves(one, np.ones(len(one)), at_order)[0].sum() for one in (counts, moved)]
        return float(costs[1] - costs[0])
