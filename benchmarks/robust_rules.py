"""Milliseconds that each defence of a robustness table takes in a round, beside the plain mean of the same updates.

Measured in turns in one process and one thread, on random updates: the whole of the aggregator's ``mean``. FLTrust is
measured without the training at the server. The noise of Global DP is the layer's, and is not measured.

    python benchmarks/robust_rules.py [--table benchmarks/robustness/fashion_mnist.toml] [--clients 20]
        [--parameters 199210] [--repeat 9] [--json]
"""

import argparse
import json
import statistics
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import FlatParams
from fl_sim.types import Cohort, Reply
from strategies.aggregators import Aggregator, Robust, WeightedMean

TABLE = Path(__file__).parent / "robustness" / "fashion_mnist.toml"


def rules_of(table: Path) -> dict[str, Aggregator]:
    """Return {label: aggregator}: the plain mean, and all rows whose aggregator compares single updates."""
    grid = tomllib.loads(table.read_text(encoding="utf-8"))["grid"][0]
    made = {one["label"]: experiment_from({"clients": 20, "aggregator": one.get("aggregator", "mean")}).aggregator
            for one in grid["algorithm"]}  # fmt: skip
    return {"mean": WeightedMean(), **{label: rule for label, rule in made.items() if isinstance(rule, Robust)}}


def cohort_of(rule: Aggregator, num_clients: int, parameters: int) -> Cohort:
    """Return random updates, a memory of zeros, and an update of the server's own."""
    generator = torch.Generator().manual_seed(0)
    layout = (("weights", (parameters,)),)
    *updates, own = (
        {"delta": FlatParams(torch.randn(parameters, generator=generator), layout)} for _ in range(num_clients + 1)
    )
    replies = tuple(Reply(client, payloads, 100, 0.5) for client, payloads in enumerate(updates))
    memory = rule.remembered(own, num_clients) if isinstance(rule, Robust) else {}
    return Cohort(1, replies, num_clients, float(num_clients), memory=memory, own=own)


def measure(rules: Mapping[str, Aggregator], clients: int, parameters: int, repeat: int) -> dict[str, dict[str, float]]:
    """Return for each rule the median milliseconds of a round, and the median ratio to the first rule."""
    cohorts = {label: cohort_of(rule, clients, parameters) for label, rule in rules.items()}
    spent: dict[str, list[float]] = {label: [] for label in rules}
    for turn in range(repeat + 1):
        for label, rule in rules.items():
            begun = time.perf_counter()
            rule.mean(cohorts[label], "uniform")
            if turn:  # the first turn loads what the rule needs
                spent[label].append(1e3 * (time.perf_counter() - begun))
    first = next(iter(spent.values()))
    return {
        label: {
            "milliseconds": statistics.median(own),
            "ratio": statistics.median(one / other for one, other in zip(own, first, strict=True)),
        }
        for label, own in spent.items()
    }


def main() -> None:
    """Measure all rules of a table and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=199_210)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = measure(rules_of(chosen.table), chosen.clients, chosen.parameters, chosen.repeat)
    if chosen.json:
        print(json.dumps(found, indent=2))
        return
    for label, row in found.items():
        print(f"{label:30} {row['milliseconds']:8.1f} ms  {row['ratio']:6.1f} x")


if __name__ == "__main__":
    main()
