"""Where the time of one round goes: CPU milliseconds by part, for few large clients and for many small ones.

A run as `fl-sim run` does it, in one process with one worker, on MNIST with evaluation on its test set after every
round. The functions that make up a round are timed from outside, each without what it calls of the others; what none of
them covers is Flower's messages, apps and contexts, and our loop.

    python benchmarks/profile_round.py [--plot profile.png] [--json] [--rounds 9] [--algorithm scaffold]

Real images are read from $FL_SIM_DATA; without it they are random bytes of the same shape, which costs the same.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scale import data_of

WORKS = {"10 clients x 600 records": (100, 10), "100 clients x 100 records": (600, 100)}
"""Clients that share 60,000 records, and how many of them take part in a round."""

REST = "messages and the rest"
PARTS = (
    "training kernel", "around the kernel", "records", "client states", "generators", "algorithm", "packing",
    "aggregation", "sampling", REST, "checkpoint and log", "evaluation",
)  # fmt: skip


class Clock:
    """Adds up CPU seconds of this thread by part; a part's own seconds are without those of parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [REST]
        self._since = time.thread_time()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, timed as ``part``."""

        @wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            self._enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self._leave()

        return wrapper

    def lap(self) -> dict[str, float]:
        """Return the seconds by part since the last lap."""
        self._charge()
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def _enter(self, part: str) -> None:
        self._charge()
        self._inside.append(part)

    def _leave(self) -> None:
        self._charge()
        self._inside.pop()

    def _charge(self) -> None:
        now = time.thread_time()
        self.seconds[self._inside[-1]] += now - self._since
        self._since = now


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Time the functions that make up a round."""
    import clients.client_task
    import clients.train
    import fl_sim.native.kernel
    import fl_sim.simulation.rounds
    import fl_sim.training.records
    import fl_sim.training.trainer
    from fl_sim.engines import wire
    from fl_sim.native.kernel import load_kernel
    from strategies.aggregators import WeightedMean
    from strategies.algorithm import Averaging
    from strategies.samplers import FixedSize
    from strategies.scaffold import Scaffold

    kernel, _ = load_kernel()
    places: list[tuple[str, Any, str]] = [
        ("training kernel", fl_sim.training.trainer, "train"),  # PyTorch, where there is no kernel
        ("around the kernel", fl_sim.training.trainer.Trainer, "prepare"),
        ("around the kernel", fl_sim.native.kernel.PreparedTraining, "train"),
        ("records", fl_sim.training.records.Records, "tensors"),
        ("client states", clients.client_task, "load_state"),
        ("client states", clients.train, "save_state"),
        ("generators", clients.train, "rng"),
        *(("packing", wire, name) for name in ("task_content", "read_task", "update_content", "read_update")),
        ("sampling", FixedSize, "sample"),
        ("aggregation", WeightedMean, "mean"),
        ("evaluation", fl_sim.training.trainer.Trainer, "evaluate"),
        ("checkpoint and log", fl_sim.simulation.rounds, "_write_round"),
        *(("algorithm", kind, name) for kind in (Averaging, Scaffold) for name in ("plan", "finish", "merge")),
    ]
    if kernel is not None:
        places.append(("training kernel", kernel.library, f"fl_sim_train_{kernel.lanes}"))
    with ExitStack() as stack:
        for part, owner, name in places:
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield


def profile(clients: int, cohort: int, *, algorithm: str, data: str, rounds: int) -> dict[str, float]:
    """Return each part's CPU seconds in one round: medians over ``rounds``, after two that do not count."""
    import torch

    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.simulation.run import Silent, run
    from fl_sim.store.run_directory import RoundRecord

    torch.set_num_threads(1)
    clock, laps = Clock(), []

    class Watch(Silent):
        def finished_round(self, _: RoundRecord) -> None:
            laps.append(clock.lap())

    table = {
        "data": data, "partition": "iid", "clients": clients, "sampler": f"fixed-size:{cohort}", "model": "niid-cnn",
        "algorithm": algorithm, "rounds": rounds + 2, "engine": {"kind": "inprocess", "workers": 1},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, watched(clock):
        run(experiment_from(table), Path(folder) / "run", None, Watch())
    return {part: statistics.median(lap.get(part, 0.0) for lap in laps[2:]) for part in PARTS}


def table(profiles: dict[str, dict[str, float]]) -> str:
    """Return the profiles as Markdown: CPU milliseconds, and the share of the round without evaluation."""
    lines = [f"| part | {' | '.join(f'{work}: ms | %' for work in profiles)} |", "|---" * (2 * len(profiles) + 1) + "|"]
    totals = {work: sum(parts.values()) - parts["evaluation"] for work, parts in profiles.items()}
    for part in PARTS:
        cells = []
        for work, parts in profiles.items():
            share = f"{100 * parts[part] / totals[work]:.1f}" if part != "evaluation" else ""
            cells += [f"{1e3 * parts[part]:.2f}", share]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines.append(
        "| **round without evaluation** | " + " | ".join(f"{1e3 * t:.1f} | 100" for t in totals.values()) + " |"
    )
    return "\n".join(lines)


def plot(profiles: dict[str, dict[str, float]], path: Path, title: str) -> None:
    """Draw one panel for each work, with one bar for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(profiles), 4.6), layout="constrained")
    panels = figure.subplots(1, len(profiles), squeeze=False)[0]
    for axes, (work, parts) in zip(panels, profiles.items(), strict=True):
        total = sum(parts.values()) - parts["evaluation"]
        colors = [
            "tab:blue" if "kernel" in part else "tab:gray" if part == "evaluation" else "tab:orange" for part in parts
        ]
        axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()], color=colors)
        for place, (part, seconds) in enumerate(parts.items()):
            share = "" if part == "evaluation" else f"  {100 * seconds / total:.1f} %"
            axes.text(1e3 * seconds, place, f" {1e3 * seconds:.1f} ms{share}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set(
            title=f"{work}: {1e3 * total:.0f} ms without evaluation", xlabel="CPU milliseconds a round, one thread"
        )
        axes.set_xlim(right=1.35e3 * max(parts.values()))
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the picture to this PNG")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of which medians are taken")
    parser.add_argument("--algorithm", default="fedavg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = data_of(Path(folder))
        profiles = {
            work: profile(*sizes, algorithm=options.algorithm, data=data, rounds=options.rounds)
            for work, sizes in WORKS.items()
        }
    if options.plot:
        plot(profiles, options.plot, f"Where a round's time goes: {options.algorithm}, niid-cnn, batch 64, one epoch")
    if options.json:
        print(json.dumps({"seconds": profiles, "data": data, "load": os.getloadavg()}))
        return
    print(table(profiles))
    print(f"\n{options.algorithm} on {data}, CPU time of one thread; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
