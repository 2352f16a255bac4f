"""The run directory: its files, the order in which they are written, and how they are read after a crash.

First ``config.toml`` is written. After every round a line is appended to ``rounds.jsonl``, then
``checkpoint.safetensors`` is replaced. At the end ``model.safetensors`` and ``result.json`` are written, also if the
run failed or was interrupted. The checkpoint contains the server state after a round. It is replaced atomically, and
verified against the run when it is read.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fl_sim.errors import UserError
from fl_sim.params import is_finite
from fl_sim.store.files import append_line, read_whole, write_whole
from fl_sim.types import Params, ServerState

CONFIG, ROUNDS, MODEL, RESULT, STATE, LEDGER, START = (
    "config.toml", "rounds.jsonl", "model.safetensors", "result.json", "clients", "ledger.jsonl", "start.json",
)  # fmt: skip
PRIVATE_ERRORS, PRIVATE_WARNINGS = "private-errors.log", "private-warnings.log"
STUDENT = "student.safetensors"
CLIENTS = "clients.csv"
MOST_LISTED: Final = 5_000
"""The largest number of clients for which a run writes one value per client. With more, files would be too large."""

_LONGEST = 2**28
"""The maximum size of a text file in a run directory, in bytes: enough for a million rounds."""

_STEPS = (10, 60, 600, 3600, 36_000, 360_000, 3_600_000)
"""Durations in seconds, from 10 seconds to 1000 hours, to which durations of private runs are rounded up."""

CHECKPOINT = "checkpoint.safetensors"

KEPT = "kept"
"""The folder with the checkpoints of earlier rounds that the setting ``keep_every`` keeps."""


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.jsonl``.

    ``test_accuracy`` in [0, 1] and ``test_loss``: None in rounds without evaluation. ``train_loss``: the mean loss of
    the clients' training. ``epsilon``: None means no guarantee. ``seconds``: the duration of the whole round. If the
    run promises privacy, ``train_loss``, ``cohort`` and ``seconds`` may be secret, and are then None.
    ``validation_accuracy`` and ``validation_loss`` are measured on validation records, if there are any. The following
    measures exist in the same rounds as the test accuracy. ``balanced_accuracy``, ``macro_f1`` and ``auc`` (for two
    classes): measures of a classifier. ``test_perplexity``: the perplexity of a model that predicts tokens.
    ``client_accuracy``, ``client_deviation``, ``client_worst_tenth`` and ``client_entropy``: mean, standard deviation,
    worst tenth and entropy of the client accuracies (None if the run promises privacy). ``bytes_down`` and
    ``bytes_up``: bytes of the arrays sent to and received from all clients of the round (None if the cohort is secret).
    With a virtual clock: ``virtual_seconds`` of the round, the number of ``late`` clients, and the mean ``staleness``
    of updates, in server steps. ``metrics``: the user's own metrics by name, in rounds with a test.

    A field with a default may be missing in a line: None is not written, and older versions lack some fields.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    round: int
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    epsilon: float | None
    cohort: int | None
    learning_rate: float
    seconds: float | None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    auc: float | None = None
    test_perplexity: float | None = None
    client_accuracy: float | None = None
    client_deviation: float | None = None
    client_worst_tenth: float | None = None
    client_entropy: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    virtual_seconds: float | None = None
    late: int | None = None
    staleness: float | None = None
    metrics: Mapping[str, float] | None = field(default=None, hash=False)

    def numbers(self) -> dict[str, float | None]:
        """Return all numbers of the round by name, including the user's own metrics."""
        said = asdict(self)
        own = said.pop("metrics") or {}
        return said | {name: value for name, value in own.items() if name not in ROUND_FIELDS}


ROUND_FIELDS: Final = frozenset(part.name for part in fields(RoundRecord))

TESTED = ("test_", "balanced_accuracy", "macro_f1", "auc", "client_", "metrics")
"""Prefixes of the fields that only rounds with test metrics have."""

MEASURED = (*TESTED, "validation_")
"""Prefixes of the fields that only rounds with test or validation metrics have."""

_RECORD = TypeAdapter(RoundRecord)
_OPTIONAL = frozenset(part.name for part in fields(RoundRecord) if part.default is not MISSING)

_IDENTITY: Final = "# identity = "
"""The prefix of the first line of ``config.toml`` if records or code are the user's own."""


class Recorded(BaseModel):
    """Digests of the user's own ``records`` and ``code`` in a run; ``code`` is {module: digest}."""

    model_config = ConfigDict(extra="forbid", strict=True)

    records: str = Field("", max_length=200)
    code: dict[str, str] | None = None


