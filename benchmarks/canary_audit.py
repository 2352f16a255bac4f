"""Audit Global DP through whole training runs with canaries (Steinke, Nasr, Jagielski 2023, algorithm 1, theorem 5.2).

A canary is a client without data that sends the same random direction, as long as the clipping norm, whenever it is
sampled (Andrew et al. 2023). Each of many canaries takes part in the run with probability 1/2. Everything else is an
ordinary run: real clients train on digits, the Poisson sampler samples, the ledger is charged, Global DP releases,
FedAvg merges. The auditor sees the global models, the canaries' directions and the run directory with the seed in it,
guesses who took part, and abstains where unsure; guessing too well refutes (epsilon, delta). Faults are planted by
scaling the true noise down behind the ledger's back, and by drawing cohorts from the published seed: where an auditor
knows the cohorts, it looks at a canary's own rounds alone, which is shown at a smaller sampling rate, where it tells.

    PYTHONPATH=. python benchmarks/canary_audit.py [--json] [--seed 0] [--repeats 1] [--canaries 1000] [--epsilon 4]
    PYTHONPATH=. python benchmarks/canary_audit.py --tightness 1 2 4 8 [--repeats 10]

One training run can prove only so much: with m canaries and every guess right, about ln(m / ln(1/p)). The table says
how much that is; a claim above it cannot be refuted by this audit, whatever the mechanism does.

``--tightness`` asks how close to the claim an audit gets that takes every canary for an audit of its own. Their
directions are orthogonal and the noise is independent in each of them, so no canary's score depends on another canary.
The canaries of several runs are put together, and the tightness is the epsilon of the least noise whose claim they
refute, over the claimed epsilon (Nasr et al. 2023). The score is the log likelihood ratio of all that the canary did to
the global models, over cohorts that the auditor does not know.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import dp_event
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from fl_sim.engines import wire
from fl_sim.engines.grid import InProcessGrid
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts, noise_multiplier
from fl_sim.privacy.audit import (
    CONFIDENCE,
    EPSILONS,
    Guess,
    audit_profile,
    epsilon_estimate,
    guess,
    least_refuted,
    power_limit,
)
from fl_sim.privacy.events import amplify_poisson
from fl_sim.seeding import rng
from fl_sim.simulation.engine_choice import client_app
from fl_sim.training.evaluation import evaluate
from fl_sim.training.loop import to_tensors
from fl_sim.types import Aggregate, ClientUpdate, Cohort, Params, ServerState
from strategies.algorithm import Algorithm
from strategies.flower import FederatedStrategy, run_round
from strategies.global_dp import GlobalDP
from strategies.private import PrivateRounds, open_private_rounds
from strategies.samplers import Coins

VARIANTS = {"global-dp as it is": 1.0, "half the noise": 0.5, "a quarter of the noise": 0.25, "no noise": 0.0}
SEED_KNOWN, PUBLISHED = "global-dp as it is, seed used", "cohort from the published seed"


RARE_RATE, RARE_ROUNDS, RARE_EPSILON = 0.05, 60, 2.0


@dataclass(frozen=True)
class Setting:
    """One audited training run. The true noise costs ``epsilon`` at ``delta``."""

    num_canaries: int = 1000
    num_real: int = 50
    rounds: int = 20
    sampling_rate: float = 0.5
    epsilon: float = 4.0
    delta: float = 1e-5
    model: str = "mlp"
    seed: int = 0

    def experiment(self) -> Experiment:
        """Return the experiment of the real clients, with the noise for its rounds and epsilon."""
        amplify = partial(amplify_poisson, sampling_rate=self.sampling_rate)
        noise = noise_multiplier(amplify, self.rounds, self.epsilon, self.delta)
        return experiment_from({
            "data": "digits", "model": self.model, "clients": self.num_real, "partition": "iid", "seed": self.seed,
            "rounds": self.rounds, "engine": "inprocess", "device": "cpu",
            "sampler": {"kind": "poisson", "sampling_rate": self.sampling_rate},
            "local": {"epochs": 2, "batch_size": 10, "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            "aggregator": {"kind": "global-dp", "noise_multiplier": noise, "delta": self.delta, "noise": "seeded"},
        })  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What one audited run says. ``claimed``: the ledger's epsilon for the true noise, and its tighter PLD value.

    ``epsilon_lower_bound`` holds with ``CONFIDENCE``. ``epsilon_estimate`` does not: it is the epsilon of a Gaussian
    mechanism whose two worlds lie as far apart as the scores of both kinds of canaries (Andrew et al. 2023).
    """

    mechanism: str
    noise_multiplier: float
    claimed: float
    claimed_pld: float
    epsilon_lower_bound: float
    epsilon_estimate: float
    power_limit: float
    guesses: tuple[Guess, ...]
    test_accuracy: float
    seconds: float
    seed: int

    @property
    def verdict(self) -> str:
        """Return the verdict in words. The PLD value is a smaller claim about the same noise."""
        if self.epsilon_lower_bound > self.claimed:
            return "REFUTED"
        return "PLD value refuted" if self.epsilon_lower_bound > self.claimed_pld else "not refuted"


