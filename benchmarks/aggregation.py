"""Seconds to aggregate a round's updates: the server's half of a round, against the plain way and the floor.

Measured in turns in one process and one thread: the whole of FederatedStrategy.aggregate_train (unpack, check, sort,
average, merge), the average alone, and what one would write first: add up dictionaries of numpy arrays in float32.
The floor is one pass over the updates at the rate at which this machine reads memory.

    python benchmarks/aggregation.py [--clients 1000] [--parameters 60000] [--repeat 9] [--json]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Message

from fl_sim.engines import arrays, wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.params import FlatParams, flattened
from fl_sim.types import ClientUpdate, Cohort, Reply
from strategies.aggregators import WeightedMean
from strategies.fedavg import FedAvg
from strategies.flower import FederatedStrategy
from strategies.samplers import Everyone

NAMES = ("plain numpy loop", "aggregate_train", "WeightedMean alone", "one pass over the updates")


def shapes_of(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a small CNN with a last layer that makes up the number of ``parameters``."""
    shapes: dict[str, tuple[int, ...]] = {
        "conv1": (6, 1, 5, 5), "bias1": (6,), "conv2": (16, 6, 5, 5), "bias2": (16,), "linear1": (120, 256),
        "bias3": (120,), "linear2": (84, 120), "bias4": (84,),
    }  # fmt: skip
    left = parameters - sum(int(np.prod(shape)) for shape in shapes.values())
    if left < 1:
        raise SystemExit(f"--parameters must be at least {parameters - left + 1}")
    return {**shapes, "last": (left,)}


def updates_of(num_clients: int, parameters: int) -> list[FlatParams]:
    """Return random updates, one vector for each client."""
    generator = torch.Generator().manual_seed(0)
    shapes = shapes_of(parameters)
    layout = tuple(shapes.items())
    return [FlatParams(torch.randn(parameters, generator=generator), layout) for _ in range(num_clients)]


def plain_mean(updates: list[dict[str, np.ndarray]], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean of dictionaries of arrays, by the simplest loop. This is the baseline."""
    mean = {name: np.zeros_like(value) for name, value in updates[0].items()}
    for update, weight in zip(updates, weights, strict=True):
        for name, value in update.items():
            mean[name] = mean[name] + value * np.float32(weight)
    return mean


def strategy_and_replies(updates: list[FlatParams]) -> tuple[FederatedStrategy, list[Message]]:
    """Return a strategy in the middle of a round, and the replies of its clients, last client first."""
    grid, algorithm = LocalGrid(len(updates)), FedAvg()
    server = algorithm.init(flattened({name: torch.zeros(shape) for name, shape in updates[0].layout}))
    order = wire.TaskConfig("", 0, 0.0, "", "")
    strategy = FederatedStrategy(algorithm, WeightedMean(), Everyone(), server, order, len(updates), 0)
    sent = strategy.configure_train(1, arrays.array_record({}), wire.ConfigRecord({"learning-rate": 0.1}), grid)
    replies = [
        Message(wire.update_content(ClientUpdate({"delta": update}, 1 + client % 7, 0.5)), reply_to=message)
        for client, (update, message) in enumerate(zip(updates, sent, strict=True))
    ]
    return strategy, replies[::-1]


def measure(num_clients: int, parameters: int, repeat: int) -> dict[str, dict[str, float]]:
    """Return for each way the median CPU and wall seconds, and the median ratio of CPU seconds to the baseline."""
    updates = updates_of(num_clients, parameters)
    arrays = [{name: value.numpy() for name, value in update.items()} for update in updates]
    counts = np.array([1 + client % 7 for client in range(num_clients)])
    cohort = Cohort(
        1, tuple(Reply(client, {"delta": update}, int(counts[client]), 0.5) for client, update in enumerate(updates)),
        num_clients, num_clients,
    )  # fmt: skip
    strategy, replies = strategy_and_replies(updates)
    jobs: dict[str, Callable[[], object]] = dict(
        zip(
            NAMES,
            (
                lambda: plain_mean(arrays, counts / counts.sum()),
                lambda: strategy.aggregate_train(1, replies),
                lambda: WeightedMean().mean(cohort, "examples"),
                lambda: [update.flat.sum() for update in updates],
            ),
            strict=True,
        )
    )
    turns = [{name: timed(job) for name, job in jobs.items()} for _ in range(repeat + 1)][1:]
    return {
        name: {
            "cpu_seconds": statistics.median(turn[name][0] for turn in turns),
            "wall_seconds": statistics.median(turn[name][1] for turn in turns),
            "cpu_ratio": statistics.median(turn[name][0] / turn[NAMES[0]][0] for turn in turns),
        }
        for name in NAMES
    }


def timed(job: Callable[[], object]) -> tuple[float, float]:
    """Return the (CPU, wall) seconds of ``job``."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=60_000)
    parser.add_argument("--repeat", type=int, default=9, help="turns, of which the median is reported")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.clients, options.parameters, options.repeat)
    megabytes = 4e-6 * options.clients * options.parameters
    if options.json:
        print(json.dumps({"rows": rows, "megabytes": megabytes, "load": os.getloadavg()}))
        return
    print(f"{options.clients} updates of {options.parameters} parameters, {megabytes:.0f} MB; one thread, medians of")
    print(f"{options.repeat} turns; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors\n")
    print("| what | CPU ms | wall ms | CPU ratio | GB/s |\n|---|---|---|---|---|")
    for name, row in rows.items():
        cpu = row["cpu_seconds"]
        print(
            f"| {name} | {1e3 * cpu:.1f} | {1e3 * row['wall_seconds']:.1f} | {row['cpu_ratio']:.2f} "
            f"| {megabytes / 1e3 / cpu:.1f} |"
        )


if __name__ == "__main__":
    main()
