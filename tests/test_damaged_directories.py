"""The harness of damaged run directories: sixty of its damages, and that it sees what is wrong."""

from pathlib import Path

import pytest

from fl_sim.store import run_directory

pytestmark = pytest.mark.usefixtures("quick_accounting")


@pytest.fixture(scope="module")
def harness(load_benchmark):
    return load_benchmark("damaged_directories")


def test_a_damaged_directory_is_refused_in_one_line_or_ends_in_the_same_bits(tmp_path: Path, harness) -> None:
    done = harness.trials(range(10_000, 10_060), tmp_path)
    assert [trial for trial in done if trial.wrong] == []
    assert {trial.outcome for trial in done} == {"refused", "went on"}
    assert len({trial.damage for trial in done}) >= 15


def test_the_harness_sees_a_run_that_goes_on_with_foreign_rounds(
    tmp_path: Path, harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = harness.prepared("fedavg", tmp_path / "fedavg")
    foreign = (setting.other / "rounds.jsonl").read_bytes()
    monkeypatch.setitem(harness.DAMAGES, "cut", lambda file: foreign)
    number = next(number for number in range(1000) if harness.drawn(number, setting)[1:] == ("rounds.jsonl", "cut"))
    assert harness.attempt(number, {"fedavg": setting}, tmp_path).outcome == "refused"
    monkeypatch.setattr(
        run_directory, "truncate_log", lambda out, last_round, chain: run_directory.read_rounds(out)[:last_round]
    )
    assert harness.attempt(number, {"fedavg": setting}, tmp_path).wrong == "other numbers in the log"
