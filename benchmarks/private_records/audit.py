"""Audit whole runs of DP-SGD on clients with canary records: the real code, and planted faults that must be refuted.

    PYTHONPATH=. python benchmarks/private_records/audit.py [--seed 0] [--only NAME]

Every row is one run of ``fl_sim.simulation.run.run`` with ``local.privacy=dp-sgd``: ledgers are charged, clients train,
updates travel. A fair coin decides for each canary whether it is in its client's records (``canaries``). The auditor is
the server. It sees the updates of every round, and scores each canary by the sum of noisy gradients along it.

* **One run** (Steinke, Nasr, Jagielski 2023, algorithm 1, theorem 5.2): the auditor guesses who was in, and abstains
  where unsure. The bound on epsilon holds at 95 %, whatever the canaries have to do with each other.
* **Each canary alone.** The canaries are independent: their coins, gradients and noise are. So each is a run of its
  own, and the scores, which are log likelihood ratios, refute a curve of delta over epsilon. The bound is the epsilon
  of the least noise whose claim they refute (Nasr et al. 2023).
* **Estimate, no bound** (Andrew et al. 2024): the epsilon of two Gaussians as far apart as the scores of both kinds.

The rows "all records" show how tight the bounds are: every canary is in every step. Elsewhere batches are sampled by
coins that the auditor does not know. Where canaries have companions, all other records of a client push against its
canary: the worst case of shuffled batches (Chua et al. 2024), which show in which batch the canary or its gap is. No
bound above that of a quarter of the noise is looked for.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import canaries
import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from clients.private_steps import ClientPrivateSteps
from fl_sim.clipping import Clipping
from fl_sim.experiment.experiment import experiment_from
from fl_sim.local_plan import LocalPlan
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import EPSILONS, audit_ratios, epsilon_estimate, guess, least_refuted, power_limit
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from fl_sim.simulation.run import run
from fl_sim.training import private_steps
from fl_sim.training.per_record import ClippedSum, clipped_sum_of
from fl_sim.types import ClientUpdate, LocalTask, Params, Reply, Trained
from strategies.private_steps import PrivateTraining

LOSS_ROUNDING: Final = 1e-6
"""The largest distance between two float32 losses that counts as rounding."""

Scores = NDArray[np.float64]

LEARNING_RATE: Final = 1e-4
"""So small that no gradient turns during a run: the model stays near zero, where every gradient is long."""


@dataclass(frozen=True)
class Setting:
    """One audited run. Every client has ``canaries`` records of which each is in by a coin, and ``companions``.

    ``batches``: the number of steps in which a record joins once on average. ``epsilon`` (at ``delta``) is the price
    of the noise, over all ``rounds`` of ``steps`` local steps.
    """

    clients: int = 5
    canaries: int = 2000
    companions: int = 0
    rounds: int = 1
    steps: int = 1
    batches: int = 1
    epsilon: float = 4.0
    delta: float = 1e-5
    seed: int = 0

    @property
    def records(self) -> int:
        """Return the number of records of each client, among them those of zeros."""
        return self.canaries + self.companions

    def event(self, noise: float) -> dp_event.DpEvent:
        """Return the privacy event of one step."""
        return amplify_poisson(dp_event.GaussianDpEvent(noise), 1 / self.batches)

    def claims(self, noise: float) -> list[float]:
        """Return the deltas that all steps with this noise multiplier claim, for each of ``EPSILONS``."""
        return delta_profile([self.event(noise)] * (self.rounds * self.steps), EPSILONS)

    def epsilon_with(self, noise: float) -> float:
        """Return the epsilon that all steps with this noise multiplier cost."""
        return epsilon_of_counts({self.event(noise): self.rounds * self.steps}, self.delta, accountant="pld")

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run."""
        privacy = {"kind": "dp-sgd", "epsilon": self.epsilon, "delta": self.delta, "accountant": "pld"}
        return {
            "data": "canaries:records", "model": "canaries:linear", "partition": "natural", "clients": self.clients,
            "rounds": self.rounds, "seed": self.seed, "engine": "inprocess", "device": "cpu",
            "evaluate": {"test": "last", "test_is_public": True},
            "local": {
                "epochs": 0, "steps": self.steps, "batch_size": max(1, self.records // self.batches),
                "learning_rate": LEARNING_RATE, "momentum": 0.0, "weight_decay": 0.0,
                "privacy": privacy | {"noise": "seeded"},
            },
        }  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The server's view of a run, and the coins.

    ``sums``: the sum of a round's noisy gradients along each canary's gradient, in clipping norms, shape (rounds,
    clients, canaries). ``losses``: what clients report, shape (rounds, clients), NaN where they report nothing.
    ``taking_part``: bool (clients, canaries). ``claimed``: the epsilon in the run's privacy statement.
    """

    setting: Setting
    noise: float
    sums: Scores
    losses: Scores
    taking_part: NDArray[np.bool_]
    claimed: float


@dataclass(frozen=True)
class Mechanism:
    """What is audited: a setting, a planted fault (or none), and the score of the auditor who looks for it."""

    setting: Setting
    score: Callable[[Seen], Scores]
    fault: Callable[[], AbstractContextManager[object]] = nullcontext
    is_faulty: bool = False


@dataclass(frozen=True)
class Finding:
    """What an audited run says: lower bounds at 95 %, of one run and of each canary by itself, and an estimate."""

    mechanism: str
    noise: float
    canaries: int
    claimed: float
    one_run: float
    each_alone: float
    estimate: float
    limit: float
    is_faulty: bool
    seconds: float

    @property
    def proven(self) -> float:
        """Return the larger one of both bounds."""
        return max(self.one_run, self.each_alone)

    @property
    def refuted(self) -> bool:
        """Return True if more than the claim is proven."""
        return self.proven > self.claimed


def watched(setting: Setting, fault: Callable[[], AbstractContextManager[object]] = nullcontext) -> Seen:
    """Make the run of ``setting`` with ``fault`` in it, and return what the server sees."""
    taking_part = rng(setting.seed, "canary coins").random((setting.clients, setting.canaries)) < 0.5
    replies: list[tuple[Reply, ...]] = []
    received = PrivateTraining.received

    def watching(layer: PrivateTraining, came: tuple[Reply, ...]) -> tuple[Reply, ...]:
        replies.append(tuple(sorted(came, key=lambda reply: reply.client)))
        return received(layer, came)

    with tempfile.TemporaryDirectory() as name, ExitStack() as patches:
        root = Path(name)
        canaries.plant(root, taking_part, setting.companions)
        patches.enter_context(mock.patch.dict(os.environ, FL_SIM_LEDGERS=str(root / "ledgers")))
        patches.enter_context(mock.patch.object(PrivateTraining, "received", watching))
        if fault is not nullcontext:  # faults are planted in PyTorch's steps
            patches.enter_context(mock.patch.object(private_steps, "is_compiled", return_value=False))
        patches.enter_context(fault())
        result = run(experiment_from(setting.settings()), root / "run", root)
    deltas = np.stack([[_weights(reply.payloads["delta"]) for reply in one] for one in replies])
    scale = setting.records / setting.batches / LEARNING_RATE
    sums = scale * (deltas[:, :, 1] - deltas[:, :, 0]) / math.sqrt(2)
    losses = np.array([[math.nan if reply.loss is None else reply.loss for reply in one] for one in replies])
    [clients] = result["local_privacy"]["by_records"]
    claimed = float(result["privacy"][0]["epsilon"])
    return Seen(setting, clients["noise_multiplier"], sums, losses, taking_part, claimed)


def _weights(params: Params) -> Scores:
    [weight] = params.values()
    return weight.double().numpy()


def along(seen: Seen) -> Scores:
    """Score by the log likelihood ratio of a canary in all steps, or by a coin in the only step of each round."""
    setting = seen.setting
    ratio = (2 * seen.sums - setting.steps) / (2 * seen.noise**2)
    if setting.batches == 1:
        return ratio.sum(axis=0)
    assert setting.steps == 1
    away, there = math.log1p(-1 / setting.batches), math.log(1 / setting.batches)
    return np.logaddexp(away, there + ratio).sum(axis=0)


def gap(seen: Seen) -> Scores:
    """Score by the log likelihood ratio of a canary in one batch of an epoch, and of its gap there.

    A batch of companions has a sum of minus their number. A canary there adds two to this sum, and a gap adds one.
    """
    above = seen.sums + seen.setting.records // seen.setting.batches
    there, missing = ((2 * size * above - size**2) / (2 * seen.noise**2) for size in (2, 1))
    return np.logaddexp.reduce(there, axis=0) - np.logaddexp.reduce(missing, axis=0)


def by_loss(seen: Seen) -> Scores:
    """Score by certainty: a record of zeros has the loss log 2 under every model, and a canary has it under none."""
    return np.where(np.abs(seen.losses[0] - math.log(2)) > LOSS_ROUNDING, 100.0, -100.0)[:, np.newaxis]


def half_noise() -> AbstractContextManager[object]:
    """Let every step have noise of half the standard deviation."""
    gaussian = Noise.gaussian
    return mock.patch.object(Noise, "gaussian", lambda *args, **names: gaussian(*args, **names) / 2)


def noise_once() -> AbstractContextManager[object]:
    """Let the first step of a round have noise, and the others none."""
    gaussian = Noise.gaussian

    def once(noise: Noise, count: int, std: float, *, purpose: str, server_round: int) -> Scores:
        made = gaussian(noise, count, std, purpose=purpose, server_round=server_round)
        return made if purpose.startswith("noise 0 ") else np.zeros(count)

    return mock.patch.object(Noise, "gaussian", once)


def clipped_mean() -> AbstractContextManager[object]:
    """Let the mean gradient of a batch be clipped instead of the gradient of each record."""

    def of_mean(model: nn.Module, trained: Params, smoothing: float, clipping: Clipping) -> ClippedSum:
        inner = clipped_sum_of(model, trained, smoothing, clipping)

        def clipped(inputs: torch.Tensor, labels: torch.Tensor, limit: float) -> Scores:
            total = inner(inputs, labels, math.inf)
            return total * min(1.0, limit * max(1, len(labels)) / max(float(np.linalg.norm(total)), 1e-300))

        return clipped

    return mock.patch.object(private_steps, "clipped_sum_of", of_mean)


@dataclass(frozen=True)
class _Shuffled(Noise):
    """Batches from a shuffled order of the records, anew in each epoch: every record joins one batch of an epoch."""

    client: int = 0

    def taking_part(self, count: int, sampling_rate: float, *, purpose: str, server_round: int) -> NDArray[np.bool_]:
        del purpose  # its step is the first one of the round
        epoch, batch = divmod(server_round - 1, round(1 / sampling_rate))
        order = rng(self.client, "shuffled records", epoch).permutation(count)
        joins = np.zeros(count, np.bool_)
        joins[np.array_split(order, round(1 / sampling_rate))[batch]] = True
        return joins


def shuffled() -> AbstractContextManager[object]:
    """Let the batches be those of shuffled records, for runs of one step a round."""
    train = private_steps.train_privately

    def shuffling(model: nn.Module, task: LocalTask, plan: LocalPlan, *records: torch.Tensor) -> Trained:
        assert plan.private is not None
        noise = plan.private.noise
        faulty = _Shuffled(noise.key, noise.simulation_only, noise.normals, task.client)
        return train(model, task, replace(plan, private=replace(plan.private, noise=faulty)), *records)

    return mock.patch.object(private_steps, "train_privately", shuffling)


def losses_sent() -> AbstractContextManager[object]:
    """Let every client report the mean loss of its records after its steps."""
    train, sent = private_steps.train_privately, ClientPrivateSteps.sent

    def with_loss(model: nn.Module, task: LocalTask, plan: LocalPlan, *records: torch.Tensor) -> Trained:
        trained, (inputs, labels) = train(model, task, plan, *records), records
        with torch.no_grad():
            return replace(trained, loss=float(functional.cross_entropy(model(inputs), labels)))

    def telling(
        half: ClientPrivateSteps, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate
    ) -> ClientUpdate:
        return replace(sent(half, came, task, trained, update), loss=trained.loss)

    patches = ExitStack()
    patches.enter_context(mock.patch.object(private_steps, "train_privately", with_loss))
    patches.enter_context(mock.patch.object(ClientPrivateSteps, "sent", telling))
    return patches


def mechanisms(scale: int = 1, seed: int = 0) -> dict[str, Mechanism]:
    """Return {name: mechanism}: the real mechanism in several settings, and planted faults.

    ``scale``: above 1 for runs with so many times fewer canaries.
    """
    whole = Setting(canaries=2000 // scale, seed=seed)
    steps = replace(whole, steps=10)
    sampled = replace(whole, rounds=20, batches=10)
    alone = Setting(clients=1000 // scale, canaries=1, seed=seed)
    apart = Setting(clients=600 // scale, canaries=1, companions=19, rounds=20, batches=20, seed=seed)
    return {
        "all records, one step": Mechanism(whole, along),
        "all records, ten steps": Mechanism(steps, along),
        "batches of a tenth, 20 rounds": Mechanism(sampled, along),
        "batches of a twentieth, companions": Mechanism(apart, gap),
        "half the noise": Mechanism(whole, along, half_noise, is_faulty=True),
        "clipped after the mean": Mechanism(whole, along, clipped_mean, is_faulty=True),
        "noise once a round": Mechanism(steps, along, noise_once, is_faulty=True),
        "shuffled, billed as Poisson": Mechanism(apart, gap, shuffled, is_faulty=True),
        "losses in the clear": Mechanism(alone, by_loss, losses_sent, is_faulty=True),
    }


def audit(name: str, mechanism: Mechanism) -> Finding:
    """Run ``mechanism`` once, score the canaries, and return what the scores prove."""
    start, setting = time.perf_counter(), mechanism.setting
    seen = watched(setting, mechanism.fault)
    scores, taking_part = mechanism.score(seen).ravel(), seen.taking_part.ravel()
    profile = audit_ratios(scores[~taking_part], scores[taking_part], setting.claims(seen.noise), delta=setting.delta)
    least = least_refuted(profile, setting.claims, seen.noise)
    return Finding(
        mechanism=name,
        noise=seen.noise,
        canaries=len(scores),
        claimed=seen.claimed,
        one_run=max(one.epsilon_lower_bound for one in guess(scores, taking_part, setting.delta)),
        each_alone=0.0 if math.isinf(least) else setting.epsilon_with(least),
        estimate=epsilon_estimate(scores, taking_part, setting.delta),
        limit=power_limit(len(scores), setting.delta),
        is_faulty=mechanism.is_faulty,
        seconds=time.perf_counter() - start,
    )


def row(one: Finding) -> str:
    """Return the line of a finding in the table."""
    verdict = "refuted" if one.refuted else f"{one.proven / one.claimed:.2f} of the claim"
    return (
        f"| {one.mechanism} | {one.noise:.3f} | {one.canaries:,} | {one.claimed:.2f} | {one.one_run:.2f} "
        f"| {one.each_alone:.2f} | {one.estimate:.2f} | {one.limit:.2f} | {verdict} | {one.seconds:.0f} |"
    )


def main() -> None:
    """Audit the real mechanism and every planted fault, and print a table."""
    parser = argparse.ArgumentParser(description="Audit whole runs of DP-SGD on clients with canary records.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the name of a single mechanism")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = (
        "mechanism", "noise", "canaries", "claim", "one run, 95 %", "each alone, 95 %", "estimate", "provable at most",
        "verdict", "seconds",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name, mechanism in mechanisms(seed=arguments.seed).items():
        if arguments.only in {None, name}:
            print(row(audit(name, mechanism)), flush=True)


if __name__ == "__main__":
    main()
