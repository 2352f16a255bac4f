"""A membership attack on models trained with and without DP-SGD: LiRA, online (Carlini et al. 2022, algorithm 1).

    PYTHONPATH=. python benchmarks/private_records/membership.py [--shadows 128]

A hundred of scikit-learn's digits are drawn. Each of many shadow runs trains a linear model on a random half of them,
by ``fl_sim.simulation.run.run``, and the next run trains on the other half. The attacker sees the final model. Its
score of a record is the logit of the model's confidence in the record's label. For each record, one Gaussian is fitted
to the scores of the models that were trained on it, and one to the scores of the others. Every model is attacked once,
with all others as shadows. The likelihood ratios of all records and models together are cut at a false-positive rate of
1 % and 0.1 %.

Under (epsilon, delta) no attack has a true-positive rate above e^epsilon times the false-positive rate, plus delta, if
one record is there or is not, and all others stay. The table prints this as the limit. In these runs another record
takes the place of a record that is left out, so the limit is approximate.
"""

import argparse
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import canaries
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from scipy import stats

from fl_sim import models
from fl_sim.data import load
from fl_sim.experiment.experiment import experiment_from
from fl_sim.seeding import rng
from fl_sim.simulation.run import run

Scores = NDArray[np.float64]

RECORDS: Final = 100
MODEL: Final = "logistic"
RATES: Final = (0.01, 0.001)
"""False-positive rates."""

PLAIN: Final = {"learning_rate": 0.5, "momentum": 0.9, "batch_size": 10, "epochs": 200}
PRIVATE: Final = {"learning_rate": 1.0, "momentum": 0.0, "batch_size": 25, "epochs": 0, "steps": 60}


@dataclass(frozen=True)
class Attacked:
    """The result of the attack on all shadow runs of one setting, and the mean accuracy on records of no run."""

    epsilon: float | None
    caught: tuple[float, ...]
    accuracy: float
    seconds: float

    def limit(self, rate: float, delta: float = 1e-5) -> float:
        """Return the highest true-positive rate that epsilon allows at the false-positive rate ``rate``."""
        return 1.0 if self.epsilon is None else min(1.0, math.exp(self.epsilon) * rate + delta)


def attacked(epsilon: float | None, shadows: int) -> Attacked:
    """Train ``shadows`` models with ``epsilon`` (None: no privacy) and attack each of them with the others."""
    start = time.perf_counter()
    train = load("digits").train
    inputs = train.inputs.reshape(len(train), -1).astype(np.float32) / 255
    used = rng(0, "attacked records").permutation(len(train))
    inputs, labels = inputs[used], train.labels[used]
    trained_on = _halves(shadows)
    logits = np.stack([_logits(inputs, labels, trained_on[number], epsilon, number) for number in range(shadows)])
    held_out = logits[:, RECORDS:].argmax(axis=2) == labels[RECORDS:]
    ratios = likelihood_ratios(confidences(logits[:, :RECORDS], labels[:RECORDS]), trained_on)
    caught = tuple(true_positive_rate(ratios[trained_on], ratios[~trained_on], rate) for rate in RATES)
    return Attacked(epsilon, caught, float(held_out.mean()), time.perf_counter() - start)


def _halves(shadows: int) -> NDArray[np.bool_]:
    """Return which records each model is trained on, (shadows, records): a random half, and for the next the others."""
    halves = [rng(0, "shadow runs", number // 2).permutation(RECORDS) < RECORDS // 2 for number in range(shadows)]
    return np.array([half ^ (number % 2 == 1) for number, half in enumerate(halves)])


def _logits(
    inputs: NDArray[np.float32], labels: NDArray[np.int64], chosen: NDArray[np.bool_], epsilon: float | None, seed: int
) -> Scores:
    """Train one model on the ``chosen`` of the first ``RECORDS`` records; return its logits of all, (records, 10)."""
    local: dict[str, Any] = PLAIN if epsilon is None else PRIVATE
    if epsilon is not None:
        local = local | {"privacy": {"kind": "dp-sgd", "epsilon": epsilon, "noise": "seeded"}}
    held = np.flatnonzero(chosen)
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, FL_SIM_LEDGERS=f"{name}/ledgers"):
        root = Path(name)
        canaries.store(root, inputs[held], labels[held], np.zeros(len(held), np.int64))
        settings = {
            "data": "canaries:records", "model": MODEL, "partition": "iid", "clients": 1, "rounds": 1, "seed": seed,
            "engine": "inprocess", "device": "cpu", "local": local,
            "evaluate": {"test": "last", "test_is_public": True},
        }  # fmt: skip
        run(experiment_from(settings), root / "run", root)
        model = models.MODELS[MODEL](inputs.shape[1:], 10)
        model.load_state_dict(load_file(root / "run/model.safetensors"))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(inputs)).double().numpy()


def confidences(logits: Scores, labels: NDArray[np.int64]) -> Scores:
    """Return log(p / (1 - p)) of the probability p of the right label, shape of ``logits`` without the classes."""
    right = np.take_along_axis(logits, np.broadcast_to(labels, logits.shape[:2])[..., np.newaxis], axis=2)[..., 0]
    others = np.where(np.arange(logits.shape[2]) == labels[:, np.newaxis], -np.inf, logits)
    return right - np.logaddexp.reduce(others, axis=2)


def likelihood_ratios(scores: Scores, trained_on: NDArray[np.bool_]) -> Scores:
    """Return the log likelihood ratio of every score, (models, records), with Gaussians of the other models' scores."""
    logs = []
    for side in (trained_on, ~trained_on):
        there = side.astype(np.float64)
        number = there.sum(axis=0) - there  # without the attacked model
        mean = ((there * scores).sum(axis=0) - there * scores) / number
        square = ((there * scores**2).sum(axis=0) - there * scores**2) / number
        logs.append(stats.norm.logpdf(scores, mean, np.sqrt(np.maximum(square - mean**2, 1e-12))))
    return logs[0] - logs[1]


def true_positive_rate(members: Scores, others: Scores, false_positives: float) -> float:
    """Return the share of ``members`` above the threshold that at most this share of ``others`` exceeds."""
    threshold = np.sort(others)[len(others) - 1 - int(false_positives * len(others))]
    return float((members > threshold).mean())


def main() -> None:
    """Attack models without privacy and at epsilon 8 and 1, and print a table."""
    parser = argparse.ArgumentParser(description="Attack models of DP-SGD by membership inference.")
    parser.add_argument("--shadows", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = " | ".join(f"caught at {rate:.1%} | limit" for rate in RATES)
    print(f"| epsilon | test accuracy | {columns} | seconds |")
    print("|---" * (3 + 2 * len(RATES)) + "|")
    for epsilon in (None, 8.0, 1.0):
        one = attacked(epsilon, arguments.shadows)
        cells = " | ".join(
            f"{caught:.2%} | {one.limit(rate):.1%}" for caught, rate in zip(one.caught, RATES, strict=True)
        )
        print(f"| {epsilon or 'none'} | {one.accuracy:.3f} | {cells} | {one.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
