"""Kill runs with SIGKILL at random moments and start them again: same bits, no unpaid release, nothing left over.

Each trial starts the real command in a directory of its own, kills its process, or one that it started (a Ray actor,
gcs_server, the raylet, a table's worker), at a random moment, waits for what then becomes of it, and repeats the
command until it succeeds. What it leaves is compared with an undisturbed run of the same settings.

    python benchmarks/kill9.py [--trials 100] [--only TEXT] [--seed 0] [--json]

Exits with 1 where any trial fails.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 600.0
"""Timeout of one command in seconds. A longer command counts as hanging."""

LOGS = "**/rounds.jsonl"
"""The files whose number of lines shows the progress of a command."""

ORPHAN_SECONDS = 10.0
"""The largest number of seconds that a process may live after its killed command."""

FEDERATED = ("model=logistic", "clients=6", "partition=iid")
PRIVATE = (*FEDERATED, "rounds=12", "aggregator=global-dp", "sampler=poisson:0.5")
DISTRIBUTED = (*FEDERATED, "rounds=12", "aggregator=distributed-dp", "aggregator.noise_multiplier=1")
POOLED = (
    *FEDERATED,
    "rounds=6",
    "preprocess=da-fl",
    "preprocess.generator=mean-embedding",
    "preprocess.epsilon=40",
    "preprocess.gamma=0.2",
)
LABELLED = (
    *FEDERATED, "algorithm=pate", "rounds=3", "local.epochs=15", "algorithm.public_records=200", "algorithm.queries=60",
    "algorithm.student=supervised", "algorithm.student.steps=9", "algorithm.labelling.mechanism=gnmax:20",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command that is killed.

    ``exact``: whether a disturbed run must end in the undisturbed one's bits. ``target``: the process that is killed,
    by a part of its name; empty means the command itself.
    """

    name: str
    settings: tuple[str, ...]
    exact: bool = True
    target: str = ""
    is_table: bool = False


CASES = (
    Case("fedavg", (*FEDERATED, "rounds=60", "engine=inprocess")),
    Case("scaffold", (*FEDERATED, "rounds=60", "engine=inprocess", "algorithm=scaffold")),
    Case("fedadam", (*FEDERATED, "rounds=60", "engine=inprocess", "algorithm=fedadam")),
    Case("global-dp seeded", (*PRIVATE, "engine=inprocess", "aggregator.noise=seeded")),
    Case("global-dp secret", (*PRIVATE, "engine=inprocess"), exact=False),
    Case("distributed-dp seeded", (*DISTRIBUTED, "engine=inprocess", "aggregator.noise=seeded")),
    Case("distributed-dp secret", (*DISTRIBUTED, "engine=inprocess"), exact=False),
    Case("scaffold global-dp seeded", (*PRIVATE, "engine=inprocess", "algorithm=scaffold", "aggregator.noise=seeded")),
    Case("da-fl seeded", (*POOLED, "engine=inprocess", "preprocess.noise=seeded")),
    Case("da-fl secret", (*POOLED, "engine=inprocess"), exact=False),
    Case("pate seeded", (*LABELLED, "engine=inprocess", "algorithm.labelling.noise=seeded")),
    Case("pate secret", (*LABELLED, "engine=inprocess"), exact=False),
    Case("ray fedavg", (*FEDERATED, "rounds=60", "engine=ray", "engine.actors=2")),
    Case("ray scaffold, an actor", (*FEDERATED, "rounds=60", "engine=ray", "algorithm=scaffold"), target="ray::Actor"),
    Case("ray fedavg, gcs_server", (*FEDERATED, "rounds=200", "engine=ray"), target="/gcs_server"),
    Case("ray fedavg, raylet", (*FEDERATED, "rounds=200", "engine=ray"), target="/raylet/raylet"),
    Case("ray global-dp seeded", (*PRIVATE, "engine=ray", "aggregator.noise=seeded")),
    Case("table", (), is_table=True),
    Case("table, a worker", (), target="fl_sim.tables.workers", is_table=True),
)


@dataclass
class Trial:
    """The outcome of one kill: its moment, the number of restarts, and all faults."""

    case: str
    moment: str = ""
    restarts: int = 0
    wrong: list[str] = field(default_factory=list)


