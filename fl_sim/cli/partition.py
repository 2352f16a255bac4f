"""``fl-sim partition``: what each client would hold."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fl_sim.cli.arguments import Given
from fl_sim.cli.run import parse_experiment
from fl_sim.cli.screen import say
from fl_sim.data import load
from fl_sim.errors import printable
from fl_sim.experiment.job import shards_of
from fl_sim.kinds import short_form
from fl_sim.report.figures.partition import draw_partition
from fl_sim.tables.labels import label
from partitions import label_counts
from partitions.assign import USUAL_MIN_SIZE

_MOST_ROWS = 30
_MOST_COLUMNS = 12
_QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def show_partition(given: Given, plot: Path | None, data_root: Path | None, *, json_output: bool) -> None:
    """Print sizes and label counts of every client, and draw them where ``plot`` names a file."""
    experiment = parse_experiment(given)
    data, clients, seed = experiment.data, experiment.clients, experiment.seed_of_partition
    dataset = load(data, data_root)
    parts = shards_of(dataset, experiment.partition, clients, seed)
    counts = label_counts(dataset.train.labels, parts, dataset.num_classes)
    left_out = np.bincount(dataset.train.labels, minlength=dataset.num_classes) - counts.sum(axis=0)
    scheme = short_form(experiment.partition)
    title = f"{data}, {label(experiment.partition)}, {clients:,} clients, seed {seed}"
    if plot is not None:
        draw_partition(counts, plot, title)
    _warn(counts, left_out)
    if json_output:
        sizes = counts.sum(axis=1).tolist()
        result = {"data": data, "data_note": dataset.note, "scheme": scheme, "clients": clients, "seed": seed,
                  "sizes": sizes, "label_counts": counts.tolist(), "left_out": left_out.tolist()}  # fmt: skip
        say(json.dumps(result))
        return
    _print(counts, f"{title} ({dataset.note})" if dataset.note else title)
    if plot is not None:
        say(f"drawn to {plot}")


def _warn(counts: NDArray[np.int64], left_out: NDArray[np.int64]) -> None:
    sizes = counts.sum(axis=1)
    num_small, num_empty = np.count_nonzero(sizes < USUAL_MIN_SIZE), np.count_nonzero(sizes == 0)
    if num_small:
        none = f"; {num_empty:,} of them none, and those train nothing" if num_empty else ""
        say(
            f"warning: {num_small:,} of {len(sizes):,} clients hold fewer than {USUAL_MIN_SIZE} records{none}", err=True
        )
    if left_out.any():
        classes = ", ".join(str(c) for c in np.flatnonzero(left_out))
        say(
            f"warning: {left_out.sum():,} of {left_out.sum() + sizes.sum():,} training records belong to no client: "
            f"nobody holds class {classes}; use at least {len(left_out)} clients or a larger k",
            err=True,
        )


def _print(counts: NDArray[np.int64], title: str) -> None:
    num_clients, num_classes = counts.shape
    wide = num_classes <= _MOST_COLUMNS
    shown = num_clients if num_clients <= _MOST_ROWS else 10
    table = Table(title=Text(printable(title)), box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    for heading in ("client", "records", *(map(str, range(num_classes)) if wide else ("classes",))):
        table.add_column(heading, justify="right")
    if not wide:
        table.add_column("largest (class: records)")
    for client in range(shown):
        row = counts[client]
        cells = [str(n) if n else "." for n in row] if wide else [str(np.count_nonzero(row)), _largest(row)]
        table.add_row(str(client), str(row.sum()), *cells)
    console = Console(soft_wrap=True)
    console.print(table)
    if shown < num_clients:
        console.print(f"... and {num_clients - shown:,} more clients (all of them with --json)")
    _print_quantiles(console, "records a client", counts.sum(axis=1))
    _print_quantiles(console, "classes a client", np.count_nonzero(counts, axis=1))


def _largest(row: NDArray[np.int64]) -> str:
    order = np.argsort(-row, kind="stable")[:5]
    return "  ".join(f"{c}: {row[c]}" for c in order if row[c])


def _print_quantiles(console: Console, what: str, values: NDArray[np.int64]) -> None:
    numbers = np.quantile(values, list(_QUANTILES.values()), method="nearest")
    console.print(f"{what}: " + ", ".join(f"{name} {number}" for name, number in zip(_QUANTILES, numbers, strict=True)))
