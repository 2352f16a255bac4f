"""The code of ``fl-sim doctor``: versions, hardware, trainer, data sets, caches, privacy ledgers, and a self-test."""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import fl_sim
from fl_sim.cli.screen import say, waiting
from fl_sim.data import NAMES, find, roots
from fl_sim.data.kept import cache_root
from fl_sim.errors import RunError
from fl_sim.interface import run
from fl_sim.native.compiling import ARCHITECTURES, WIDTHS, find_library, lanes_of, processor
from fl_sim.native.kernel import load_kernel
from fl_sim.simulation.client_ledgers import ledgers_root
from fl_sim.simulation.stage import pools_root

PACKAGES: Final = (
    "torch", "torchvision", "numpy", "flwr", "ray", "opacus", "dp-accounting", "scikit-learn", "pydantic",
)  # fmt: skip
EXTRAS: Final = ("datasets", "pyarrow", "optuna", "mlflow", "wandb", "tensorboard", "trackio")
FOLDERS: Final[Mapping[str, Callable[[], Path]]] = {
    "pools": pools_root, "features": cache_root, "ledgers": ledgers_root,
}  # fmt: skip
"""{name of a folder that is shared by all runs: function that returns its path}."""

_SELF_TEST: Final = {
    "data": "digits", "model": "logistic", "partition": "iid", "clients": 4, "rounds": 5, "seed": 0,
    "local": {"epochs": 5},
    "engine": {"kind": "inprocess", "workers": 1},
}  # fmt: skip
_LEAST_ACCURACY: Final = 0.5
"""Smallest accuracy for which the self-test succeeds.

Random guesses have an accuracy of 0.1. The model of the self-test usually has an accuracy of about 0.9.
"""
_MEGABYTE: Final = 1e6


def examine(data_root: Path | None, *, json_output: bool) -> None:
    """Print the state of the installation and the result of the self-test. Raise RunError if a check fails."""
    with waiting() as show:
        show("checking data sets, caches and ledgers")
        report: dict[str, Any] = {
            "fl_sim": _installation(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "packages": {name: _version(name) for name in PACKAGES},
            "extras": {name: _version(name) for name in EXTRAS},
            "processor": _processor(),
            "compiled_trainer": _compiled_trainer(),
            "gpu": _gpu(),
            "data_roots": [
                {"path": str(root.path), "origin": root.origin, "exists": root.path.is_dir()}
                for root in roots(data_root)
            ],
            "data": {name: source.layout if (source := find(name, data_root)) else None for name in NAMES},
            "folders": {name: _folder(place()) for name, place in FOLDERS.items()},
        }
        show("training a small model twice")
        report["self_test"] = _self_test()
    problems = [*report["fl_sim"]["problems"], *report["self_test"]["problems"]]
    say(json.dumps({"ok": not problems, **report}) if json_output else "\n".join(_in_lines(report)))
    if problems:
        raise RunError("; ".join(problems))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installation() -> dict[str, Any]:
    """Return the version of fl-sim, its folder, and a list of problems with the installation.

    An example of a problem: another installed project contains a package with the same import name, ``fl_sim``. Such a
    project exists on GitHub. pip then overwrites files of one project with files of the other.
    """
    place, problems = Path(fl_sim.__file__).parent, []
    others = sorted({name for name in metadata.packages_distributions().get("fl_sim", []) if name != "fl-sim"})
    if others:
        problems.append(
            f"the import package fl_sim belongs to {', '.join(others)}, too: install only fl-sim, in a new environment"
        )
    installed = _version("fl-sim")
    if installed is not None and installed != fl_sim.__version__:
        problems.append(
            f"fl_sim in {place} is version {fl_sim.__version__}, and the installed version is {installed}: install "
            "fl-sim again, or start Python in another folder"
        )
    return {"version": fl_sim.__version__, "installed": installed, "path": str(place), "problems": problems}


def _processor() -> dict[str, Any]:
    features = processor()
    known = {name for names in WIDTHS.values() for name in names} | {"avx512_bf16", "amx_bf16"} | set(ARCHITECTURES)
    return {"cores": os.cpu_count(), "features": sorted(features & known), "vector_width": lanes_of(features)}


def _compiled_trainer() -> dict[str, Any]:
    kernel, reason = load_kernel()
    return {"available": kernel is not None, "reason": reason, "path": str(find_library())}


def _gpu() -> list[str]:
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return []


def _folder(path: Path) -> dict[str, Any]:
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else []
    return {
        "path": str(path),
        "files": len(files),
        "megabytes": round(sum(one.stat().st_size for one in files) / _MEGABYTE, 1),
    }


def _self_test() -> dict[str, Any]:
    """Run FedAvg for five rounds, twice with the same seed.

    Return the total duration in seconds, the accuracy, whether the two models are bit-identical, and a list of
    problems.
    """
    start, problems = time.perf_counter(), []
    folder = Path(tempfile.mkdtemp(prefix="fl-sim-doctor-"))
    try:
        first, again = (run(_SELF_TEST, out=folder / name, progress=False) for name in ("first", "again"))
        models = {(one.directory / "model.safetensors").read_bytes() for one in (first, again)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    same = len(models) == 1
    if not same:
        problems.append(
            "two runs with the same seed ended in different models: report this with the output of 'fl-sim doctor "
            "--json'"
        )
    accuracy = first.final_accuracy or 0.0  # the accuracy is None if it was NaN, because JSON has no NaN
    if accuracy < _LEAST_ACCURACY:
        problems.append(
            f"the accuracy of the self-test is {accuracy:.2f}, which is less than {_LEAST_ACCURACY}: report this with "
            "the output of 'fl-sim doctor --json'"
        )
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "accuracy": accuracy,
        "bit_identical": same,
        "problems": problems,
    }


def _in_lines(report: Mapping[str, Any]) -> list[str]:
    ours, tested, trainer = report["fl_sim"], report["self_test"], report["compiled_trainer"]
    found = [f"{name} ({layout})" for name, layout in report["data"].items() if layout]
    missing = [name for name, layout in report["data"].items() if not layout]
    lines = {
        "fl-sim": f"{ours['version']} in {ours['path']}",
        "Python": report["python"],
        "system": report["system"],
        "packages": ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items()),
        "extras": ", ".join(f"{name} {version}" for name, version in report["extras"].items() if version) or "none",
        "processor": f"{report['processor']['cores']} cores; {', '.join(report['processor']['features']) or 'unknown'}",
        "compiled trainer": trainer["path"] if trainer["available"] else f"none: {trainer['reason']}",
        "GPU": ", ".join(report["gpu"]) or "none",
        "data roots": ", ".join(
            f"{root['path']} ({root['origin']}{'' if root['exists'] else ', not there'})"
            for root in report["data_roots"]
        ),
        "data sets": f"{', '.join(found)}; missing: {', '.join(missing) or 'none'}",
        **{
            name: f"{one['path']}: {one['files']} files, {one['megabytes']} MB"
            for name, one in report["folders"].items()
        },
        "self-test": f"accuracy {tested['accuracy']:.2f} after five rounds, "
        f"{'bit-identical' if tested['bit_identical'] else 'NOT bit-identical'} twice, {tested['seconds']} s",
    }
    return [f"{name:17} {text}" for name, text in lines.items()]