class Command:
    """One start of a case's command; all of its processes carry a mark in their environment or their session."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._mark = f"KILL9={folder.name}-{time.monotonic_ns()}"
        words = _table(folder) if case.is_table else ["run", *case.settings]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        environment |= {"FL_SIM_POOLS": str(folder / "pools"), "FL_SIM_LEDGERS": str(folder / "ledgers")}
        environment |= {"PYTHONPATH": str(PROJECT)}
        environment |= dict([self._mark.split("=")])
        self._output = (folder / "output.txt").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fl_sim", *words, "--out", str(folder / "out")],
            cwd=folder, env=environment, stdout=self._output, stderr=self._output, start_new_session=True,
        )  # fmt: skip

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, command line) of all processes of this start that live."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_ours = os.getsid(int(entry.name)) == self.process.pid or self._mark.encode() in environment
                if is_ours and words and _state(entry) != "Z":
                    found.append((int(entry.name), words))
        return found

    def kill(self, target: str) -> bool:
        """Kill the process that ``target`` names; False where there is none."""
        if not target:
            self.process.kill()
            return True
        hit = [pid for pid, words in self.processes() if target in words.split(" --")[0] and pid != self.process.pid]
        for pid in hit[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(hit)

    def end(self) -> int | None:
        """Wait for the command; return its exit code, None where it hangs."""
        try:
            return self.process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        finally:
            self._output.close()

    def orphans(self) -> list[str]:
        """Return the processes that still live ``ORPHAN_SECONDS`` after the command, and end them."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while left and self.processes() and time.monotonic() < deadline + ORPHAN_SECONDS + MOST_SECONDS:
            time.sleep(0.01)  # the kernel may need some time to remove a killed process
        return [words[:80] for _, words in left]


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: its directory, and how many rounds and seconds it took."""

    folder: Path
    rounds: int
    seconds: float


def undisturbed(case: Case, folder: Path) -> Reference:
    """Run a case to its end. Raises RuntimeError where that fails."""
    folder.mkdir(parents=True)
    start = time.monotonic()
    command = Command(case, folder)
    if command.end() != 0:
        raise RuntimeError(f"{case.name} fails undisturbed: {(folder / 'output.txt').read_text()[-2000:]}")
    seconds = time.monotonic() - start
    return Reference(folder, _num_rounds(folder), seconds)


def attempt(case: Case, reference: Reference, folder: Path, chance: random.Random) -> Trial:
    """Start, kill, start again until it succeeds, and compare."""
    folder.mkdir(parents=True)
    trial = Trial(case.name)
    command = Command(case, folder)
    trial.moment = _wait(case, command, reference, folder, chance)
    hit = command.kill(case.target)
    code = command.end()
    trial.moment += "" if hit else ", but there was none to hit"
    trial.wrong += [f"outlives the command: {words}" for words in command.orphans()]
    while code != 0 and trial.restarts < 3:
        if code is None:
            trial.wrong.append(f"hangs for {MOST_SECONDS:g} s")
        elif code not in (-signal.SIGKILL, 1):
            trial.wrong.append(f"exit code {code}")
        trial.restarts += 1
        command = Command(case, folder)
        code = command.end()
        trial.wrong += [f"outlives the command: {words}" for words in command.orphans()]
    if code != 0:
        trial.wrong.append(f"does not succeed: {(folder / 'output.txt').read_text()[-500:]}")
    elif "Traceback" in (folder / "output.txt").read_text():
        trial.wrong.append("a traceback")
    if code == 0:
        trial.wrong += differences(case, reference.folder, folder)
    return trial


def differences(case: Case, reference: Path, folder: Path) -> list[str]:
    """Return all faults of a disturbed run."""
    wrong = []
    for path in sorted(folder.glob("out/**/rounds.jsonl")):
        rounds, expected = (_rounds(root / path.relative_to(folder)) for root in (folder, reference))
        if [one["round"] for one in rounds] != [*range(1, len(expected) + 1)]:
            wrong.append(f"{path.relative_to(folder)} has rounds {[one['round'] for one in rounds]}")
        elif case.exact and rounds != expected:
            wrong.append(f"{path.relative_to(folder)} has other numbers")
    if case.exact:
        for path in sorted(reference.glob("out/**/model.safetensors")):
            other = folder / path.relative_to(reference)
            if not other.exists() or other.read_bytes() != path.read_bytes():
                wrong.append(f"{path.relative_to(reference)} has other bits")
    by_chance = set() if case.exact else {"out/samples.png"}  # secret noise may leave a pool without a record to draw
    left = _names(folder) - _names(reference) - by_chance
    missing = _names(reference) - _names(folder) - by_chance
    wrong += [f"left over: {name}" for name in sorted(left)] + [f"missing: {name}" for name in sorted(missing)]
    return wrong + unpaid(reference, folder)


def unpaid(reference: Path, folder: Path) -> list[str]:
    """Return where a ledger has fewer charges than the undisturbed run's, or a result says less than was charged."""
    wrong = []
    charges, expected = _charges(folder), _charges(reference)
    if charges < expected:
        wrong.append(f"{charges} charges, where an undisturbed run pays {expected}")
    for path in sorted(reference.glob("out/**/result.json")):
        before, after = (_privacy(root / path.relative_to(reference)) for root in (reference, folder))
        for unit, epsilon in before.items():
            if unit not in after:
                wrong.append(f"no privacy of a {unit} is stated")
            elif after[unit] < epsilon * (1 - 1e-9):
                wrong.append(f"epsilon {after[unit]:.4g} of a {unit}, where an undisturbed run says {epsilon:.4g}")
    return wrong


