"""The class ``Experiment``: one immutable object with all settings of data, partition, model and method."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fl_sim.data import Features
from fl_sim.data.naming import as_table, from_table
from fl_sim.errors import UserError
from fl_sim.experiment.fixed_shards import check_fixed_shards
from fl_sim.experiment.groups import Auto, Engine, Evaluate, Local, Model, goes_by_steps
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
    Short,
    by_default,
    check_choices,
    choices_in,
    chosen_class,
    default_of,
    group_in,
    spelt_out,
)
from partitions import Scheme
from strategies.aggregators import Aggregator
from strategies.algorithm import Algorithm, Central
from strategies.samplers import Sampler


def _numbers(value: Any) -> Any:
    """Return the client IDs in ``value``, in ascending order, for the setting ``forgotten``.

    ``value``: a list, a number, or a text such as "3+5".
    """
    given = value if isinstance(value, list | tuple) else [value]
    parts = [one for part in given for one in (part.split("+") if isinstance(part, str) else [part])]
    with suppress(ValueError):
        if not any(isinstance(part, bool | float) for part in parts):
            return tuple(sorted({int(str(part)) for part in parts}))
    return value


class Experiment(Settings):
    """All settings of a run. All of them except the engine determine the numbers in the result.

    ``data``: the name of a data set ('fl-sim data list' shows all names), your own file, such as ``csv:PATH`` or
    ``npz:PATH`` (docs/data.md), or the import path of a function that returns a data set. ``partition``: the rule that
    assigns training records to clients. ``clients``: the number of clients. ``model``: the model, by name or by the
    import path of a function that returns it, and its initial weights. Left out: a model that suits the data.
    ``algorithm``: the federated method: the objective of the clients, their messages, and the server's use of these
    messages. ``aggregator``: the rule that turns a round's updates into one aggregate: their mean, a robust mean, or a
    mean with noise for privacy. ``sampler``: the rule that chooses the clients of a round. ``compress``: the
    compression of the clients' messages in a round. ``preprocess``: the stage before the first round, such as DA-FL.
    ``attack``: the behaviour of hostile clients. ``calibrate``: the change of the model after the last round.
    ``devices``: the speeds at which clients compute and send, for a virtual clock. ``server``: "synchronous" waits for
    all clients of a round; other servers merge updates when they arrive, one by one or in groups. ``local``: the
    clients' training. ``rounds``: the number of exchanges of updates between the server and its clients.
    ``evaluate_every``: a number n. The model is measured after every n-th round, and after the last round.
    ``evaluate``: the records on which the model is measured. ``engine``: the processors or machines that execute
    clients; results are the same. ``seed``: the integer from which all random numbers of a run are derived, except
    secret noise.

    ``round_timeout``: the number of seconds within which all clients of a round must answer. ``device``: "auto" uses a
    GPU if the worker process finds one. A Ray actor finds the GPUs that ``engine.gpus`` requests. Sums on a GPU are
    rounded differently than on a CPU. ``normalise``: how inputs are scaled. "published" uses the data set's published
    mean and standard deviation. "none" leaves images in [0, 1], as NIID-Bench's program does, and does not change
    feature vectors. "unit" puts images into [-1, 1]. ``features``: "scattering" turns images into vectors by a fixed
    transform that depends on no data set (fl_sim.data.scattering). On these vectors, linear models and small
    perceptrons are as accurate as a convolutional network on pixels. "whitened-scattering" also gives all directions of
    the vectors about the same variance, so that noise harms accuracy less. These variances are measured on artificial
    images. "scattering-maps" keeps all outputs of the transform, such as 3,888 numbers for a CIFAR-10 image. All maps
    have about the same variance (fl_sim.data.scattering_maps). "root-scattering-maps" uses the square roots of the
    maps, and keeps an image's contrast. "mirrored-" before such a name uses means over an image and its mirror image,
    for photographs. "none" leaves pixels. ``partition_seed``: the seed of the partition; left out: the run's seed.
    ``model_seed``: the seed of the initial weights; left out: the run's seed. ``sampling_seed``: the seed of the
    cohorts; left out: the run's seed (fl_sim.seeding).

    ``forgotten``: the IDs of clients, such as 3 or 3+5. Their records are removed after the partition, and the run
    never uses these records. These clients are sampled as before, and answer like clients without records. All other
    clients keep their records, IDs and random numbers. ``keep_every``: a number n. The run directory keeps the server
    state after every n-th round, so that 'fl-sim unlearn' need not train from the first round. With 0, the run
    directory keeps only the state after the last round. ``left_out``: a probability. Each training record is left out
    of its client's shard with this probability. A random number, derived from the run's seed, decides for each record.
    The run never uses these records, so that 'fl-sim attack membership' can compare them with the records of the
    shards.
    """

    data: Annotated[str, InOneLine(as_table, from_table)] = "digits"
    partition: Annotated[Scheme, OneOf("partition", group="fl_sim.partition")] = by_default("label-1")
    clients: int = Field(10, ge=1, le=1_000_000)
    model: Annotated[Model, Short("name")] = Model()
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
    forgotten: Annotated[tuple[int, ...], BeforeValidator(_numbers)] = ()
    keep_every: int = Field(0, ge=0, le=10**9)
    left_out: float = Field(0.0, ge=0, lt=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Annotated[Engine, OneOf("engine")] = Auto()
    round_timeout: float = Field(3600.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_kinds(cls, table: Any) -> Any:
        """Fill in the defaults that the chosen algorithm and aggregator define for other settings.

        Example: with aggregator global-dp, the default sampler is Poisson sampling. So ``sampler.sampling_rate=0.2`` is
        enough to set the rate, and the name of the sampler may be left out.
        """
        if not isinstance(table, dict):
            return table
        filled = dict(table)
        for part in ("algorithm", "aggregator"):
            starts_with: Mapping[str, Any] = getattr(chosen_class(cls, table, part), "starts_with", {})
            for key, value in starts_with.items():
                given = spelt_out(cls.model_fields[key], filled.get(key, {}))
                if isinstance(given, BaseModel) and isinstance(value, dict) and "kind" not in value:
                    # fields that the user has not set keep the default of the algorithm or aggregator
                    given = {name: getattr(given, name) for name in given.model_fields_set}
                both = isinstance(value, dict) and isinstance(given, dict)
                filled[key] = _laid_over(value, given) if both else filled.get(key, value)
        return filled

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        for part in self._parts:
            if isinstance(part, Checking):
                part.check(self)
        check_choices(self)
        self._check_forgotten()
        check_fixed_shards(self)
        if is_own_kind(self.server):
            self._check_own_server()
        if self.evaluate.measures_nothing and not self.is_private:
            raise ValueError(
                "evaluate.test=never without evaluate.validation measures nothing: hold records out, for example "
                "evaluate.validation=0.1, or set evaluate.test=last"
            )
        if self.evaluate.validation and self.is_private:
            raise ValueError(
                f"evaluate.validation={self.evaluate.validation} reads records without noise, so a run that promises "
                "privacy cannot use it: leave it out, or choose settings on public records"
            )
        return self

    def _check_forgotten(self) -> None:
        """Raise ValueError for unknown clients in ``forgotten``, and for ``keep_every`` in a run with privacy."""
        if unknown := [client for client in self.forgotten if not 0 <= client < self.num_clients]:
            raise ValueError(
                f"forgotten={unknown[0]}: the clients are 0 to {self.num_clients - 1}; use one of these numbers"
            )
        if self.keep_every and (self.is_private or not self.is_synchronous):
            what = "promises privacy" if self.is_private else f"has server {kind_of(self.server)}"
            raise ValueError(
                f"keep_every={self.keep_every} keeps the server states of earlier rounds for 'fl-sim unlearn', which "
                f"cannot use the states of a run that {what}: leave keep_every out"
            )

    def _check_own_server(self) -> None:
        """Raise ValueError if the user's own server class has no ``procedure``, or if the run promises privacy."""
        if self.is_synchronous:
            raise ValueError(
                f"server {kind_of(self.server)} has no procedure, the class that runs its rounds: set procedure = "
                "'module:Class' in the server's class"
            )
        if self.is_private:
            raise ValueError(
                f"server {kind_of(self.server)} is your own code, and this run promises privacy: the releases of its "
                "procedure are unknown, so there is no epsilon; set server=synchronous"
            )

    @model_validator(mode="wrap")
    @classmethod
    def _completed(cls, table: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Return the experiment with the missing values that settings classes compute, such as a noise multiplier."""
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
        """True if training is centralized. One client then holds all records, and ``partition`` has no effect."""
        return isinstance(self.algorithm, Central) and self.algorithm.is_central

    @property
    def is_timed(self) -> bool:
        """True if a virtual clock simulates the time that clients need for computing and sending."""
        return not is_none(self.devices)

    @property
    def is_synchronous(self) -> bool:
        """True if the server waits in every round for the answers of the cohort."""
        return not path_in(type(self.server), "procedure")

    @property
    def num_clients(self) -> int:
        """The number of simulated clients: one if training is centralized, else the setting ``clients``."""
        return 1 if self.is_central else self.clients

    @property
    def num_members(self) -> int:
        """The number of clients that may take part in rounds: all clients that are not held out for evaluation."""
        return self.num_clients - round(self.evaluate.held_out_clients * self.num_clients)

    @property
    def seed_of_partition(self) -> int:
        """The seed of the partition, and of each client's feature skew."""
        return self.seed if self.partition_seed is None else self.partition_seed

    @property
    def seed_of_model(self) -> int:
        """The seed of the model's initial weights."""
        return self.seed if self.model_seed is None else self.model_seed

    @property
    def seed_of_sampling(self) -> int:
        """The seed from which the cohorts are sampled."""
        return self.seed if self.sampling_seed is None else self.sampling_seed

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return the settings with these ``names`` as JSON values. The cache key of a result contains these values.

        Two kinds of settings are left out: optional seeds that are not set, and settings that newer versions of fl-sim
        added, if they have their defaults. So the cache keys of older versions stay valid.
        """
        unset = {f"{part}_seed" for part in ("partition", "model", "sampling") if getattr(self, f"{part}_seed") is None}
        without = self._unused_newcomers
        return self.model_dump(mode="json", include={*names} - unset - without)

    def as_written(self) -> dict[str, Any]:
        """Return all settings in the form of ``config.toml``.

        Values of None are left out. Settings that newer versions of fl-sim added are left out, too, if they have their
        defaults. So the same settings give the same file in all versions.
        """
        unused = {"evaluate"} if self.evaluate == Evaluate() else set()
        return self.model_dump(exclude_none=True, exclude=unused | self._unused_newcomers)

    @property
    def _unused_newcomers(self) -> set[str]:
        """The names of the settings that newer versions of fl-sim added, and that have their default values."""
        newcomers = ("features", "compress", "devices", "server", "forgotten", "keep_every", "left_out")
        return {name for name in newcomers if getattr(self, name) == default_of(type(self), name)}

    @property
    def remarks(self) -> list[str]:
        """Warnings about settings that have no effect, or a surprising effect, in this experiment."""
        parts = [*self._parts, self.local.schedule]
        return [said for part in parts if isinstance(part, Remarking) for said in part.remarks(self)]

    @property
    def is_private(self) -> bool:
        """True if the run promises privacy. Such a run shows no facts about single clients, not even training times."""
        return bool(self._promising)

    @property
    def hides_time(self) -> bool:
        """True if the duration of local training would reveal private facts.

        The duration tells how many records a client trains. The result is False if clients train only on a pool of
        synthetic records, because the pool is public.
        """
        return any(not replaces_records(part) for part in self._promising)

    @property
    def _parts(self) -> list[object]:
        return [*(getattr(self, name) for name in type(self).model_fields), self.local.privacy]

    @property
    def _promising(self) -> list[object]:
        parts: tuple[object, ...] = (
            self.algorithm, self.aggregator, self.preprocess, self.calibrate, self.local.privacy,
        )  # fmt: skip
        return [part for part in parts if isinstance(part, Promising) and part.is_private]


def _laid_over(value: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default settings ``value``, with the user's settings ``given`` in place of defaults of the same name.

    Local training is counted in epochs or in steps: if the user sets ``steps``, the default of ``epochs`` is left out.
    """
    kept = {name: part for name, part in value.items() if name != "epochs" or not goes_by_steps(given)}
    return {**kept, **given}


def defined_in_script(experiment: Experiment) -> str:
    """Return the name of a class or function that the running script or notebook defines; empty if there is none.

    No other process can import such a class or function.
    """
    found = re.search(r'"__main__:([^":]+)', experiment.model_dump_json())
    return found[1] if found else ""


def own_modules(experiment: Experiment) -> tuple[str, ...]:
    """Return the names of the user's own top-level modules. Workers on other machines need the code of these modules.

    The names come from all import paths in the experiment except the path in ``data``: only the main process imports
    the module of ``data``.
    """
    return tuple(sorted({path.partition(":")[0].partition(".")[0] for path in own_paths(experiment)}))


def own_paths(experiment: Experiment) -> list[str]:
    """Return all import paths (``module:name``) of the user's own code in the settings, except the path in ``data``."""
    return paths_in(experiment.model_dump(mode="json", exclude={"data"}))


def paths_in(settings: Mapping[str, Any]) -> list[str]:
    """Return all import paths (``module:name``) in ``settings``, which are JSON values."""
    return [text for text in _texts(dict(settings)) if IMPORT_PATH.fullmatch(text)]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)


