"""What is said of searches: their plans, what their runs took together, what was chosen and whether at an end."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from fl_sim.tables.filling import search_caption, search_json
from fl_sim.tables.plan import TableSettings, plan_table, table_settings
from fl_sim.tables.tuning import Search, SearchResult, Trial, TrialResult, csv_text, searches_of
from fl_sim.tables.tuning_space import Rung, Tune

RATES = {"low": 0.001, "high": 1.0, "log": True}


def settings(**tuning: Any) -> TableSettings:
    table = {
        "base": {"model": "logistic", "rounds": 8, "clients": 4},
        "grid": {"algorithm": ["fedavg", "scaffold"], "partition": ["label-1", "label-2"], "seed": [3, 4]},
        "centralized": False, "tune": {"trials": 8, "space": {"local.learning_rate": RATES}, **tuning},
    }  # fmt: skip
    return table_settings(table, [], "the test")


def tune_of(**tuning: Any) -> Tune:
    found = settings(**tuning).tune
    assert found is not None
    return found


def tried(search: Search, number: int, rung: int, name: str, accuracy: float | None, seconds: float) -> TrialResult:
    """Return what a trial of rate ``number`` / 10 came to on a rung of 10 times its number of rounds."""
    trial = Trial(search, number, {"local.learning_rate": number / 10})
    return TrialResult(trial, rung, 10 * rung, 10 * rung - number, name, accuracy, seconds, "" if accuracy else "nan")


@pytest.fixture
def choices() -> tuple[SearchResult, ...]:
    """Three searches, of which the second shares a run with the first; the third has other rungs and another seed."""
    chosen = settings()
    first, second, third, _ = searches_of(chosen, plan_table(chosen), None)
    third = Search(replace(third.cell, seed=7), third.space, (Rung(8, 3), Rung(2, 6)))
    tries = (
        [tried(first, 1, 1, "a", 0.5, 1.0), tried(first, 2, 1, "b", None, 2.0), tried(first, 1, 2, "a", 0.75, 4.0)],
        [tried(second, 1, 1, "a", 0.5, 1.0), tried(second, 9, 1, "c", 0.625, 8.0)],
        [tried(third, 3, 1, "d", None, 16.0), tried(third, 4, 1, "e", 0.25, 32.0)],
    )
    return tuple(
        SearchResult(search, best, tuple(of))
        for search, of, best in zip((first, second, third), tries, (tries[0][2], tries[1][1], tries[2][1]), strict=True)
    )


def test_searches_with_a_run_in_common_take_it_once_together_and_once_each(choices: tuple[SearchResult, ...]) -> None:
    told = search_json(choices, tune_of())
    assert [[one[key] for key in ("runs", "diverged", "rounds", "seconds")] for one in told] == [
        [2, 1, 9 + 8 + 19, 7.0], [2, 0, 9 + 1, 9.0], [2, 1, 7 + 6, 48.0],
    ]  # fmt: skip
    (first, *_) = search_caption(choices, tune_of())
    assert "All searches together took 5 runs, of which 2 diverged, 50 rounds and 63 s; tuning.csv" in first
    (first, *_) = search_caption(choices[1:2], tune_of())
    assert "All searches together took 2 runs, 10 rounds and 9 s; tuning.csv" in first


def test_each_search_is_told_with_its_own_trials_rungs_and_best(choices: tuple[SearchResult, ...]) -> None:
    told = search_json(choices, tune_of())
    assert [(one["row"], one["column"], one["seed"], one["values"], one["accuracy"]) for one in told] == [
        ("FedAvg", "digits 1-Label", 3, {"local.learning_rate": 0.1}, 75.0),
        ("FedAvg", "digits 2-Label", 3, {"local.learning_rate": 0.9}, 62.5),
        ("SCAFFOLD", "digits 1-Label", 7, {"local.learning_rate": 0.4}, 25.0),
    ]
    assert [(one["trials"], one["rungs"], one["at_end"]) for one in told] == [
        (8, [[8, 2], [4, 4], [2, 8]], []), (8, [[8, 2], [4, 4], [2, 8]], ["local.learning_rate"]),
        (8, [[8, 3], [2, 6]], []),
    ]  # fmt: skip
    assert {one["judged_on"] for one in told} == {"validation"}
    tuned = tune_of(data="mnist")
    assert {one["judged_on"] for one in search_json(choices, tuned)} == {"test records of mnist"}


def test_the_caption_tells_all_plans_and_what_was_chosen_for_each_row_and_where(
    choices: tuple[SearchResult, ...],
) -> None:
    first, *others = search_caption(choices, tune_of())
    assert (
        "8 trials of 2 rounds, the best 4 of them 4 rounds, the best 2 of them 8 rounds; 8 trials of 3 rounds, the "
        "best 2 of them 6 rounds;" in first
    )
    assert "Trials have the first of the table's seeds (3, 7)." in first
    second, wider = (
        "FedAvg, digits 2-Label",
        "Chosen at an end of the search space, so a wider space may contain better values",
    )
    assert others == [
        "FedAvg, chosen: digits 1-Label local.learning_rate=0.1; digits 2-Label local.learning_rate=0.9.",
        "SCAFFOLD, chosen: digits 1-Label local.learning_rate=0.4.",
        f"{wider}: {second}: local.learning_rate.",
    ]
    assert search_caption(choices[:1], tune_of())[1:] == ("FedAvg, chosen: digits 1-Label local.learning_rate=0.1.",)


def test_runs_train_on_all_records_unless_one_of_them_holds_some_out(choices: tuple[SearchResult, ...]) -> None:
    tune = tune_of()
    whole = "The runs of the table train on all training records and use the test records once"
    assert whole in search_caption(choices, tune)[0]
    for validation, is_whole in ((0.2, False), ("given", True)):
        last = choices[-1].search
        evaluate = last.cell.experiment.evaluate.model_copy(update={"validation": validation})
        cell = replace(last.cell, experiment=last.cell.experiment.model_copy(update={"evaluate": evaluate}))
        changed = replace(choices[-1], search=replace(last, cell=cell))
        assert (whole in search_caption([*choices[:2], changed], tune)[0]) is is_whole


def test_tuning_csv_has_what_each_trial_came_to_on_each_of_its_rungs(choices: tuple[SearchResult, ...]) -> None:
    lines = list(csv.DictReader(csv_text(choices[0].tried).splitlines()))
    assert [[line[key] for key in ("trial", "rung", "rounds", "trained", "accuracy", "seconds", "dir", "status")]
            for line in lines] == [
        ["1", "1", "10", "9", "0.5", "1.0", "a", "finished"], ["2", "1", "10", "8", "", "2.0", "b", "diverged"],
        ["1", "2", "20", "19", "0.75", "4.0", "a", "finished"],
    ]  # fmt: skip
    assert {line["values"] for line in lines} == {'{"local.learning_rate": 0.1}', '{"local.learning_rate": 0.2}'}
