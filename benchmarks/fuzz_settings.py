"""Settings drawn at random from all that is nasty: each is taken, or refused in one short line; nothing else happens.

Every settings class is walked through by its fields, so that a new one is fuzzed without a word here. What is taken is
resolved and split; ``--runs`` of them are run for a round on digits, too.

    python benchmarks/fuzz_settings.py [--cases 1000] [--runs 20] [--seed 0]

Prints how many were taken and refused; exits with 1 for a traceback, a refusal that is no short line, or a slow one.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run

MOST_CHARACTERS = 1000
"""The largest length of an error message in characters, also for several mistakes."""
MOST_SECONDS = 20.0

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5, 1e-3, 1e-300, 5e-324, 1e300, 1e308,
    float("nan"), float("inf"), -float("inf"), "0", "1e400", "9" * 5000,
)  # fmt: skip
SMALL: tuple[Any, ...] = (0, 1, 2, 3, 7, 10, 0.05, 0.1, 0.5, 0.9, 0.999, 1.0, 2.5, "3", "0.25", "1e-5")
OTHERS: tuple[Any, ...] = (
    None, True, False, "", " ", "x", ":", "::", "a:b:c", "nan", "\0", "a\ud800b", "ä" * 3, "x" * 100_000, b"bytes",
    (1,), [], [1, [2]], {}, {"kind": None}, {"kind": ["a"]}, {"kind": "x"}, {"a": {"b": {"c": 1}}}, object, 1j,
    "label-0", "label-99999999999", "dirichlet:0", "dirichlet:1e-300", "shards:999999999", "quantity:inf",
    "poisson:1e-320", "fixed-size:0", "global-dp:0", "global-dp:1e-300", "da-fl:inf", "ray:-1", "cosine:2", "npz:",
    "npz:\0", "folder:/dev", "npz:/dev/zero", "no.such.module:thing", "json:loads",
)  # fmt: skip


@dataclass
class Tally:
    """The outcomes. ``trouble``: one line for each case that was neither accepted nor refused in one line."""

    outcomes: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)


def cases(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield tables of settings: kinds chosen at random, a few values of theirs nasty, most of those just numbers."""
    generator = random.Random(seed)  # noqa: S311 (nothing is secret here)
    for _ in range(count):
        yield draw(Experiment, generator, share=generator.choice((0.02, 0.1, 0.3)))


def draw(settings: type, generator: random.Random, share: float) -> dict[str, Any]:
    """Return a table for ``settings`` in which about ``share`` of the values are drawn from all that is nasty."""
    table: dict[str, Any] = {}
    for name, annotation in _fields(settings).items():
        members = _classes(annotation)
        if name != "kind" and generator.random() < share:
            table[name] = generator.choice(generator.choice((NUMBERS, SMALL, SMALL, OTHERS)))
        elif members and generator.random() < max(share, 0.3):
            member = generator.choice(members)
            kind = get_args(_fields(member)["kind"])[:1] if "kind" in _fields(member) else ()
            table[name] = {**({"kind": kind[0]} if kind else {}), **draw(member, generator, share)}
    return table


def try_out(table: dict[str, Any], tally: Tally) -> Experiment | None:
    """Validate, resolve and split; count the outcome in ``tally``, and return the accepted experiment."""
    start = time.perf_counter()
    try:
        experiment = job_of(experiment_from(table)).experiment
    except UserError as refusal:
        tally.outcomes["refused"] += 1
        if "\n" in str(refusal) or len(str(refusal)) > MOST_CHARACTERS:
            tally.trouble.append(f"a refusal of {len(str(refusal))} characters, {str(refusal)[:80]!r}: {_told(table)}")
        experiment = None
    except Exception:  # noqa: BLE001 (that there is none is what is asked)
        tally.outcomes["traceback"] += 1
        tally.trouble.append(f"{traceback.format_exc(limit=-1).strip().splitlines()[-1][:120]}: {_told(table)}")
        experiment = None
    else:
        tally.outcomes["taken"] += 1
    if (seconds := time.perf_counter() - start) > MOST_SECONDS:
        tally.trouble.append(f"{seconds:.0f} s: {_told(table)}")
    return experiment


def try_run(experiment: Experiment, folder: Path, tally: Tally) -> None:
    """Run a small version of ``experiment`` for one round."""
    small = {"rounds": 1, "round_timeout": 60.0, "engine": {"kind": "inprocess"}, "device": "cpu"}
    try:
        run(experiment_from(experiment.model_dump() | small), folder)
        tally.outcomes["ran"] += 1
    except (UserError, RunError):
        tally.outcomes["run refused"] += 1
    except Exception:  # noqa: BLE001 (as above)
        tally.outcomes["traceback"] += 1
        tally.trouble.append(f"running: {traceback.format_exc(limit=-1).strip().splitlines()[-1][:200]}: {experiment}")


def is_small(experiment: Experiment) -> bool:
    """Say whether a round takes seconds: no teachers, no generators, no million of epochs or clients."""
    federated = experiment.algorithm.kind != "pate" and experiment.preprocess.kind == "none"
    return (
        federated
        and max(experiment.local.epochs, experiment.local.steps) <= 2
        and experiment.clients <= 1000
        and experiment.data == "digits"
    )


def main() -> None:
    """Fuzz, and print the counts."""
    parser = argparse.ArgumentParser(description="Fuzz the settings of an experiment.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tally = Tally()
    tried = [try_out(table, tally) for table in cases(arguments.cases, arguments.seed)]
    taken = [experiment for experiment in tried if experiment is not None and is_small(experiment)]
    with tempfile.TemporaryDirectory() as folder:
        for number, experiment in enumerate(taken[: arguments.runs]):
            try_run(experiment, Path(folder) / str(number), tally)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.outcomes.items())))
    print("\n".join(tally.trouble) or "no trouble")
    sys.exit(bool(tally.trouble))


def _fields(settings: type) -> dict[str, Any]:
    if issubclass(settings, BaseModel):
        return {name: one.annotation for name, one in settings.model_fields.items()}
    hints = get_type_hints(settings)
    return {one.name: hints[one.name] for one in fields(settings)}


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return [annotation]
    return [one for member in get_args(annotation) for one in _classes(member)]


def _told(table: dict[str, Any]) -> str:
    return ascii({key: str(value)[:60] if isinstance(value, str) else value for key, value in table.items()})[:200]


if __name__ == "__main__":
    main()
