"""Audit single private releases on a worst case: all of this project that are not Global DP's rounds.

Privacy-profile audit as in ``fl_sim.privacy.audit``: both worlds of a neighbouring pair are run many times, and the
outputs are held against the claimed (epsilon, delta) curve. The number of records is public, so the record that is
left out is replaced by one that the mechanism does not look at (of a class that was not released). Every planted fault
claims what the true mechanism does. The mechanisms: ``audited_gan.py``, ``audited_sums.py``, ``audited_choices.py``.

    PYTHONPATH=. python benchmarks/release_audit.py [--json] [--seed 0] [--runs 2000] [--epsilon 4] [--families D]
    PYTHONPATH=. python benchmarks/release_audit.py --tightness --epsilon 1 2 4 8

Of every true mechanism the tightness is told, too: the epsilon of the least noise whose claim the same runs refute,
over the epsilon that is claimed. It is near 1 where the audit sees all that the accountant pays for. ``--tightness``
leaves the planted faults out.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from audited_choices import PickedCount, PublishedCost, VotedLabels
from audited_gan import FAR, Array, DiscriminatorStep
from audited_sums import (
    ClippedRound,
    EmbeddingRelease,
    GaussianRelease,
    MarginalsRelease,
    MomentsRelease,
    StartReleases,
)
from dp_accounting import dp_event
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.optimize import brentq

from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import ProfileAudit, audit_profile, least_refuted, run_mechanism
from fl_sim.privacy.events import BoundedRangeDpEvent, amplify_poisson
from fl_sim.privacy.renyi import ORDERS, Curve, epsilons_of_curves

CONFIDENCE = 0.95

DELTA = 1e-5

SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""The shares of the claimed epsilon at which delta is compared with the claim."""


@dataclass(frozen=True)
class Finding:
    """What the runs of one mechanism prove against the claim that all mechanisms of its family share."""

    mechanism: str
    faulty: bool
    profile: ProfileAudit
    seconds: float
    proven: float = 0.0


@dataclass(frozen=True)
class Family:
    """A mechanism and what may be wrong with it.

    ``events``: from the noise multiplier to all that is claimed. ``mechanisms``: from the noise multiplier to those
    that are run; the first is the true one.
    """

    events: Callable[[float], list[dp_event.DpEvent]]
    mechanisms: Callable[[float], list[Any]]

    def claims(self, noise: float, epsilons: Sequence[float]) -> list[float]:
        """Return the claimed delta at each of ``epsilons``."""
        return delta_profile(self.events(noise), epsilons)

    def epsilon(self, noise: float) -> float:
        """Return the claimed epsilon at ``DELTA``."""
        return epsilon_of_counts(Counter(self.events(noise)), DELTA, accountant="pld")


@dataclass(frozen=True)
class DivergenceFamily:
    """The same for a mechanism of which nothing but Renyi divergences is claimed. ``curve``: these at ``ORDERS``."""

    curve: Callable[[float], Curve]
    mechanisms: Callable[[float], list[Any]]

    def claims(self, noise: float, epsilons: Sequence[float]) -> list[float]:
        """Return the claimed delta at each of ``epsilons``."""
        curve = self.curve(noise)
        return [float(compute_delta(ORDERS, curve, epsilon)[0]) for epsilon in epsilons]

    def epsilon(self, noise: float) -> float:
        """Return the claimed epsilon at ``DELTA``."""
        return float(epsilons_of_curves(self.curve(noise), DELTA))


def noise_for(family: Family | DivergenceFamily, epsilon: float) -> float:
    """Return the noise multiplier at which ``epsilon`` is claimed."""
    found: float = brentq(lambda log: family.epsilon(math.exp(log)) - epsilon, -3.0, 5.0, xtol=1e-4)
    return math.exp(found)


def one_gaussian(noise: float) -> list[dp_event.DpEvent]:
    """Return the claimed event of one Gaussian release on all records."""
    return [dp_event.GaussianDpEvent(noise)]


def _marginals(noise: float) -> list[dp_event.DpEvent]:
    """Return the three parts one by one, which is less than the zCDP that they are billed as."""
    ones, choice, twos = MarginalsRelease("as it is", noise).parts
    return [dp_event.GaussianDpEvent(ones), BoundedRangeDpEvent(choice), dp_event.GaussianDpEvent(twos)]


