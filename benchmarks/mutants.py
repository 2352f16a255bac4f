"""Plant small faults in the code, one at a time, and check that the tests detect each of them.

Each file of benchmarks/mutants/ lists the mutants of one area: ``name``; ``file``; ``old``, a text that occurs there
exactly once; ``new``, which takes its place; ``tests``, the test files that must fail. They are planted in a copy of
the project, never in the project itself. Before the first one, all named tests must pass as things are.

    python benchmarks/mutants.py [--area partitions] [--only TEXT] [--json]

Exits with 1 where a mutant survives, with 2 where there is nothing to judge by.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

PROJECT = Path(__file__).resolve().parents[1]
LISTS = Path(__file__).resolve().parent / "mutants"
KEYS = {"name", "file", "old", "new", "tests"}
TIMEOUT = 300.0
"""Seconds that a mutant's tests may take: a change that makes them hang is seen, too."""

_COPIED = (
    "fl_sim",
    "strategies",
    "clients",
    "partitions",
    "tests",
    "benchmarks",
    "docs",
    "README.md",
    "pyproject.toml",
)
_OUTCOMES = {0: "survived", 1: "killed"}
"""What pytest's exit code says of a mutant; any other one is trouble with the tests themselves."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change. ``file`` and ``tests`` are relative to the project."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: "killed", "survived", or the message of pytest."""

    area: str
    name: str
    outcome: str
    seconds: float


def read_mutants(lists: Path = LISTS) -> list[Mutant]:
    """Read all lists. Raises ValueError for an entry with other keys than ``KEYS``."""
    mutants = []
    for path in sorted(lists.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
            if entry.keys() != KEYS:
                raise ValueError(f"{path.name}: a mutant has {sorted(entry)}, not {sorted(KEYS)}")
            mutants.append(Mutant(path.stem, **{**entry, "tests": tuple(entry["tests"])}))
    return mutants


def problems(mutants: Sequence[Mutant], project: Path = PROJECT) -> list[str]:
    """Return messages about the entries that no longer fit the code."""
    found = []
    names = Counter((mutant.area, mutant.name) for mutant in mutants)
    found += [f"{area}: two mutants are called {name!r}" for (area, name), count in names.items() if count > 1]
    for mutant in mutants:
        where = f"{mutant.area}: {mutant.name}"
        path = project / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.suffix == ".py" and path.is_file() else 0
        if count != 1:
            found.append(f"{where}: its text occurs {count} times in {mutant.file}, not once")
        if mutant.new == mutant.old:
            found.append(f"{where}: it changes nothing")
        found += [f"{where}: there is no {test}" for test in mutant.tests if not (project / test).is_file()]
        found += [] if mutant.tests else [f"{where}: it names no tests"]
    return found


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Have ``mutant`` in the project's ``copy`` while the block runs."""
    path = copy / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def run_tests(tests: Sequence[str], copy: Path, timeout: float | None = TIMEOUT) -> tuple[str, str]:
    """Run ``tests`` in ``copy``; return what they say of a mutant, and their output. ``timeout`` is in seconds."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return "killed", f"the tests took more than {TIMEOUT:g} s"
    return _OUTCOMES.get(done.returncode, f"pytest ended with {done.returncode}"), done.stdout + done.stderr


def judge(mutants: Sequence[Mutant], copy: Path) -> Iterator[Outcome]:
    """Plant one mutant after the other in ``copy``, and run its tests."""
    for mutant in mutants:
        start = time.perf_counter()
        with planted(mutant, copy):
            outcome, _ = run_tests(mutant.tests, copy)
        yield Outcome(mutant.area, mutant.name, outcome, time.perf_counter() - start)


def copied(project: Path, into: Path) -> Path:
    """Copy what tests need of ``project``; the compiled kernel comes along."""
    for name in _COPIED:
        source = project / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, into / name)
    return into


def main() -> None:
    """Plant the chosen mutants, and print their outcomes."""
    parser = argparse.ArgumentParser(description="Plant small wrong changes, and see whether the tests notice.")
    parser.add_argument("--area", help="only this list, such as partitions")
    parser.add_argument("--only", default="", help="only mutants whose name holds this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    mutants = read_mutants()
    if stale := problems(mutants):
        _refuse("\n".join(["the lists of mutants do not fit the code:", *stale]))
    chosen = [one for one in mutants if arguments.area in {None, one.area} and arguments.only in one.name]
    if not chosen:
        _refuse(f"no such mutant; areas: {', '.join(sorted({one.area for one in mutants}))}")
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(PROJECT, Path(folder))
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        as_it_is, output = run_tests(tests, copy, timeout=None)
        if as_it_is != "survived":
            _refuse(f"the tests do not pass as things are:\n{output[-4000:]}")
        outcomes = []
        for one in judge(chosen, copy):
            outcomes.append(one)
            print(f"{one.outcome:10} {one.seconds:6.1f} s  {one.area}: {one.name}", file=sys.stderr, flush=True)
    _print(outcomes, as_json=arguments.json)
    sys.exit(any(one.outcome != "killed" for one in outcomes))


def _refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(2)


def _print(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {"mutants": [asdict(one) for one in outcomes]}
        print(json.dumps(told))
        return
    print("| area | mutants | killed |\n|---|---:|---:|")
    for area in sorted({one.area for one in outcomes}):
        own = [one for one in outcomes if one.area == area]
        print(f"| {area} | {len(own)} | {sum(one.outcome == 'killed' for one in own)} |")
    print(f"| all | {len(outcomes)} | {sum(one.outcome == 'killed' for one in outcomes)} |")
    for one in outcomes:
        if one.outcome != "killed":
            print(f"{one.outcome}: {one.area}: {one.name}")


if __name__ == "__main__":
    main()
