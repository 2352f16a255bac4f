"""What the directory of a trial says that it came to."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.store.checkpoint import CHECKPOINT
from fl_sim.store.run_directory import RESULT, ROUNDS, read_rounds
from fl_sim.tables.tuning_runs import Outcome, directory_of, goes_on, outcome_in


def trial(rounds: int) -> Experiment:
    judged = {"validation": 0.2, "test": "never"}
    return experiment_from({"model": "logistic", "clients": 4, "rounds": rounds, "evaluate": judged})


def test_a_run_that_diverged_in_its_third_round_has_the_accuracy_of_its_second_for_a_trial_of_two(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    run(trial(3), out)
    lines = (out / ROUNDS).read_text().splitlines(keepends=True)
    (out / ROUNDS).write_text("".join(lines[:-1]))
    result = json.loads((out / RESULT).read_text())
    (out / RESULT).write_text(json.dumps({**result, "status": "failed", "diverged": True, "error": "the loss is nan"}))
    accuracies = [record.validation_accuracy for record in read_rounds(out)]
    assert len({*accuracies}) == 2
    found = [outcome_in(out, trial(rounds), 0, None) for rounds in (1, 2, 3, 5)]
    assert [one and (one.accuracy, one.trained) for one in found] == [
        (accuracies[0], 1), (accuracies[1], 2), (None, 2), (None, 2),
    ]  # fmt: skip


def rewritten(out: Path, **changes: Any) -> None:
    """Give each record the named values in turn."""
    lines = [json.loads(line) for line in (out / ROUNDS).read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {name: values[number] for name, values in changes.items()}
    (out / ROUNDS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def told(out: Path, **changes: Any) -> None:
    (out / RESULT).write_text(json.dumps({**json.loads((out / RESULT).read_text()), **changes}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished trial of four rounds."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(trial(4), out)
    return out


@pytest.fixture
def four(whole: Path, tmp_path: Path) -> Path:
    out = shutil.copytree(whole, tmp_path / "run")
    rewritten(out, seconds=[1.0, 2.0, 4.0, 8.0], validation_accuracy=[0.5, 0.25, 0.75, 0.625], test_accuracy=[0.1] * 4)
    told(out, seconds={"preprocess": 16.0, "train": 32.0, "total": 64.0}, validation={"final_accuracy": 0.625})
    return out


def test_a_rung_pays_for_the_rounds_after_those_of_the_rung_before_and_the_first_for_what_came_before(
    four: Path,
) -> None:
    for after, rounds, accuracy, seconds in (
        (0, 4, 0.625, 31.0), (0, 1, 0.5, 17.0), (0, 3, 0.75, 23.0), (1, 3, 0.75, 6.0), (3, 4, 0.625, 8.0),
        (2, 2, 0.25, 0.0),
    ):  # fmt: skip
        assert outcome_in(four, trial(rounds), after, None) == Outcome(accuracy, rounds - after, seconds)


def test_a_run_that_diverged_after_its_last_round_did_so_for_a_trial_of_all_rounds_and_for_no_shorter_one(
    four: Path,
) -> None:
    told(four, status="failed", diverged=True, error="the loss is nan")
    found = [outcome_in(four, trial(rounds), 0, None) for rounds in (1, 2, 3, 4)]
    assert [one and (one.accuracy, one.trained, one.error) for one in found] == [
        (0.5, 1, ""), (0.25, 2, ""), (0.75, 3, ""), (None, 4, "the loss is nan"),
    ]  # fmt: skip


def test_rounds_that_are_not_all_timed_take_the_time_of_the_whole_run(four: Path) -> None:
    rewritten(four, seconds=[1.0, None, 4.0, 8.0])
    found = [outcome_in(four, trial(4), after, None) for after in (0, 1, 2)]
    assert [one and one.seconds for one in found] == [48.0, 32.0, 12.0]


def test_a_trial_without_validation_is_judged_by_its_test_records(four: Path) -> None:
    rewritten(four, validation_accuracy=[None] * 4, test_accuracy=[0.2, 0.8, 0.4, 0.6])
    found = [outcome_in(four, trial(rounds), 0, None) for rounds in (1, 2, 3)]
    assert [one and one.accuracy for one in found] == [0.2, 0.8, 0.4]


def test_what_a_trial_came_to_is_not_known_where_its_rounds_or_its_end_are_missing(four: Path) -> None:
    assert outcome_in(four, trial(5), 0, None) is None
    told(four, rounds=3)
    found = outcome_in(four, trial(4), 0, None)
    assert found is not None
    told(four, rounds=4)
    lines = (four / ROUNDS).read_text().splitlines(keepends=True)
    (four / ROUNDS).write_text("".join(lines[:3]))
    assert outcome_in(four, trial(4), 0, None) is None
    (four / RESULT).unlink()
    assert [outcome_in(four, trial(rounds), 0, None) is None for rounds in (2, 3, 4)] == [False, False, True]


def test_a_trial_goes_on_where_more_rounds_change_no_learning_rate_and_nothing_at_its_end() -> None:
    def goes(rounds: int = 2, **changes: Any) -> bool:
        return goes_on(experiment_from({"model": "mlp", "clients": 4, "rounds": rounds, **changes}))

    schedules = "constant", "exponential", "step", "cosine"
    assert [goes(local={"schedule": each}) for each in schedules] == [True, True, True, False]
    assert [goes(rounds, local={"schedule": "cosine"}) for rounds in (1, 2, 3, 9)] == [True, False, False, False]
    assert not goes(calibrate="ccvr:5")
    assert not goes(aggregator="global-dp", sampler="poisson:0.5")


def test_a_trial_of_which_too_much_was_left_to_be_kept_begins_anew_unless_it_has_all_rounds(tmp_path: Path) -> None:
    shared = directory_of(trial(1), tmp_path, None)
    assert directory_of(trial(4), tmp_path, None) == shared
    run(trial(3), shared)
    assert {directory_of(trial(rounds), tmp_path, None) for rounds in (1, 2, 3, 4, 9)} == {shared}
    (shared / CHECKPOINT).unlink()
    anew = [directory_of(trial(rounds), tmp_path, None).name.removeprefix(shared.name) for rounds in (2, 3, 4, 9)]
    assert anew == ["", "", "-4-rounds", "-9-rounds"]
    (shared / ROUNDS).write_text("")
    assert directory_of(trial(4), tmp_path, None) == shared
