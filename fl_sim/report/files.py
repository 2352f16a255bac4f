"""Schemas (pydantic models) of the result files that a report reads. A file with invalid values is refused.

Fields that are not in the schema are ignored. The files may come from an untrusted source. Therefore their size is
limited, and their numbers must be finite.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from fl_sim.privacy.terms import rounded_up
from fl_sim.settings import model_line

_LARGEST: Final = 2**26
"""Largest size of a file in bytes."""
_DEEPEST: Final = 32
"""Largest depth of nested lists and objects in a JSON file."""

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
Duration: TypeAlias = Annotated[float, Field(ge=0, le=1e12)]
Bytes: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]


class FileModel(BaseModel):
    """Base class of the schemas. NaN and infinite numbers in a file are refused."""

    model_config = ConfigDict(allow_inf_nan=False)


class PrivacyStatement(FileModel):
    """One privacy statement of ``result.json``.

    ``unit``: the privacy unit, such as "client" or "record". ``epsilon``: None if there is no guarantee. ``covers``,
    ``does_not_cover``: the outputs that the guarantee covers, and the outputs that it does not cover. ``ledger``: the
    privacy ledger into which the cost was written. ``planned_events``: all noisy outputs that were planned before the
    run. Files of older versions lack ``ledger`` and ``planned_events``. ``budget``: the largest epsilon allowed. If the
    budget is smaller than the epsilon of all planned outputs, ``epsilon`` is the budget. ``epsilon_whole_run``,
    ``delta_whole_run``: the privacy cost of everything that the run publishes about a unit, if this cost differs from
    ``epsilon`` and ``delta``.
    """

    unit: str
    epsilon: float | None = Field(ge=0)
    delta: float | None = Field(None, ge=0, lt=1)
    guarantee: str = ""
    covers: str = ""
    does_not_cover: str = ""
    ledger: str = ""
    adjacency: str = "add-or-remove-one"
    planned_events: list[Any] | None = None
    budget: float | None = None
    epsilon_whole_run: float | None = Field(None, ge=0)
    delta_whole_run: float | None = Field(None, ge=0, lt=1)
    simulation_only: bool = False

    @property
    def protects(self) -> bool:
        """Return True if the statement is a privacy guarantee, and False if its epsilon is None."""
        return self.epsilon is not None

    @property
    def of_run(self) -> tuple[float | None, float]:
        """Return (epsilon, delta) of everything that the run publishes about the privacy unit of this statement."""
        if self.epsilon is None or self.epsilon_whole_run is None:
            return self.epsilon, self.delta or 0.0
        return self.epsilon_whole_run, self.delta_whole_run or 0.0

    @property
    def promise(self) -> str:
        """Return a sentence that states the privacy guarantee, or that there is no guarantee."""
        if self.epsilon is None:
            return f"No privacy guarantee for a {self.unit}. {self.guarantee}".strip() + "."
        promised = self.guarantee or f"({rounded_up(self.epsilon)}, {self.delta or 0:g})-differential privacy"
        return f"Per {self.unit}: {promised.rstrip('.')}."

    @property
    def limits(self) -> str:
        """Return sentences that list the outputs that the guarantee covers, and the outputs that it does not cover."""
        covered = f"It covers: {self.covers.rstrip('.')}." if self.covers and self.protects else ""
        left_out = f"It does not cover: {self.does_not_cover.rstrip('.')}." if self.does_not_cover else ""
        return f"{covered} {left_out}".strip()

    @property
    def in_short(self) -> str:
        """Return the privacy cost of the whole run per privacy unit as text, such as ``epsilon 3.2 per client``."""
        epsilon, _ = self.of_run
        return f"{'none' if epsilon is None else f'epsilon {rounded_up(epsilon, 3)}'} per {self.unit}"


class KindTable(FileModel):
    """A section of ``config.toml`` or ``result.json``, such as ``algorithm``. Only its field ``kind`` is read."""

    kind: str


class PoolSettings(FileModel):
    """The settings of DA-FL, whose clients publish synthetic records (the pool). ``epsilon`` may be inf."""

    kind: Literal["da-fl"]
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=True)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    gamma: Positive
    client_gammas: list[Positive] = []
    noise: str
    generator: KindTable
    train_on: str = ""


class OtherPreprocess(FileModel):
    """The settings of any preprocessing other than DA-FL. Only ``kind`` is read: a name or an import path."""

    kind: Annotated[str, Field(pattern="^(none|private-start|.*:.*)$")]


def _tag_of(table: Any) -> str:
    kind = table.get("kind") if isinstance(table, dict) else getattr(table, "kind", "")
    return "da-fl" if kind == "da-fl" else "other"


class RunConfig(FileModel):
    """The part of ``config.toml`` that a report reads."""

    data: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    clients: Count
    rounds: Count
    model: str
    algorithm: KindTable
    partition: KindTable
    preprocess: Annotated[
        Annotated[PoolSettings, Tag("da-fl")] | Annotated[OtherPreprocess, Tag("other")], Discriminator(_tag_of)
    ] = OtherPreprocess(kind="none")
    server: KindTable = KindTable(kind="synchronous")
    features: str = "none"

    @field_validator("model", mode="before")
    @classmethod
    def _in_one_line(cls, value: Any) -> Any:
        """Return the setting ``model`` as one line of text. In the file, this setting may be a table of settings."""
        return model_line(value) if isinstance(value, dict) else value


class ClientShare(FileModel):
    """The synthetic records of one client in DA-FL. ``counts``: the number of synthetic records in each class.

    ``facts``: the privacy mechanisms with which the client made the records, and their noise. The privacy cost is
    computed from ``facts``.
    """

    counts: list[Count]
    facts: dict[str, Any] | None = None


class StageResult(KindTable):
    """The result of a run's preprocessing, such as DA-FL.

    ``pool``: name of the file with the synthetic records of all clients; empty if there is none. ``train_on``: the
    records on which clients train, such as "synthetic". ``clients``: facts about the synthetic records of each client.
    """

    pool: str = ""
    train_on: str = ""
    clients: list[ClientShare] = []


class MechanismFacts(KindTable):
    """The noise mechanism of PATE and its parameters, in units of votes.

    A parameter is None if the mechanism does not have it.
    """

    gamma: Positive | None = None
    sigma: Positive | None = None
    threshold: float | None = None
    sigma_threshold: Positive | None = None

    @model_validator(mode="after")
    def _complete(self) -> "MechanismFacts":
        if self.kind == "confident" and None in {self.sigma, self.threshold, self.sigma_threshold}:
            raise ValueError("the mechanism confident needs sigma, threshold and sigma_threshold")
        return self


class PateFacts(FileModel):
    """The facts about a run of PATE: the teachers' votes, and the noisy labels on which the student model trains.

    ``queries_asked``: number of records on whose labels the teachers voted. ``queries_answered``: number of records
    that got a label. ``label_accuracy``: the share of right labels, in [0, 1].
    """

    teachers: Annotated[Count, Field(ge=1)]
    mechanism: MechanismFacts
    evaluation_records: Count
    queries_asked: Count
    queries_answered: Count
    label_accuracy: Share | None
    student: str
    private_kept: bool
    asking: str = "in-order"


class Seconds(FileModel):
    """The wall-clock times of a run, in seconds."""

    preprocess: Duration
    train: Duration
    total: Duration


class RecordedTraffic(FileModel):
    """Numbers of bytes: ``down`` from the server to the clients, ``up`` from the clients to the server."""

    down: Bytes
    up: Bytes


class BytesFacts(FileModel):
    """The bytes that were sent before the first round. ``before``: {kind of message: bytes}; None if unknown."""

    before: dict[str, RecordedTraffic | None] = {}


class MeasureFacts(FileModel):
    """Measures of the final model.

    ``confusion[i][j]``: the number of test records of class i that the model classifies as class j.
    ``client_accuracy``: the mean accuracy of all clients. ``client_worst_tenth``: the mean accuracy of the tenth of the
    clients with the lowest accuracies. ``client_quantiles``: equally spaced quantiles of client accuracy, ascending.
    """

    confusion: list[list[Count]] | None = None
    client_accuracy: Share | None = None
    client_worst_tenth: Share | None = None
    client_quantiles: list[Share] = []

    @model_validator(mode="after")
    def _is_square(self) -> "MeasureFacts":
        if self.confusion and any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("confusion must have equal numbers of rows and columns")
        return self


class ResultFile(FileModel):
    """The part of ``result.json`` that a report reads. Accuracies are in [0, 1].

    A file of an older version may lack ``is_private``; the run is then treated as private. ``image_shape``: (channels,
    height, width) of the images from which the features were computed. ``by_client``: the lists with one number per
    client, {"FIELD.by_client.NAME": list}. These lists come from the key ``by_client`` of any field of the file. Each
    number is in [0, 1]; None if it is unknown.
    """

    algorithm: str = ""
    titles: dict[Literal["algorithm", "preprocess", "server"], Annotated[str, Field(max_length=100)]] = {}
    status: Literal["finished", "failed", "interrupted"]
    data_note: str
    partition: str
    is_private: bool = True
    records: Annotated[str, Field(max_length=100)] = ""
    engine: str
    rounds: Count
    final_accuracy: Share | None
    best_accuracy: Share | None
    best_chosen_on: Literal["test", "validation", "last", "nothing"] = "test"
    privacy: list[PrivacyStatement]
    seconds: Seconds
    virtual_seconds: Duration | None = None
    bytes: BytesFacts = BytesFacts()
    measures: MeasureFacts = MeasureFacts()
    versions: dict[str, str]
    error: str = ""
    preprocess: StageResult = StageResult(kind="none")
    image_shape: Annotated[list[Annotated[int, Field(ge=1, le=10**6)]], Field(max_length=3)] | None = None
    pate: PateFacts | None = None
    by_client: dict[str, list[Share | None]] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_lists(cls, content: Any) -> Any:
        """Collect the lists with one number per client from the key ``by_client`` of all fields.

        Lists with values outside [0, 1] are left out.
        """
        if not isinstance(content, dict):
            return content
        found = {
            f"{field}.by_client.{name}": values
            for field, inner in content.items()
            if isinstance(inner, dict) and isinstance(lists := inner.get("by_client"), dict)
            for name, values in lists.items()
            if isinstance(values, list) and all(map(_is_share, values))
        }
        return {**content, "by_client": found}


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and 0 <= value <= 1)


class CellFile(FileModel):
    """One cell of ``table.json``. Accuracies are in percent. Lists have one value per seed, in the order of ``seeds``.

    ``values``: the accuracies after the last round. ``best_values``: the accuracies in the best round. ``errors``: the
    errors of failed runs. ``measures``: {name: one value per seed}; empty in files of version 1. ``statuses``: empty in
    older files.
    """

    row: str
    column: str
    seeds: list[int]
    values: list[float | None]
    best_values: list[float | None]
    status: Literal["finished", "failed", "missing"]
    errors: list[str]
    dir: list[str]
    measures: dict[str, list[float | None]] = {}
    statuses: list[Literal["finished", "failed", "missing"]] = []


class ShownMeasure(FileModel):
    """The part of a table's settings that a report reads. ``measure``: the name of the measure that the table shows."""

    measure: str = ""


