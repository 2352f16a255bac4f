"""Damages one file of an interrupted run's directory at a time, and checks the resumed run's bits and epsilon.

Each trial takes a copy of the directory of a run that was stopped after its second round, damages one file in it, and
starts the same run again. That must either refuse, with one line that names what is wrong, or end in the bits of the
run that was never interrupted; the epsilon that it prints must never be below what all its releases cost. The seed of a
trial is its number, so each can be repeated.

    python benchmarks/damaged_directories.py [--trials 1000] [--first 0] [--json]

Exits with 1 where a trial fails.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dp_accounting import dp_event
from safetensors.torch import load_file

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.events import amplify_poisson
from fl_sim.simulation.run import Silent, run
from fl_sim.store.run_directory import RoundRecord, read_rounds

ROUNDS, STOPPED_AFTER, DELTA, RATE = 4, 2, 1e-3, 0.4
SLOW = 60.0
"""Timeout of a trial in seconds. A trial that takes longer counts as hanging."""

_QUICK = {"model": "logistic", "rounds": ROUNDS, "clients": 5, "engine": "inprocess"}
_PRIVATE = {"kind": "global-dp", "delta": DELTA}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "scaffold": {"algorithm": "scaffold", "sampler": "fixed-size:3"},
    "fedadam": {"algorithm": "fedadam"},
    "global dp": {"aggregator": _PRIVATE | {"noise": "seeded"}, "sampler": f"poisson:{RATE}"},
    "scaffold, secret dp": {"aggregator": _PRIVATE, "algorithm": "scaffold", "sampler": f"poisson:{RATE}"},
}


@dataclass(frozen=True)
class File:
    """A file's content, that of another run's file of this name, and coins to damage it with."""

    content: bytes
    other: bytes
    coins: random.Random


@dataclass(frozen=True)
class Trial:
    """One damage and its outcome. ``wrong``: the fault, empty if the outcome is right."""

    number: int
    method: str
    file: str
    damage: str
    outcome: str
    wrong: str


class _Watch(Silent):
    """Counts rounds, and stops after one."""

    def __init__(self, last: int = 0) -> None:
        self.rounds, self._last = 0, last

    def finished_round(self, record: RoundRecord) -> None:
        self.rounds += 1
        if record.round == self._last:
            raise KeyboardInterrupt


def _place(file: File) -> int:
    return file.coins.randrange(len(file.content) + 1)


def _flipped(file: File, number: int) -> bytes:
    changed = bytearray(file.content)
    for _ in range(number if changed else 0):
        changed[file.coins.randrange(len(changed))] ^= 1 << file.coins.randrange(8)
    return bytes(changed)


def _zeroed(file: File) -> bytes:
    start, end = sorted((_place(file), _place(file)))
    return file.content[:start] + bytes(end - start) + file.content[end:]


def _lines(file: File, change: Callable[[list[bytes], int], None]) -> bytes:
    lines = file.content.splitlines(keepends=True) or [b""]
    change(lines, file.coins.randrange(len(lines)))
    return b"".join(lines)


def _mixed(file: File) -> bytes:
    """Replace one line by a line of another run."""
    foreign = file.other.splitlines(keepends=True) or [b""]
    return _lines(file, lambda lines, at: lines.__setitem__(at, foreign[min(at, len(foreign) - 1)]))


def _huge(file: File) -> bytes:
    """Replace a number in the text by a huge number."""
    numbers = list(re.finditer(rb"\d+", file.content))
    if not numbers:
        return file.content + b"9" * 5000
    one = file.coins.choice(numbers)
    number = file.coins.choice([b"9" * 5000, b"1e400", b"-1", b"1e300"])
    return file.content[: one.start()] + number + file.content[one.end() :]


DAMAGES: Mapping[str, Callable[[File], bytes]] = {
    "cut": lambda file: file.content[: _place(file)],
    "empty": lambda _: b"",
    "zeros": lambda file: bytes(len(file.content)),
    "zeros in it": _zeroed,
    "a bit": lambda file: _flipped(file, 1),
    "ten bits": lambda file: _flipped(file, 10),
    "noise": lambda file: file.coins.randbytes(len(file.content)),
    "another run's": lambda file: file.other,
    "half another run's": lambda file: file.content[: len(file.content) // 2] + file.other[len(file.content) // 2 :],
    "a line of another run": _mixed,
    "a line twice": lambda file: _lines(file, lambda lines, at: lines.insert(at, lines[at])),
    "a line less": lambda file: _lines(file, lambda lines, at: lines.__delitem__(at)),
    "lines reversed": lambda file: b"".join(reversed(file.content.splitlines(keepends=True))),
    "more behind it": lambda file: file.content + file.other,
    "other JSON": lambda file: file.coins.choice([b"[]", b"null", b"{}", b'{"a": [1]}', b"3", b'"x"\n']),
    "deep JSON": lambda file: file.coins.choice([b"[", b'{"a":']) * 100_000 + b"\n",
    "a huge number": _huge,
}
"""Kinds of damage that return the file's new content."""

OTHER = ("deleted", "a folder", "an endless device")
"""Kinds of damage that remove the file or replace it by something that is no file."""


@dataclass(frozen=True)
class Setting:
    """A method's directories: of the stopped run, of another one, of the whole one, and what that printed."""

    experiment: Experiment
    stopped: Path
    other: Path
    whole: Path
    result: dict[str, Any]


