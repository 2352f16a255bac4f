"""The section ``[tune]`` of a table: hyperparameter search with successive halving, and its search space."""

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
"""The hyperparameters of one trial, {setting: value}, such as {"local.learning_rate": 0.013}."""

NOT_TUNED = (
    "data", "partition", "clients", "seed", "partition_seed", "model_seed", "sampling_seed", "rounds", "evaluate",
    "evaluate_every", "engine", "device", "round_timeout", "attack", "forgotten", "keep_every", "left_out",
)  # fmt: skip
"""Settings that a search must not change. All methods of a comparison need the same values of these settings."""

_DIGITS = 3
"""Number of significant digits of a drawn value. A value with few digits is easy to copy into an experiment."""


class Tune(Settings):
    """A hyperparameter search for every method in every column, with the same numbers of trials and rounds for each.

    ``trials``: the number of trials per method and column. ``rounds``: number of rounds of the longest trials (0: the
    number of rounds of the table's runs). ``halving``: the factor n of successive halving. In each stage of the search,
    the best 1/n of the trials continue to the next stage, with n times as many rounds. ``validation``: the share of
    every client's training records that is held out to evaluate trials ("given": the validation records of the data
    set). ``search``: "random" draws the values at random. With "optuna", the method TPE of the library Optuna proposes
    values from earlier results. ``seed``: the seed of the drawn values.

    ``space``: the settings to tune for all methods, each with a list of values or a range {low, high, log}. ``spaces``:
    further settings to tune for single methods, {kind of the algorithm or name of the row: settings}. ``data``: a
    public data set for the trials, in place of the table's own data. Its training records train the trials, and its
    test records evaluate them. A search for a method with a privacy guarantee requires ``data``.

    ``partial``: True permits rows without a search space, which are then not tuned (as in papers that tune only some
    methods). False forbids such rows, because a fair comparison tunes all methods with equal effort.
    """

    trials: int = Field(16, ge=1, le=10_000)
    rounds: int = Field(0, ge=0, le=10**9)
    halving: int = Field(2, ge=2)
    validation: Validation = 0.1
    search: Literal["random", "optuna"] = "random"
    seed: int = Field(0, ge=0)
    data: str = ""
    partial: bool = False
    space: dict[str, Any] = Field(default_factory=dict)
    spaces: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("validation")
    @classmethod
    def _judges(cls, validation: Validation) -> Validation:
        if not validation:
            raise ValueError("trials are compared on validation records: give the share to hold out, such as 0.1")
        return validation


@dataclass(frozen=True)
class Rung:
    """One stage of successive halving: a number of ``trials``, each with a total of ``rounds`` rounds."""

    trials: int
    rounds: int