def write_config(out: Path, settings: Mapping[str, Any], identity: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write the full experiment to ``config.toml``.

    The ``identity`` of the user's own records and code is written as a comment in the first line.
    """
    write_whole(out / CONFIG, _config(settings, identity))


def read_identity(out: Path) -> dict[str, Any]:
    """Return the identity that ``write_config`` wrote; empty if the run has none or an older version wrote the file.

    Raises UserError if the identity is damaged.
    """
    first = read_whole(out / CONFIG, _LONGEST).partition(b"\n")[0].decode(errors="replace")
    if not first.startswith(_IDENTITY):
        return {}
    try:
        return Recorded.model_validate_json(first.removeprefix(_IDENTITY)).model_dump(exclude_defaults=True)
    except ValidationError as error:
        raise UserError(
            f"{out / CONFIG} is damaged: its first line is not the identity of a run "
            "(digests of records and code); restore the file"
        ) from error


def chain_start(out: Path) -> str:
    """Return the first value of the hash chain over a run's rounds: the hash of the run's settings."""
    return hashlib.sha256(read_whole(out / CONFIG)).hexdigest()


def run_name(out: Path) -> str:
    """Return the random name of the run in ``out``. A resumed run has the same name, and a new run gets a new name."""
    path = out / STATE / "run"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, secrets.token_hex(8).encode())
    name = read_whole(path, 64).decode(errors="replace")
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise UserError(f"{path} is damaged: restore it, or start again in a fresh directory")
    return name


def append_round(out: Path, record: RoundRecord, chain: str) -> str:
    """Append a round to ``rounds.jsonl``, wait until it is on the disk, and return the new value of the hash chain.

    ``chain``: the hash over the settings and all earlier rounds. By this hash, a resumed run detects a line that is
    missing, changed or from another run.
    """
    line = _line(record)
    append_line(out / ROUNDS, line, is_first=record.round == 1)
    return _linked(chain, [line])


def read_rounds(out: Path) -> list[RoundRecord]:
    """Return the rounds in ``rounds.jsonl``, without a last line that a crash left incomplete.

    Raises UserError if a line is not a round; the message names the first such line.
    """
    records = []
    for number, line in enumerate(_whole_lines(out), 1):
        try:
            records.append(_RECORD.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
            raise UserError(
                f"{out / ROUNDS} is damaged, line {number} is not a round: {where}{first['msg']}"
            ) from error
    return records


def log_chain(out: Path) -> str:
    """Return the value of the hash chain after the last complete line of ``rounds.jsonl``."""
    return _linked(chain_start(out), _whole_lines(out))


def truncate_log(out: Path, last_round: int, chain: str) -> list[RoundRecord]:
    """Return rounds 1 to ``last_round``, and remove the line of round ``last_round + 1`` from ``rounds.jsonl``.

    A crash can leave one such line, of a round without a checkpoint. Raises UserError for any other difference: missing
    or added rounds, or a round that has changed since the hash chain ``chain`` was computed.
    """
    lines, records = _whole_lines(out), read_rounds(out)
    numbers = [record.round for record in records]
    way_on = "restore an unchanged copy of the directory, or start again in a fresh one"
    if numbers not in ([*range(1, last_round + 1)], [*range(1, last_round + 2)]):
        found = f"{len(numbers)} rounds, which are not 1 to {last_round}," if numbers else "no rounds"
        raise UserError(f"{out / ROUNDS} holds {found} but the checkpoint is of round {last_round}: {way_on}")
    now = _linked(chain_start(out), lines[:last_round])
    if now != chain:
        raise UserError(
            f"{out / ROUNDS} or {out / CONFIG} was changed since the checkpoint of round {last_round} was written: "
            f"{way_on}"
        )
    write_log(out, b"".join(lines[:last_round]))
    return records[:last_round]


def log_with_settings(
    out: Path, settings: Mapping[str, Any], num_rounds: int, unmeasured: tuple[str, ...]
) -> tuple[bytes, str]:
    """Return the content and hash chain that ``rounds.jsonl`` will have after a change of the run's ``settings``.

    Nothing is written. The content has the first ``num_rounds`` rounds. ``unmeasured``: prefixes of field names, as in
    the constant MEASURED. Fields with these prefixes are set to None in the last round of the content, because a longer
    run would not measure them in this round.
    """
    lines, records = _whole_lines(out)[:num_rounds], read_rounds(out)[:num_rounds]
    foreign: dict[str, Any] = {part.name: None for part in fields(RoundRecord) if part.name.startswith(unmeasured)}
    if records and any(getattr(records[-1], name) is not None for name in foreign):
        lines[-1] = _line(replace(records[-1], **foreign))
    start = hashlib.sha256(_config(settings, read_identity(out))).hexdigest()
    return b"".join(lines), _linked(start, lines)


def write_log(out: Path, content: bytes) -> None:
    """Replace the content of ``rounds.jsonl`` by ``content``."""
    if _content(out) != content:
        write_whole(out / ROUNDS, content)


def write_model(out: Path, params: Mapping[str, torch.Tensor]) -> None:
    """Write the global model, readable by ``safetensors.torch.load_file``."""
    write_whole(out / MODEL, save({name: value.contiguous() for name, value in params.items()}))


def read_model(out: Path) -> Params:
    """Return the global model that ``write_model`` wrote. Raises UserError if the file is damaged."""
    try:
        return load(read_whole(out / MODEL))
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{out / MODEL} is damaged ({error}): restore it, or repeat the run with --again") from error


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """Write ``result.json``. The status "finished" in it marks a run as finished."""
    write_text(out / RESULT, json.dumps(result, indent=2) + "\n")


def read_result(out: Path) -> dict[str, Any] | None:
    """Return the content of a run's ``result.json``; None if the file is missing or cannot be read."""
    try:
        result = json.loads(read_whole(out / RESULT, _LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def coarse(seconds: float) -> float:
    """Round a duration of a private run up to 10 s, 1 or 10 min, 1, 10, 100 or 1000 h.

    The exact duration of client training would reveal the number of records.

    >>> [coarse(seconds) for seconds in (0.3, 10.0, 11.0, 3601.0)]
    [10.0, 10.0, 60.0, 36000.0]
    """
    return float(next((step for step in _STEPS if seconds <= step), _STEPS[-1]))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, even if the power fails.

    An unpaired surrogate (half a character), which a damaged JSON file may contain, is written as an escape sequence.
    """
    write_whole(path, text.encode(errors="backslashreplace"))


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    ``last_round``: the last finished round. ``chain``: the hash over the run's settings and its log up to that round.
    ``records``: a digest of the user's own training records, empty for public records. ``versions``: {round: digest} of
    earlier server states in separate files. Some clients of an asynchronous run still train from these states.
    ``counts_holders``: True if an algorithm that divides by the number of clients counts only clients with records.
    ``layers``: {name of a layer, such as Global DP: the layer's state, as JSON values by name}.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    last_round: int
    chain: str
    records: str = ""
    versions: dict[int, str] = field(default_factory=dict)
    counts_holders: bool = False
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)


_PROGRESS = TypeAdapter(Progress)


def write_state(path: Path, progress: Progress, server: ServerState) -> str:
    """Write a server state and the progress to a file atomically; return the SHA-256 of the file's content."""
    # safetensors sorts tensors by name, but rounding and privacy noise depend on the order of tensors. So each name
    # begins with the tensor's position, and sorting keeps the order.
    named = {f"{number:06}/{name}": value for number, (name, value) in enumerate(_named(server))}
    later = ("versions", "counts_holders", "layers")  # checkpoints of older versions lack these fields
    unused = {name for name in later if not getattr(progress, name)}
    facts = _PROGRESS.dump_json(progress, exclude=unused).decode()
    digest = digest_of(facts, named)
    write_whole(path, save(named, {"progress": facts, "sha256": digest}))
    return digest


def kept_path(out: Path, server_round: int) -> Path:
    """Return the path of the checkpoint that the run keeps of a round. The folder is made if it is missing."""
    (out / KEPT).mkdir(exist_ok=True)
    return out / KEPT / f"round-{server_round:06}.safetensors"


def kept_rounds(out: Path) -> list[int]:
    """Return the rounds whose checkpoints the run in ``out`` keeps, in ascending order."""
    found = [re.fullmatch(r"round-(\d{6,10})\.safetensors", path.name) for path in (out / KEPT).glob("round-*")]
    return sorted(int(one[1]) for one in found if one)


def read_kept(out: Path, server_round: int, like: ServerState) -> tuple[Progress, ServerState]:
    """Return the progress and the server state after an earlier round, from the checkpoint that the run keeps.

    Raises UserError for a damaged checkpoint (see ``read_state``), and if the checkpoint does not belong to the rounds
    in the log.
    """
    path = kept_path(out, server_round)
    progress, server = read_state(path, like)
    chain = _linked(chain_start(out), _whole_lines(out)[:server_round])
    if (progress.last_round, progress.chain) != (server_round, chain):
        raise UserError(f"{path} does not belong to the rounds in {out / ROUNDS}: delete it, or restore the files")
    return progress, server


def relink_kept(out: Path, settings: Mapping[str, Any], like: ServerState) -> None:
    """Update the hash chain in all kept checkpoints of the run in ``out``, after a change to ``settings``."""
    for server_round in kept_rounds(out):
        path = kept_path(out, server_round)
        progress, server = read_state(path, like)
        _, chain = log_with_settings(out, settings, server_round, ())
        if progress.chain != chain:
            write_state(path, replace(progress, chain=chain), server)


def read_checkpoint(out: Path, like: ServerState) -> tuple[Progress, ServerState] | None:
    """Return the progress and the server state of the run in ``out``; None if there is no checkpoint.

    Raises UserError for a damaged checkpoint (see ``read_state``).
    """
    path = out / CHECKPOINT
    return read_state(path, like) if path.exists() else None


def read_state(path: Path, like: ServerState, digest: str = "") -> tuple[Progress, ServerState]:
    """Return the progress and the server state in a file of ``write_state``.

    ``digest``: the SHA-256 that ``write_state`` returned, empty if unknown. ``like``: the initial state of the run's
    model and algorithm. Raises UserError for a damaged file, and for tensors with other names, shapes or types than
    ``like``. The shapes are checked because compiled code would read outside of tensors that are smaller than expected.
    """
    content = read_whole(path)
    try:
        found, said = load(content), metadata_in(content)
        facts = json.loads(said["progress"])
        private = {name: facts.pop(name) for name in ("clipping_norm", "receipt") if name in facts}
        # older versions stored the state of one layer in these fields
        if any(value is not None for value in private.values()):
            facts["layers"] = {"strategies.private:PrivateRounds": private}
        progress = _PROGRESS.validate_python(facts)
        now = digest_of(said["progress"], dict(sorted(found.items())))
        if not said["sha256"] == now == (digest or now):
            raise ValueError("its checksum does not match")  # noqa: TRY301 (one error message for any damage)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = "its progress is not readable" if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged, or not a checkpoint of this version ({reason}): delete it to start this run again"
        ) from error
    tensors = {name.partition("/")[2]: value for name, value in sorted(found.items())}
    _check_fit(path, tensors, dict(_named(like)))
    parts: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        part, group, name = key.split("/", 2)
        parts.setdefault(part, {}).setdefault(group, {})[name] = value
    layers = parts.get("layers", {}).get("", {})
    params = parts.get("params", {}).get("", {})  # the server has no parameters if all of them stay on clients
    return progress, ServerState(params, parts.get("broadcast", {}), parts.get("memory", {}), layers)


def metadata_in(content: bytes) -> dict[str, str]:
    """Return the metadata in the content of a safetensors file."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said: dict[str, str] = header["__metadata__"]
    return said


def digest_of(facts: str, named: Params) -> str:
    """Return the SHA-256 of the text ``facts`` and of the tensors, in their order: names, types, shapes and bytes."""
    digest = hashlib.sha256(facts.encode())
    for name, value in named.items():
        digest.update(f"\n{name} {_kind(value)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _content(out: Path) -> bytes:
    return read_whole(out / ROUNDS, _LONGEST) if (out / ROUNDS).exists() else b""


def _whole_lines(out: Path) -> list[bytes]:
    content = _content(out)
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def _config(settings: Mapping[str, Any], identity: Mapping[str, Any]) -> bytes:
    first = f"{_IDENTITY}{json.dumps(identity, sort_keys=True)}\n" if identity else ""
    return (first + tomli_w.dumps(settings)).encode(errors="backslashreplace")


def _line(record: RoundRecord) -> bytes:
    said = {name: value for name, value in asdict(record).items() if value is not None or name not in _OPTIONAL}
    return json.dumps(said, allow_nan=False).encode() + b"\n"


def _linked(chain: str, lines: Iterable[bytes]) -> str:
    for line in lines:
        chain = hashlib.sha256(chain.encode() + line).hexdigest()
    return chain


def _named(server: ServerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor of the server state. The name has the form "part/group/tensor"."""
    parts: dict[str, Mapping[str, Params]] = {
        "params": {"": server.params}, "broadcast": server.broadcast, "memory": server.memory,
        "layers": {"": server.layers},
    }  # fmt: skip
    for part, groups in parts.items():
        for group, params in groups.items():
            for name, value in params.items():
                yield f"{part}/{group}/{name}", value.contiguous()


def _check_fit(path: Path, found: Params, wanted: Params) -> None:
    """Raise UserError if the tensors ``found`` do not fit ``wanted``, the tensors of the run's model and algorithm.

    Names, shapes, types and order must be equal, and all numbers must be finite.
    """
    way_on = (
        "the code of the model or of the algorithm has changed since; restore the old code, or delete the checkpoint "
        "to start this run again"
    )
    for name in [*wanted, *found]:
        one = _kind(found[name]) if name in found else "not there"
        other = _kind(wanted[name]) if name in wanted else "unknown"
        if one != other:
            raise UserError(f"{path} does not fit: tensor {name} is {one}, but in this run it is {other}: {way_on}")
    if list(found) != list(wanted):
        raise UserError(f"{path} does not fit: its tensors are in another order: {way_on}")
    if bad := [name for name, value in found.items() if not is_finite({"one": {name: value}})]:
        raise UserError(f"{path}: tensor {bad[0]} has numbers that are not finite: delete it to start this run again")


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
