"""Searches are checked before a trial runs, and a trial's directory says what it came to."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import CHECKPOINT, RESULT, ROUNDS, read_rounds
from fl_sim.tables import tuning
from fl_sim.tables.earlier_runs import TrialOutcome, can_extend, trial_directory, trial_outcome
from fl_sim.tables.plan import TableSettings, plan_table, table_settings
from fl_sim.tables.tuning import Search, Trial, experiment_of, proposed_trial, searches_of, trial_batches
from fl_sim.tables.tuning_space import Rung, Tune, drawn

RATES = {"low": 0.001, "high": 1.0, "log": True}


def settings(*, grid: dict[str, Any] | None = None, base: dict[str, Any] | None = None, **tuning: Any) -> TableSettings:
    table = {
        "base": {"model": "logistic", "rounds": 8, "clients": 4, **(base or {})},
        "grid": {"algorithm": ["fedavg"], **(grid or {})}, "centralized": False,
        "tune": {"trials": 8, "space": {"local.learning_rate": RATES}, **tuning},
    }  # fmt: skip
    return table_settings(table, [], "the test")


def searches(chosen: TableSettings) -> tuple[Search, ...]:
    return searches_of(chosen, plan_table(chosen), None)


def test_a_row_is_searched_for_in_each_column_on_its_first_seed_with_the_rounds_of_its_cell() -> None:
    grid = {"partition": ["iid", "label-2"], "seed": [3, 1, 2], "rounds": [8, 4]}
    found = searches(settings(grid=grid))
    assert [(*one.place, one.cell.seed, one.rungs[-1]) for one in found] == [
        (f"FedAvg, rounds={rounds}", column, 3, Rung(2, rounds))
        for rounds in (8, 4)
        for column in ("digits iid", "digits 2-Label")
    ]
    assert {one.rungs[-1] for one in searches(settings(grid=grid, rounds=16))} == {Rung(2, 16)}


@pytest.mark.parametrize(("trials", "first"), [(1, 1), (2, 1), (3, 1), (7, 1), (8, 2), (11, 2), (16, 4), (100, 25)])
def test_optuna_is_asked_for_one_trial_after_another_once_a_quarter_was_drawn(trials: int, first: int) -> None:
    together = trial_batches(Tune(trials=trials, search="optuna"))
    assert together == [range(first), *(range(number, number + 1) for number in range(first, trials))]
    assert trial_batches(Tune(trials=trials)) == [range(trials)]


def test_trials_count_from_one_and_are_drawn_by_their_numbers_unless_optuna_proposes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = settings(search="optuna", seed=5)
    assert chosen.tune is not None
    (search,) = searches(settings())
    monkeypatch.setattr(tuning, "proposed", lambda space, tried, seed: {"asked": (len(tried), seed)})
    trials = [proposed_trial(search, chosen.tune, number, ()) for number in range(8)]
    assert [trial.number for trial in trials] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [trial.values for trial in trials[:2]] == [drawn(search.space, 5, number) for number in (0, 1)]
    assert [trial.values for trial in trials[2:]] == [{"asked": (0, 5)}] * 6


def test_a_trial_has_the_rounds_of_its_rung_and_is_judged_as_the_search_says_whatever_its_cell_says() -> None:
    grid = {"evaluate_every": [4, 2], "evaluate.validation": [0.3], "evaluate.patience": [3]}
    chosen = settings(grid=grid, base={"evaluate": {"target_accuracy": 0.5}}, validation=0.2)
    for search in searches(chosen):
        made = experiment_of(chosen, Trial(search, 1, {"local.learning_rate": 0.25, "local.epochs": 3}), 5)
        assert (made.rounds, made.local.learning_rate, made.local.epochs, made.evaluate_every) == (5, 0.25, 3, 1)
        judged = made.evaluate
        assert (judged.validation, judged.test, judged.patience, judged.target_accuracy) == (0.2, "never", 0, 0)


@pytest.mark.parametrize(("low", "high", "refused"), [(0.5, 1.0, "1"), (-0.5, 0.5, "-0.5"), (-0.5, 1.0, "-0.5|1")])
def test_both_ends_of_a_range_are_tried_before_the_first_trial(low: float, high: float, refused: str) -> None:
    with pytest.raises(UserError, match=rf"local.momentum = ({refused})"):
        searches(settings(space={"local.momentum": {"low": low, "high": high}}))
    searches(settings(space={"local.momentum": {"low": 0.0, "high": 0.5}}))


@pytest.mark.parametrize("order", [1, -1])
def test_one_row_under_privacy_is_enough_to_ask_for_public_records(order: int) -> None:
    private = {"algorithm": "fedavg", "aggregator": "global-dp", "sampler": "poisson:0.5"}
    chosen = settings(grid={"algorithm": ["scaffold", private][::order]})
    with pytest.raises(UserError, match=r"row FedAvg, .*global-dp.* promises privacy"):
        searches(chosen)
    assert len(searches(settings(grid={"algorithm": ["scaffold"]}))) == 1


def test_own_test_records_are_public_where_a_private_trial_is_judged_by_them_and_public_ones_are_not_the_users() -> (
    None
):
    private = {"aggregator": "global-dp", "sampler": "poisson:0.5"}
    for data, base, public in (
        ("npz:public.npz", private, True), ("mnist", private, False), ("npz:public.npz", {}, False),
        ("mnist", {}, False),
    ):  # fmt: skip
        chosen = settings(base=base, data=data)
        search = Search(plan_table(chosen).cells[0], {}, ())
        assert experiment_of(chosen, Trial(search, 1, {}), 5).evaluate.test_is_public is public


def test_what_a_row_sets_beside_the_defaults_is_not_searched_for_and_its_defaults_are() -> None:
    for algorithm, key in (("fedprox:2", "algorithm.mu"), ({"kind": "fedprox", "mu": 0.5}, "algorithm.mu")):
        with pytest.raises(UserError, match=f"sets algorithm.* but tune also searches for values of {key}"):
            searches(settings(grid={"algorithm": [algorithm]}, space={key: [0.1, 1.0]}))
    (search,) = searches(settings(grid={"algorithm": ["fedprox"]}, space={"algorithm.mu": [0.1, 1.0]}))
    assert [*search.space] == ["algorithm.mu"]


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
    found = [trial_outcome(out, trial(rounds), 0, None) for rounds in (1, 2, 3, 5)]
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
        assert trial_outcome(four, trial(rounds), after, None) == TrialOutcome(accuracy, rounds - after, seconds)


def test_a_run_that_diverged_after_its_last_round_did_so_for_a_trial_of_all_rounds_and_for_no_shorter_one(
    four: Path,
) -> None:
    told(four, status="failed", diverged=True, error="the loss is nan")
    found = [trial_outcome(four, trial(rounds), 0, None) for rounds in (1, 2, 3, 4)]
    assert [one and (one.accuracy, one.trained, one.error) for one in found] == [
        (0.5, 1, ""), (0.25, 2, ""), (0.75, 3, ""), (None, 4, "the loss is nan"),
    ]  # fmt: skip


def test_rounds_that_are_not_all_timed_take_the_time_of_the_whole_run(four: Path) -> None:
    rewritten(four, seconds=[1.0, None, 4.0, 8.0])
    found = [trial_outcome(four, trial(4), after, None) for after in (0, 1, 2)]
    assert [one and one.seconds for one in found] == [48.0, 32.0, 12.0]


def test_a_trial_without_validation_is_judged_by_its_test_records(four: Path) -> None:
    rewritten(four, validation_accuracy=[None] * 4, test_accuracy=[0.2, 0.8, 0.4, 0.6])
    found = [trial_outcome(four, trial(rounds), 0, None) for rounds in (1, 2, 3)]
    assert [one and one.accuracy for one in found] == [0.2, 0.8, 0.4]


def test_what_a_trial_came_to_is_not_known_where_its_rounds_or_its_end_are_missing(four: Path) -> None:
    assert trial_outcome(four, trial(5), 0, None) is None
    told(four, rounds=3)
    found = trial_outcome(four, trial(4), 0, None)
    assert found is not None
    told(four, rounds=4)
    lines = (four / ROUNDS).read_text().splitlines(keepends=True)
    (four / ROUNDS).write_text("".join(lines[:3]))
    assert trial_outcome(four, trial(4), 0, None) is None
    (four / RESULT).unlink()
    assert [trial_outcome(four, trial(rounds), 0, None) is None for rounds in (2, 3, 4)] == [False, False, True]


def test_a_trial_goes_on_where_more_rounds_change_no_learning_rate_and_nothing_at_its_end() -> None:
    def goes(rounds: int = 2, **changes: Any) -> bool:
        return can_extend(experiment_from({"model": "mlp", "clients": 4, "rounds": rounds, **changes}))

    schedules = "constant", "exponential", "step", "cosine"
    assert [goes(local={"schedule": each}) for each in schedules] == [True, True, True, False]
    assert [goes(rounds, local={"schedule": "cosine"}) for rounds in (1, 2, 3, 9)] == [True, False, False, False]
    assert not goes(calibrate="ccvr:5")
    assert not goes(aggregator="global-dp", sampler="poisson:0.5")


def test_a_trial_of_which_too_much_was_left_to_be_kept_begins_anew_unless_it_has_all_rounds(tmp_path: Path) -> None:
    shared = trial_directory(trial(1), tmp_path, None)
    assert trial_directory(trial(4), tmp_path, None) == shared
    run(trial(3), shared)
    assert {trial_directory(trial(rounds), tmp_path, None) for rounds in (1, 2, 3, 4, 9)} == {shared}
    (shared / CHECKPOINT).unlink()
    anew = [trial_directory(trial(rounds), tmp_path, None).name.removeprefix(shared.name) for rounds in (2, 3, 4, 9)]
    assert anew == ["", "", "-4-rounds", "-9-rounds"]
    (shared / ROUNDS).write_text("")
    assert trial_directory(trial(4), tmp_path, None) == shared
