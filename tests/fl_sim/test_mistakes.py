"""A refusal of settings tells the first mistakes, whole, and how many more there are, in at most 1,000 characters."""

import pytest

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from

LONG = "9" * 5000


def refusal(**settings: object) -> str:
    with pytest.raises(UserError) as caught:
        experiment_from(settings)
    return str(caught.value)


def test_five_short_mistakes_are_all_told():
    told = refusal(clients=0, rounds=0, model=2, round_timeout=-1, evaluate_every="x")
    assert told.count("; ") == 4
    assert "more mistake" not in told


def test_of_seven_short_mistakes_five_are_told():
    told = refusal(clients=0, rounds=0, model=2, round_timeout=-1, evaluate_every="x", seed="x", device=2)
    assert told.count("; ") == 5
    assert told.endswith("; and 2 more mistakes")


def test_what_is_told_of_long_values_stays_short_and_counts_the_rest():
    told = refusal(partition=LONG, algorithm=LONG, aggregator=LONG, compress=LONG, attack=LONG)
    assert told.startswith("partition = '999")
    assert " ... " in told
    assert len(told) <= 1000
    whole = told.count("package.module:Class")
    assert 1 <= whole < 5
    assert told.endswith(f"; and {5 - whole} more mistakes")


def test_one_mistake_is_told_however_long_and_one_more_is_one():
    told = refusal(partition=LONG, algorithm=LONG)
    assert told.endswith("; and 1 more mistake")
    assert len(refusal(algorithm=LONG)) <= 700


def test_a_value_of_usual_length_is_quoted_whole():
    name = "csv:" + "/folder" * 30
    assert f"normalise = {name!r}" in refusal(normalise=name)
