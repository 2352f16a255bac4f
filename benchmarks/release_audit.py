"""Audit single private releases on a worst case: a D step of DP-CGAN, the mean embedding's sums, moments of features.

Privacy-profile audit as in ``fl_sim.privacy.audit``: both worlds of a neighbouring pair are run many times, and the
outputs are held against the claimed (epsilon, delta) curve. The number of records is public, so the record that is
left out is replaced by one that the mechanism does not look at (of a class that was not released). Every planted fault
claims what the true mechanism does.

    PYTHONPATH=. python benchmarks/release_audit.py [--json] [--seed 0] [--runs 2000] [--epsilon 4] [--families D]

Of every true mechanism the tightness is told, too: the epsilon of the least noise whose claim the same runs refute,
over the epsilon that is claimed. It is near 1 where the audit sees all that the accountant pays for.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from clients import private_moments
from clients.dafl import mean_embedding
from clients.dafl.dpcgan import training as dpcgan
from clients.dafl.dpcgan.client import Client
from clients.dafl.dpcgan.clipping import Pairs
from clients.dafl.dpcgan.compiled import CompiledTraining
from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.dpcgan.training import Training
from clients.dafl.dpcgan.weights import Adam
from clients.dafl.generator import Bill, PrivateRecords, Request
from clients.dafl.mean_embedding import MeanEmbedding
from clients.private_moments import Protection
from fl_sim.privacy.accounting import amplify_poisson, delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import EPSILONS, ProfileAudit, World, audit_profile, least_refuted, run_mechanism
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.planning import noise_multiplier

CONFIDENCE = 0.95
_CLIPPING = 0.1
"""Smaller than any pair's gradient: all are clipped, and what is not clipped shows."""

DELTA = 1e-5