def _wait(case: Case, command: Command, reference: Reference, folder: Path, chance: random.Random) -> str:
    """Wait for a random moment; return it in words. In one of four trials it may be before the first round."""
    start = time.monotonic()
    rounds = -1 if chance.random() < 0.25 and not case.target else chance.randrange(reference.rounds)
    pause = chance.random() * (reference.seconds if rounds < 0 else 0.05)
    while rounds >= 0 and command.process.poll() is None and _num_rounds(folder) < max(1, rounds):
        time.sleep(0.002)
    with suppress(subprocess.TimeoutExpired):
        command.process.wait(pause)
    return f"after {time.monotonic() - start:.2f} s, {_num_rounds(folder)} rounds"


def _table(folder: Path) -> list[str]:
    (folder / "table.toml").write_text(
        'centralized = false\n[base]\nmodel = "logistic"\nclients = 6\nrounds = 30\n'
        '[grid]\nalgorithm = ["fedavg", "scaffold"]\npartition = ["iid"]\nseed = [0, 1]\n'
    )
    return ["table", "table.toml", "--jobs", "2"]


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def _num_rounds(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in (folder / "out").glob(LOGS))


def _rounds(path: Path) -> list[dict[str, Any]]:
    """Return a run's rounds without the times that they took."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) | {"seconds": 0} for line in lines]


def _names(folder: Path) -> set[str]:
    """Return the files of a run, by names in which what is drawn at random, or a hash, is left out."""
    files = [
        path.relative_to(folder).as_posix()
        for root in ("out", "pools", "ledgers")
        for path in (folder / root).rglob("*")
    ]
    return {re.sub(r"[0-9a-f]{8,}", "#", name) for name in files}


def _charges(folder: Path) -> int:
    """Return how many charges all ledgers of a run hold; the first line of a ledger is its head."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in folder.rglob("*ledger*.jsonl"))


def _privacy(path: Path) -> dict[str, float]:
    result = json.loads(path.read_text()) if path.exists() else {}
    return {one["unit"]: one["epsilon"] or 0.0 for one in result.get("privacy", [])}


def trials(cases: Sequence[Case], number: int, seed: int, folder: Path) -> Iterator[Trial]:
    """Make so many trials of the cases in turn, in ``folder``."""
    references: dict[str, Reference] = {}
    chance = random.Random(seed)  # noqa: S311 (when to kill, no secret)
    for index in range(number):
        case = cases[index % len(cases)]
        if case.name not in references:
            references[case.name] = undisturbed(case, folder / f"reference-{len(references)}")
        trial = attempt(case, references[case.name], folder / f"trial-{index}", chance)
        yield trial
        if not trial.wrong:
            shutil.rmtree(folder / f"trial-{index}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the trials, print a line for each that fails and a table of all; return 1 where any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    cases = [case for case in CASES if asked.only in case.name]
    folder = Path(tempfile.mkdtemp(prefix="kill9-"))
    done = []
    for trial in trials(cases, asked.trials, asked.seed, folder):
        done.append(trial)
        words = "; ".join(trial.wrong) or "ok"
        print(f"{trial.case}: killed {trial.moment}, started again {trial.restarts} times: {words}", file=sys.stderr)
    failed = [trial for trial in done if trial.wrong]
    if asked.json:
        print(json.dumps([vars(trial) for trial in done]))
    else:
        print(f"{'case':32} trials  failed")
        for name, number in Counter(trial.case for trial in done).items():
            print(f"{name:32} {number:6}  {sum(trial.case == name for trial in failed):6}")
    if not failed:
        shutil.rmtree(folder)
    else:
        print(f"{len(failed)} of {len(done)} trials failed; what they left lies in {folder}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
