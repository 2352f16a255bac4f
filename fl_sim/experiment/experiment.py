"""The experiment as a frozen value: the only place where data, partition, model and method meet."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fl_sim.data import Features
from fl_sim.data.naming import as_table, from_table
from fl_sim.errors import UserError
from fl_sim.experiment.groups import Auto, Engine, Evaluate, Local, goes_by_steps
from fl_sim.kinds import (
    Checking,
    Completing,
    Compressing,
    Harm,
    Promising,
    Remarking,
    is_none,
    is_own_kind,
    kind_of,
    path_in,
    replaces_records,
)
from fl_sim.mistakes import explain, shortened
from fl_sim.own_code import IMPORT_PATH
from fl_sim.settings import (
    MOST_LEVELS,
    InOneLine,
    OneOf,
    Settings,
    by_default,
    check_choices,
    choices_in,
    chosen_class,
    default_of,
    group_in,
    known_model,
)
from partitions import Scheme
from strategies.aggregators import Aggregator
from strategies.algorithm import Algorithm, Central
from strategies.samplers import Sampler


class Experiment(Settings):
    """All settings that determine a run's numbers, and the engine, which does not.

    ``data``: a data set by name ('fl-sim data list' shows them), a file of your own as ``csv:PATH``, ``npz:PATH`` and
    so on (docs/data.md), or the import path of a function of your own. ``partition``: how training records are dealt to
    clients. ``clients``: how many clients. ``model``: what is trained, by name, or the import path of a function that
    makes it; left out: what suits the data.
    ``algorithm``: what clients minimise, what they send, and what the server makes of it. ``aggregator``: how the
    server turns a round's updates into one: their mean, a robust mean, or a mean with noise for privacy. ``sampler``:
    which clients take part in a round. ``compress``: how what clients send in a round is made smaller.
    ``preprocess``: what clients do before the first round. ``attack``: what hostile clients do. ``calibrate``: what is
    done to the model after the last round. ``devices``: how fast clients compute and send, by a virtual clock.
    ``server``: whether the server waits for a round's clients, or goes on as updates come. ``local``: how clients
    train.
    ``rounds``: how often the server and its clients exchange updates. ``evaluate_every``: the model is measured after
    every round whose number is a multiple of this, and after the last one. ``evaluate``: which records it is measured
    on. ``engine``: how the work is spread over processors; results are the same. ``seed``: decides all that is random.

    ``round_timeout``: seconds in which all clients of a round must have answered. ``device`` "auto" takes a GPU where
    the worker sees one (a Ray actor sees the share it asked for); sums on a GPU have other last bits than on a CPU.
    ``normalise``: how inputs are scaled. "published" takes the data set's published mean and deviation, "none" leaves
    images in [0, 1], as NIID-Bench's program does, and features as they are, "unit" puts images into [-1, 1].
    ``features``: "scattering" turns images into vectors that no data set had a say in (fl_sim.data.scattering), so that
    linear models and small perceptrons do on them what takes a convolutional network on pixels; "whitened-scattering"
    makes all directions of these vectors about as long, by made-up images, so that noise takes less of them; "none"
    leaves pixels.
    ``partition_seed``, ``model_seed`` and ``sampling_seed`` take their part of what ``seed`` decides (fl_sim.seeding);
    each that is left out is ``seed``.
    """

    data: Annotated[str, InOneLine(as_table, from_table)] = "digits"
    partition: Annotated[Scheme, OneOf("partition", group="fl_sim.partition")] = by_default("label-1")
    clients: int = Field(10, ge=1, le=1_000_000)
    model: Annotated[str, AfterValidator(known_model)] = ""
    normalise: Literal["published", "none", "unit"] = "published"
    features: Features = "none"
    algorithm: Annotated[Algorithm, OneOf("algorithm", group="fl_sim.algorithm")] = by_default("fedavg")
    aggregator: Annotated[Aggregator, OneOf("aggregator", group="fl_sim.aggregator")] = by_default("mean")
    sampler: Annotated[Sampler, OneOf("sampler", group="fl_sim.sampler")] = by_default("full")
    compress: Annotated[Compressing, OneOf("compress", group="fl_sim.compress")] = by_default("none")
    preprocess: Annotated[object, OneOf("preprocess", group="fl_sim.preprocess")] = by_default("none")
    attack: Annotated[Harm, OneOf("attack", group="fl_sim.attack")] = by_default("none")
    calibrate: Annotated[object, OneOf("calibrate", group="fl_sim.calibrate")] = by_default("none")
    devices: Annotated[object, OneOf("devices", group="fl_sim.devices")] = by_default("none")
    server: Annotated[object, OneOf("server", group="fl_sim.server")] = by_default("synchronous")
    local: Local = Local()
    rounds: int = Field(20, ge=1, le=10**9)
    evaluate_every: int = Field(1, ge=1)
    evaluate: Evaluate = Evaluate()
    seed: int = Field(0, ge=0)
    partition_seed: int | None = Field(None, ge=0)
    model_seed: int | None = Field(None, ge=0)
    sampling_seed: int | None = Field(None, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Annotated[Engine, OneOf("engine")] = Auto()
    round_timeout: float = Field(3600.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_kinds(cls, table: Any) -> Any:
        """Fill in the defaults of the chosen kinds: ``sampler.sampling_rate=0.2`` is Poisson's under global-dp."""
        if not isinstance(table, dict):
            return table
        filled = dict(table)
        for part in ("algorithm", "aggregator"):
            starts_with: Mapping[str, Any] = getattr(chosen_class(cls, table, part), "starts_with", {})
            for key, value in starts_with.items():
                given = filled.get(key, {})
                if isinstance(given, BaseModel) and isinstance(value, dict) and "kind" not in value:
                    given = {name: getattr(given, name) for name in given.model_fields_set}  # what the user set
                both = isinstance(value, dict) and isinstance(given, dict)
                filled[key] = _laid_over(value, given) if both else filled.get(key, value)
        return filled

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for part in self._parts:
            if isinstance(part, Checking):
                part.check(self)
        check_choices(self)
        if is_own_kind(self.server):
            self._check_own_server()
        if self.evaluate.measures_nothing and not self.is_private:
            raise ValueError(
                "evaluate.test=never without evaluate.validation measures nothing: hold records out, for example "
                "evaluate.validation=0.1, or take evaluate.test=last"
            )
        if self.evaluate.validation and self.is_private:
            raise ValueError(
                f"evaluate.validation={self.evaluate.validation} reads records without noise, so it has no place in a "
                "run that promises privacy: leave it out, or choose settings on public records"
            )
        return self

    def _check_own_server(self) -> None:
        """Raise ValueError where a server of the user's own replaces no rounds, or a run promises privacy."""
        if self.is_synchronous:
            raise ValueError(f"server {kind_of(self.server)} has the procedure '': name one as module:Class")
        if self.is_private:
            raise ValueError(
                f"server {kind_of(self.server)} is of your own, and this run promises privacy: nobody knows what its "
                "procedure releases, so there is no epsilon; take server=synchronous"
            )

    @model_validator(mode="wrap")
    @classmethod
    def _completed(cls, table: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Have kinds compute their missing settings, such as noise from a budget."""
        if not isinstance(table, dict):
            return validated(table)
        for name in choices_in(cls):
            given = table.get(name)
            if isinstance(given, dict) and isinstance(kind := chosen_class(cls, table, name), Completing):
                others = {key: value for key, value in table.items() if key != name}
                found = kind.completed(given, lambda part, name=name, others=others: validated({**others, name: part}))
                table = {**others, name: found}
        return validated(table)

    @property
    def is_central(self) -> bool:
        """True if one client holds all records, whatever ``partition`` and ``clients`` are."""
        return isinstance(self.algorithm, Central) and self.algorithm.is_central

    @property
    def is_timed(self) -> bool:
        """True if a virtual clock simulates the clients' time."""
        return not is_none(self.devices)

    @property
    def is_synchronous(self) -> bool:
        """True if the server waits in every round for its cohort."""
        return not path_in(type(self.server), "procedure")

    @property
    def num_clients(self) -> int:
        """The number of simulated clients: one where training is centralized."""
        return 1 if self.is_central else self.clients

    @property
    def seed_of_partition(self) -> int:
        """The seed of the partition, and of each client's view of its records."""
        return self.seed if self.partition_seed is None else self.partition_seed

    @property
    def seed_of_model(self) -> int:
        """The seed of initial weights."""
        return self.seed if self.model_seed is None else self.model_seed

    @property
    def seed_of_sampling(self) -> int:
        """The seed of the cohorts."""
        return self.seed if self.sampling_seed is None else self.sampling_seed

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return these settings as JSON values, for the key of a cached result.

        Seeds of a part that are not set are left out, so that older keys stay valid.
        """
        unset = {f"{part}_seed" for part in ("partition", "model", "sampling") if getattr(self, f"{part}_seed") is None}
        without = self._unused_newcomers
        return self.model_dump(mode="json", include={*names} - unset - without)

    def as_written(self) -> dict[str, Any]:
        """Return these settings as in ``config.toml``: without None, and without later settings at their defaults.

        So files of the same settings are the same in all versions.
        """
        unused = {"evaluate"} if self.evaluate == Evaluate() else set()
        return self.model_dump(exclude_none=True, exclude=unused | self._unused_newcomers)

    @property
    def _unused_newcomers(self) -> set[str]:
        """The later settings that have their defaults."""
        newcomers = ("features", "compress", "devices", "server")
        return {name for name in newcomers if getattr(self, name) == default_of(type(self), name)}

    @property
    def remarks(self) -> list[str]:
        """Sentences on settings with no effect, or an unexpected one, in this experiment."""
        parts = [*self._parts, self.local.schedule]
        return [said for part in parts if isinstance(part, Remarking) for said in part.remarks(self)]

    @property
    def is_private(self) -> bool:
        """True if a run promises privacy to anybody: then it shows nothing about single clients, nor their time."""
        return bool(self._promising)

    @property
    def hides_time(self) -> bool:
        """True if the time that clients take would reveal what is private.

        False where all clients train on a pool of synthetic records alone, which is public.
        """
        return any(not replaces_records(part) for part in self._promising)

    @property
    def _parts(self) -> list[object]:
        return [getattr(self, name) for name in type(self).model_fields]

    @property
    def _promising(self) -> list[object]:
        parts: tuple[object, ...] = (self.algorithm, self.aggregator, self.preprocess, self.calibrate)
        return [part for part in parts if isinstance(part, Promising) and part.is_private]


def _laid_over(value: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kind's defaults with ``given`` over them, without epochs beside the user's steps."""
    kept = {name: part for name, part in value.items() if name != "epochs" or not goes_by_steps(given)}
    return {**kept, **given}


def defined_in_script(experiment: Experiment) -> str:
    """Return the name of a class or function of the running script or notebook, which no other process can import.

    Empty if the experiment names none.
    """
    found = re.search(r'"__main__:([^":]+)', experiment.model_dump_json())
    return found[1] if found else ""


def own_modules(experiment: Experiment) -> tuple[str, ...]:
    """Return the top-level modules that the experiment names by import path, those of its data left out."""
    return tuple(sorted({path.partition(":")[0].partition(".")[0] for path in own_paths(experiment)}))


def own_paths(experiment: Experiment) -> list[str]:
    """Return the import paths that the experiment names, that of its data left out."""
    return paths_in(experiment.model_dump(mode="json", exclude={"data"}))


def paths_in(settings: Mapping[str, Any]) -> list[str]:
    """Return the import paths in settings that are JSON values."""
    return [text for text in _texts(dict(settings)) if IMPORT_PATH.fullmatch(text)]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)


