"""Makes the disk of runs unusable in many ways, and checks that runs report it and lose nothing.

Each case must end in one line that names a path and a cure, never in a traceback; ``result.json`` must say "failed"
where it can be written; and once there is room again the same run must end in the bits of one that was never disturbed.
Cases that need a file system of their own (a small one, one that cannot be written) mount one, which takes the right to
do so; without it they are left out, and counted as such.

    python benchmarks/disk_limits.py [--json]

Exits with 1 where a case fails.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import Silent, run
from fl_sim.store.files import explain
from fl_sim.store.run_directory import PRIVATE_ERRORS, RoundRecord, read_result

_QUICK = {"model": "logistic", "rounds": 3, "clients": 4, "engine": "inprocess"}
PLAIN = experiment_from(_QUICK)
SCAFFOLD = experiment_from(_QUICK | {"algorithm": "scaffold"})
PRIVATE = experiment_from(_QUICK | {"aggregator": {"kind": "global-dp", "noise": "seeded", "delta": 1e-3}})
DA_FL = experiment_from(_QUICK | {"preprocess": {"kind": "da-fl", "generator": "mean-embedding"}, "partition": "iid"})
PATE = experiment_from(
    _QUICK | {"algorithm": {"kind": "pate", "queries": 20, "student": {"kind": "supervised", "steps": 20}}}
)


class NoMount(Exception):  # noqa: N818 (the reason why a case is left out)
    """This user may not mount a file system."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. ``wrong``: the fault, empty if there is none. ``said``: the run's last line."""

    case: str
    said: str
    wrong: str
    left_out: bool = False


@dataclass(frozen=True)
class Ended:
    """The message and the checked facts of a disturbed run; None for a fact that cannot be checked."""

    said: str
    is_told: bool | None = None
    is_resumed: bool | None = None


class _At(Silent):
    """An observer that calls a function after a given round."""

    def __init__(self, server_round: int, act: Callable[[], object]) -> None:
        self._round, self._act = server_round, act

    def finished_round(self, record: RoundRecord) -> None:
        if record.round == self._round:
            self._act()


def refused(experiment: Experiment, out: Path, observer: Silent | None = None) -> str:
    """Start a run that must be refused, and return the error message."""
    try:
        run(experiment, out, None, observer)
    except (RunError, UserError) as error:
        return str(error)
    raise AssertionError("the run ended well")


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limit the size of every file to ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory. Raises NoMount."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)],  # noqa: S607 (the system's own)
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise NoMount
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # noqa: S607


