"""What a search will take, before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_sim.tables.forecast import Forecast, in_time, rounds_done
from fl_sim.tables.plan import TableSettings
from fl_sim.tables.tuning import TRIALS
from fl_sim.tables.tuning_trials import Search, directory_of, experiment_of, goes_on, proposed_trial, turns


@dataclass(frozen=True)
class SearchForecast:
    """What the search for a row's settings in a column takes: ``rounds`` that its trials train, ``done`` of them.

    ``seconds_left``: of the rest, one run at a time; None where nothing was timed.
    """

    search: Search
    rounds: int
    done: int
    seconds_left: float | None


def search_forecasts(
    settings: TableSettings,
    searches: Sequence[Search],
    out: Path,
    data_root: Path | None,
    runs: Sequence[Forecast],
) -> list[SearchForecast]:
    """Return what the ``searches`` of the table in ``out`` take, those with the same trials once.

    ``runs``: what the table's own runs take, by which the rounds of trials are timed.
    """
    whole = {one.name: one.estimate.seconds for one in runs}
    found: dict[tuple[str, ...], SearchForecast] = {}
    for search in searches:
        directories = _directories(settings, search, out / TRIALS, data_root)
        rounds = _rounds(settings, search)
        done = min(rounds, sum(map(rounds_done, directories)))
        seconds = whole[search.cell.name]
        left = None if seconds is None else seconds / search.cell.experiment.rounds * (rounds - done)
        found.setdefault(tuple(path.name for path in directories), SearchForecast(search, rounds, done, left))
    return list(found.values())


def search_in_words(searches: Sequence[SearchForecast], jobs: int) -> str:
    """Return how much there is to search, what of it is done, and how long the rest takes, ``jobs`` side by side."""
    rounds, done = sum(one.rounds for one in searches), sum(one.done for one in searches)
    trials = sum(one.search.rungs[0].trials for one in searches)
    told = (
        f"{len(searches)} search{'' if len(searches) == 1 else 'es'} for settings, one a row and column: {trials} "
        f"trials with {rounds:,} rounds together, {done:,} of them done"
    )
    seconds = [one.seconds_left for one in searches if one.seconds_left is not None]
    if len(seconds) < len(searches):
        return told
    return (
        f"{told}; the rest takes about {in_time(sum(seconds) / jobs)}{f' with {jobs} side by side' if jobs > 1 else ''}"
    )


def _directories(settings: TableSettings, search: Search, folder: Path, data_root: Path | None) -> list[Path]:
    """Return where those trials run that are known from the beginning, which is all of them unless Optuna is asked."""
    assert settings.tune is not None
    trials = [proposed_trial(search, settings.tune, number, ()) for number in turns(settings.tune)[0]]
    rounds = search.rungs[0].rounds
    return list(
        dict.fromkeys(directory_of(experiment_of(settings, trial, rounds), folder, data_root) for trial in trials)
    )


def _rounds(settings: TableSettings, search: Search) -> int:
    """Return how many rounds the trials of a search train, all rungs together."""
    assert settings.tune is not None
    trial = proposed_trial(search, settings.tune, 0, ())
    total, before = 0, 0
    for rung in search.rungs:
        on = goes_on(experiment_of(settings, trial, rung.rounds))
        total += rung.trials * (rung.rounds - before if on else rung.rounds)
        before = rung.rounds
    return total