class HeatMapFile(FileModel):
    """One heat map of ``table.json``, as in ``fl_sim.report.table.HeatMap``.

    ``places``: (row label, column label, row of the table).
    """

    title: Annotated[str, Field(max_length=500)]
    column: str
    rows: str
    columns: str
    row_labels: Annotated[list[str], Field(min_length=1, max_length=200)]
    column_labels: Annotated[list[str], Field(min_length=1, max_length=200)]
    places: list[tuple[str, str, str]]


class TableFile(FileModel):
    """The part of ``table.json`` that a report reads. ``titles``: None in files of older versions."""

    rows: list[str]
    columns: list[str]
    upper_bounds: list[str]
    cells: list[CellFile]
    caption: list[str]
    labels: dict[str, str] = {}
    reference: str = ""
    settings: ShownMeasure = ShownMeasure()
    alone: list[str] = []
    titles: dict[str, str] | None = None
    heat_maps: Annotated[list[HeatMapFile], Field(max_length=100)] = []


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise ValueError if the file is too large, too deeply nested, or not JSON."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} bytes, which is more than fl-sim writes")
    try:
        value = json.loads(content.decode())
        if _is_deeper(value, _DEEPEST):
            raise ValueError("its content is nested too deeply")
    except RecursionError as error:
        raise ValueError("its content is nested too deeply") from error
    return value


def _is_deeper(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most == 0 or any(_is_deeper(one, most - 1) for one in inner)
