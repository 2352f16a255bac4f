"""A sweep from Python with a plot: final accuracy by FedProx's mu, with mean and standard deviation over seeds.

    python examples/sweep.py

Finished runs are not repeated: add values or seeds, and start the script again.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import fl_sim
from strategies.fedprox import FedProx


def sweep(mus: Sequence[float], seeds: Sequence[int], base: Mapping[str, Any], out: Path) -> Path:
    """Run FedProx with each mu and seed in the folder ``out``, and return the path of the plot in this folder."""
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
    print(f"plot in {picture}")
