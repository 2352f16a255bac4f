"""A sweep from Python with a plot: final accuracy over FedProx's mu, mean and deviation over seeds.

    python examples/sweep.py

What is finished is not run again: add values or seeds, and start it once more.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import fl_sim
from strategies.fedprox import FedProx


def sweep(mus: Sequence[float], seeds: Sequence[int], base: Mapping[str, Any], out: Path) -> Path:
    """Run FedProx with each mu and seed in ``out``, and return the picture that is drawn there."""
    plan = {
        "base": base,
        "grid": {"algorithm": [FedProx(mu=mu) for mu in mus], "seed": seeds},
        "centralized": False,
    }
    table = fl_sim.table(plan, out=out).table
    (column,) = table.columns
    accuracies = [[cell.last or 0.0 for cell in table.at(row, column)] for row in table.rows]
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(mus, [statistics.fmean(one) for one in accuracies], [statistics.pstdev(one) for one in accuracies])
    axes.set(xlabel="mu", ylabel="final test accuracy", xscale="log", title=column)
    figure.savefig(out / "sweep.png", dpi=150)
    return out / "sweep.png"


if __name__ == "__main__":
    settings = {"partition": "dirichlet:0.1", "rounds": 30, "local": {"epochs": 5}}
    picture = sweep([0.001, 0.01, 0.1, 1.0], [0, 1, 2], settings, Path("results/fedprox-mu"))
    print(f"drawn to {picture}")
