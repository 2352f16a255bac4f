"""The code of ``fl-sim privacy audit``: tests of the real Global DP aggregator, and of planted faults.

A planted fault is a variant of the aggregator that protects less than it claims. The audit must find all planted
faults. The auditor sees everything that a run publishes: all global models, and the run directory with the seed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray

from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import (
    EPSILONS,
    Mechanism,
    ProfileAudit,
    World,
    audit_profile,
    least_refuted,
    noise_calibration,
    run_mechanism,
)
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Adjacency, Terms
from fl_sim.seeding import rng
from fl_sim.types import Cohort, Payloads, Reply
from strategies.global_dp import GlobalDP
from strategies.private import PrivateRounds
from strategies.samplers import Coins, Poisson

CLIPPING_NORM: Final = 1.0
_LAYERS: Final = {"delta": ("conv", "dense"), "control_delta": ("conv", "dense")}
_WIDTH: Final = 3
_DIMENSION: Final = 4 * _WIDTH
_UNCLIPPED: Final = 1000.0
TRUE_MECHANISM: Final = "global-dp as it is"
TRUE_SAMPLING: Final = "sampled cohorts as they are"

_ROUNDS: Final = 16
_RATE: Final = 0.1
_SEED: Final = 0


@dataclass(frozen=True)
class Finding:
    """The result of the audit of one mechanism: the real mechanism, or a mechanism with a planted fault.

    ``mechanism``: the name of the mechanism. ``profile``: for several epsilons, the claimed delta and the lower bound
    on delta that the audit proved. ``calibration``: the p-value of each statistical test of the noise's distribution,
    by the test's name; empty if the noise was not tested.
    """

    mechanism: str
    profile: ProfileAudit
    calibration: dict[str, float]

    @property
    def caught(self) -> bool:
        """Return True if the audit refutes the claimed guarantee, or if the noise has a wrong distribution."""
        return self.profile.refuted or min(self.calibration.values(), default=1.0) < 1e-6


def audit_global_dp(noise_multiplier: float, *, num_runs: int, noise: Noise, only: str | None = None) -> list[Finding]:
    """Audit the real aggregator with ``noise_multiplier``, and its variants with planted faults.

    The audit compares many runs with the audited client and many runs without it. A faulty variant is tested against
    the guarantee that the real mechanism claims. ``num_runs``: the number of runs with the audited client, which is
    also the number of runs without this client. ``only``: the name of the only mechanism to audit; None audits all
    mechanisms.
    """
    claimed = delta_profile([dp_event.GaussianDpEvent(noise_multiplier)], EPSILONS)
    expected = {0: np.zeros(_DIMENSION), 1: np.full(_DIMENSION, CLIPPING_NORM / _DIMENSION**0.5)}
    findings = []
    for name, mechanism in mechanisms(noise_multiplier, noise).items():
        if only not in {None, name}:
            continue
        without, with_unit = run_mechanism(mechanism, num_runs)
        residuals = np.concatenate([without - expected[0], with_unit - expected[1]]) / (
            noise_multiplier * CLIPPING_NORM
        )
        findings.append(Finding(name, audit_profile(without, with_unit, claimed), noise_calibration(residuals)))
    return findings + _audit_sampling(noise_multiplier, num_runs, noise, only)


def refuted_epsilon(finding: Finding, noise_multiplier: float, delta: float) -> float:
    """Return the largest epsilon (at ``delta``) whose guarantee the audit of one round refutes.

    The audit tests the guarantees of several noise multipliers. It finds the smallest noise multiplier whose guarantee
    is refuted; the result is the epsilon of this guarantee, or 0 if none is refuted. The result divided by the claimed
    epsilon is the tightness of the audit.
    """

    def claims(noise: float) -> list[float]:
        return delta_profile([dp_event.GaussianDpEvent(noise)], EPSILONS)

    least = least_refuted(finding.profile, claims, noise_multiplier)
    event = dp_event.GaussianDpEvent(least)
    return 0.0 if math.isinf(least) else epsilon_of_counts({event: 1}, delta, accountant="pld")


def _audit_sampling(noise_multiplier: float, num_runs: int, noise: Noise, only: str | None) -> list[Finding]:
    """Audit runs of several rounds in which random cohorts take part.

    The audit tests the claimed guarantee with privacy amplification by sampling. It also tests a faulty variant, which
    samples the cohorts from a public seed.
    """
    chosen = {name: one for name, one in sampled(noise_multiplier, noise).items() if only in {None, name}}
    if not chosen:
        return []
    event = amplify_poisson(dp_event.GaussianDpEvent(noise_multiplier), _RATE)
    claimed = delta_profile([event] * _ROUNDS, EPSILONS)
    return [
        Finding(name, audit_profile(*run_mechanism(mechanism, num_runs), claimed), {})
        for name, mechanism in chosen.items()
    ]


def mechanisms(noise_multiplier: float, noise: Noise) -> dict[str, Mechanism]:
    """Return the real Global DP aggregator and its variants with planted faults, as {name: mechanism}.

    A mechanism simulates one round with or without the audited client. It returns the noisy SUM of all updates.
    """
    std = noise_multiplier * CLIPPING_NORM
    true = GlobalDP(noise_multiplier=noise_multiplier, clipping_norm=CLIPPING_NORM)
    half = GlobalDP(noise_multiplier=noise_multiplier / 2, clipping_norm=CLIPPING_NORM)
    silent = GlobalDP(noise_multiplier=0.0, clipping_norm=CLIPPING_NORM)
    unclipped = GlobalDP(noise_multiplier=std / _UNCLIPPED, clipping_norm=_UNCLIPPED)

    def missing_coordinates(world: World, run: int) -> NDArray[np.float64]:
        noised, plain = _release(true, _world(world, run), noise), _release(silent, _world(world, run), noise)
        return np.concatenate([noised[_WIDTH:], plain[:_WIDTH]])

    def realised_denominator(world: World, run: int) -> NDArray[np.float64]:
        cohort = _world(world, run)
        return _release(true, cohort, noise) * cohort.expected_size / len(cohort.replies)

    def prepared(change: Callable[[Cohort], Cohort]) -> Mechanism:
        return lambda world, run: _release(unclipped, change(_world(world, run)), noise)

    return {
        TRUE_MECHANISM: lambda world, run: _release(true, _world(world, run), noise),
        "half the noise": lambda world, run: _release(half, _world(world, run), noise),
        "no clipping": prepared(lambda cohort: cohort),
        "weighted by num_examples": prepared(_clipped_then_weighted),
        "coordinates without noise": missing_coordinates,
        "clipped layer by layer": prepared(_clipped_by_layer),
        "divided by the realised cohort": realised_denominator,
        "the same noise every round": lambda world, _: _release(true, replace(_world(world, 0), server_round=0), noise),
    }


def sampled(noise_multiplier: float, noise: Noise) -> dict[str, Mechanism]:
    """Return the mechanisms for the audit of cohort sampling, as {name: mechanism}.

    The real mechanism samples cohorts from secret random numbers. The faulty mechanism samples them from a public seed.
    The auditor samples cohorts from this seed, and selects the rounds in which the audited client is in the cohort. For
    each of these rounds, the auditor computes a log likelihood ratio of the published noisy sum: the log of its
    likelihood with the audited client, minus the log of its likelihood without this client. A mechanism returns the sum
    of these ratios.
    """
    true = GlobalDP(noise_multiplier=noise_multiplier, clipping_norm=CLIPPING_NORM)
    sampler = Poisson(sampling_rate=_RATE)
    ledger = Ledger(Terms("client", Adjacency.ADD_OR_REMOVE_ONE, true.delta))
    rounds = PrivateRounds(true, sampler, 2, ledger, noise, CLIPPING_NORM)

    def published(server_round: int) -> Coins:
        return rng(_SEED, "sampler", server_round).random

    def statistic(coins: Callable[[int], Coins], world: World, run: int) -> NDArray[np.float64]:
        total = 0.0
        for server_round in range(run * _ROUNDS, (run + 1) * _ROUNDS):
            if 1 in sampler.sample(2, published(server_round), server_round):
                everybody, there = _world(world, server_round), sampler.sample(2, coins(server_round), server_round)
                replies = tuple(reply for reply in everybody.replies if reply.client in there)
                along = float(_release(true, replace(everybody, replies=replies), noise).sum()) / _DIMENSION**0.5
                total += (along - CLIPPING_NORM / 2) * CLIPPING_NORM / (noise_multiplier * CLIPPING_NORM) ** 2
        return np.array([total])

    return {
        TRUE_SAMPLING: partial(statistic, rounds.coins),
        "cohort from the published seed": partial(statistic, published),
    }


def _world(world: World, run: int) -> Cohort:
    """Return the cohort of one audited round: with the audited client if ``world`` is 1, without it if ``world`` is 0.

    This is the worst case for privacy: the update of the audited client is large in all parameters, and the only other
    client in the cohort has the update zero.
    """
    bystander = Reply(0, _payloads(0.0), num_examples=1, loss=None)
    audited = Reply(1, _payloads(10.0), num_examples=1000, loss=None)
    replies = (bystander, audited) if world else (bystander,)
    return Cohort(run, replies, num_clients=20, expected_size=2.0)


def _payloads(value: float) -> Payloads:
    return {group: {name: torch.full((_WIDTH,), value) for name in names} for group, names in _LAYERS.items()}


def _release(aggregator: GlobalDP, cohort: Cohort, noise: Noise) -> NDArray[np.float64]:
    mean = aggregator.mean(cohort, noise=noise, template=_payloads(0.0)).payloads
    flat = torch.cat([value for params in mean.values() for value in params.values()])
    vector: NDArray[np.float64] = flat.double().numpy() * cohort.expected_size
    return vector


def _clipped_then_weighted(cohort: Cohort) -> Cohort:
    total = sum(reply.num_examples for reply in cohort.replies)
    scales = [reply.num_examples * len(cohort.replies) / total for reply in cohort.replies]
    return _scaled(cohort, [scale / max(1.0, 10 * _DIMENSION**0.5) if i else 0.0 for i, scale in enumerate(scales)])


def _clipped_by_layer(cohort: Cohort) -> Cohort:
    return _scaled(cohort, [1 / max(1.0, 10 * _WIDTH**0.5)] * len(cohort.replies))


def _scaled(cohort: Cohort, factors: list[float]) -> Cohort:
    replies = [
        replace(
            reply,
            payloads={
                group: {name: value * factor for name, value in params.items()}
                for group, params in reply.payloads.items()
            },
        )
        for reply, factor in zip(cohort.replies, factors, strict=True)
    ]
    return replace(cohort, replies=tuple(replies))