class CanaryClients(ClientApp):
    """Clients 0..K-1 train as always; of the canaries after them, those not taking part do not answer at all.

    To leave a canary out changes nothing else: the population that samples and the denominator stay, as they do for
    any client that is missing. ``directions``: (canaries, parameters), unit vectors; ``taking_part``: bool (canaries,).
    """

    def __init__(
        self, num_real: int, directions: torch.Tensor, taking_part: NDArray[np.bool_], norm: float, template: Params
    ) -> None:
        super().__init__()
        self._real = client_app()
        self._num_real = num_real
        self._directions, self._taking_part = directions, taking_part
        self._norm, self._template = norm, template

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer as the client that the context says."""
        canary = int(str(context.node_config["partition-id"])) - self._num_real
        if canary < 0:
            return self._real(message, context)
        if not self._taking_part[canary]:
            raise ConnectionError("nobody here")
        parts = torch.split(self._directions[canary] * self._norm, [v.numel() for v in self._template.values()])
        delta = {name: part.reshape(v.shape) for (name, v), part in zip(self._template.items(), parts, strict=True)}
        return Message(wire.update_content(ClientUpdate({"delta": delta}, 1)), reply_to=message)


@dataclass
class FaultyRounds(PrivateRounds):
    """Charges the cost of the true noise, and adds ``noise_factor`` times this noise."""

    noise_factor: float = 1.0
    published_seed: int | None = None

    def coins(self, server_round: int) -> Coins:
        """Return the random source of cohorts. With the fault it is the public seed, known to everybody."""
        if self.published_seed is None:
            return super().coins(server_round)
        return _published(self.published_seed, server_round)

    def release(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate:
        """Return the mean with too little noise."""
        noise = self.aggregator.noise_multiplier * self.noise_factor
        faulty = self.aggregator.model_copy(update={"noise_multiplier": noise})
        sound = PrivateRounds(faulty, self.sampler, self.num_clients, self.ledger, self.noise, self.clipping_norm)
        return sound.release(cohort, algorithm, server)


@dataclass(frozen=True)
class Scored:
    """One run as the auditor sees it: a score for every canary, and which of them took part, both (canaries,)."""

    experiment: Experiment
    scores: NDArray[np.float64]
    taking_part: NDArray[np.bool_]
    charged: float
    test_accuracy: float

    @property
    def aggregator(self) -> GlobalDP:
        """Return the claimed mechanism, without a fault."""
        assert isinstance(self.experiment.aggregator, GlobalDP)
        return self.experiment.aggregator


def audit(setting: Setting, mechanism: str) -> Finding:
    """Train one federation with canaries in it, under one of ``VARIANTS``, and guess who took part."""
    start = time.perf_counter()
    seen = scored(setting, mechanism)
    guesses = guess(seen.scores, seen.taking_part, setting.delta)
    return Finding(
        mechanism=mechanism,
        noise_multiplier=seen.aggregator.noise_multiplier * VARIANTS.get(mechanism, 1.0),
        claimed=seen.charged,
        claimed_pld=_epsilon(setting, seen.aggregator.noise_multiplier),
        epsilon_lower_bound=max(one.epsilon_lower_bound for one in guesses),
        epsilon_estimate=epsilon_estimate(seen.scores, seen.taking_part, setting.delta),
        power_limit=power_limit(setting.num_canaries, setting.delta),
        guesses=guesses,
        test_accuracy=seen.test_accuracy,
        seconds=time.perf_counter() - start,
        seed=setting.seed,
    )


@dataclass(frozen=True)
class Tightness:
    """The proven epsilon of several runs, with each canary as one audit, and the epsilon that the ledger charged."""

    claimed: float
    noise_multiplier: float
    proven: float
    canaries: int
    seconds: float

    @property
    def share(self) -> float:
        """Return the proven epsilon divided by the claimed epsilon."""
        return self.proven / self.claimed


def tightness(settings: Sequence[Setting]) -> Tightness:
    """Run the true mechanism once for each of ``settings``, which differ in seeds, and put their canaries together."""
    start = time.perf_counter()
    runs = [scored(setting, "global-dp as it is") for setting in settings]
    setting, noise = settings[0], runs[0].aggregator.noise_multiplier

    def claims(multiplier: float) -> list[float]:
        return delta_profile([_event(setting, multiplier)] * setting.rounds, EPSILONS)

    with_unit = np.concatenate([run.scores[run.taking_part] for run in runs])[:, np.newaxis]
    without = np.concatenate([run.scores[~run.taking_part] for run in runs])[:, np.newaxis]
    number = min(len(with_unit), len(without))
    profile = audit_profile(without[:number], with_unit[:number], claims(noise), confidence=CONFIDENCE)
    least = least_refuted(profile, claims, noise)
    proven = 0.0 if math.isinf(least) else _epsilon(setting, least)
    return Tightness(runs[0].charged, noise, proven, 2 * number, time.perf_counter() - start)


def _event(setting: Setting, noise: float) -> dp_event.DpEvent:
    return amplify_poisson(dp_event.GaussianDpEvent(noise), setting.sampling_rate)


def _epsilon(setting: Setting, noise: float) -> float:
    return epsilon_of_counts({_event(setting, noise): setting.rounds}, setting.delta, accountant="pld")


def scored(setting: Setting, mechanism: str) -> Scored:
    """Train one federation with canaries in it, under one of ``VARIANTS``, and score every canary."""
    experiment = setting.experiment()
    job = job_of(experiment)
    model, dataset = job.model(), job.dataset
    first = detached(model.named_parameters())
    size = sum(value.numel() for value in first.values())
    drawn = rng(setting.seed, "canary directions").standard_normal((size, setting.num_canaries), dtype=np.float32)
    directions = torch.linalg.qr(torch.from_numpy(drawn)).Q.T.contiguous()
    taking_part = rng(setting.seed, "canary coins").random(setting.num_canaries) < 0.5
    assert isinstance(experiment.aggregator, GlobalDP)
    app = CanaryClients(setting.num_real, directions, taking_part, experiment.aggregator.clipping_norm, first)
    factor, seed = VARIANTS.get(mechanism, 1.0), setting.seed if mechanism == PUBLISHED else None
    models, charged = _trained(
        experiment, app, first, setting, partial(FaultyRounds, noise_factor=factor, published_seed=seed)
    )
    last = models[-1]
    expected = setting.sampling_rate * (setting.num_real + setting.num_canaries)
    away = math.log1p(-setting.sampling_rate) if setting.sampling_rate < 1 else -math.inf
    scores = np.zeros(setting.num_canaries)
    for server_round, (before, after) in enumerate(pairwise([first, *models]), start=1):
        moved = torch.cat([(after[name] - before[name]).reshape(-1) for name in first])
        along = (directions @ moved).double().numpy() * expected / experiment.aggregator.clipping_norm
        ratio = (2 * along - 1) / (2 * experiment.aggregator.noise_multiplier**2)
        if mechanism in {SEED_KNOWN, PUBLISHED}:
            scores += ratio * _published_cohort(experiment, setting, server_round)
        else:
            scores += np.logaddexp(away, math.log(setting.sampling_rate) + ratio)
    accuracy = evaluate(model, last, *to_tensors(dataset.test, dataset)).accuracy
    return Scored(experiment, scores, taking_part, charged, accuracy)


def _trained(
    experiment: Experiment, app: ClientApp, first: Params, setting: Setting, faulty: Callable[..., FaultyRounds]
) -> tuple[list[Params], float]:
    """Run every round and return the global model after each, and the ledger's epsilon."""
    population = setting.num_real + setting.num_canaries
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        order = wire.TaskConfig(experiment.model_dump_json(), 0, 0.0, "", str(out / "state"), "")
        strategy = FederatedStrategy(
            experiment.algorithm, experiment.aggregator, experiment.sampler, experiment.algorithm.init(first), order,
            population, setting.seed,
        )  # fmt: skip
        assert isinstance(experiment.aggregator, GlobalDP)
        rounds = open_private_rounds(
            experiment.aggregator, experiment.sampler, population, setting.seed, out, clipping_norm=None
        )
        strategy.wrap(faulty(**{one.name: getattr(rounds, one.name) for one in fields(rounds) if one.init}))
        grid, models = InProcessGrid(app, population), []
        for server_round in range(1, setting.rounds + 1):
            run_round(strategy, grid, server_round, experiment.local.learning_rate, timeout=600.0)
            models.append(strategy.server.params)
        charged = rounds.ledger.epsilon
    assert charged is not None
    return models, charged