def experiment_from(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a table of settings. Raises UserError with the valid names and a guess."""
    try:
        return Experiment.model_validate(table)
    except ValidationError as error:
        raise UserError(explain(error, Experiment, "")) from error


def experiment_of_run(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a ``config.toml``: later settings that it lacks have the values of that time.

    Raises UserError as ``experiment_from`` does.
    """
    filled = dict(table)
    for part in ("algorithm", "aggregator", "attack"):
        if isinstance(given := table.get(part), Mapping):
            filled[part] = {**getattr(chosen_class(Experiment, table, part), "before", {}), **given}
    return experiment_from(filled)


def with_overrides(table: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return ``table`` with ``key=value`` settings in it; dots separate groups: ``local.epochs=5``.

    A group in short form (``algorithm=fedprox``) becomes a table when a key inside it is set, in any order.
    """
    pairs = []
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            raise UserError(
                f"settings are given as key=value, got {shortened(override)!r}; for example rounds=50 or local.epochs=5"
            )
        pairs.append((path, value))
    return with_values(table, pairs)


def with_values(table: Mapping[str, Any], pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return ``table`` with (dotted name, value) pairs in it, values of any type, as ``with_overrides`` does."""
    merged = copy.deepcopy(dict(table))
    for path, value in sorted(pairs, key=lambda pair: pair[0].count(".")):
        *groups, key = path.split(".")
        if len(groups) > MOST_LEVELS:
            raise UserError(f"{shortened(path)!r} lies {len(groups)} groups deep: no setting does")
        target: dict[str, Any] = merged
        settings: type[BaseModel] | None = Experiment
        for group in groups:
            inner, settings = group_in(settings, target, group)
            target[group] = inner = dict(inner)
            target = inner
        target[key] = value
    return merged
