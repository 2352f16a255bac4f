"""Where the compiled trainer's time goes, layer by layer, beside what one core of this machine could do at best.

    python benchmarks/roofline.py [--plot roofline.png] [--json] [--repeats 60] [--batch 64]
        [--only "resnet on CIFAR-10"] [--precision bfloat16]

The trainer is compiled once more, with a clock in it, and trains on one minibatch in one thread, again and again. For
every layer: milliseconds a minibatch forward, back to its inputs, back to its weights, for laying weights out and for
the step; and its least time. That is the larger of two: its operations, counted as if every product were computed, over
the rate of a loop of fused multiplications and additions; and the bytes of what it reads and writes, each number once,
over the rate of a loop that copies 1 MB (the L2 cache). A layer can be faster than that where it leaves arithmetic
out, as Winograd's convolutions and the way back through pooling do, and where ``--precision bfloat16`` takes two at a
time, or by AMX many (the least times are float32's).
Real images are read from $FL_SIM_DATA; without it they are random.
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from contestants import images
from numpy.typing import NDArray
from speed_work import SHAPES

from fl_sim.local_plan import LocalPlan
from fl_sim.models import MODELS
from fl_sim.native.compiling import NoCompiler, compile_kernel, compile_plain, lanes_of, processor
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.native.layers import KINDS, Stack, describe, products_in_output, products_of, shapes_of
from fl_sim.native.layers import rows_of as layers_of
from fl_sim.native.request import Draws, KernelJob
from fl_sim.params import detached, flattened
from fl_sim.seeding import rng
from fl_sim.types import LocalSettings, LocalTask, Precision

WORKS = {
    "niid-cnn on MNIST": ("niid-cnn", "mnist"),
    "niid-cnn on CIFAR-10": ("niid-cnn", "cifar10"),
    "dafl-cnn on CIFAR-10": ("dafl-cnn", "cifar10"),
    "resnet on CIFAR-10": ("resnet", "cifar10"),
}
PARTS = ("forward", "to inputs", "to weights", "layout", "step")
"""Of a layer's time, as clock.h has them."""

MOST_PLACES, FIRST_LAYER = 64, 3


@dataclass(frozen=True)
class Roofs:
    """What one core does at best: operations a second, and bytes a second in the L2 cache and in 64 MB of memory.

    ``half_operations``: those of AVX512-BF16's products of pairs; ``amx_operations``: of AMX's. 0 where there are none.
    """

    operations: float
    half_operations: float
    amx_operations: float
    cached_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class Row:
    """A layer in one minibatch: milliseconds by part, operations and bytes of all its ways, and its least time."""

    name: str
    milliseconds: dict[str, float]
    operations: float
    bytes: float
    least: float

    @property
    def total(self) -> float:
        """Return the milliseconds of all parts."""
        return sum(self.milliseconds.values())


def roofs(folder: Path) -> Roofs:
    """Measure the rates of this machine, each as the best of 5."""
    library = folder / "roofline.so"
    compile_plain(Path(__file__).with_suffix(".cpp"), library, lanes_of(processor()))
    measured = ctypes.CDLL(str(library))
    for name in ("operations", "bfloat16_operations", "amx_operations", "bytes"):
        getattr(measured, name).restype = ctypes.c_double
    memory = torch.ones(2**24)
    at = ctypes.c_void_p(memory.data_ptr())
    turns, rates = ctypes.c_long(3_000_000), []
    for _ in range(5):
        operations = measured.operations(turns, ctypes.c_float(0.5), at)
        halves = measured.bfloat16_operations(turns, at) if "avx512_bf16" in processor() else 0.0
        by_amx = measured.amx_operations(turns) if "amx_bf16" in processor() else 0.0
        cached = measured.bytes(ctypes.c_long(800), ctypes.c_long(2**18), at)
        rates.append((operations, halves, by_amx, cached, measured.bytes(ctypes.c_long(4), ctypes.c_long(2**24), at)))
    return Roofs(*(max(rate) for rate in zip(*rates, strict=True)))


def ticks(kernel: Kernel, precision: Precision) -> NDArray[np.float64]:
    """Return the clock's ticks since the last call, (places, parts)."""
    found = np.zeros((MOST_PLACES, len(PARTS)))
    kernel.function("clock", precision)(ctypes.c_void_p(found.ctypes.data))
    return found


def measure(
    kernel: Kernel, model: str, data: str, batch: int, repeats: int, precision: Precision = "float32"
) -> tuple[Stack, NDArray[np.float64]]:
    """Return the model and the milliseconds of every place and part in one minibatch, lower quartiles of ``repeats``.

    What takes a few milliseconds is often left alone by other programs, and then it is at its fastest.
    """
    torch.manual_seed(0)
    network = MODELS[model](SHAPES[data], 10)
    stack, params = describe(network, SHAPES[data]), flattened(detached(network.named_parameters()))
    assert stack is not None
    pixels, classes = images(data, batch)
    records = torch.from_numpy(np.moveaxis(pixels, -1, 1).astype(np.float32) / 255).contiguous()
    settings = LocalSettings(0.01, 0.9, 0.0, batch, 1)
    task = LocalTask(1, 0, 1, batch, settings, params)
    draws = Draws.of(task, LocalPlan(), batch, rng(0, "roofline"))
    lesson = KernelJob(task, LocalPlan(), records, torch.from_numpy(classes.astype(np.int64)), draws)
    taken = []
    for _ in range(repeats + 1):
        ticks(kernel, precision)
        start = time.perf_counter()
        kernel.train(stack, [lesson], precision)
        seconds = time.perf_counter() - start
        counted = ticks(kernel, precision)
        taken.append(1e3 * counted * (seconds / counted.sum()))
    return stack, np.quantile(np.stack(taken[1:]), 0.25, axis=0)


