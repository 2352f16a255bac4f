"""The settings of the main job's methods, each tuned alike: the search that the preset ``digits`` rests on.

    python benchmarks/digits_tuned.py OUT [--jobs 2]

Every method gets the same 12 draws of learning rate and momentum, and each value of its own parameter as often as the
others. Successive halving: 12 trials of 6 rounds, the best 6 of them 12, the best 3 of those 25, the best 2 of those
50, the job's own number. A trial's score is its accuracy on a tenth of the training records, held out, meaned over both
splits of the job; no trial looks at the test records. A trial that diverges counts as the worst. DA-FL's trials pay for
nothing but themselves, since their records are a file of their own; the preset's privacy statement names the choice.
"""

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

import fl_sim
from fl_sim.data import load

SPLITS: Final = ("label-1", "label-2")
RUNGS: Final = ((12, 6), (6, 12), (3, 25), (2, 50))
"""(trials, rounds) of each rung."""

OWN: Final[Mapping[str, tuple[str, list[Any]]]] = {
    "fedprox": ("mu", [0.001, 0.01, 0.1, 1.0]),
    "scaffold": ("variant", ["paper", "momentum"]),
    "fedmix": ("mixing_weight", [0.05, 0.1, 0.2]),
    "naivemix": ("mixing_weight", [0.05, 0.1, 0.2]),
    "fedavgm": ("server_momentum", [0.5, 0.7, 0.9]),
    "fedadagrad": ("server_learning_rate", [0.003, 0.01, 0.03, 0.1]),
    "fedadam": ("server_learning_rate", [0.003, 0.01, 0.03, 0.1]),
    "fedyogi": ("server_learning_rate", [0.003, 0.01, 0.03, 0.1]),
}
"""{a method: its own parameter and the values tried}, as their papers try them."""

METHODS: Final = ("fedavg", *OWN, "fednova", "da-fl")
DAFL: Final = {
    "kind": "da-fl", "gamma": 0.5, "labels": "exponential:0.5",
    "generator": "mean-embedding", "noise": "seeded",
}  # fmt: skip


def held_out(out: Path) -> Path:
    """Write the training records of digits as an npz file whose test records are a tenth of them; return its path."""
    path = out / "digits-held-out.npz"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        train = load("digits", None).train
        order = np.random.default_rng(0).permutation(len(train.labels))
        test, rest = order[: len(order) // 10], order[len(order) // 10 :]
        np.savez(
            path, x_train=train.inputs[rest, 0], y_train=train.labels[rest], x_test=train.inputs[test, 0],
            y_test=train.labels[test],
        )  # fmt: skip
    return path


def trials_of(method: str) -> list[dict[str, Any]]:
    """Return the settings of a method's trials. All methods have the same learning rates and momenta."""
    draws = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for number in range(RUNGS[0][0]):
        rate = float(np.exp(draws.uniform(np.log(0.003), np.log(0.3))))
        local = {"learning_rate": float(f"{rate:.2g}"), "momentum": (0.0, 0.9)[number % 2]}
        algorithm: dict[str, Any] = {"kind": "fedavg" if method == "da-fl" else method}
        if method in OWN:
            name, values = OWN[method]
            algorithm[name] = values[(number // 2) % len(values)]
        found.append({"algorithm": algorithm, "local": local, **({"preprocess": DAFL} if method == "da-fl" else {})})
    return found


def score(settings: Mapping[str, Any], records: Path, rounds: int, out: Path) -> float:
    """Return the accuracy on the held-out records after ``rounds`` rounds, mean of both splits; -1 for divergence."""
    found = []
    for split in SPLITS:
        whole = {
            **settings, "data": f"npz:{records}", "clients": 10, "partition": split, "rounds": rounds, "seed": 0,
            "evaluate": {"test_is_public": True}, "engine": {"kind": "inprocess", "workers": 1},
        }  # fmt: skip
        try:
            result = fl_sim.run(whole, out=out / split, progress=False)
        except fl_sim.RunError:
            return -1.0
        found.append(result.rounds[-1].test_accuracy or 0.0)
    return sum(found) / len(found)


def search(method: str, out: Path) -> dict[str, Any]:
    """Return the best trial of a method and the scores of all, by successive halving."""
    trials, left, scores = trials_of(method), list(range(RUNGS[0][0])), {}
    for keep, rounds in RUNGS:
        left = left[:keep]
        scores = {
            number: score(trials[number], held_out(out), rounds, out / method / f"{number}-{rounds}") for number in left
        }
        left = sorted(left, key=lambda number: (-scores[number], number))
    best = left[0]
    print(
        f"{method}: {json.dumps(trials[best]['algorithm'])} {json.dumps(trials[best]['local'])} {scores[best]:.4f}",
        flush=True,
    )
    return {
        "method": method,
        **trials[best],
        "score": scores[best],
        "last_rung": {str(k): v for k, v in scores.items()},
    }


def main() -> None:
    """Search for every method, and write ``chosen.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    held_out(asked.out)
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as workers:
        found = list(workers.map(search, METHODS, [asked.out] * len(METHODS)))
    (asked.out / "chosen.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