def rungs(trials: int, rounds: int, halving: int) -> tuple[Rung, ...]:
    """Return the rungs (stages) of successive halving (Jamieson & Talwalkar 2016, algorithm 1).

    From each rung to the next, the number of trials is divided by ``halving`` and rounded down. The number of rounds is
    multiplied by ``halving``, so that every rung costs about the same. A trial of the last rung has all ``rounds``. The
    best trial of the last rung is the result of the search. Because a trial has at least one round, a search with few
    rounds has fewer rungs.

    >>> [(rung.trials, rung.rounds) for rung in rungs(16, 20, 2)]
    [(16, 2), (8, 5), (4, 10), (2, 20)]
    """
    counts, shortest = [trials], rounds
    while counts[-1] > halving and shortest >= halving:
        counts.append(counts[-1] // halving)
        shortest //= halving
    last = len(counts) - 1
    return tuple(Rung(count, rounds // halving ** (last - step)) for step, count in enumerate(counts))


@dataclass(frozen=True)
class ValueList:
    """A search space of one setting: a list of values. All values are drawn equally often."""

    values: tuple[Any, ...]

    def drawn(self, seed: int, key: str, trial: int) -> Any:
        """Return the value of the setting ``key`` for trial number ``trial`` (from 0).

        Each pass over the list draws every value once, in a new random order.
        """
        repeat, place = divmod(trial, len(self.values))
        return self.values[int(rng(seed, f"tuning {key}", repeat).permutation(len(self.values))[place])]

    def extremes(self) -> tuple[Any, ...]:
        """Return the values that are validated before the search starts: all values of the list."""
        return self.values

    def is_at_end(self, value: Any) -> bool:
        """Return True if ``value`` is the smallest or the largest value of the list.

        The result is False for a list of fewer than three numbers, or if a value is not a number.
        """
        numbers = [one for one in self.values if isinstance(one, int | float) and not isinstance(one, bool)]
        return len(numbers) == len(self.values) > 2 and value in {min(numbers), max(numbers)}


def _finite(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a number")
    # pydantic must not convert numbers here, because ``low = 1`` asks for integers, and ``low = 1.0`` for floats
    return value


Number: TypeAlias = Annotated[int | float, PlainValidator(_finite)]


class Range(Settings):
    """A search space of one setting: the numbers from ``low`` to ``high``.

    If both limits are integers, only integers are drawn. ``log``: True draws from a log-uniform distribution, so that
    numbers between 1 and 10 are as likely as numbers between 10 and 100.
    """

    low: Number
    high: Number
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Return True if the range draws integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def drawn(self, seed: int, key: str, trial: int) -> float | int:
        """Return the value of the setting ``key`` for trial number ``trial`` (from 0), rounded by ``rounded``."""
        at = float(rng(seed, f"tuning {key}", trial).random())
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        return self.rounded(math.exp(low + at * (high - low)) if self.log else low + at * (high - low))

    def rounded(self, number: float) -> float | int:
        """Return ``number`` rounded to an integer or to three significant digits, and limited to the range."""
        short = round(number) if self.is_whole else float(f"{number:.{_DIGITS}g}")
        return min(max(short, self.low), self.high)

    def extremes(self) -> tuple[Any, ...]:
        """Return the values that are validated before the search starts: the lower and the upper end of the range."""
        return self.low, self.high

    def is_at_end(self, value: float) -> bool:
        """Return True if ``value`` is in the first or last tenth of the range.

        If ``log`` is True, a tenth is measured on the logarithmic scale.
        """
        low, high, at = (math.log(one) if self.log else float(one) for one in (self.low, self.high, value))
        return not 0.1 < (at - low) / (high - low) < 0.9


Dimension: TypeAlias = ValueList | Range
Space: TypeAlias = Mapping[str, Dimension]


@dataclass(frozen=True)
class Method:
    """A row of the table whose hyperparameters are tuned.

    ``kind``: kind of the algorithm, such as "fedprox". ``spanned``: settings that cannot be tuned, because the grid
    varies them or the row's name states them. ``is_bound``: True for the row Centralized, which has no settings of
    federated learning.
    """

    row: str
    kind: str
    spanned: frozenset[str]
    is_bound: bool = False


def spaces(tune: Tune, methods: Iterable[Method], federated: Iterable[str]) -> dict[str, Space]:
    """Return {row: search space} for ``methods``. In each space, the settings of [tune.space] come first.

    ``federated``: names of the settings of federated learning, which the row Centralized does not have. Raises
    UserError for an empty space, for a value that is neither list nor range, for an unknown method, and for a setting
    that must not be tuned or is already in the grid.
    """
    methods = tuple(methods)
    shared = _read(tune.space, "tune.space")
    own = {name: _read(table, f"tune.spaces.{name}") for name, table in tune.spaces.items()}
    names = [name for method in methods for name in (method.kind, method.row)]
    for name, space in own.items():
        if name not in names:
            raise UserError(
                f"tune.spaces.{shortened(name)}: the table has no such method{guess(name, names)}; methods here: "
                f"{', '.join(dict.fromkeys(names))}"
            )
        if not space:
            raise UserError(f"tune.spaces.{name} is empty: give it a setting, or leave it out")
    found: dict[str, Space] = {}
    for method in methods:
        space = {**shared, **own.get(method.kind, {}), **own.get(method.row, {})}
        for key in space:
            _check_free(key, method)
        if method.is_bound:
            space = {key: dimension for key, dimension in space.items() if key.split(".")[0] not in federated}
        elif not space and not tune.partial:
            raise UserError(
                f"row {method.row} has no setting to search for, and every row gets the same search: name a setting of "
                'all rows in [tune.space], such as "local.learning_rate" = { low = 0.001, high = 0.1, log = true }, or '
                "permit rows without a search by partial = true"
            )
        found[method.row] = space
    return found


def drawn(space: Space, seed: int, trial: int) -> dict[str, Any]:
    """Return {setting: random value} for trial number ``trial`` (from 0).

    The value of a setting depends only on ``seed``, ``trial`` and the search space of this setting. Methods with the
    same search space for a setting therefore get equal values.
    """
    return {key: dimension.drawn(seed, key, trial) for key, dimension in space.items()}


def check_installed() -> None:
    """Raise UserError if Optuna, an optional dependency, is not installed."""
    if find_spec("optuna") is None:
        raise UserError(
            "tune.search=optuna needs the package Optuna: pip install 'fl-sim[tune]', or take tune.search=random"
        )


def proposed(space: Space, tried: Sequence[tuple[Values, float | None]], seed: int) -> dict[str, Any]:
    """Return the values that Optuna proposes for the next trial, {setting: value}.

    ``tried``: (values, accuracy) of the earlier trials; the accuracy is None for a trial that diverged. The result
    depends only on the arguments, so a resumed search proposes the same values.
    """
    import optuna  # noqa: PLC0415 (an extra)
    from optuna import distributions  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds: dict[str, Any] = {}
    for key, dimension in space.items():
        if isinstance(dimension, ValueList):
            kinds[key] = distributions.CategoricalDistribution(range(len(dimension.values)))
        else:
            kind = distributions.IntDistribution if dimension.is_whole else distributions.FloatDistribution
            kinds[key] = kind(dimension.low, dimension.high, log=dimension.log)
    # Optuna draws no random trials at its start, because the first trials of the search were random.
    number = int(rng(seed, "tuning optuna", len(tried)).integers(2**31))
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=number, n_startup_trials=0)
    )
    for values, accuracy in tried:
        listed = {key: one.values for key, one in space.items() if isinstance(one, ValueList)}
        params = {key: listed[key].index(value) if key in listed else value for key, value in values.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=accuracy or 0.0))
    params = study.ask(kinds).params
    return {
        key: one.values[params[key]] if isinstance(one, ValueList) else one.rounded(params[key])
        for key, one in space.items()
    }


def _check_free(key: str, method: Method) -> None:
    if key.partition(".")[0] in NOT_TUNED:
        raise UserError(
            f"{key} cannot be tuned: all methods of a comparison need the same value; tune settings of the methods, "
            "such as local.learning_rate or algorithm.mu"
        )
    if key == "algorithm":
        raise UserError(
            "algorithm cannot be tuned: the rows of the table are algorithms; tune settings such as algorithm.mu"
        )
    for other in method.spanned:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            raise UserError(
                f"row {method.row} sets {other} in the grid, but tune also searches for values of {key}: leave one of "
                "them out"
            )


def _read(table: Mapping[str, Any], where: str) -> dict[str, Dimension]:
    def is_dimension(value: Any) -> bool:  # False if the entry is a nested group of settings
        return not isinstance(value, Mapping) or not value or bool({"low", "high"} & set(value))

    return {key: _dimension(value, f"{where}.{key}") for key, value in flat(table, is_dimension)}


def _dimension(value: Any, where: str) -> Dimension:
    if isinstance(value, list) and value:
        return ValueList(tuple(value))
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