def experiment_from(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the settings in ``table``, such as the content of a TOML file.

    Raises UserError for an invalid setting; the message gives the valid names and the most similar one.
    """
    try:
        return Experiment.model_validate(table)
    except ValidationError as error:
        raise UserError(explain(error, Experiment, "")) from error


def changed(experiment: Experiment, **settings: object) -> Experiment:
    """Return ``experiment`` with other ``settings``. Raises UserError as ``experiment_from`` does."""
    return experiment_from({name: getattr(experiment, name) for name in Experiment.model_fields} | settings)


def experiment_of_run(table: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a stored ``config.toml``.

    The file may come from an older version without some settings. A missing setting gets the value with which the run
    behaves as in the older version. Raises UserError as ``experiment_from`` does.
    """
    filled = dict(table)
    for part in ("algorithm", "aggregator", "attack"):
        if isinstance(given := table.get(part), Mapping):
            filled[part] = {**getattr(chosen_class(Experiment, table, part), "before", {}), **given}
    return experiment_from(filled)


def with_overrides(table: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return a copy of ``table`` with the settings ``overrides``, each of the form ``key=value``.

    Dots separate a group from its keys: ``local.epochs=5``. A group may be set by its short form and by a key, in any
    order: ``algorithm=fedprox`` and ``algorithm.mu=0.1``. The result then holds both in one table.
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
    """Return a copy of ``table`` with changed settings.

    ``pairs``: (name, value) for each changed setting. Names contain dots, such as "local.epochs".
    """
    merged = copy.deepcopy(dict(table))
    for path, value in sorted(pairs, key=lambda pair: pair[0].count(".")):
        *groups, key = path.split(".")
        if len(groups) > MOST_LEVELS:
            raise UserError(f"{shortened(path)!r} has {len(groups)} dots: no setting has more than {MOST_LEVELS}")
        target: dict[str, Any] = merged
        settings: type[BaseModel] | None = Experiment
        for group in groups:
            inner, settings = group_in(settings, target, group)
            target[group] = inner = dict(inner)
            target = inner
        target[key] = value
    return merged
