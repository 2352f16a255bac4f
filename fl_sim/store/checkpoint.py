"""The server's state after a round, on disk: whole or the one before, and checked against the run when read back."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fl_sim.errors import UserError
from fl_sim.params import is_finite
from fl_sim.store.files import read_whole, write_whole
from fl_sim.types import Params, Payloads, ServerState

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    ``last_round``: the last finished one. ``chain``: the hash over the run's settings and its log up to that round.
    ``records``: a digest of the user's own records that the run trains on, empty where they are public. ``versions``:
    {round: digest} of the states before some rounds, which lie in files beside it (``write_state``).
    ``counts_holders``: whether clients without records are left out where an algorithm counts all clients. ``layers``:
    {layer: its own part, JSON values by name}.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    last_round: int
    chain: str
    records: str = ""
    versions: dict[int, str] = field(default_factory=dict)
    counts_holders: bool = False
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)


_PROGRESS = TypeAdapter(Progress)


def write_checkpoint(out: Path, progress: Progress, server: ServerState) -> None:
    """Keep the server's state after a round: the whole of it or, after a crash while writing, the one before."""
    write_state(out / CHECKPOINT, progress, server)


def write_state(path: Path, progress: Progress, server: ServerState) -> str:
    """Keep a state of the server in a file, whole or not at all; return the SHA-256 of what is in it."""
    # safetensors sorts by name; numbers first keep our order, on which last bits and the noise of privacy depend.
    named = {f"{number:06}/{name}": value for number, (name, value) in enumerate(_named(server))}
    unused = {
        name for name in ("versions", "counts_holders", "layers") if not getattr(progress, name)
    }  # which came later
    facts = _PROGRESS.dump_json(progress, exclude=unused).decode()
    digest = digest_of(facts, named)
    write_whole(path, save(named, {"progress": facts, "sha256": digest}))
    return digest


def read_checkpoint(out: Path, like: ServerState) -> tuple[Progress, ServerState] | None:
    """Return the progress of the run in ``out`` and the state after it; None where there is no checkpoint.

    Raises UserError as ``read_state`` does.
    """
    path = out / CHECKPOINT
    return read_state(path, like) if path.exists() else None


def read_state(path: Path, like: ServerState, digest: str = "") -> tuple[Progress, ServerState]:
    """Return what ``write_state`` has written; ``digest``: what that returned, empty where nobody knows.

    ``like``: the state that the run's model and algorithm start from. Raises UserError for a file that is damaged, and
    for one that does not hold tensors of the same names, shapes and types: training would read foreign memory.
    """
    content = read_whole(path)
    try:
        found, said = load(content), metadata_in(content)
        progress = _PROGRESS.validate_python(_as_now(json.loads(said["progress"])))
        now = digest_of(said["progress"], dict(sorted(found.items())))
        if not said["sha256"] == now == (digest or now):
            raise ValueError("its checksum is another")  # noqa: TRY301 (one message for all that is wrong with a file)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = "its progress is not readable" if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged, or not a checkpoint of this version ({reason}): delete it to start this run again"
        ) from error
    tensors = {name.partition("/")[2]: value for name, value in sorted(found.items())}
    _check_fit(path, tensors, dict(_named(like)))
    parts = _grouped(tensors)
    layers = parts.get("layers", {}).get("", {})
    return progress, ServerState(parts["params"][""], parts.get("broadcast", {}), parts.get("memory", {}), layers)


def _as_now(progress: dict[str, Any]) -> dict[str, Any]:
    """Return a progress as it is written now: once it had fields of one layer."""
    private = {name: progress.pop(name) for name in ("clipping_norm", "receipt") if name in progress}
    if any(value is not None for value in private.values()):
        progress["layers"] = {"strategies.private:PrivateRounds": private}
    return progress


def _named(server: ServerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every tensor of the state by a name: its part of the state, its group, its own name."""
    parts: dict[str, Mapping[str, Params]] = {
        "params": {"": server.params}, "broadcast": server.broadcast, "memory": server.memory,
        "layers": {"": server.layers},
    }  # fmt: skip
    for part, groups in parts.items():
        for group, params in groups.items():
            for name, value in params.items():
                yield f"{part}/{group}/{name}", value.contiguous()


def _grouped(tensors: Params) -> dict[str, Payloads]:
    parts: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, value in tensors.items():
        part, group, name = key.split("/", 2)
        parts.setdefault(part, {}).setdefault(group, {})[name] = value
    return {part: dict(groups) for part, groups in parts.items()}


def _check_fit(path: Path, found: Params, wanted: Params) -> None:
    """Refuse tensors that are not those of the run's model and algorithm, in their order."""
    way_on = (
        "the code of the model or of the algorithm has changed since; put that back, or delete the checkpoint to "
        "start this run again"
    )
    for name in [*wanted, *found]:
        one = _kind(found[name]) if name in found else "not there"
        other = _kind(wanted[name]) if name in wanted else "unknown"
        if one != other:
            raise UserError(f"{path} does not fit: tensor {name} is {one}, but in this run it is {other}: {way_on}")
    if list(found) != list(wanted):
        raise UserError(f"{path} does not fit: its tensors are in another order: {way_on}")
    if bad := [name for name, value in found.items() if not is_finite({"one": {name: value}})]:
        raise UserError(f"{path}: tensor {bad[0]} holds numbers that are not finite: delete it to start this run again")


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def metadata_in(content: bytes) -> dict[str, str]:
    """Return what a safetensors file says beside its tensors."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said: dict[str, str] = header["__metadata__"]
    return said


def digest_of(facts: str, named: Params) -> str:
    """Return the SHA-256 of facts and of tensors in their order: names, kinds and bytes."""
    digest = hashlib.sha256(facts.encode())
    for name, value in named.items():
        digest.update(f"\n{name} {_kind(value)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
