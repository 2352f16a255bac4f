"""How far the compiled trainer, PyTorch's loop, a stack of clients and Ray end from each other: every method and model.

    PYTHONPATH=. python benchmarks/agreement.py [--json] [--algorithms fedavg ...] [--models mlp ...] [--no-ray]

Four clients with 160 small images in all train for two rounds, once in each way. Columns hold the greatest difference
of any weight of the models that come out. "nudged" tells what rounding alone does: PyTorch's loop, from a start of
which every weight is the next float32, against itself. "moved" is how far the furthest weight went. Ray must end in the
bits of one process: "yes", or a difference. Where the compiled trainer does not take a method on a model, its columns
are "-": PyTorch's loop trains it.
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
from fl_sim.params import detached
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from fl_sim.types import Params

ALGORITHMS = tuple(kind for kind in kinds_of("algorithm") if kind not in {"afl", "pate", "tstr"})
"""All that train in rounds."""

BOUNDS = {"logistic": 1e-5, "mlp": 1e-2, "niid-cnn": 1e-3, "dafl-cnn": 3e-2, "resnet": 3e-2}
"""How far apart, at most, two ways to train a model were found, rounded up: in parts of ``Row.moved``."""


@dataclass(frozen=True)
class Row:
    """One method on one model. Differences are the greatest of any weight; None: it is not trained like that.

    ``by_ray``: that of Ray from one process, 0 for the same bits; None where Ray was not asked. ``nudged``: that of the
    loop from a start that is one rounding away; ``moved``: how far the loop's furthest weight went.
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
        """Return how far apart the two that differ most are, in parts of ``moved``."""
        found = (self.compiled_and_loop, self.stack_and_loop, self.compiled_and_stack)
        return max((value for value in found if value is not None), default=0.0) / self.moved


def measured(algorithm: str, model: str, folder: Path, *, rounds: int = 2, ray: bool = True) -> Row:
    """Train in every way, in ``folder``, which holds what ``write_records`` puts there."""
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
    """Return how far apart one process and Ray end, at the furthest weight: 0 for the same bits.

    ``folder`` holds what ``write_records`` puts there.
    """
    settings = _settings(algorithm, model, folder, rounds)
    process, ray = (
        _trained({**settings, "engine": engine}, folder / f"{algorithm} {model} {engine.partition(':')[0]} alone")[0]
        for engine in ("inprocess", "ray:1")
    )
    return difference(process, ray)


def write_records(folder: Path) -> None:
    """Write 28x28 images, scikit-learn's digits made larger, as ``folder``/digits.npz: 160, and 40 for tests."""
    digits = load_digits()
    large = np.pad(np.kron(digits.images[:200] * 15, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    labels = digits.target[:200].astype(np.int64)
    np.savez(folder / "digits.npz", x_train=large[:160], y_train=labels[:160], x_test=large[160:], y_test=labels[160:])


@contextmanager
def without_kernel() -> Iterator[None]:
    """Let PyTorch train whatever the compiled trainer would."""
    with mock.patch.object(client_task, "load_kernel", return_value=(None, "it is hidden")):
        yield


def _nudged(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return ``build`` of models whose every initial weight is the next float32 above."""

    def nudged(*args: object, **options: object) -> nn.Module:
        model = build(*args, **options)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
        return model

    return nudged


def difference(one: Params, other: Params) -> float:
    """Return the greatest difference of any weight; NaN where one is not finite."""
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
    """Return the rows as a table for people, and for each model the greatest of a column in parts of what was moved."""
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
    """Measure and print; the exit code is 1 where Ray ends in other bits, or a bound does not hold."""
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
    """Start one Ray for all runs, which join it and leave it running."""
    choose_token()  # before Ray is imported
    from fl_sim.engines import ray_start

    ray_start.start_or_join(ray_start.RayResources(actors=1), 1)
    try:
        yield
    finally:
        ray_start.stop_or_leave()


if __name__ == "__main__":
    sys.exit(main())
