"""The kill -9 harness in short: two kills, and that it sees each kind of damage that it is there for."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.simulation.run import run

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a run's processes in /proc")


@pytest.fixture(scope="module")
def kill9(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("kill9")


@needs_proc
def test_a_killed_run_goes_on_to_the_same_bits_and_leaves_nothing(
    kill9: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that keeps all that a run may keep: states of clients, a ledger, a key of its noise."""
    private = ("algorithm=scaffold", "aggregator=global-dp", "aggregator.noise=seeded", "sampler=full")
    case = kill9.Case("of all kinds", (*kill9.FEDERATED, "rounds=12", "engine=inprocess", *private))
    for store in ("pools", "ledgers"):
        monkeypatch.setenv(f"FL_SIM_{store.upper()}", str(tmp_path / "reference" / store))
    run(experiment_from(with_overrides({}, case.settings)), tmp_path / "reference/out")
    reference = kill9.Reference(tmp_path / "reference", rounds=12, seconds=1.0)
    trial = kill9.attempt(case, reference, tmp_path / "trial", random.Random(2))
    assert trial.wrong == []
    assert trial.restarts == 1, trial.moment
    assert " 0 rounds" not in trial.moment  # this seed kills after the first of twelve rounds, however slow the machine


def folder_of_a_run(path: Path, *, charges: int = 2, epsilon: float = 1.0, bits: bytes = b"model") -> Path:
    (path / "out").mkdir(parents=True)
    (path / "pools").mkdir()
    rounds = [{"round": number, "test_accuracy": 0.5, "seconds": number} for number in (1, 2)]
    (path / "out/rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rounds))
    (path / "out/ledger.jsonl").write_text("head\n" + "charge\n" * charges)
    (path / "out/model.safetensors").write_bytes(bits)
    (path / "out/result.json").write_text(json.dumps({"privacy": [{"unit": "client", "epsilon": epsilon}]}))
    return path


def cut_rounds(out: Path) -> None:
    (out / "rounds.jsonl").write_text((out / "rounds.jsonl").read_text().splitlines(keepends=True)[1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda out: (out / "model.safetensors").write_bytes(b"other"), ["out/model.safetensors has other bits"]),
        (cut_rounds, ["out/rounds.jsonl has rounds [2]"]),
        (lambda out: (out / ".x.part").touch(), ["left over: out/.x.part"]),
        (
            lambda out: (out / "ledger.jsonl").write_text("head\ncharge\n"),
            ["1 charges, where an undisturbed run pays 2"],
        ),
    ],
)
def test_damage_is_seen(kill9: ModuleType, tmp_path: Path, damage: Callable[[Path], None], said: list[str]) -> None:
    case = kill9.Case("any", ())
    reference, other = (folder_of_a_run(tmp_path / name) for name in ("reference", "other"))
    assert kill9.differences(case, reference, other) == []
    damage(other / "out")
    assert kill9.differences(case, reference, other) == said


def test_a_smaller_epsilon_than_an_undisturbed_runs_is_seen(kill9: ModuleType, tmp_path: Path) -> None:
    reference, other = folder_of_a_run(tmp_path / "reference"), folder_of_a_run(tmp_path / "other", epsilon=0.9)
    assert kill9.differences(kill9.Case("any", ()), reference, other) == [
        "epsilon 0.9 of a client, where an undisturbed run says 1"
    ]


@needs_proc
def test_a_process_that_outlives_its_command_is_seen_and_ended(
    kill9: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill9, "ORPHAN_SECONDS", 0.2)
    sleeper = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (tmp_path / "fl_sim.py").write_text(sleeper)
    monkeypatch.setattr(kill9, "PROJECT", tmp_path)
    command = kill9.Command(kill9.Case("any", ()), tmp_path)
    assert command.end() == 0
    assert len(command.orphans()) == 1
    assert command.processes() == []