def _published(seed: int, server_round: int) -> Coins:
    return rng(seed, "sampler", server_round).random


def _published_cohort(experiment: Experiment, setting: Setting, server_round: int) -> NDArray[np.bool_]:
    """Return a mask of the canaries that the published seed samples, shape (canaries,)."""
    population = setting.num_real + setting.num_canaries
    there = experiment.sampler.sample(population, _published(setting.seed, server_round), server_round)
    return np.isin(np.arange(setting.num_real, population), there)


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a Markdown table."""
    columns = (
        "mechanism", "seed", "noise", "claimed epsilon (RDP / PLD)", "proven, 95 %", "provable at most",
        "best guessing", "estimate, no bound", "accuracy", "verdict",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in findings:
        best = max(one.guesses, key=lambda each: each.epsilon_lower_bound)
        lines.append(
            f"| {one.mechanism} | {one.seed} | {one.noise_multiplier:.3f} | {one.claimed:.2f} / {one.claimed_pld:.2f} "
            f"| {one.epsilon_lower_bound:.2f} | {one.power_limit:.2f} | {best.correct} of {best.guesses} "
            f"| {one.epsilon_estimate:.2f} | {one.test_accuracy:.3f} | {one.verdict} |"
        )
    return "\n".join(lines)


def _print_tightness(settings: Sequence[Setting], claims: Sequence[float]) -> None:
    print("| claimed epsilon | noise | canaries | refuted up to epsilon, 95 % | tightness | seconds |")
    print("|---|---|---|---|---|---|")
    for claim in claims:
        one = tightness([replace(setting, epsilon=claim) for setting in settings])
        print(
            f"| {one.claimed:.2f} | {one.noise_multiplier:.3f} | {one.canaries:,} | {one.proven:.2f} | {one.share:.2f} "
            f"| {one.seconds:.0f} |",
            flush=True,
        )


def main() -> None:
    """Audit every variant and print the findings."""
    default = Setting()
    parser = argparse.ArgumentParser(description="Audit Global DP with canaries through whole training runs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--repeats", type=int, default=1, help="runs per mechanism, with seeds from --seed on")
    parser.add_argument("--canaries", type=int, default=default.num_canaries)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--epsilon", type=float, default=default.epsilon, help="what the true noise is to cost")
    parser.add_argument("--tightness", type=float, nargs="+", default=[], help="claims to get close to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = replace(default, num_canaries=arguments.canaries, rounds=arguments.rounds, epsilon=arguments.epsilon)
    settings = [replace(base, seed=seed) for seed in range(arguments.seed, arguments.seed + arguments.repeats)]
    if arguments.tightness:
        _print_tightness(settings, arguments.tightness)
        return
    findings = [audit(setting, mechanism) for mechanism in VARIANTS for setting in settings]
    rarely = [replace(one, sampling_rate=RARE_RATE, rounds=RARE_ROUNDS, epsilon=RARE_EPSILON) for one in settings]
    findings += [audit(setting, mechanism) for mechanism in (SEED_KNOWN, PUBLISHED) for setting in rarely]
    if arguments.json:
        told: list[dict[str, Any]] = [asdict(one) | {"verdict": one.verdict} for one in findings]
        told = [
            {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in one.items()}
            for one in told
        ]
        setting_told = {key: value for key, value in asdict(base).items() if key != "seed"}
        print(json.dumps({"confidence": CONFIDENCE, "setting": setting_told, "findings": told}))
        return
    print(
        f"{base.num_canaries} canaries, each in with probability 1/2, beside {base.num_real} real clients; "
        f"{base.rounds} rounds, sampling rate {base.sampling_rate} (the last two: {RARE_ROUNDS} rounds, "
        f"rate {RARE_RATE}), {base.model} on digits, delta {base.delta:g}\n"
    )
    print(table(findings))


if __name__ == "__main__":
    main()
