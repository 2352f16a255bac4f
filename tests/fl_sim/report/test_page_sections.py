"""Methods have short names, and what a target took is that of the runs that reached it, "-" where none did."""

from dataclasses import replace

import pytest

from fl_sim.report.files import BytesFacts, RecordedTraffic, ResultFile, RunConfig, Seconds
from fl_sim.report.groups import SeedGroup
from fl_sim.report.page_sections import target_rows
from fl_sim.report.runs import SavedRun
from fl_sim.store.run_directory import RoundRecord


@pytest.fixture
def run(tmp_path):
    def make(*accuracies, seed=0, status="finished", each=500_000, before=None):
        rounds = tuple(
            RoundRecord(number, accuracy, 1.0, None, None, 10, 0.1, 2.0, bytes_down=each, bytes_up=each)
            for number, accuracy in enumerate(accuracies, 1)
        )
        config = RunConfig(
            data="digits", seed=seed, clients=10, rounds=len(rounds), model="mlp", algorithm={"kind": "fedavg"},
            partition={"kind": "iid"},
        )  # fmt: skip
        result = ResultFile(
            status=status, data_note="", partition="iid", engine="inprocess", rounds=len(rounds),
            final_accuracy=accuracies[-1], best_accuracy=max(accuracies), privacy=[], versions={},
            seconds=Seconds(preprocess=1.0, train=2.0, total=3.0),
            bytes=BytesFacts(before={"shared_records": before} if before is not None else {}),
        )  # fmt: skip
        return SavedRun(tmp_path, config, {}, rounds, result)

    return make


@pytest.fixture
def timed(run):
    """A run on devices whose rounds last 3 virtual seconds."""

    def make(*accuracies, **others):
        one = run(*accuracies, **others)
        return replace(one, rounds=tuple(replace(record, virtual_seconds=3.0) for record in one.rounds))

    return make


def _taken(*runs):
    groups = {"digits, iid": [("FedAvg", SeedGroup("FedAvg", "digits", "", "iid", runs))]}
    (one,) = target_rows(groups, 0.8)
    return one


def test_rounds_bytes_and_seconds_are_means_over_the_finished_runs_that_got_there(run):
    found = _taken(run(0.5, 0.8), run(0.5, 0.6, 0.7, 0.9, seed=1), run(0.5, 0.7, seed=2), run(0.9, status="failed"))
    assert tuple(found.cells.values()) == ("3.0 ± 1.4", "3.00 ± 1.41", "7.0 ± 2.8", "-", "2 of 3")
    assert found.in_words == (
        "FedAvg on digits, iid: rounds 3.0 ± 1.4, MB 3.00 ± 1.41, seconds 7.0 ± 2.8 (2 of 3 runs reached it)"
    )


def test_virtual_seconds_are_told_where_there_is_a_clock(timed):
    found = _taken(timed(0.5, 0.8), timed(0.5, 0.6, 0.7, 0.9, seed=1))
    assert found.cells["Virtual seconds"] == "9.0 ± 4.2"
    assert "seconds 7.0 ± 2.8, virtual seconds 9.0 ± 4.2" in found.in_words


def test_a_target_that_no_run_reaches_is_a_dash_with_the_number_of_runs(run):
    assert _taken(run(0.5, 0.7)).in_words == "FedAvg on digits, iid: - (0 of 1 runs reached it)"


def test_what_travelled_beforehand_counts_and_what_is_not_told_leaves_the_bytes_out(run):
    assert _taken(run(0.9, before=RecordedTraffic(down=2_000_000, up=500_000))).cells["MB"] == "3.50"
    assert list(_taken(run(0.9, each=None)).cells.values())[:2] == ["1.0", "-"]


def test_what_is_not_known_of_one_thing_that_travelled_beforehand_is_not_known_of_all(run):
    done = run(0.9)
    known = RecordedTraffic(down=2_000_000, up=500_000)
    for before, spent in (([known, known], 5_000_000), ([known, None], None), ([], 0)):
        told = BytesFacts(before={str(number): one for number, one in enumerate(before)})
        result = done.result.model_copy(update={"bytes": told})
        assert replace(done, result=result).spent_beforehand.bytes == spent
