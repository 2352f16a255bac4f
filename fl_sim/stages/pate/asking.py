"""PATE's server asks clients as teachers."""

from dataclasses import replace
from typing import Final

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fl_sim.engines import arrays, wire
from fl_sim.errors import Malformed, RunError
from fl_sim.types import Traffic
from strategies.answers import UNQUOTED, Asking, answers_to, find_population, in_words, refusal

VOTE: Final = "vote"
"""The task of training as a teacher and voting on the public pool."""


def ask_teachers(
    grid: Grid, order: wire.TaskConfig, timeout: float, *, teachers: int, records: int, classes: int, private: bool
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Have every client train a teacher and vote; return the votes, shape (teachers, records), and who gave none.

    Raises RunError that names the first teacher whose votes are missing or malformed. Under ``private`` such a teacher
    votes for class 0 throughout, one vote a query as ever, because a run that stops for one teacher tells about its
    records; where all of them fail, the set-up is at fault, and the reason given comes from no client.
    """
    population = find_population(grid, teachers, timeout)
    asking = Asking(replace(order, task=VOTE), timeout, quoted=not private)
    answers = answers_to(grid, population, asking, lambda one: wire.read_votes(one, records, classes))
    failed = {teacher: answer for teacher, answer in enumerate(answers) if isinstance(answer, Malformed)}
    if failed and not private:
        raise refusal(f"teacher {min(failed)}", failed[min(failed)], quoted=True)
    if len(failed) == teachers:
        raise RunError(
            f"none of {teachers} teachers voted: local.learning_rate may be too large, or the model not fit the "
            f"records; {UNQUOTED}",
            private=in_words("teacher", failed),
        )
    silent = np.zeros(records, dtype=np.int64)
    return np.stack([silent if isinstance(one, Malformed) else one for one in answers]), tuple(failed)


def traffic_of_votes(num_records: int, num_teachers: int) -> Traffic:
    """Return what it takes that every teacher sends its votes on public records, which all have."""
    sent = wire.votes_content(np.zeros(num_records, dtype=np.int64))
    return Traffic(0, arrays.num_bytes(sent)) * num_teachers
