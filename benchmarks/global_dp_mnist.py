"""Global DP on MNIST as in Geyer et al. 2017: shards(2), MLP 784-600-100-10, epsilon 8, K = 100 and 1000 clients.

    FL_SIM_DATA=ROOT python benchmarks/global_dp_mnist.py --out DIR [--clients 100] [--clients 1000]

Settings are chosen on a validation share: the last sixth of the (shuffled) TRAINING set, which trains nobody during the
choice; one setting after the other, each with the best of the others so far. The chosen ones then train on the whole
training set and are evaluated once on the test set, beside the same run without privacy. Clients hold disjoint shares;
the paper replicates the data over clients, so its figures are not for the same task. Choosing on validation data is not
charged: a real deployment would have to.
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from fl_sim.data import load
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.privacy.accounting import noise_multiplier
from fl_sim.privacy.events import amplify_poisson
from fl_sim.simulation.run import run

EPSILON = 8.0
DELTA = {100: 1e-3, 1000: 1e-5}
PUBLISHED = {100: "78 % after 11 rounds", 1000: "92 % after 54 rounds"}
START = {
    100: {"rounds": 60, "sampling_rate": 0.3, "clipping_norm": 0.1, "learning_rate": 0.1},
    1000: {"rounds": 120, "sampling_rate": 0.1, "clipping_norm": 0.3, "learning_rate": 0.1},
}
VALUES = {
    100: {
        "clipping_norm": [0.03, 0.1, 0.3], "learning_rate": [0.03, 0.1, 0.3], "sampling_rate": [0.15, 0.3, 0.6],
        "rounds": [30, 60, 120],
    },
    1000: {
        "clipping_norm": [0.1, 0.3, 1.0], "learning_rate": [0.03, 0.1, 0.3], "sampling_rate": [0.05, 0.1, 0.2],
        "rounds": [60, 120, 240],
    },
}  # fmt: skip


def experiment_of(data: str, clients: int, choice: dict[str, float], seed: int, *, private: bool) -> Experiment:
    """Return one run; the noise multiplier is the smallest that affords all its rounds."""
    table = {
        "data": data, "clients": clients, "partition": "shards:2", "model": "mlp", "rounds": int(choice["rounds"]),
        "engine": "inprocess", "evaluate_every": 5, "seed": seed,
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
    """Search one setting after the other, each over its values with the best so far of the others; return the best.

    What counts is the validation accuracy after the last round.
    """
    scores: dict[tuple[float, ...], float] = {}
    best = START[clients]
    with tempfile.TemporaryDirectory() as folder:
        data = validation_split(Path(folder))
        for name, values in VALUES[clients].items():
            for choice in ({**best, name: value} for value in values):
                key = tuple(choice.values())
                if key in scores:
                    continue
                place = out / f"{clients}-validation-{len(scores)}"
                result = run(experiment_of(data, clients, choice, 0, private=True), place)
                scores[key] = result["final_accuracy"]
                noise = result["privacy"][0]["noise_multiplier"]
                print(f"validation, K={clients}: {choice}, z={noise:.3f}: {scores[key]:.4f}", flush=True)
            best = dict(zip(best, max(scores, key=scores.__getitem__), strict=True))
    return best


def main() -> None:
    """Choose, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, action="append", choices=list(VALUES))
    parser.add_argument("--seeds", type=int, default=1, help="runs of the chosen settings, private and plain")
    options = parser.parse_args()
    for clients in options.clients or list(VALUES):
        best = choose(clients, options.out)
        finals: dict[bool, list[float]] = {True: [], False: []}
        for seed, private in product(range(options.seeds), finals):
            place = options.out / f"{clients}-{'private' if private else 'plain'}-{seed}"
            result = run(experiment_of("mnist", clients, best, seed, private=private), place)
            finals[private].append(100 * result["final_accuracy"])
            if private:
                promise, rounds, stopped = result["privacy"][0], result["rounds"], result["stopped"]
        cohort = best["sampling_rate"] * clients
        print(f"K={clients}, chosen {json.dumps(best)}: z={promise['noise_multiplier']:.3f}, m={cohort:.0f} expected")
        print(f"  private: {spread(finals[True])} after {rounds} rounds, {options.seeds} seeds")
        spent = f"epsilon {promise['epsilon']:.3f} (RDP), {promise['epsilon_pld']:.3f} (PLD)"
        print(f"  {spent}, delta {promise['delta']:g}")
        print(f"  {stopped or 'the rounds fit the budget exactly as planned'}")
        print(f"  without privacy, same settings: {spread(finals[False])} after {rounds} rounds")
        print(f"  published, on replicated data: {PUBLISHED[clients]}", flush=True)


def spread(values: list[float]) -> str:
    """Return the mean in percent, and the standard deviation where there are several values."""
    deviation = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation} %"


if __name__ == "__main__":
    main()
