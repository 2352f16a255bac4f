"""What ``[tune]`` in a table's file says: trials and rungs, what a knob may be, and which values a trial draws."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, ValidationError, field_validator

from fl_sim.errors import UserError
from fl_sim.experiment.groups import Validation
from fl_sim.mistakes import explain, guess, shortened
from fl_sim.seeding import rng
from fl_sim.settings import Settings, flat

Values: TypeAlias = Mapping[str, Any]
"""What a trial sets, by key: {"local.learning_rate": 0.013}."""

NOT_TUNED = (
    "data", "partition", "clients", "seed", "partition_seed", "model_seed", "sampling_seed", "rounds", "evaluate",
    "evaluate_every", "engine", "device", "round_timeout", "attack",
)  # fmt: skip
"""Settings that say what is compared and how it is measured: a search leaves them as they are."""

_DIGITS = 3
"""Significant digits of a number that is drawn: enough for a setting, and few enough to be told and typed again."""


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


@dataclass(frozen=True)
class Choices:
    """A list of values, each tried as often as any other."""

    values: tuple[Any, ...]

    def drawn(self, seed: int, key: str, trial: int) -> Any:
        """Return the value of ``trial``, from 0: every so many trials a new order of all values begins."""
        turn, place = divmod(trial, len(self.values))
        return self.values[int(rng(seed, f"tuning {key}", turn).permutation(len(self.values))[place])]

    def extremes(self) -> tuple[Any, ...]:
        """Return the values that show whether all may be taken: here all of them."""
        return self.values

    def is_at_end(self, value: Any) -> bool:
        """Say whether ``value`` is the smallest or the largest of three or more numbers."""
        numbers = [one for one in self.values if isinstance(one, int | float) and not isinstance(one, bool)]
        return len(numbers) == len(self.values) > 2 and value in {min(numbers), max(numbers)}


def _finite(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a number")  # its kind is kept: 1 is a whole one and 1.0 is not
    return value


Number: TypeAlias = Annotated[int | float, PlainValidator(_finite)]


class Range(Settings):
    """The numbers from ``low`` to ``high``, whole ones where both are.

    ``log``: as many are drawn between 1 and 10 as between 10 and 100.
    """

    low: Number
    high: Number
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Say whether whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def drawn(self, seed: int, key: str, trial: int) -> float | int:
        """Return the value of ``trial``, from 0, rounded to three significant digits or to a whole number."""
        at = float(rng(seed, f"tuning {key}", trial).random())
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        return self.rounded(math.exp(low + at * (high - low)) if self.log else low + at * (high - low))

    def rounded(self, number: float) -> float | int:
        """Return ``number`` as it is set: inside the range, short enough to be typed."""
        short = round(number) if self.is_whole else float(f"{number:.{_DIGITS}g}")
        return min(max(short, self.low), self.high)

    def extremes(self) -> tuple[Any, ...]:
        """Return the values that show whether all may be taken: both ends."""
        return self.low, self.high

    def is_at_end(self, value: float) -> bool:
        """Say whether ``value`` lies in the first or the last tenth of the range."""
        low, high, at = (math.log(one) if self.log else float(one) for one in (self.low, self.high, value))
        return not 0.1 < (at - low) / (high - low) < 0.9


Knob: TypeAlias = Choices | Range
Space: TypeAlias = Mapping[str, Knob]


@dataclass(frozen=True)
class Method:
    """A row that is tuned: its name, the kind of its algorithm, and what spans the table for it.

    ``is_bound``: whether it is an upper bound, which has no place for what federations have alone.
    """

    row: str
    kind: str
    spanned: frozenset[str]
    is_bound: bool = False


def spaces(tune: Tune, methods: Iterable[Method], federations: Iterable[str]) -> dict[str, Space]:
    """Return {row: its space}, the knobs that all methods share first.

    ``federations``: groups of settings that an upper bound has no place for. Raises UserError for a space that is
    empty, not a list or a range, about what may not be tuned or is varied already, or of a method that is not there.
    """
    methods = tuple(methods)
    shared = _read(tune.space, "tune.space")
    own = {name: _read(table, f"tune.spaces.{name}") for name, table in tune.spaces.items()}
    names = [name for method in methods for name in (method.kind, method.row)]
    for name, space in own.items():
        if name not in names:
            raise UserError(
                f"tune.spaces.{shortened(name)} is for no method of this table{guess(name, names)}; methods here: "
                f"{', '.join(dict.fromkeys(names))}"
            )
        if not space:
            raise UserError(f"tune.spaces.{name} is empty: give it a knob, or leave it out")
    found: dict[str, Space] = {}
    for method in methods:
        space = {**shared, **own.get(method.kind, {}), **own.get(method.row, {})}
        for key in space:
            _check_free(key, method)
        if method.is_bound:
            space = {key: knob for key, knob in space.items() if key.split(".")[0] not in federations}
        elif not space:
            raise UserError(
                f"row {method.row} has nothing to tune, and every method is to get the same search: name a knob for "
                'all in [tune.space], such as "local.learning_rate" = { low = 0.001, high = 0.1, log = true }'
            )
        found[method.row] = space
    return found


def drawn(space: Space, seed: int, trial: int) -> dict[str, Any]:
    """Return the values of ``trial``, from 0. Of a knob that methods share all of them draw the same ones."""
    return {key: knob.drawn(seed, key, trial) for key, knob in space.items()}


def check_installed() -> None:
    """Raise UserError where Optuna, which is an extra, is not installed."""
    if find_spec("optuna") is None:
        raise UserError(
            "tune.search=optuna needs Optuna, which is an extra: pip install 'fl-sim[tune]', or take tune.search=random"
        )


def proposed(space: Space, tried: Sequence[tuple[Values, float | None]], seed: int) -> dict[str, Any]:
    """Return the values to try next, given what was ``tried``: values and accuracies, None where a trial diverged.

    A pure function of its arguments, so a search that was broken off proposes the same again.
    """
    import optuna  # noqa: PLC0415 (an extra)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {key: _distribution(knob) for key, knob in space.items()}
    # All draws that are not guided are made before Optuna is asked, so it starts at once.
    number = int(rng(seed, "tuning optuna", len(tried)).integers(2**31))
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=number, n_startup_trials=0)
    )
    for values, accuracy in tried:
        params = {key: _encoded(space[key], value) for key, value in values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=accuracy or 0.0))
    params = study.ask(kinds).params
    return {key: _decoded(knob, params[key]) for key, knob in space.items()}


def _check_free(key: str, method: Method) -> None:
    if key.partition(".")[0] in NOT_TUNED:
        raise UserError(
            f"{key} cannot be tuned: it says what is compared, on which records, or how it is measured; tune settings "
            "of the method, such as local.learning_rate or algorithm.mu"
        )
    if key == "algorithm":
        raise UserError("algorithm cannot be tuned: methods are the rows; tune its settings, such as algorithm.mu")
    for other in method.spanned:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            raise UserError(
                f"row {method.row} sets {other} in the grid, and tune searches for {key}: leave one of them out"
            )


def _read(table: Mapping[str, Any], where: str) -> dict[str, Knob]:
    return {key: _knob(value, f"{where}.{key}") for key, value in flat(table, _is_knob)}


def _is_knob(value: Any) -> bool:
    """Say whether it is no further table of keys: ``{low = ..., high = ...}`` is a range."""
    return not isinstance(value, Mapping) or not value or bool({"low", "high"} & set(value))


def _knob(value: Any, where: str) -> Knob:
    if isinstance(value, list) and value:
        return Choices(tuple(value))
    if not isinstance(value, Mapping) or not value:
        raise UserError(
            f"{where} = {shortened(repr(value))}: give a list of one or more values, or a range "
            "{ low = 0.001, high = 0.1, log = true }"
        )
    try:
        found = Range.model_validate(value)
    except ValidationError as error:
        raise UserError(explain(error, Range, where)) from error
    if found.low >= found.high:
        raise UserError(f"{where}: low = {found.low:g} must be below high = {found.high:g}")
    if found.log and found.low <= 0:
        raise UserError(f"{where}: log = true needs low above 0, got low = {found.low:g}")
    return found


def _distribution(knob: Knob) -> Any:
    from optuna import distributions  # noqa: PLC0415

    if isinstance(knob, Choices):
        return distributions.CategoricalDistribution(range(len(knob.values)))
    kind = distributions.IntDistribution if knob.is_whole else distributions.FloatDistribution
    return kind(knob.low, knob.high, log=knob.log)


def _encoded(knob: Knob, value: Any) -> Any:
    return knob.values.index(value) if isinstance(knob, Choices) else value


def _decoded(knob: Knob, value: Any) -> Any:
    return knob.values[value] if isinstance(knob, Choices) else knob.rounded(value)