def rows_of(stack: Stack, milliseconds: NDArray[np.float64], batch: int, roof: Roofs) -> list[Row]:
    """Return a row for every layer, one for the loss, and one for the rest."""
    shapes, products, rows = shapes_of(stack), products_of(stack), []
    for index, row in enumerate(layers_of(stack)):
        kind, read, written = KINDS[row["kind"]], shapes[row["source"]], shapes[index + 1]
        ways = 3 if index else 2  # the gradient of the records is not computed
        operations = 2.0 * ways * batch * products[index]
        moved = batch * (np.prod(read) + np.prod(written)) * (2 if kind == "add" else 1)
        moved = ways * (moved + products_in_output(row) * written[0])
        least = max(operations / roof.operations, 4 * moved / roof.cached_bytes)
        name = f"{index + 1} {kind} " + "x".join(map(str, read)) + " to " + "x".join(map(str, written))
        taken = dict(zip(PARTS, milliseconds[FIRST_LAYER + index].tolist(), strict=True))
        rows.append(Row(name, taken, operations, 4.0 * moved, 1e3 * least))
    for place, name in enumerate(("records laid out, and the rest", "loss"), start=1):
        rows.append(Row(name, {"forward": float(milliseconds[place].sum())}, 0, 0, 0))
    return rows


def table(rows: list[Row]) -> str:
    """Return one network's rows as Markdown."""
    lines = ["| layer | ms | " + " | ".join(PARTS) + " | GFLOP/s | least ms | of the least |", "|---" * 10 + "|"]
    whole = Row(
        "**all**",
        {part: sum(row.milliseconds.get(part, 0) for row in rows) for part in PARTS},
        *(sum(getattr(row, what) for row in rows) for what in ("operations", "bytes", "least")),
    )
    for row in [*rows, whole]:
        cells = [f"{row.milliseconds[part]:.3f}" if part in row.milliseconds else "" for part in PARTS]
        rate = f"{row.operations / row.total / 1e6:.0f}" if row.operations else ""
        ratio = f"{row.total / row.least:.2f}" if row.least else ""
        lines.append(f"| {row.name} | {row.total:.3f} | {' | '.join(cells)} | {rate} | {row.least:.3f} | {ratio} |")
    return "\n".join(lines)


def plot(found: dict[str, list[Row]], roof: Roofs, path: Path) -> None:
    """Draw every layer that multiplies under the two roofs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    intensity = np.logspace(-1, 3.2, 200)
    for rate, name in ((roof.cached_bytes, "L2 cache"), (roof.memory_bytes, "memory")):
        axes.plot(intensity, np.minimum(roof.operations, intensity * rate) / 1e9, label=f"roof: {name}", color="0.4",
                  linestyle="-" if name == "L2 cache" else "--")  # fmt: skip
    for marker, (work, rows) in zip("os^D", found.items(), strict=False):
        layers = [row for row in rows if row.operations]
        share = [400 * row.total / sum(one.total for one in rows) for row in layers]
        axes.scatter([row.operations / row.bytes for row in layers],
                     [row.operations / row.total / 1e6 for row in layers], s=share, marker=marker, alpha=0.7,
                     label=work)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte that must be moved",
             ylabel="GFLOP/s, all products counted",
             title="The compiled trainer's layers under the roofs of one core (area: share of the time)")  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the picture to this PNG")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--repeats", type=int, default=60, help="minibatches of which lower quartiles are taken")
    parser.add_argument("--batch", type=int, default=64, help="records a minibatch")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="what products are computed in"
    )
    parser.add_argument("--only", choices=WORKS, action="append", help="only these networks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            roof = roofs(Path(folder))
            compile_kernel(Path(folder) / "clocked.so", ["-DFL_SIM_CLOCK"])
        except NoCompiler as reason:
            print(f"there is nothing to measure: {reason}", file=sys.stderr)
            return 2
        kernel, why_not = load_kernel.__wrapped__(Path(folder) / "clocked.so")
        if kernel is None:
            print(f"there is nothing to measure: {why_not}", file=sys.stderr)
            return 2
        if options.precision == "bfloat16" and not kernel.has_bfloat16:
            print("there is nothing to measure: this processor has no avx512_bf16", file=sys.stderr)
            return 2
        measured = {
            work: measure(kernel, *WORKS[work], options.batch, options.repeats, options.precision)
            for work in options.only or WORKS
        }
        found = {work: rows_of(*times, options.batch, roof) for work, times in measured.items()}
    if options.plot:
        plot(found, roof, options.plot)
    if options.json:
        print(json.dumps({
            "roofs": asdict(roof), "works": {work: [asdict(row) for row in rows] for work, rows in found.items()}
        }))  # fmt: skip
        return 0
    for work, rows in found.items():
        width = f"{kernel.lanes} numbers a vector, {options.precision}"
        print(f"\n{work}, a minibatch of {options.batch}, one thread, {width}:\n")
        print(table(rows))
    operations, halves, by_amx, cached, memory = (rate / 1e9 for rate in asdict(roof).values())
    print(f"\nRoofs of one core: {operations:.0f} GFLOP/s; of bfloat16 {halves:.0f}, by AMX {by_amx:.0f} (0: none);")
    print(f"{cached:.0f} GB/s in the L2 cache, {memory:.0f} in memory. Load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
