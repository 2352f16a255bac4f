"""What a result says of the rounds: first, last and best are three different ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation import run_log
from fl_sim.store.run_directory import RoundRecord


def scores(*pairs: tuple[float | None, float | None]) -> list[RoundRecord]:
    return [
        RoundRecord(number, test, None, None, None, None, 0.1, None, validation_accuracy=held_out)
        for number, (test, held_out) in enumerate(pairs, 1)
    ]


def test_the_best_validation_accuracy_is_neither_the_first_nor_the_last() -> None:
    job: Any = SimpleNamespace(num_validated=40)
    told = run_log._validation(job, scores((0.1, 0.3), (0.2, 0.8), (0.4, 0.5)))
    assert told == {"validation": {"records": 40, "final_accuracy": 0.5, "best_accuracy": 0.8}}


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([(0.9, 0.3), (0.2, 0.8), (0.4, 0.5)], 2),  # by validation, where there is one
        ([(0.3, None), (0.9, None), (0.9, None), (0.5, None)], 2),  # the first of equals
        ([(0.3, None), (None, None), (0.2, None)], 1),
    ],
)
def test_the_best_round_is_the_first_of_the_highest(found: list[tuple[float | None, float | None]], best: int) -> None:
    chosen = run_log._best(experiment_from({}), scores(*found))
    assert chosen is not None
    assert chosen.round == best