_FAR = 1e4
"""How far beyond [-1, 1] an audited record may lie: clipping has to hold whatever a record is."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """What the runs of one mechanism prove against the claim that all mechanisms of its family share."""

    mechanism: str
    faulty: bool
    profile: ProfileAudit
    seconds: float
    proven: float = 0.0


@dataclass(frozen=True)
class DiscriminatorStep:
    """One D step and what is wrong with it. The release is the noised SUM of gradients, flat.

    ``record``: the input of the audited record, and ``networks``: the seed of the first weights, together the worst
    case. Compiled code takes the step where it can. ``clipping_norm``: the step's, noise staying what it is.
    ``apart``: real and fake are clipped one by one, which PyTorch does.
    ``histogram``: fakes get their classes from the client's own records. ``realised``: the sum is divided by the size
    of the batch.
    """

    name: str
    noise_multiplier: float
    sampling_rate: float = 1.0
    record: float = -_FAR
    networks: int = 4
    clipping_norm: float = _CLIPPING
    apart: bool = False
    histogram: bool = False
    realised: bool = False

    _BYSTANDERS = 3

    def __call__(self, world: World, run: int) -> Array:
        """Take the first step of a training on some bystanders of class 0 and the audited record of class 1."""
        total = _prepared(self, world)(_key(run)) * self.sampling_rate * (self._BYSTANDERS + 1)
        return total * (self._BYSTANDERS + 1) / (self._BYSTANDERS + world) if self.realised else total

    def prepared(self, world: World) -> "Gradient":
        """Return what takes the first step of a training, which does not move the weights."""
        others = self._BYSTANDERS
        inputs = torch.full((others + 1, 1), -1.0)
        inputs[-1] = self.record
        labels = torch.tensor([*[0] * others, 1 if world else 2])
        settings = DpCgan(
            discriminator_steps=1, batch_size=len(inputs), clipping_norm=self.clipping_norm, latent_dim=2,
            discriminator_width=4, generator_width=4,
        )  # fmt: skip
        noise_multiplier = self.noise_multiplier * _CLIPPING / self.clipping_norm
        bill = Bill(dp_event.GaussianDpEvent(noise_multiplier), 1, noise_multiplier, self.sampling_rate)
        first_weights = mock.create_autospec(np.random.Generator, instance=True)
        first_weights.integers.return_value = self.networks
        request = Request(PrivateRecords(inputs, labels, 3), np.array([1, 1, 0]), bill, _key(0), first_weights)
        client = Client(settings, request)
        if self.histogram:
            client.counts = np.array([others, world])
        if client.kernel and not self.apart:
            return partial(_by_compiled, client, CompiledTraining(settings, client, client.kernel))
        training = Training(settings, [client, *self.neighbours(settings)])
        return partial(_by_pytorch, training, _clipped_apart if self.apart else dpcgan.clipped_sums)

    def neighbours(self, settings: DpCgan) -> list[Client]:
        """Return two more clients of the stack, of other sizes: they tell the audited one nothing."""
        return [
            Client(settings, Request(
                PrivateRecords(torch.full((number, 1), 1.0), torch.zeros(number, dtype=torch.int64), 3),
                np.array([2, 0, 0]), Bill(dp_event.GaussianDpEvent(1.0), 1, 1.0, 0.5), _key(number),
                np.random.default_rng(number),
            ))
            for number in (1, 40)
        ]  # fmt: skip


Gradient: TypeAlias = Callable[[Noise], Array]
"""From the source of coins and noise to the gradient that a step releases."""


@lru_cache(maxsize=2)
def _prepared(step: DiscriminatorStep, world: World) -> Gradient:
    """Return the same for every run, since no step changes it."""
    return step.prepared(world)


def _by_compiled(client: Client, training: CompiledTraining, noise: Noise) -> Array:
    client.noise = noise
    adam = training.adversaries.discriminator_adam
    adam.described.learning_rate = 0.0
    training.discriminator_step(0)
    return adam.gradient.astype(np.float64)


def _by_pytorch(training: Training, sums: Callable[[Sequence[Pairs]], list[torch.Tensor]], noise: Noise) -> Array:
    training.clients[0].noise = noise
    released: list[Sequence[torch.Tensor]] = []
    with (
        mock.patch.object(dpcgan, "clipped_sums", sums),
        mock.patch.object(Adam, "step", lambda _, each: released.extend(each)),
    ):
        training.discriminator_step(0)
    [gradient] = released[0]  # of the audited client, the first
    vector: Array = gradient.double().numpy()
    return vector


def _clipped_apart(clients: Sequence[Pairs]) -> list[torch.Tensor]:
    return [_one_clipped_apart(one.discriminator, one.real, one.fake, one.clipping_norm) for one in clients]


def _one_clipped_apart(net: nn.Sequential, real: torch.Tensor, fake: torch.Tensor, bound: float) -> torch.Tensor:
    total = torch.zeros(sum(weight.numel() for weight in net.parameters()), dtype=torch.float64)
    for row, sign in [*((row, -1) for row in real), *((row, 1) for row in fake)]:
        gradients = torch.autograd.grad(functional.softplus(sign * net(row[None])).sum(), list(net.parameters()))
        flat = torch.cat([part.flatten() for part in gradients]).double()
        total += flat * (bound / flat.norm()).clamp(max=1)
    return total


@dataclass(frozen=True)
class EmbeddingRelease:
    """Both sums of the mean embedding, of the audited record alone or of nothing. ``share``: of the first release.

    ``clipped``: whether anything is. ``split``: whether the two releases share the budget, or each takes it whole.
    ``count_noised``: whether the number of records is.
    """

    name: str
    noise_multiplier: float
    clipped: bool = True
    split: bool = True
    count_noised: bool = True

    _SHARE = 0.5

    def __call__(self, world: World, run: int) -> Array:
        """Return the sums, (13,): count, 3 means, 3 squares; 6 products."""
        settings = MeanEmbedding(frequencies=3, mean_share=self._SHARE)
        records = PrivateRecords(torch.full((world, 1, 2, 2), _FAR), torch.zeros(world, dtype=torch.int64), 1)
        bill = Bill(dp_event.GaussianDpEvent(self.noise_multiplier), 1, self.noise_multiplier, 1.0)
        sums: list[Array] = []
        release, whole = mean_embedding.Release.sums, 1.0 if self.split else math.sqrt(self._SHARE)

        def kept(one: mean_embedding.Release, features: Array, norm: float, *classes: Any) -> tuple[Array, float]:
            spent = replace(one, noise_multiplier=one.noise_multiplier * whole)
            released, std = release(spent, features, norm, *classes)
            if not sums and not self.count_noised:
                released[:, 0] = features[:, 0].sum()
            sums.append(released.ravel() / norm)
            return released, std

        with mock.patch.object(mean_embedding.Release, "sums", kept), _unclipped(self.clipped):
            settings.generate(records, np.array([1]), bill, _key(run), np.random.default_rng(0))
        return np.concatenate(sums)


@dataclass(frozen=True)
class MomentsRelease:
    """The moments of CCVR, of the audited record alone or of nothing, in units of the clipping norm.

    ``sensitivity``: what the noise counts on. ``count_noised``: whether the number of records is.
    """

    name: str
    noise_multiplier: float
    sensitivity: float = private_moments.LONGEST
    count_noised: bool = True

    def __call__(self, world: World, run: int) -> Array:
        """Return the moments, (6,): count, 2 sums, 3 products."""
        feature = np.array([[_FAR, _FAR]]) if world else np.full((1, 2), np.nan)
        with mock.patch.object(Protection, "std", self.noise_multiplier * self.sensitivity):
            released = private_moments.private_moments(
                feature, np.zeros(1, np.int64), 1, Protection(1.0, 1e-5, 2.0, "seeded"), _key(run)
            )[0]
        return released if self.count_noised else np.concatenate([[float(world)], released[1:]])


@contextmanager
def _unclipped(clipped: bool) -> Iterator[None]:  # noqa: FBT001 (a switch)
    keep: Callable[[float, float], float] = lambda _, __: 1.0  # noqa: E731
    with mock.patch.object(mean_embedding, "clip_factor", mean_embedding.clip_factor if clipped else keep):
        yield


def _key(run: int) -> Noise:
    return Noise.seeded(run)


Amplify: TypeAlias = Callable[[dp_event.DpEvent], dp_event.DpEvent]
"""From the event of the noise alone to that of the mechanism, which may sample."""


def every_record(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """Return what a release on all records claims."""
    return event


def families(noise_multiplier: float) -> dict[str, tuple[Amplify, list[Any]]]:
    """Return {family: (how all its mechanisms sample, mechanisms)}; the first of each is the true one."""
    z = noise_multiplier
    return {
        "D step, all records": (every_record, [
            DiscriminatorStep("as it is", z),
            DiscriminatorStep("half the noise", z / 2),
            DiscriminatorStep("no noise", 0.0),
            DiscriminatorStep("no clipping", z, clipping_norm=1e3),
            DiscriminatorStep("real and fake clipped apart", z, apart=True),
            DiscriminatorStep("divided by the realised batch", z, realised=True),
        ]),
        "D step, where the classes of fakes matter": (every_record, [
            DiscriminatorStep("as it is", z, record=_FAR, networks=11),
            DiscriminatorStep("fake labels from the private histogram", z, record=_FAR, networks=11, histogram=True),
        ]),
        "D step, records by coins of 1/2": (partial(amplify_poisson, sampling_rate=0.5), [
            DiscriminatorStep("as it is", z, 0.5),
            DiscriminatorStep("half the noise", z / 2, 0.5),
            DiscriminatorStep("all records taken", z, 1.0),
        ]),
        "mean embedding": (every_record, [
            EmbeddingRelease("as it is", z),
            EmbeddingRelease("half the noise", z / 2),
            EmbeddingRelease("no noise", 0.0),
            EmbeddingRelease("no clipping", z, clipped=False),
            EmbeddingRelease("two releases for the price of one", z, split=False),
            EmbeddingRelease("count without noise", z, count_noised=False),
        ]),
        "moments of features": (every_record, [
            MomentsRelease("as it is", z),
            MomentsRelease("half the noise", z / 2),
            MomentsRelease("products forgotten in the sensitivity", z, sensitivity=1.0),
            MomentsRelease("count without noise", z, count_noised=False),
        ]),
    }  # fmt: skip


def audit(amplify: Amplify, noise: float, mechanism: Any, *, num_runs: int, seed: int, faulty: bool) -> Finding:
    """Run ``mechanism`` in both worlds, ``num_runs`` times each, against the claim for the multiplier ``noise``."""
    start = time.perf_counter()
    first = 2 * num_runs * seed
    without, with_unit = run_mechanism(lambda world, run: mechanism(world, first + run), num_runs)

    def claims(multiplier: float) -> list[float]:
        return delta_profile([amplify(dp_event.GaussianDpEvent(multiplier))], EPSILONS)

    profile = audit_profile(without, with_unit, claims(noise), confidence=CONFIDENCE)
    least = math.inf
    if not faulty:
        along = [outputs @ direction(mechanism)[:, np.newaxis] for outputs in (without, with_unit)]
        least = least_refuted(audit_profile(*along, profile.claimed, confidence=CONFIDENCE), claims, noise)
    proven = 0.0 if math.isinf(least) else epsilon_at(amplify, least)
    return Finding(mechanism.name, faulty, profile, time.perf_counter() - start, proven)


def direction(mechanism: Any) -> Array:
    """Return in which direction the audited record moves what is released, shape (coordinates,), of length 1.

    Whoever knows all but the coins and the noise knows it: no test of two Gaussians that differ in their mean does
    better than to look along it.
    """
    quiet = replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 50)  # not 0, by which clipping would be 0
    moved: Array = np.mean([quiet(1, run) - quiet(0, run) for run in range(64)], axis=0)
    return moved / np.linalg.norm(moved)


def epsilon_at(amplify: Amplify, noise: float) -> float:
    """Return the epsilon of one release at ``DELTA``."""
    return epsilon_of_counts({amplify(dp_event.GaussianDpEvent(noise)): 1}, DELTA, accountant="pld")


def table(family: str, claimed_epsilon: float, findings: Sequence[Finding]) -> str:
    """Return the findings of one family for people."""
    claimed, true = findings[0].profile.claimed, findings[0]
    head = (
        f"**{family}**: claimed delta(0) {claimed[0]:.3f}, delta(1) {claimed[2]:.3f}, epsilon {claimed_epsilon:.2f}; "
        f"refuted up to epsilon {true.proven:.2f}: tightness {true.proven / claimed_epsilon:.2f}"
    )
    lines = [
        head,
        "",
        "| mechanism | delta(0) >= | delta(1) >= | power | epsilon at delta 1e-5 >= | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for one in findings:
        bounds = one.profile.lower_bounds
        lines.append(
            f"| {one.mechanism} | {bounds[0]:.3f} | {bounds[2]:.3f} | {one.profile.power:.2f} "
            f"| {one.profile.epsilon_lower_bound:.2f} | {'REFUTED' if one.profile.refuted else 'not refuted'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Audit everything and print what comes out."""
    parser = argparse.ArgumentParser(description="Audit single releases of the private generators.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2000, help="runs per world and mechanism")
    parser.add_argument("--epsilon", type=float, default=4.0, help=f"what one release claims at delta {DELTA:g}")
    parser.add_argument("--families", default="", help="only those whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Finding]] = {}
    for family in [name for name in families(1.0) if arguments.families in name]:
        amplify, _ = families(1.0)[family]
        noise = noise_multiplier(amplify, 1, arguments.epsilon, DELTA, accountant="pld")
        found[family] = [
            audit(amplify, noise, one, num_runs=arguments.runs, seed=arguments.seed, faulty=number > 0)
            for number, one in enumerate(families(noise)[family][1])
        ]
        if not arguments.json:
            print(table(family, epsilon_at(amplify, noise), found[family]), end="\n\n", flush=True)
    if arguments.json:
        told = {
            family: [asdict(one) | {"refuted": one.profile.refuted} for one in findings]
            for family, findings in found.items()
        }
        print(json.dumps({**vars(arguments), "confidence": CONFIDENCE, "families": told}))


if __name__ == "__main__":
    main()
