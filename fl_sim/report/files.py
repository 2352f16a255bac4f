"""What a report needs of the files of runs and tables; anything else in them is refused or not looked at.

The files may come from anywhere: what they cost to read is bounded, and no number in them is NaN or infinite.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from fl_sim.report.release import Release

_LARGEST: Final = 2**26  # bytes
_DEEPEST: Final = 32

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
Duration: TypeAlias = Annotated[float, Field(ge=0, le=1e12)]
Bytes: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]


class Facts(BaseModel):
    """Facts read from a file: finite numbers only."""

    model_config = ConfigDict(allow_inf_nan=False)


class Kind(Facts):
    """A settings value, by the name of its kind."""

    kind: str


class NoPreprocess(Facts):
    """Nothing is done before the first round."""

    kind: Literal["none"] = "none"


class Synthesis(Facts):
    """DA-FL's settings; ``epsilon`` may be inf."""

    kind: Literal["da-fl"]
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=True)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    gamma: Positive
    client_gammas: list[Positive] = []
    noise: str
    generator: Kind
    train_on: str = ""


class PrivatelyStarted(Facts):
    """The settings of a private start, of which a report needs none."""

    kind: Literal["private-start"]


def _preprocess_in(table: Any) -> str:
    """Return which settings a table holds; those of a user's own kind, named by an import path, are any."""
    kind = str(table.get("kind")) if isinstance(table, dict) else str(getattr(table, "kind", ""))
    return "own" if ":" in kind else kind


class RunConfig(Facts):
    """What a report needs of ``config.toml``."""

    data: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    clients: Count
    rounds: Count
    model: str
    algorithm: Kind
    partition: Kind
    preprocess: Annotated[
        Annotated[NoPreprocess, Tag("none")]
        | Annotated[Synthesis, Tag("da-fl")]
        | Annotated[PrivatelyStarted, Tag("private-start")]
        | Annotated[Kind, Tag("own")],
        Discriminator(_preprocess_in),
    ] = NoPreprocess()
    server: Kind = Kind(kind="synchronous")
    features: str = "none"


class Shared(Facts):
    """How many records of each class a client released, and the events that it paid for them with."""

    counts: list[Count]
    facts: dict[str, Any] | None = None


class Made(Kind):
    """What a run did before its first round; ``pool``: the file of its synthetic records, empty without any."""

    pool: str = ""
    train_on: str = ""
    clients: list[Shared] = []


class MechanismFacts(Kind):
    """The noise on a vote, in votes; each mechanism has some of these."""

    gamma: Positive | None = None
    sigma: Positive | None = None
    threshold: float | None = None
    sigma_threshold: Positive | None = None

    @model_validator(mode="after")
    def _complete(self) -> "MechanismFacts":
        if self.kind == "confident" and None in {self.sigma, self.threshold, self.sigma_threshold}:
            raise ValueError("confident has a sigma, a threshold and a sigma_threshold")
        return self


class PateFacts(Facts):
    """What a run with PATE says of its vote and its labels; ``label_accuracy`` in [0, 1]."""

    teachers: Annotated[Count, Field(ge=1)]
    mechanism: MechanismFacts
    evaluation_records: Count
    queries_asked: Count
    queries_answered: Count
    label_accuracy: Share | None
    student: str
    private_kept: bool
    asking: str = "in-order"


class Seconds(Facts):
    """Wall-clock seconds of a run."""

    preprocess: Duration
    train: Duration
    total: Duration


class Travelled(Facts):
    """Bytes to clients, and from them."""

    down: Bytes
    up: Bytes


class BytesFacts(Facts):
    """What travelled before the first round, by what it was; None where that is not told."""

    before: dict[str, Travelled | None] = {}


class MeasureFacts(Facts):
    """What is said of the last model; ``client_quantiles`` of the clients' accuracies ascend, in equal steps.

    Row i of ``confusion`` holds the test records of class i, column j those taken for class j.
    """

    confusion: list[list[Count]] | None = None
    client_accuracy: Share | None = None
    client_worst_tenth: Share | None = None
    client_quantiles: list[Share] = []

    @model_validator(mode="after")
    def _is_square(self) -> "MeasureFacts":
        if self.confusion and any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("confusion has as many columns as rows")
        return self


class Outcome(Facts):
    """What a report needs of ``result.json``; accuracies in [0, 1]. What does not say so may be private.

    ``image_shape``: channels, height and width of the images that records were before features took their place.
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
    privacy: list[Release]
    seconds: Seconds
    virtual_seconds: Duration | None = None
    bytes: BytesFacts = BytesFacts()
    measures: MeasureFacts = MeasureFacts()
    versions: dict[str, str]
    error: str = ""
    preprocess: Made = Made(kind="none")
    image_shape: Annotated[list[Annotated[int, Field(ge=1, le=10**6)]], Field(max_length=3)] | None = None
    pate: PateFacts | None = None


class CellFile(Facts):
    """One cell of ``table.json``, accuracies in percent, lists in the order of the seeds.

    ``measures``: since version 2, {name: a value a seed}. ``statuses``: one a seed, empty in older files.
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


class TableFile(Facts):
    """What a report needs of ``table.json``."""

    rows: list[str]
    columns: list[str]
    upper_bounds: list[str]
    cells: list[CellFile]
    caption: list[str]


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ValueError where it is too large or nested too deeply, or is no JSON."""
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} bytes, which no file of this program has")
    try:
        value = json.loads(content.decode())
        if _is_deeper(value, _DEEPEST):
            raise ValueError("it is nested too deeply")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _is_deeper(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most == 0 or any(_is_deeper(one, most - 1) for one in inner)
