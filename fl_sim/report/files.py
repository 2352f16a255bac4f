"""What a report needs of the files of runs and tables; anything else in them is refused or not looked at.

The files may come from anywhere: what they cost to read is bounded, and no number in them is NaN or infinite.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fl_sim.report.release import Release

_LARGEST: Final = {".toml": 2**18, ".json": 2**26}  # bytes
_DEEPEST: Final = 32

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class Facts(BaseModel):
    """Facts read from a file: finite numbers only."""

    model_config = ConfigDict(allow_inf_nan=False)


class Kind(Facts):
    """A settings value, by the name of its kind."""

    kind: str


class RunConfig(Facts):
    """What a report needs of ``config.toml``."""

    data: str
    seed: int
    clients: int
    rounds: int
    model: str
    algorithm: Kind
    partition: Kind
    preprocess: Kind = Kind(kind="none")


class Shared(Facts):
    """How many records of each class a client released, and the events that it paid for them with."""

    counts: list[int]
    facts: dict[str, Any] | None = None


class Made(Kind):
    """What a run did before its first round; ``pool``: the file of its synthetic records, empty without any."""

    pool: str = ""
    train_on: str = ""
    clients: list[Shared] = []


class MechanismFacts(Kind):
    """The noise on a vote, in votes; each mechanism has some of these."""

    gamma: float | None = None
    sigma: float | None = None
    threshold: float | None = None
    sigma_threshold: float | None = None


class PateFacts(Facts):
    """What a run with PATE says of its vote and its labels; ``label_accuracy`` in [0, 1]."""

    teachers: int
    mechanism: MechanismFacts
    evaluation_records: int
    queries_asked: int
    queries_answered: int
    label_accuracy: float | None
    student: str
    private_kept: bool
    asking: str = "in-order"


class Seconds(Facts):
    """Wall-clock seconds of a run."""

    preprocess: float
    train: float
    total: float


class Outcome(Facts):
    """What a report needs of ``result.json``; accuracies in [0, 1]."""

    algorithm: str = ""
    status: Literal["finished", "failed", "interrupted"]
    data_note: str
    partition: str
    engine: str
    rounds: int
    final_accuracy: Share | None
    best_accuracy: Share | None
    privacy: list[Release]
    seconds: Seconds
    versions: dict[str, str]
    error: str = ""
    preprocess: Made = Made(kind="none")
    pate: PateFacts | None = None


class CellFile(Facts):
    """One cell of ``table.json``, accuracies in percent, lists in the order of the seeds."""

    row: str
    column: str
    seeds: list[int]
    values: list[float | None]
    best_values: list[float | None]
    status: Literal["finished", "failed", "missing"]
    errors: list[str]
    dir: list[str]


class TableFile(Facts):
    """What a report needs of ``table.json``."""

    rows: list[str]
    columns: list[str]
    upper_bounds: list[str]
    cells: list[CellFile]
    caption: list[str]


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ValueError where it is too large or nested too deeply, or is no JSON."""
    return _read(path, json.loads)


def read_settings(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds. Raises ValueError where it is too large or nested too deeply, or is no TOML."""
    settings = _read(path, tomllib.loads)
    assert isinstance(settings, dict)
    return settings


def _read(path: Path, parse: Any) -> Any:
    largest = _LARGEST[path.suffix]
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest} bytes, which no file of this program is")
    try:
        value = parse(content.decode())
        if _is_deeper(value, _DEEPEST):
            raise ValueError("it is nested too deeply")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _is_deeper(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most == 0 or any(_is_deeper(one, most - 1) for one in inner)