def prepared(method: str, folder: Path) -> Setting:
    """Run a method: stopped, stopped with another seed, and to its end."""
    experiment = experiment_from({**_QUICK, **METHODS[method]})
    for name, seed in (("stopped", 0), ("other", 1)):
        try:
            run(
                experiment_from({**_QUICK, **METHODS[method], "seed": seed}), folder / name, None, _Watch(STOPPED_AFTER)
            )
        except KeyboardInterrupt:
            continue
        raise AssertionError("the run was not stopped")
    result = run(experiment, folder / "whole")
    return Setting(experiment, folder / "stopped", folder / "other", folder / "whole", result)


def attempt(number: int, settings: Mapping[str, Setting], folder: Path) -> Trial:
    """Damage one file, start the run again, and check the outcome."""
    method = list(settings)[number % len(settings)]
    setting, out = settings[method], folder / f"trial-{number}"
    shutil.copytree(setting.stopped, out)
    coins, name, kind = drawn(number, setting)
    _damage(out / name, setting.other / name, kind, coins)
    watch, start = _Watch(), time.monotonic()
    try:
        result = run(setting.experiment, out, None, watch)
        outcome, wrong = "went on", _judge(setting, out, result, watch)
    except (RunError, UserError) as error:
        outcome, wrong = "refused", "more than one line" if "\n" in str(error) or not str(error) else ""
    except Exception:  # noqa: BLE001 (the trial is about just these)
        outcome, wrong = "traceback", traceback.format_exc()
    if time.monotonic() - start > SLOW:
        wrong = wrong or f"took {time.monotonic() - start:.0f} s"
    shutil.rmtree(out)
    return Trial(number, method, name, kind, outcome, wrong)


def drawn(number: int, setting: Setting) -> tuple[random.Random, str, str]:
    """Return a trial's random generator, the damaged file, and the kind of damage."""
    coins = random.Random(number)  # noqa: S311 (for what a trial is, not for secrets)
    files = sorted(str(path.relative_to(setting.stopped)) for path in setting.stopped.rglob("*") if path.is_file())
    return coins, coins.choice(files), coins.choice([*DAMAGES, *OTHER])


def _damage(path: Path, other: Path, kind: str, coins: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    if kind in DAMAGES:
        path.write_bytes(DAMAGES[kind](File(content, other.read_bytes() if other.exists() else b"", coins)))
    elif kind == "a folder":
        path.mkdir()
    elif kind == "an endless device":
        path.symlink_to("/dev/zero")


def _judge(setting: Setting, out: Path, result: Mapping[str, Any], watch: _Watch) -> str:
    """Return the fault of a run that reached its end, in words; empty if there is no fault."""
    if result["privacy"]:
        event = amplify_poisson(dp_event.GaussianDpEvent(1.0), RATE)
        secret = not result["privacy"][0]["simulation_only"]
        paid = STOPPED_AFTER + watch.rounds if secret else ROUNDS
        truth = min(
            epsilon([dp_event.SelfComposedDpEvent(event, paid)], DELTA),
            epsilon([dp_event.SelfComposedDpEvent(event, paid)], DELTA, accountant="pld"),
        )
        said = result["privacy"][0]["epsilon"]
        if said is None or said < truth * (1 - 1e-9):
            return f"epsilon {said} is below the truth, {truth}"
        if secret:
            return "" if result["status"] == "finished" else "not finished"
    mine, theirs = (load_file(place / "model.safetensors") for place in (out, setting.whole))
    if list(mine) != list(theirs) or not all(torch.equal(mine[name], theirs[name]) for name in mine):
        return "other bits in the model"
    if _numbers(out) != _numbers(setting.whole):
        return "other numbers in the log"
    # A run that begins again has paid for its later rounds already: then more than before is true.
    pairs = zip(read_rounds(out), read_rounds(setting.whole), strict=True)
    if any((mine.epsilon or 0.0) < (theirs.epsilon or 0.0) for mine, theirs in pairs):
        return "an epsilon in the log is below the truth"
    return "" if result["final_accuracy"] == setting.result["final_accuracy"] else "another accuracy"


def _numbers(out: Path) -> list[dict[str, Any]]:
    return [asdict(record) | {"seconds": None, "epsilon": None} for record in read_rounds(out)]


def trials(numbers: range, folder: Path, tell: Callable[[Trial], None] | None = None) -> list[Trial]:
    """Execute the trials with these numbers."""
    settings = {method: prepared(method, folder / method.replace(" ", "-")) for method in METHODS}
    done = []
    for number in numbers:
        done.append(attempt(number, settings, folder))
        if tell is not None:
            tell(done[-1])
    return done


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(chosen.first, chosen.first + chosen.trials)
        done = trials(numbers, Path(folder), lambda trial: print(trial, file=sys.stderr) if trial.wrong else None)
    wrong = [trial for trial in done if trial.wrong]
    if chosen.json:
        print(json.dumps([asdict(trial) for trial in done]))
        return 1 if wrong else 0
    print("| method | trials | refused in one line | same bits (secret noise: paid) | wrong |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        mine = [trial for trial in done if trial.method == method]
        outcomes = Counter(trial.outcome for trial in mine if not trial.wrong)
        bad = sum(bool(trial.wrong) for trial in mine)
        print(f"| {method} | {len(mine)} | {outcomes['refused']} | {outcomes['went on']} | {bad} |")
    print(f"{len(done)} damages, {sum(trial.outcome == 'traceback' for trial in done)} tracebacks, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
