"""Counts of the modules that import each feature, and of the code that one round executes.

    python benchmarks/house.py [CHECKOUT]

For each feature: the files that are not its own and import one of its modules, which should be few, as what a feature
needs is said by its own files. Then how often general code asks whether a value is of one concrete kind; how large the
code is; and how many functions, files and lines of it the second round of a run goes through, in one process with one
thread, without what it calls in other packages. CHECKOUT: another one than this, for the first two tables.
"""

import argparse
import ast
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
TOPS = ("fl_sim", "strategies", "clients", "partitions")

FEATURES: Mapping[str, tuple[str, ...]] = {
    "DA-FL": ("clients.dafl", "fl_sim.stages.dafl", "fl_sim.simulation.dafl"),
    "Global DP": (
        "strategies.global_dp", "strategies.private", "strategies.private_plan", "strategies.correlated_noise",
    ),
    "compression": ("strategies.compression", "fl_sim.packed"),
    "CCVR, AFL": (
        "strategies.ccvr", "strategies.class_gaussians", "clients.private_moments",
        "strategies.afl", "strategies.fedpft", "strategies.head_training", "strategies.one_message",
        "strategies.ridge", "clients.gram", "clients.private_gram", "fl_sim.stages.ridge",
        "fl_sim.stages.feature_sums", "fl_sim.stages.fedpft", "fl_sim.stages.one_message", "clients.mixtures",
        "fl_sim.stages.ccvr", "fl_sim.simulation.calibration", "fl_sim.simulation.summaries",
        "fl_sim.simulation.moments_bill",
    ),
    "private start": (
        "strategies.private_start", "clients.frequency_sums", "fl_sim.stages.private_start",
        "fl_sim.simulation.starting",
    ),
    "devices": (
        "fl_sim.devices", "strategies.timed", "strategies.servers", "fl_sim.stages.asynchronous",
        "fl_sim.simulation.asynchronous",
        "fl_sim.simulation.clocks",
    ),
    "BatchNorm": ("fl_sim.batch_norm", "strategies.batch_norm"),
    "PATE": (
        "strategies.pate", "fl_sim.stages.pate", "fl_sim.simulation.pate", "fl_sim.privacy.pate", "clients.teacher",
    ),
    "TSTR": ("strategies.tstr", "fl_sim.stages.tstr", "fl_sim.simulation.tstr"),
    "attacks": (
        "strategies.attacks", "strategies.model_attacks", "strategies.backdoors", "strategies.neurotoxin",
        "fl_sim.stages.backdoor",
    ),
}  # fmt: skip
"""{feature: its own modules}, now and before they had folders of their own."""

GENERAL = (
    "fl_sim",
    "clients.app",
    "clients.client_task",
    "strategies.flower",
    "strategies.answers",
    "strategies.layer",
)
"""Code that should know no feature, but for the features' own modules."""


@cache
def modules(top: Path) -> tuple[tuple[str, ast.Module], ...]:
    """Return the name and the syntax tree of every module of a checkout. Each checkout is parsed once."""
    paths = [path for package in TOPS for path in sorted((top / package).rglob("*.py"))]
    names = [".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return tuple((name, ast.parse(path.read_text())) for name, path in zip(names, paths, strict=True))


def imported(tree: ast.Module) -> set[str]:
    """Return the names that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    """Say whether ``module`` is one of ``packages`` or lies in one."""
    return any(module == one or module.startswith(f"{one}.") for one in packages)


def foreign(top: Path) -> dict[str, set[str]]:
    """Return, by feature, the modules that are not its own and import one of its modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules(top):
        others = [one for one in imported(tree) if one.startswith(TOPS)]
        for feature, own in FEATURES.items():
            if not is_of(name, own) and any(is_of(one, own) for one in others):
                found[feature].add(name)
    return found


def asked_by_kind(top: Path) -> list[str]:
    """Return, as module:line, where general code asks whether a value is of a feature's own class."""
    found = []
    for name, tree in modules(top):
        if not is_of(name, GENERAL) or any(is_of(name, own) for own in FEATURES.values()):
            continue
        of_features = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and any(is_of(node.module or "", own) for own in FEATURES.values())
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
                found += [f"{name}:{node.lineno}"] if names & of_features else []
    return found


def size(top: Path) -> tuple[int, int, float]:
    """Return how many files and lines the code has, and what part of the lines imports something."""
    files, lines, importing = 0, 0, 0
    for package in TOPS:
        for path in (top / package).rglob("*.py"):
            text = path.read_text()
            files, lines = files + 1, lines + text.count("\n")
            nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Import | ast.ImportFrom)]
            importing += sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in nodes)
    return files, lines, importing / lines


class Trail:
    """Records the functions and lines of this project that are executed between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.lines: set[tuple[str, int]] = set()

    def start(self) -> None:
        """Begin to record."""
        sys.settrace(self._called)

    def stop(self) -> None:
        """End the recording."""
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any] | None:  # noqa: ARG002 (settrace's)
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(HERE) or path.relative_to(HERE).parts[0] not in TOPS:
            return None
        self.functions.add(frame.f_code)
        return self._line

    def _line(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any]:  # noqa: ARG002
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def of_a_round(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many functions, files and lines the second round of such a run goes through."""
    from fl_sim.experiment.experiment import experiment_from
    from fl_sim.simulation.run import run
    from fl_sim.simulation.run_log import Silent

    trail = Trail()

    class Between(Silent):
        """Starts after the first round, and ends after the second."""

        def finished_round(self, record: Any) -> None:
            """Start the trail after the first round, and stop it after the second."""
            trail.stop() if record.round == 2 else trail.start()

    usual = {"model": "logistic", "rounds": 2, "engine": {"kind": "inprocess", "workers": 1}, "clients": 4}
    with tempfile.TemporaryDirectory() as folder:
        run(experiment_from({**usual, **settings}), Path(folder) / "run", observer=Between())
    return len(trail.functions), len({path for path, _ in trail.lines}), len(trail.lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE, metavar="CHECKOUT")
    top = parser.parse_args().checkout
    if not (top / "fl_sim").is_dir():
        parser.error(f"{top} is no checkout: it has no folder fl_sim")
    found = foreign(top)
    print("| feature | foreign files that import it | |\n|---|---|---|")
    for feature in FEATURES:
        print(f"| {feature} | {len(found[feature])} | {', '.join(sorted(found[feature]))} |")
    print(f"| all pairs | {sum(map(len, found.values()))} | |\n")
    asked = asked_by_kind(top)
    print(f"general code asks for a concrete kind in {len(asked)} places: {', '.join(asked)}")
    files, lines, importing = size(top)
    print(f"{files} files, {lines:,} lines, {100 * importing:.1f} % of them import\n")
    if top.resolve() != HERE:
        return
    print("| one round of | functions | files | lines |\n|---|---|---|---|")
    private = {"aggregator": {"kind": "global-dp", "noise": "seeded"}}
    for name, settings in {"FedAvg": {}, "Global DP": private}.items():
        print(f"| {name} | {' | '.join(map(str, of_a_round(settings)))} |")


if __name__ == "__main__":
    main()
