"""Global DP on MNIST as in Geyer et al. 2017: shards(2), MLP 784-600-100-10, epsilon 8, K = 100 and 1000 clients.

    FL_SIM_DATA=ROOT python benchmarks/global_dp_mnist.py --out DIR [--clients 100] [--clients 1000]

Settings are chosen on a validation share: the last sixth of the (shuffled) TRAINING set, which trains nobody during the
choice. The chosen settings then train once on the whole training set and are evaluated once on the test set, beside the
same run without privacy. Clients hold disjoint shares; the paper replicates the data over clients, so its figures are
not for the same task. Choosing on validation data is not charged: a real deployment would have to.
"""

import argparse
import json
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from fl_sim.data import load
from fl_sim.experiment import Experiment, experiment_from
from fl_sim.privacy.accounting import amplify_poisson
from fl_sim.privacy.planning import noise_multiplier
from fl_sim.simulation import run

EPSILON = 8.0
DELTA = {100: 1e-3, 1000: 1e-5}
PUBLISHED = {100: "78 % after 11 rounds", 1000: "92 % after 54 rounds"}
GRID = {
    100: {"rounds": [20, 60], "sampling_rate": [0.3], "clipping_norm": [0.1, 0.3], "learning_rate": [0.1]},
    1000: {"rounds": [60, 120], "sampling_rate": [0.1], "clipping_norm": [0.1, 0.3], "learning_rate": [0.1]},
}


def experiment_of(data: str, clients: int, choice: dict[str, float], *, private: bool) -> Experiment:
    """Return one run; the noise multiplier is the smallest that affords all its rounds."""
    table = {
        "data": data, "clients": clients, "partition": "shards:2", "model": "mlp", "rounds": int(choice["rounds"]),
        "engine": "inprocess", "evaluate_every": 5,
        "sampler": {"kind": "poisson", "sampling_rate": choice["sampling_rate"]},
        "local": {
            "epochs": 2, "batch_size": 50, "learning_rate": choice["learning_rate"],
            "momentum": 0.0, "weight_decay": 0.0,
        },
    }  # fmt: skip
    if private:
        table["aggregator"] = {
            "kind": "global-dp", "epsilon": EPSILON, "delta": DELTA[clients], "clipping_norm": choice["clipping_norm"],
            "noise_multiplier": noise_for(clients, choice),
        }  # fmt: skip
    return experiment_from(table)


def noise_for(clients: int, choice: dict[str, float]) -> float:
    """Return the noise multiplier whose rounds cost just under epsilon."""
    amplify = partial(amplify_poisson, sampling_rate=choice["sampling_rate"])
    return noise_multiplier(amplify, int(choice["rounds"]), EPSILON, DELTA[clients], accountant="rdp")


def validation_split(folder: Path) -> str:
    """Write MNIST's training set as 5/6 training and 1/6 validation, and return its name as a data set."""
    train = load("mnist").train
    cut = len(train) * 5 // 6
    order = np.random.default_rng(0).permutation(len(train))
    images, labels = np.asarray(train.inputs)[order, 0], np.asarray(train.labels)[order]
    np.savez(
        folder / "v.npz", x_train=images[:cut], y_train=labels[:cut], x_test=images[cut:], y_test=labels[cut:],
        mean=np.array([0.1307]), std=np.array([0.3081]),
    )  # fmt: skip
    return f"npz:{folder / 'v.npz'}"


def choose(clients: int, out: Path) -> dict[str, float]:
    """Return the settings with the best validation accuracy after their last round."""
    tried = []
    with tempfile.TemporaryDirectory() as folder:
        data = validation_split(Path(folder))
        for number, values in enumerate(product(*GRID[clients].values())):
            choice = dict(zip(GRID[clients], values, strict=True))
            result = run(experiment_of(data, clients, choice, private=True), out / f"{clients}-validation-{number}")
            tried.append((result["final_accuracy"], choice))
            noise = result["privacy"][0]["noise_multiplier"]
            print(f"validation, K={clients}: {choice}, z={noise:.3f}: {result['final_accuracy']:.4f}", flush=True)
    return max(tried, key=lambda one: one[0])[1]


def main() -> None:
    """Choose, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, action="append", choices=list(GRID))
    options = parser.parse_args()
    for clients in options.clients or list(GRID):
        best = choose(clients, options.out)
        private = run(experiment_of("mnist", clients, best, private=True), options.out / f"{clients}-private")
        plain = run(experiment_of("mnist", clients, best, private=False), options.out / f"{clients}-plain")
        promise = private["privacy"][0]
        cohort = best["sampling_rate"] * clients
        print(f"K={clients}, chosen {json.dumps(best)}: z={promise['noise_multiplier']:.3f}, m={cohort:.0f} expected")
        print(f"  private: {100 * private['final_accuracy']:.2f} % after {private['rounds']} rounds")
        print(
            f"  epsilon {promise['epsilon']:.3f} (RDP), {promise['epsilon_pld']:.3f} (PLD), delta {promise['delta']:g}"
        )
        print(f"  {private['stopped'] or 'the rounds fit the budget exactly as planned'}")
        print(f"  without privacy, same settings: {100 * plain['final_accuracy']:.2f} % after {plain['rounds']} rounds")
        print(f"  published, on replicated data: {PUBLISHED[clients]}", flush=True)


if __name__ == "__main__":
    main()
