"""A finished run with more rounds ends in the bits of an undisturbed one, or says why it cannot go on."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation import resuming
from fl_sim.simulation.run import Silent, run
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, read_rounds

QUICK = {"model": "logistic", "rounds": 2, "engine": "inprocess", "partition": "label-2", "local": {"batch_size": 32}}


def quick(**changes: object) -> Experiment:
    return experiment_from({**QUICK, **changes})


def bits(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def untimed(out: Path) -> list[RoundRecord]:
    return [replace(record, seconds=None) for record in read_rounds(out)]


def told(result: dict[str, Any]) -> dict[str, Any]:
    steps = {name: {**step, "seconds": None} for name, step in result["measures"]["reached"].items()}
    facts = {**result, "measures": {**result["measures"], "reached": steps}}
    return {key: value for key, value in facts.items() if key not in {"seconds", "chain"}}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"algorithm": "scaffold", "sampler": "fixed-size:4"}, {"algorithm": "fedadam"}, {"algorithm": "fedmix"},
        {"algorithm": "fedexp"}, {"calibrate": {"kind": "ccvr", "samples_per_class": 5, "epochs": 1}},
        {"evaluate_every": 4, "evaluate": {"validation": 0.2}}, {"evaluate": {"validation": 0.2, "test": "last"}},
        {"local": {"batch_size": 32, "schedule": "step:3"}},
    ],
    ids=["fedavg", "scaffold", "fedadam", "fedmix", "fedexp", "ccvr", "evaluated seldom", "tested last", "steps"],
)  # fmt: skip
def test_a_run_that_gets_more_rounds_ends_in_the_bits_of_one_that_had_them_at_once(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = run(quick(**settings, rounds=4), tmp_path / "whole")
    run(quick(**settings), tmp_path / "run")
    first = (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines()
    assert told(run(quick(**settings, rounds=4), tmp_path / "run")) == told(whole)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")
    if "evaluate" not in settings:  # the rounds that were done were not done again
        assert (tmp_path / "run" / "rounds.jsonl").read_bytes().splitlines()[:2] == first


def test_an_interrupted_run_can_get_more_rounds_too_and_more_than_once(tmp_path: Path) -> None:
    class Impatient(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick(), tmp_path / "run", observer=Impatient())
    for rounds in (3, 4):
        run(quick(rounds=rounds), tmp_path / "run")
    run(quick(rounds=4), tmp_path / "whole")
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def test_a_stopped_run_does_not_become_one_of_no_more_rounds_than_it_has(tmp_path: Path) -> None:
    class Stopping(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick(algorithm="scaffold", rounds=4), tmp_path / "run", observer=Stopping())
    with pytest.raises(UserError, match=r"2 rounds of this run already.* rounds=2"):
        run(quick(algorithm="scaffold", rounds=2), tmp_path / "run")
    assert run(quick(algorithm="scaffold", rounds=3), tmp_path / "run")["rounds"] == 3


def test_the_first_round_of_another_learning_rate_is_the_one_that_is_told(tmp_path: Path) -> None:
    earlier, longer = (quick(rounds=rounds, local={"schedule": "cosine"}) for rounds in (3, 5))
    done = [
        RoundRecord(number, 0.5, 1.0, None, None, 10, earlier.local.rate_in(number, 3), 0.1) for number in (1, 2, 3)
    ]
    with pytest.raises(UserError, match=r"round 2 .*0.0075 with rounds=3 .* 0.00904508"):
        resuming.check_extension(longer, tmp_path, earlier, done)


@pytest.mark.parametrize("dies_at", ["write_log", "write_config"])
def test_a_crash_while_a_run_gets_more_rounds_is_made_good_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    settings = {"algorithm": "scaffold", "evaluate_every": 3}
    run(quick(**settings, rounds=4), tmp_path / "whole")
    run(quick(**settings), tmp_path / "run")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, dies_at, die)
        with pytest.raises(KeyboardInterrupt):
            run(quick(**settings, rounds=4), tmp_path / "run")
    run(quick(**settings, rounds=4), tmp_path / "run")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def _forget_the_checkpoint(out: Path) -> None:
    (out / "checkpoint.safetensors").unlink()


def _change_a_round(out: Path) -> None:
    rounds = (out / "rounds.jsonl").read_text()
    (out / "rounds.jsonl").write_text(rounds.replace('"cohort": 10', '"cohort": 9', 1))


def _forget_the_states(out: Path) -> None:
    shutil.rmtree(out / "clients")


def _nothing(out: Path) -> None:
    del out


@pytest.mark.parametrize(
    ("settings", "rounds", "before", "said"),
    [
        ({}, 1, _nothing, r"holds 2 rounds of this run already, so .* to rounds=1: .* choose another --out"),
        ({"local": {"schedule": "cosine"}}, 4, _nothing, r"schedule=cosine depends on .*: .* 0.005 .* 0.0085355"),
        ({}, 4, _forget_the_checkpoint, r"not checkpoint.safetensors, so more rounds cannot follow: .* 64 MiB"),
        ({}, 4, _change_a_round, r"rounds.jsonl or .*config.toml was changed"),
        ({"algorithm": "scaffold"}, 4, _forget_the_states, "does not hold the client states after round 2"),
    ],
    ids=["fewer", "cosine", "no checkpoint", "changed", "no states"],
)  # fmt: skip
def test_a_run_that_cannot_go_on_says_why_and_stays_as_it_was(
    tmp_path: Path, settings: dict[str, Any], rounds: int, before: Callable[[Path], None], said: str
) -> None:
    run(quick(**settings), tmp_path / "run")
    before(tmp_path / "run")
    model = bits(tmp_path / "run")
    with pytest.raises(UserError, match=said):
        run(quick(**settings, rounds=rounds), tmp_path / "run")
    assert bits(tmp_path / "run") == model
    assert "rounds = 2" in (tmp_path / "run" / "config.toml").read_text()


def test_a_run_that_stopped_by_itself_would_have_done_so_with_more_rounds_too(tmp_path: Path) -> None:
    evaluate = {"validation": 0.2, "target_accuracy": 0.01}
    assert run(quick(evaluate=evaluate, rounds=3), tmp_path / "run")["rounds"] == 1
    with pytest.raises(UserError, match=r"rounds=3, and it stopped by itself \(.*\): more rounds change nothing"):
        run(quick(evaluate=evaluate, rounds=4), tmp_path / "run")


@pytest.mark.usefixtures("quick_accounting")
def test_a_run_that_promises_privacy_gets_no_further_rounds_and_keeps_nothing_for_them(tmp_path: Path) -> None:
    private = {"algorithm": "scaffold", "aggregator": {"kind": "global-dp", "noise": "seeded"}}
    run(quick(**private), tmp_path / "run")
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "clients").exists()
    with pytest.raises(UserError, match=r"rounds=2, .* another --out"):
        run(quick(**private, rounds=4), tmp_path / "run")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == ledger


def test_what_a_run_could_go_on_with_is_kept_where_it_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(quick(algorithm="scaffold"), tmp_path / "small")
    kept = resuming.num_bytes_kept(tmp_path / "small")
    sizes = [path.stat().st_size for path in (tmp_path / "small").glob("c*/*")]
    assert 10_000 < kept < sum(sizes) + 100_000
    monkeypatch.setattr(resuming, "MOST_KEPT", kept - 1)
    run(quick(algorithm="scaffold"), tmp_path / "large")
    assert not {"checkpoint.safetensors", "clients"} & {path.name for path in (tmp_path / "large").iterdir()}


def test_what_is_kept_takes_the_bytes_of_all_its_files_on_the_disk_and_holes_take_none(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    kept = {"checkpoint.safetensors": 30_000, "clients/0": 10_000, "clients/1": 50_000}
    for name, size in kept.items():
        (tmp_path / name).write_bytes(bytes(range(250)) * (size // 250))
    (tmp_path / "rounds.jsonl").write_text("x" * 20_000)
    with (tmp_path / "clients" / "2").open("wb") as holes:
        holes.truncate(10 * 2**20)
    on_disk = sum(512 * (tmp_path / name).stat().st_blocks for name in kept)
    assert sum(kept.values()) <= resuming.num_bytes_kept(tmp_path) == on_disk < 2**20


def table(path: Path, first: float = 0.0) -> str:
    path.write_text("x,label\n" + "".join(f"{first if i == 0 else i % 7},{i % 2}\n" for i in range(200)))
    return f"csv:{path}:test=0.2"


def test_a_run_does_not_go_on_with_records_that_have_changed(tmp_path: Path) -> None:
    name = table(tmp_path / "t.csv")
    settings = {"data": name, "partition": "iid", "clients": 2}
    run(quick(**settings), tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    table(tmp_path / "t.csv", 0.5)
    with pytest.raises(UserError, match=r"other records \(the data have changed since.* restore the old files"):
        run(quick(**settings, rounds=3), tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    table(tmp_path / "t.csv")
    assert run(quick(**settings, rounds=3), tmp_path / "run")["rounds"] == 3


def test_what_a_private_run_keeps_of_its_records_are_public_numbers(tmp_path: Path) -> None:
    def key(first: float, **private: object) -> str:
        made = {"data": table(tmp_path / "t.csv", first), "partition": "iid", "clients": 2, **private}
        return resuming._records_key(job_of(quick(**made)))

    private = {"aggregator": "global-dp", "sampler": "poisson:0.5", "evaluate": {"test_is_public": True}}
    assert key(0.0, **private) == key(0.5, **private) != ""
    assert key(0.0) != key(0.5)
    assert resuming._records_key(job_of(quick())) == ""
