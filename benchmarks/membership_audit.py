"""Audit released synthetic records by membership inference: who was among the records a generator learned from.

One run with canaries (Steinke, Nasr, Jagielski 2023): each of many crafted records is in the client's data with
probability 1/2; the auditor sees the released records and the crafted ones, and guesses. A canary of the DP-CGAN is a
record with one feature lit that no other has; one of the mean embedding is one frequency of one class. In place of an
excluded canary there is a record of a class that is not released, so that the number of records, which is public, says
nothing. Scores: "nearest", minus the distance to the nearest released record of its class; "inner", its mean inner
product with them; "reference", that less its mean in runs of the auditor's own (as in Carlini et al. 2022).

Many runs with and without one record, through the whole of DA-FL's release (labels first, then records): the one record
of its class, whose presence shows where the histogram is used as it is.

    PYTHONPATH=. python benchmarks/membership_audit.py [--json] [--seed 0] [--repeats 1] [--epsilon 2] [--runs 400]

Faults are planted behind the bill's back: what is claimed is what the true mechanism costs.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy.fft import idctn

from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.generator import Generator, GeneratorBill, PrivateRecords
from clients.dafl.labels import ExponentialMechanism
from clients.dafl.noisy_moments import MeanEmbedding
from clients.images import lowest_frequencies
from fl_sim.privacy.accounting import epsilon, epsilon_of_counts
from fl_sim.privacy.audit import CONFIDENCE, audit_profile, guess, power_limit
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng

Array = NDArray[np.float64]

VARIANTS = {"as it is": 1.0, "a quarter of the noise": 0.25, "no noise": 0.0}
DELTA = 1e-5
_SHADOWS = 4


@dataclass(frozen=True)
class Finding:
    """What is proven about one release, with ``CONFIDENCE``, beside what was claimed; ``limit``: the most there is."""

    audit: str
    mechanism: str
    claimed: float
    proven: float
    limit: float
    best: str
    seconds: float

    @property
    def verdict(self) -> str:
        """Return whether the claim is false, at the confidence asked for."""
        return "REFUTED" if self.proven > self.claimed else "not refuted"


@dataclass(frozen=True)
class Canaries:
    """Crafted records and the generator they are fed to. ``labels``: the class each has when it takes part.

    ``counts``: how many records of each class are released, whoever takes part; the last class has none of its own.
    """

    generator: Generator
    inputs: torch.Tensor
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    def release(self, taking_part: NDArray[np.bool_], bill: GeneratorBill, noise: Noise, seed: int) -> torch.Tensor:
        """Return the released records if the canaries of a mask take part."""
        labels = np.where(taking_part, self.labels, len(self.counts) - 1)
        records = PrivateRecords(self.inputs, torch.from_numpy(labels), len(self.counts))
        return self.generator.generate(records, self.counts, bill, noise, rng(seed, "generator"))

    def scores(self, released: torch.Tensor) -> dict[str, Array]:
        """Return how close the released records of its class come to each canary."""
        by_class = torch.split(released.flatten(1).double(), self.counts.tolist())
        own = self.inputs.flatten(1).double()
        nearest, inner = np.zeros(len(own)), np.zeros(len(own))
        for label in np.unique(self.labels):
            mine = np.flatnonzero(self.labels == label)
            nearest[mine] = -torch.cdist(own[mine], by_class[label]).min(1).values.numpy()
            inner[mine] = (own[mine] @ by_class[label].mean(0)).numpy()
        return {"nearest": nearest, "inner": inner}


def cgan_canaries(number: int = 400, steps: int = 200) -> Canaries:
    """Return canaries for the DP-CGAN, all in every step: each lights one feature of its own."""
    generator = DpCgan(
        discriminator_steps=steps, batch_size=number, ratio=2, discriminator_learning_rate=1e-3,
        generator_learning_rate=1e-3, averaging=0.0, snapshots=1,
    )  # fmt: skip
    inputs = 2 * torch.eye(number) - 1
    return Canaries(generator, inputs, np.zeros(number, dtype=np.int64), np.array([200, 0]))


def embedding_canaries(num_classes: int = 10, side: int = 8) -> Canaries:
    """Return canaries for the mean embedding: every frequency of an image, as strong as it can be, in every class."""
    number, shape = side * side, (1, side, side)
    spectra = np.zeros((number, number))
    spectra[np.arange(number), lowest_frequencies(shape, number)[0]] = 1
    images = idctn(spectra.reshape(number, *shape), axes=(1, 2, 3), norm="ortho")
    images /= np.abs(images).max(axis=(1, 2, 3), keepdims=True)
    inputs = torch.from_numpy(np.tile(images, (num_classes, 1, 1, 1)).astype(np.float32))
    counts = np.array([*[400] * num_classes, 0])
    return Canaries(MeanEmbedding(frequencies=number), inputs, np.repeat(np.arange(num_classes), number), counts)


def audit_one_run(name: str, canaries: Canaries, mechanism: str, target: float, seed: int) -> Finding:
    """Release once, under one of ``VARIANTS``, and guess which canaries took part; all scores' bounds hold together."""
    start = time.perf_counter()
    number = len(canaries.labels)
    bill = canaries.generator.bill(number, len(canaries.counts), target, DELTA)
    # Whether a release is worth making is no matter of privacy: what is refused is audited all the same.
    faulty = replace(bill, noise_multiplier=bill.noise_multiplier * VARIANTS[mechanism], refused="")
    taking_part = rng(seed, "canaries").random(number) < 0.5
    scores = canaries.scores(canaries.release(taking_part, faulty, Noise.seeded(seed), seed))
    scores["reference"] = scores["inner"] - _reference(canaries, faulty, seed)
    level = 1 - (1 - CONFIDENCE) / len(scores)
    guesses = {
        score: max(guess(values, taking_part, DELTA, confidence=level), key=lambda one: one.epsilon_lower_bound)
        for score, values in scores.items()
    }
    best = max(guesses, key=lambda score: guesses[score].epsilon_lower_bound)
    said = f"{best}: {guesses[best].correct} of {guesses[best].guesses}"
    return Finding(
        f"{name}, one run, {number} canaries", mechanism, epsilon_of_counts({bill.event: bill.steps}, DELTA),
        guesses[best].epsilon_lower_bound, power_limit(number, DELTA), said, time.perf_counter() - start,
    )  # fmt: skip