@contextmanager
def pools_in(folder: Path) -> Iterator[None]:
    """Keep pools and votes in ``folder``."""
    before = os.environ.get("FL_SIM_POOLS")
    os.environ["FL_SIM_POOLS"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FL_SIM_POOLS"]
        else:
            os.environ["FL_SIM_POOLS"] = before


def fill(folder: Path) -> Path:
    """Write until the file system is full; return the file that fills it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


def _same(experiment: Experiment, folder: Path, out: Path) -> bool:
    """Resume a disturbed run, and compare it with an undisturbed run."""
    run(experiment, out)
    run(experiment, folder / "whole")
    mine, theirs = (load_file(place / "model.safetensors") for place in (out, folder / "whole"))
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _is_told(out: Path) -> bool:
    return (read_result(out) or {}).get("status") == "failed"


def limited(experiment: Experiment, size: int) -> Callable[[Path], Ended]:
    """Limit the size of every file to ``size`` bytes from the start of a run."""

    def case(folder: Path) -> Ended:
        with file_limit(size):
            said = refused(experiment, folder / "run")
        return Ended(said, None, _same(experiment, folder, folder / "run"))

    return case


def full(experiment: Experiment, after: int) -> Callable[[Path], Ended]:
    """Fill the file system after a round, free the space, and resume the run."""

    def case(folder: Path) -> Ended:
        with mounted(folder / "small", "size=2m") as small:
            said = refused(experiment, small / "run", _At(after, lambda: fill(small)))
            (small / "filler").unlink()
            return Ended(said, None, _same(experiment, folder, small / "run"))

    return case


def changed(act: Callable[[Path], object], *, is_told: bool | None = None) -> Callable[[Path], Ended]:
    """Change the run directory after the second round."""

    def case(folder: Path) -> Ended:
        out = folder / "run"
        said = refused(SCAFFOLD, out, _At(2, lambda: act(out)))
        return Ended(said, is_told if is_told is None else _is_told(out) == is_told)

    return case


def _replaced(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("a file")


def _blocked(name: str) -> Callable[[Path], None]:
    def act(out: Path) -> None:
        (out / name).unlink()
        (out / name).mkdir()

    return act


def _linked(out: Path) -> None:
    (out / "rounds.jsonl").unlink()
    (out / "rounds.jsonl").symlink_to("/dev/full")


def at_start(make: Callable[[Path], Path]) -> Callable[[Path], Ended]:
    """Start a run whose directory cannot be written."""
    return lambda folder: Ended(refused(PLAIN, make(folder)))


def _a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


def _a_loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def _a_dangling_link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere" / "run")
    return folder / "link"


def read_only_start(folder: Path) -> Ended:
    """Start on a file system that cannot be written."""
    with mounted(folder / "fixed", "ro") as fixed:
        return Ended(refused(PLAIN, fixed / "run"))


def pools(experiment: Experiment, options: str, *, filled: bool = False) -> Callable[[Path], Ended]:
    """Make the folder of pools unusable, so that clients' releases before the first round cannot be stored."""

    def case(folder: Path) -> Ended:
        with mounted(folder / "pools", options) as place, pools_in(place):
            if filled:
                fill(place)
            said = refused(experiment, folder / "run")
            private = folder / "run" / PRIVATE_ERRORS  # error messages of clients are not quoted
            said += private.read_text(encoding="utf-8").rstrip("\n") if private.exists() else ""
            return Ended(said, _is_told(folder / "run"))

    return case


CASES: Mapping[str, Callable[[Path], Ended]] = {
    "file-size limit: the settings": limited(PLAIN, 200),
    "file-size limit: the checkpoint": limited(PLAIN, 3000),
    "file-size limit: what clients keep": limited(SCAFFOLD, 20_000),
    "file-size limit: the privacy ledger": limited(PRIVATE, 400),
    "full disk: plain": full(PLAIN, 2),
    "full disk: what clients keep": full(SCAFFOLD, 1),
    "full disk: private": full(PRIVATE, 2),
    "full disk: the result": full(PLAIN, 3),
    "deleted while it runs": changed(shutil.rmtree),
    "a file in its place while it runs": changed(_replaced),
    "a folder in the log's place": changed(_blocked("rounds.jsonl"), is_told=True),
    "a folder in the checkpoint's place": changed(_blocked("checkpoint.safetensors"), is_told=True),
    "a link in the log's place": changed(_linked, is_told=True),
    "--out is a file": at_start(_a_file),
    "--out lies in a file": at_start(lambda folder: _a_file(folder) / "run"),
    "--out is a link in a circle": at_start(_a_loop),
    "--out is a link to nothing": at_start(_a_dangling_link),
    "--out is too long a name": at_start(lambda folder: folder / ("n" * 300)),
    "--out where nobody may write": at_start(lambda _: Path("/sys/fl-sim-run")),
    "read-only file system": read_only_start,
    "DA-FL: read-only cache": pools(DA_FL, "ro"),
    "DA-FL: full cache": pools(DA_FL, "size=64k", filled=True),
    "PATE: read-only cache": pools(PATE, "ro"),
    "PATE: full cache": pools(PATE, "size=64k", filled=True),
}


def attempt(name: str, folder: Path) -> Outcome:
    """Execute a case, and check its outcome."""
    folder.mkdir()
    try:
        ended = CASES[name](folder)
    except NoMount:
        return Outcome(name, "", "", left_out=True)
    except Exception:  # noqa: BLE001 (the case is about just these)
        return Outcome(name, "", traceback.format_exc())
    said = ended.said
    if "\n" in said or "[Errno" in said or "Traceback" in said:
        return Outcome(name, said, "not one plain line")
    if "/" not in said or ":" not in said:
        return Outcome(name, said, "no path, or no cure")
    if ended.is_told is False:
        return Outcome(name, said, "result.json does not say that the run failed")
    return Outcome(name, said, "does not end in the same bits" if ended.is_resumed is False else "")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, pools_in(Path(folder) / "own-pools"):
        try:
            done = [attempt(name, Path(folder) / str(number)) for number, name in enumerate(CASES)]
        except OSError as error:
            print(f"the harness itself cannot go on: {explain(error)}", file=sys.stderr)
            return 2
    if chosen.json:
        print(json.dumps([asdict(outcome) for outcome in done]))
    else:
        _print(done)
    return 1 if any(outcome.wrong for outcome in done) else 0


def _print(done: list[Outcome]) -> None:
    print("| case | what the run says | right |")
    print("|---|---|---|")
    for outcome in done:
        right: Any = "left out: no right to mount" if outcome.left_out else outcome.wrong.splitlines()[-1:] or "yes"
        print(f"| {outcome.case} | {outcome.said} | {right} |")
    tracebacks = sum("Traceback" in outcome.wrong for outcome in done)
    wrong = sum(bool(outcome.wrong) for outcome in done)
    left_out = sum(outcome.left_out for outcome in done)
    print(f"{len(done)} cases, {left_out} left out, {tracebacks} tracebacks, {wrong} wrong")


if __name__ == "__main__":
    sys.exit(main())
