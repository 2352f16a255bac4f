"""Differences between compiled trainer, PyTorch's loop, stacks of clients and Ray, for every method and model.

    PYTHONPATH=. python benchmarks/agreement.py [--json] [--algorithms fedavg ...] [--models mlp ...] [--no-ray]

Four clients with 160 small images together train for two rounds, once in each way. Columns contain the largest
difference of any weight of the final models. "nudged" shows the effect of rounding alone: the difference of two runs of
PyTorch's loop, one of which starts from the next larger float32 of every weight. "moved" is the largest change of any
weight in training. Ray must give the same bits as one process: "yes", or the difference. If the compiled trainer does
not support a method on a model, PyTorch's loop trains it, and the columns of the compiled trainer are "-".
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

from clients import client_task
from fl_sim import models
from fl_sim.engines.own_ray import choose_token
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.kinds import path_in
from fl_sim.params import detached
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from fl_sim.types import Params

ALGORITHMS = tuple(kind for kind, made in kinds_of("algorithm").items() if not path_in(made, "procedure"))
"""All algorithms that train in rounds."""

BOUNDS = {"logistic": 1e-5, "mlp": 1e-2, "niid-cnn": 1e-3, "dafl-cnn": 3e-2, "resnet": 3e-2}
"""The largest measured difference of two ways to train each model, divided by ``Row.moved``, rounded up."""


@dataclass(frozen=True)
class Row:
    """The differences for one method on one model, each the largest of any weight; None if one way cannot train it.

    ``by_ray``: between Ray and one process, 0 for the same bits; None if Ray was not used. ``nudged``: between two runs
    of the loop whose initial weights differ by one rounding. ``moved``: the largest change of a weight in the loop.
    """

    algorithm: str
    model: str
    compiled_and_loop: float | None
    stack_and_loop: float | None
    compiled_and_stack: float | None
    by_ray: float | None
    nudged: float
    moved: float

    @property
    def apart(self) -> float:
        """Return the largest difference of two ways to train, divided by ``moved``."""
        found = (self.compiled_and_loop, self.stack_and_loop, self.compiled_and_stack)
        return max((value for value in found if value is not None), default=0.0) / self.moved


def measured(algorithm: str, model: str, folder: Path, *, rounds: int = 2, ray: bool = True) -> Row:
    """Train in every way on the records in ``folder``, which ``write_records`` wrote."""
    ways = {"compiled": "inprocess", "stack": {"kind": "inprocess", "stack": 4}}
    if ray:
        ways["ray"] = "ray:1"
    settings = _settings(algorithm, model, folder, rounds)
    ends, trainers = {}, {}
    for way, engine in ways.items():
        ends[way], trainers[way] = _trained({**settings, "engine": engine}, folder / f"{algorithm} {model} {way}")
    with without_kernel():
        ends["loop"], _ = _trained({**settings, "engine": "inprocess"}, folder / f"{algorithm} {model} loop")
        with mock.patch.object(models, "build", _nudged(models.build)):
            ends["nudged"], _ = _trained({**settings, "engine": "inprocess"}, folder / f"{algorithm} {model} nudged")
    is_compiled = trainers["compiled"].startswith("native")
    is_stacked = trainers["stack"].startswith("stacked")
    start = detached(job_of(experiment_from(settings)).model().named_parameters())
    return Row(
        algorithm, model,
        difference(ends["compiled"], ends["loop"]) if is_compiled else None,
        difference(ends["stack"], ends["loop"]) if is_stacked else None,
        difference(ends["compiled"], ends["stack"]) if is_compiled and is_stacked else None,
        difference(ends["ray"], ends["compiled"]) if ray else None,
        difference(ends["nudged"], ends["loop"]),
        difference(ends["loop"], start),
    )  # fmt: skip


def ray_and_process(algorithm: str, model: str, folder: Path, *, rounds: int = 1) -> float:
    """Return the largest difference of any weight between one process and Ray: 0 for the same bits.

    ``folder``: the folder with the records of ``write_records``.
    """
    settings = _settings(algorithm, model, folder, rounds)
    process, ray = (
        _trained({**settings, "engine": engine}, folder / f"{algorithm} {model} {engine.partition(':')[0]} alone")[0]
        for engine in ("inprocess", "ray:1")
    )
    return difference(process, ray)


def write_records(folder: Path) -> None:
    """Write ``folder``/digits.npz: scikit-learn's digits enlarged to 28x28, 160 for training and 40 for tests."""
    digits = load_digits()
    large = np.pad(np.kron(digits.images[:200] * 15, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target[:200].astype(np.int64)
    np.savez(folder / "digits.npz", x_train=large[:160], y_train=labels[:160], x_test=large[160:], y_test=labels[160:])


@contextmanager
def without_kernel() -> Iterator[None]:
    """Disable the compiled trainer, so that PyTorch trains all clients."""
    with mock.patch.object(client_task, "load_kernel", return_value=(None, "it is hidden")):
        yield


def _nudged(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a builder like ``build`` whose models have the next larger float32 in place of every initial weight."""

    def nudged(*args: object, **options: object) -> nn.Module:
        model = build(*args, **options)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
        return model

    return nudged


def difference(one: Params, other: Params) -> float:
    """Return the largest difference of any weight; NaN if a weight is not finite."""
    return float(torch.stack([(one[name].double() - other[name].double()).abs().max() for name in one]).max())


def _settings(algorithm: str, model: str, folder: Path, rounds: int) -> dict[str, object]:
    return {
        "data": f"npz:{folder / 'digits.npz'}", "partition": "iid", "clients": 4, "rounds": rounds, "model": model,
        "algorithm": algorithm, "device": "cpu", "evaluate_every": rounds,
        "local": {"batch_size": 16, "learning_rate": 0.02},
    }  # fmt: skip


def _trained(settings: dict[str, object], out: Path) -> tuple[Params, str]:
    experiment: Experiment = experiment_from(settings)
    trainer = str(run(experiment, out)["trainer"])
    return load_file(out / "model.safetensors"), trainer


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the rows, and for each model the largest value of a column divided by ``moved``."""
    names = ("compiled_and_loop", "stack_and_loop", "compiled_and_stack", "nudged", "moved")
    lines = [f"| method | model | {' | '.join(names).replace('_and_', ', ')} | Ray the same |", "|---" * 8 + "|"]
    for row in rows:
        same = "-" if row.by_ray is None else "yes" if row.by_ray == 0 else f"{row.by_ray:.1e}"
        cells = " | ".join(_figure(getattr(row, name)) for name in names)
        lines.append(f"| {row.algorithm} | {row.model} | {cells} | {same} |")
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        found = [[value / row.moved for row in own if (value := getattr(row, name)) is not None] for name in names]
        cells = " | ".join(_figure(max(values, default=None)) for values in found)
        lines.append(f"| greatest, of moved | {model} | {cells} | |")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def main() -> int:
    """Measure and print. The exit code is 1 if Ray gives other bits, or if a difference exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--models", nargs="+", choices=tuple(BOUNDS), default=tuple(BOUNDS))
    parser.add_argument("--no-ray", action="store_true")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        write_records(Path(name))
        if not asked.no_ray:
            opened.enter_context(one_ray())
        for model in asked.models:
            for algorithm in asked.algorithms:
                rows.append(measured(algorithm, model, Path(name), ray=not asked.no_ray))
                print(f"{model} {algorithm}: {rows[-1]}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows]) if asked.json else table(rows))
    return int(any(row.by_ray or row.apart > BOUNDS[row.model] for row in rows))


@contextmanager
def one_ray() -> Iterator[None]:
    """Start one Ray for all runs. A run joins this Ray and does not stop it."""
    choose_token()  # before Ray is imported
    from fl_sim.engines import ray_start

    ray_start.start_or_join(ray_start.RayResources(actors=1), 1)
    try:
        yield
    finally:
        ray_start.stop_or_leave()


if __name__ == "__main__":
    sys.exit(main())