FAMILIES: dict[str, Family | DivergenceFamily] = {
    "D step, all records": Family(one_gaussian, lambda z: [
        DiscriminatorStep("as it is", z),
        DiscriminatorStep("half the noise", z / 2),
        DiscriminatorStep("no noise", 0.0),
        DiscriminatorStep("no clipping", z, clipping_norm=1e3),
        DiscriminatorStep("real and fake clipped apart", z, apart=True),
        DiscriminatorStep("divided by the realised batch", z, realised=True),
    ]),
    "D step, where the classes of fakes matter": Family(one_gaussian, lambda z: [
        DiscriminatorStep("as it is", z, record=FAR, networks=11),
        DiscriminatorStep("fake labels from the private histogram", z, record=FAR, networks=11, histogram=True),
    ]),
    "D step, records by coins of 1/2": Family(lambda z: [amplify_poisson(dp_event.GaussianDpEvent(z), 0.5)], lambda z: [
        DiscriminatorStep("as it is", z, 0.5),
        DiscriminatorStep("half the noise", z / 2, 0.5),
        DiscriminatorStep("all records taken", z, 1.0),
    ]),
    "mean embedding": Family(one_gaussian, lambda z: [
        EmbeddingRelease("as it is", z),
        EmbeddingRelease("half the noise", z / 2),
        EmbeddingRelease("no noise", 0.0),
        EmbeddingRelease("no clipping", z, clipped=False),
        EmbeddingRelease("two releases for the price of one", z, split=False),
        EmbeddingRelease("count without noise", z, count_noised=False),
    ]),
    "class Gaussians": Family(one_gaussian, lambda z: [
        GaussianRelease("as it is", z),
        GaussianRelease("half the noise", z / 2),
        GaussianRelease("no noise", 0.0),
        GaussianRelease("no clipping", z, clipped=False),
        GaussianRelease("two releases for the price of one", z, split=False),
    ]),
    "moments of features": Family(one_gaussian, lambda z: [
        MomentsRelease("as it is", z),
        MomentsRelease("half the noise", z / 2),
        MomentsRelease("products forgotten in the sensitivity", z, sensitivity=1.0),
        MomentsRelease("count without noise", z, count_noised=False),
    ]),
    "marginals of a table": Family(_marginals, lambda z: [
        MarginalsRelease("as it is", z),
        MarginalsRelease("half the noise", z / 2),
        MarginalsRelease("noise as for one column", z, tables=1),
        MarginalsRelease("the pair chosen without noise", z, choice_noised=False),
        MarginalsRelease("three parts for the price of one", z, split=False),
    ]),
    "a round with adaptive clipping": Family(one_gaussian, lambda z: [
        ClippedRound("as it is", z),
        ClippedRound("half the noise", z, times=0.5),
        ClippedRound("updates noised as if there were no count", z, count_is_paid=False),
        ClippedRound("count without noise", z, count_noised=False),
        ClippedRound("count of all within, not less a half each", z, centred=False),
    ]),
    "private start": Family(one_gaussian, lambda z: [
        StartReleases("as it is", z),
        StartReleases("half the noise", z / 2),
        StartReleases("no clipping", z, clipped=False),
        StartReleases("three releases for the price of one", z, split=False),
    ]),
    "label picker, exponential": Family(lambda z: [BoundedRangeDpEvent(1 / z)], lambda z: [
        PickedCount("as it is", z),
        PickedCount("half the noise", z / 2),
        PickedCount("the range follows the records", z, gamma=1.0, num_records=0, range_follows=True),
        PickedCount("the target is rounded first", z, num_records=9, rounded=True),
    ]),
    "label picker, geometric": Family(lambda z: [dp_event.DiscreteLaplaceDpEvent(1 / z, 1)], lambda z: [
        PickedCount("as it is", z, "geometric", gamma=1.0),
        PickedCount("half the noise", z / 2, "geometric", gamma=1.0),
    ]),
    "LNMax": Family(lambda z: VotedLabels("", z, "lnmax").events(), lambda z: [
        VotedLabels("as it is", z, "lnmax"),
        VotedLabels("half the noise", z, "lnmax", times=0.5),
        VotedLabels("no noise", z, "lnmax", times=1e-3),
    ]),
    "GNMax": Family(lambda z: VotedLabels("", z).events(), lambda z: [
        VotedLabels("as it is", z),
        VotedLabels("half the noise", z, times=0.5),
    ]),
    # A label is one bit of a tie, which of a single query is all that there is to know at epsilon 0.
    "GNMax, a single query": Family(lambda z: VotedLabels("", z, queries=1).events(), lambda z: [
        VotedLabels("as it is", z, queries=1),
        VotedLabels("noise as for one count", z, times=math.sqrt(0.5), queries=1),
    ]),
    "Confident-GNMax": Family(lambda z: VotedLabels("", z, "confident").events(), lambda z: [
        VotedLabels("as it is", z, "confident"),
        VotedLabels("half the noise", z, "confident", times=0.5, test_times=0.5),
        VotedLabels("tests without noise", z, "confident", test_times=1e-3),
    ]),
    "published cost of labels": DivergenceFamily(lambda z: PublishedCost("", z).curve(np.array(ORDERS)), lambda z: [
        PublishedCost("as it is", z),
        PublishedCost("a quarter of the noise", z, times=0.25),
        PublishedCost("sensitivity of a single label", z, queries=1),
        PublishedCost("noise by the votes' own sensitivity", z, local=True, behind=14),
    ]),
}  # fmt: skip