def _reference(canaries: Canaries, bill: GeneratorBill, seed: int) -> Array:
    """Return the mean "inner" of each canary in runs of the auditor's own, half of them with it."""
    found = []
    for shadow in range(_SHADOWS // 2):
        coins = rng(seed, "shadow", shadow).random(len(canaries.labels)) < 0.5
        for number, mask in enumerate((coins, ~coins)):
            noise = Noise.seeded(1_000_000 + 10_000 * seed + 2 * shadow + number)
            found.append(canaries.scores(canaries.release(mask, bill, noise, seed))["inner"])
    mean: Array = np.mean(found, axis=0)
    return mean


@dataclass(frozen=True)
class Pipeline:
    """DA-FL's release of one small client: labels, then records. The audited record alone is of class 1.

    ``histogram``: the labels are the client's own histogram, and the label picker is passed by.
    """

    name: str
    histogram: bool = False

    _OTHERS = 20
    _GENERATOR = DpCgan(
        discriminator_steps=4, batch_size=21, ratio=2, discriminator_width=8, generator_width=8, latent_dim=2,
        generator_batch_size=16, snapshots=1,
    )  # fmt: skip
    _LABELS = ExponentialMechanism(epsilon=0.5, false_positive=1, least_share=0)

    def bill(self, target: float) -> GeneratorBill:
        """Return the generator's bill; whether so few records are worth a release is no matter of privacy."""
        return replace(self._GENERATOR.bill(self._OTHERS + 1, 3, target, DELTA), refused="")

    def claimed(self, bill: GeneratorBill) -> float:
        """Return the ledger's epsilon: labels and generator together."""
        return epsilon([self._LABELS.event(3), dp_event.SelfComposedDpEvent(bill.event, bill.steps)], DELTA)

    def __call__(self, world: int, run: int, bill: GeneratorBill) -> Array:
        """Return a summary of what is released, (6,): how many of classes 0 and 1, and their mean records."""
        labels = torch.tensor([*[0] * self._OTHERS, 1 if world else 2])
        inputs = torch.full((self._OTHERS + 1, 2), -1.0)
        inputs[-1] = 1.0
        noise = Noise.seeded(run)
        held = np.bincount(labels.numpy(), minlength=3)
        held[2] = 0
        counts = held if self.histogram else self._LABELS.select(held, 1.0, 40, noise)
        counts[2] = 0  # the class of the record left out, which the guarantee does not speak of
        records = PrivateRecords(inputs, labels, 3)
        made = self._GENERATOR.generate(records, counts, bill, noise, rng(0, "generator")).double().numpy()
        split = np.split(made, np.cumsum(counts)[:-1])[:2]
        return np.concatenate([counts[:2], *(part.mean(0) if len(part) else np.zeros(2) for part in split)])


PIPELINES = (
    Pipeline("as it is"),
    Pipeline("labels from the private histogram", histogram=True),
)


def audit_pipeline(pipeline: Pipeline, target: float, *, num_runs: int, seed: int) -> Finding:
    """Run ``pipeline`` with and without the audited record, and return the epsilon that the outputs prove."""
    start, first = time.perf_counter(), 2 * num_runs * seed
    bill = pipeline.bill(target)
    without = np.stack([pipeline(0, first + run, bill) for run in range(num_runs)])
    with_record = np.stack([pipeline(1, first + num_runs + run, bill) for run in range(num_runs)])
    claimed = pipeline.claimed(bill)
    profile = audit_profile(without, with_record, [DELTA], epsilons=[claimed], delta=DELTA, confidence=CONFIDENCE)
    return Finding(
        f"labels and DP-CGAN, {num_runs} runs per world", pipeline.name, claimed, profile.epsilon_lower_bound,
        _separated(num_runs), "fitted likelihood ratio", time.perf_counter() - start,
    )  # fmt: skip


def _separated(num_runs: int) -> float:
    """Return the proven epsilon if no output occurs in both worlds."""
    apart = audit_profile(np.zeros((num_runs, 1)), np.ones((num_runs, 1)), [0], epsilons=[0], delta=DELTA)
    return apart.epsilon_lower_bound


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a Markdown table."""
    columns = ("audit", "mechanism", "claimed epsilon", "proven, 95 %", "provable at most", "best attack", "verdict")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {one.audit} | {one.mechanism} | {one.claimed:.2f} | {one.proven:.2f} | {one.limit:.2f} | {one.best} "
        f"| {one.verdict} |"
        for one in findings
    ]
    return "\n".join(lines)


def main() -> None:
    """Audit every release and print the findings."""
    parser = argparse.ArgumentParser(description="Audit released synthetic records by membership inference.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--repeats", type=int, default=1, help="one-run audits per mechanism, with seeds from --seed on"
    )
    parser.add_argument("--epsilon", type=float, default=2.0, help="what the true generator is to cost")
    parser.add_argument("--runs", type=int, default=400, help="runs per world of the audits with many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.seed, arguments.seed + arguments.repeats)
    kinds: dict[str, Callable[[], Canaries]] = {"DP-CGAN": cgan_canaries, "mean embedding": embedding_canaries}
    findings = [
        audit_one_run(name, make(), mechanism, arguments.epsilon, seed)
        for name, make in kinds.items()
        for mechanism in VARIANTS
        for seed in seeds
    ]
    findings += [
        audit_pipeline(one, arguments.epsilon, num_runs=arguments.runs, seed=arguments.seed) for one in PIPELINES
    ]
    if arguments.json:
        told: list[dict[str, Any]] = [asdict(one) | {"verdict": one.verdict} for one in findings]
        print(json.dumps({**vars(arguments), "delta": DELTA, "confidence": CONFIDENCE, "findings": told}))
        return
    print(table(findings))


if __name__ == "__main__":
    main()
