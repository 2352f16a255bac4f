"""Robust aggregators and model attacks beside those of ByzFL, on random vectors.

    pip install --no-deps --target DIR byzfl==0.0.11 seaborn
    PYTHONPATH=DIR python benchmarks/peers/robust_byzfl.py

Every rule and attack that both have gets the same float64 numbers. The largest difference over all seeds is printed;
the exit code is 1 if one is above 1e-6. Where definitions differ, ``note`` says how, and what the paper has; then ours
is given the settings with which both must agree.
"""

# mypy: disable-error-code="import-not-found"

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import byzfl
import numpy as np
import torch

from fl_sim.types import Cohort, Reply
from strategies.attacks import ALittleIsEnough, Seen
from strategies.centred_clipping import CentredClipping
from strategies.coordinate_median import CoordinateMedian
from strategies.geometric_median import GeometricMedian
from strategies.krum import Krum, MultiKrum
from strategies.mixing import Bucketing, NearestNeighbourMixing
from strategies.model_attacks import InnerProductManipulation, Mimic
from strategies.norm_bound import NormBound
from strategies.trimmed_mean import TrimmedMean

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Pair: TypeAlias = tuple[str, Callable[[Rows], Any], Callable[[Rows], Any], str]

LARGEST = 1e-6
CLIENTS, HOSTILE, SIZE, SEEDS = 15, 3, 40, 20
_ONE_MORE = "ByzFL adds the n - f - 1 nearest, the paper n - f - 2: ours with hostile = f - 1"


def replies(rows: Rows) -> tuple[Reply, ...]:
    """Return one update for each row, in float64."""
    return tuple(Reply(i, {"delta": {"w": torch.from_numpy(row.copy())}}, 1, None) for i, row in enumerate(rows))


def ours(rule: Any) -> Callable[[Rows], Any]:
    """Return a function from rows to the aggregate of our ``rule``."""

    def made(rows: Rows) -> Any:
        aggregate = rule.mean(Cohort(1, replies(rows), len(rows), float(len(rows))), "uniform")
        return aggregate.payloads["delta"]["w"].numpy()

    return made


def forged(attack: Any) -> Callable[[Rows], Any]:
    """Return a function from honest rows to the forged update of our ``attack``."""

    def made(rows: Rows) -> Any:
        seen = Seen(replies(rows), len(rows) + HOSTILE, np.random.default_rng(0))
        return attack.forged(replies(rows[:2]), seen)[0].payloads["delta"]["w"].numpy()

    return made


def clipped_twice(rows: Rows) -> Any:
    """Return our centred clipping in a second round, with the memory of the first round."""
    rule, cohort = CentredClipping(tau=2.0, iterations=3), Cohort(1, replies(rows), len(rows), float(len(rows)))
    first = rule.mean(cohort, "uniform")
    assert first is not None
    again = rule.mean(Cohort(2, replies(rows[::-1] * 1.5), len(rows), 0.0, memory=first.memory), "uniform")
    assert again is not None
    return again.payloads["delta"]["w"].numpy()


def clipped_twice_there(rows: Rows) -> Any:
    """Return ByzFL's centred clipping in a second round."""
    rule = byzfl.CenteredClipping(L=3, tau=2.0)
    rule(rows)
    return rule(rows[::-1] * 1.5)


def pairs() -> Iterator[Pair]:
    """Yield (name, our function, ByzFL's function, note) of everything that both have."""
    f, n = HOSTILE, CLIENTS
    yield "median", ours(CoordinateMedian()), byzfl.Median(), "in PyTorch, ByzFL takes the lower of two middle values"
    yield "trimmed mean", ours(TrimmedMean(trim=f / n)), byzfl.TrMean(f), ""
    median = byzfl.GeometricMedian(nu=1e-6, T=2000)
    yield "geometric median", ours(GeometricMedian(iterations=2000)), median, "after 2,000 steps; ByzFL starts from 0"
    yield "Krum", ours(Krum(hostile=f - 1)), byzfl.Krum(f), _ONE_MORE
    yield "Multi-Krum", ours(MultiKrum(hostile=f - 1, selected=n - f)), byzfl.MultiKrum(f), _ONE_MORE
    yield "centred clipping", clipped_twice, clipped_twice_there, "three steps a round, two rounds"

    def mixed(rows: Rows) -> Any:
        return byzfl.Median()(byzfl.NNM(f)(rows))

    yield "NNM, median", ours(NearestNeighbourMixing(hostile=f, over=CoordinateMedian())), mixed, ""

    def bucketed(rows: Rows) -> Any:
        return byzfl.TrMean(f)(byzfl.Bucketing(1)(rows))

    one = Bucketing(size=1, over=TrimmedMean(trim=f / n))
    yield "bucketing", ours(one), bucketed, "buckets of one: others are random"

    def bounded(rows: Rows) -> Any:
        return byzfl.Average()(byzfl.Clipping(3.0)(rows.copy()))

    yield "norm bound", ours(NormBound(norm_bound=3.0)), bounded, ""
    ipm = InnerProductManipulation(eps=2.0)
    yield "IPM", forged(ipm), byzfl.InnerProductManipulation(2.0), ""
    yield "Mimic", forged(Mimic()), byzfl.Mimic(0), "the first honest client"
    z = 1.5 * math.sqrt(n / (n - 1))
    alie = forged(ALittleIsEnough(knows="all", deviations=z))

    def other_side(rows: Rows) -> Any:
        return 2 * rows.mean(axis=0) - alie(rows)

    subtracted = "ByzFL adds deviations, with n - 1; the authors' program subtracts them"
    yield "ALIE", other_side, byzfl.ALittleIsEnough(1.5), subtracted


def main() -> int:
    """Print the table; return 1 if a difference is too large."""
    failed = False
    print(f"{CLIENTS} vectors of {SIZE} numbers, {SEEDS} seeds; f = {HOSTILE}\n")
    print("| | largest difference | note |\n|---|---|---|")
    for name, here, there, note in pairs():
        found = 0.0
        for seed in range(SEEDS):
            coins = np.random.default_rng(seed)
            rows = coins.normal(size=(CLIENTS, SIZE)) * coins.uniform(0.1, 2, size=(CLIENTS, 1))
            rows[:HOSTILE] += 5
            found = max(found, float(np.abs(np.asarray(here(rows)) - np.asarray(there(rows))).max()))
        failed |= not found <= LARGEST
        print(f"| {name} | {found:.1e} | {note} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
