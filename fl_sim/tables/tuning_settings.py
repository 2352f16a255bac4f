"""What ``[tune]`` in a table's file says: how the methods' settings are searched for, at the same expense for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from fl_sim.experiment.evaluate import Validation
from fl_sim.settings import Settings


class Tune(Settings):
    """A search for every method in every column, with the same ``trials`` and rounds for each.

    ``rounds``: of the longest trials (0: as many as the runs of the table). ``halving``: of the trials of a rung one in
    so many goes on to the next, which has so many times the rounds. ``validation``: the part of every client's training
    records that a trial does not train on and is judged by ("given": it is judged by the validation records that the
    data set comes with). ``search``: "random" draws the values, "optuna" lets
    Optuna's TPE propose them from what was found before. ``seed``: of the draws.

    ``space``: the knobs that all methods have, ``spaces``: those of single ones, by their kind or their row's name;
    each is a list of values or a range {low, high, log}. ``data``: a public data set to search on in place of the
    table's own, which methods under privacy need; trials are then judged by its test records.
    """

    trials: int = Field(16, ge=1, le=10_000)
    rounds: int = Field(0, ge=0, le=10**9)
    halving: int = Field(2, ge=2)
    validation: Validation = 0.1
    search: Literal["random", "optuna"] = "random"
    seed: int = Field(0, ge=0)
    data: str = ""
    space: dict[str, Any] = Field(default_factory=dict)
    spaces: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("validation")
    @classmethod
    def _judges(cls, validation: Validation) -> Validation:
        if not validation:
            raise ValueError("trials would have nothing to be judged by; a tenth of the records is 0.1")
        return validation


@dataclass(frozen=True)
class Rung:
    """``trials`` runs of ``rounds`` rounds each."""

    trials: int
    rounds: int


def rungs(trials: int, rounds: int, halving: int) -> tuple[Rung, ...]:
    """Return the rungs of successive halving (Jamieson & Talwalkar 2016, algorithm 1), the last with all ``rounds``.

    Every rung costs about the same: one in ``halving`` of its trials, rounded down, goes on to the next, which has
    ``halving`` times the rounds. Of the last rung the best one is taken. No trial is shorter than a round, so a
    search with few rounds has fewer rungs, and more trials in the last.

    >>> [(rung.trials, rung.rounds) for rung in rungs(16, 20, 2)]
    [(16, 2), (8, 5), (4, 10), (2, 20)]
    """
    counts, shortest = [trials], rounds
    while counts[-1] > halving and shortest >= halving:
        counts.append(counts[-1] // halving)
        shortest //= halving
    last = len(counts) - 1
    return tuple(Rung(count, rounds // halving ** (last - step)) for step, count in enumerate(counts))


def num_rounds(plan: Sequence[Rung]) -> int:
    """Return how many rounds the trials of a search train together where each rung starts anew."""
    return sum(rung.trials * rung.rounds for rung in plan)