def audit(
    family: Family | DivergenceFamily, noise: float, mechanism: Any, *, num_runs: int, seed: int, faulty: bool
) -> Finding:
    """Run ``mechanism`` in both worlds, ``num_runs`` times each, against the claim for the multiplier ``noise``.

    Most is seen of a claim well below its epsilon. At epsilon itself a loss that never goes beyond it shows.
    """
    start = time.perf_counter()
    first = 2 * num_runs * seed
    without, with_unit = run_mechanism(lambda world, run: mechanism(world, first + run), num_runs)
    epsilons = tuple(share * family.epsilon(noise) for share in SHARES)
    judged = partial(audit_profile, claimed=family.claims(noise, epsilons), epsilons=epsilons, confidence=CONFIDENCE)
    profile, least = judged(without, with_unit), math.inf
    if not faulty:
        along = profile if without.shape[1] == 1 else judged(*_along(direction(mechanism), without, with_unit))
        least = least_refuted(along, lambda other: family.claims(other, epsilons), noise)
    proven = 0.0 if math.isinf(least) else family.epsilon(least)
    return Finding(mechanism.name, faulty, profile, time.perf_counter() - start, proven)


def _along(axis: Array, *worlds: Array) -> list[Array]:
    return [outputs @ axis[:, np.newaxis] for outputs in worlds]


def direction(mechanism: Any) -> Array:
    """Return in which direction the audited unit moves what is released, shape (coordinates,), of length 1.

    Whoever knows all but the coins and the noise knows it: no test of two Gaussians that differ in their mean does
    better than to look along it.
    """
    quiet = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 50)  # not 0, by which clipping would be 0
    moved: Array = np.mean([quiet(1, run) - quiet(0, run) for run in range(64)], axis=0)
    direction: Array = moved / np.linalg.norm(moved)
    return direction


def table(name: str, claimed_epsilon: float, findings: Sequence[Finding]) -> str:
    """Return the findings of one family as a Markdown table."""
    claimed, true, quarter = findings[0].profile.claimed, findings[0], claimed_epsilon / 4
    head = (
        f"**{name}**: claimed epsilon {claimed_epsilon:.2f}, "
        f"delta(0) {claimed[0]:.3f}, delta({quarter:g}) {claimed[2]:.3f}; "
        f"refuted up to epsilon {true.proven:.2f}: tightness {true.proven / claimed_epsilon:.2f}"
    )
    lines = [
        head,
        "",
        f"| mechanism | delta(0) >= | delta({quarter:g}) >= | power | epsilon at delta 1e-5 >= | verdict | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in findings:
        bounds = one.profile.lower_bounds
        lines.append(
            f"| {one.mechanism} | {bounds[0]:.3f} | {bounds[2]:.3f} | {one.profile.power:.2f} "
            f"| {one.profile.epsilon_lower_bound:.2f} | {'REFUTED' if one.profile.refuted else 'not refuted'} "
            f"| {one.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Audit all releases and print the findings."""
    parser = argparse.ArgumentParser(description="Audit single private releases on a worst case.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2000, help="runs per world and mechanism")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[4.0], help=f"what is claimed at delta {DELTA:g}")
    parser.add_argument("--families", default="", help="only those whose name contains this")
    parser.add_argument("--tightness", action="store_true", help="run the true mechanisms alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[float, list[Finding]]] = {}
    for name in [name for name in FAMILIES if arguments.families in name]:
        family = FAMILIES[name]
        for epsilon in arguments.epsilon:
            noise = noise_for(family, epsilon)
            mechanisms = family.mechanisms(noise)[: 1 if arguments.tightness else None]
            findings = [
                audit(family, noise, one, num_runs=arguments.runs, seed=arguments.seed, faulty=number > 0)
                for number, one in enumerate(mechanisms)
            ]
            found.setdefault(name, {})[epsilon] = findings
            if not arguments.json:
                print(table(name, epsilon, findings), end="\n\n", flush=True)
    if arguments.json:
        told = {
            name: {
                epsilon: [asdict(one) | {"refuted": one.profile.refuted} for one in findings]
                for epsilon, findings in at.items()
            }
            for name, at in found.items()
        }
        print(json.dumps({**vars(arguments), "confidence": CONFIDENCE, "families": told}))


if __name__ == "__main__":
    main()
