"""Where a student's training stands, on the disk: who goes on with it ends in the bits of one that never stopped."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fl_sim.errors import UserError
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.run_directory import RoundRecord, digest_of, metadata_in
from fl_sim.types import Params
from strategies.pate.student import Part


@dataclass(frozen=True)
class Standing:
    """How far a student is.

    ``start``: a digest of all that its training depends on. ``steps``: it has taken so many. ``rounds``: what the log
    says of its epochs so far.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    start: str
    steps: int
    rounds: tuple[RoundRecord, ...]


_STANDING = TypeAdapter(Standing)


def write_standing(path: Path, standing: Standing, parts: Mapping[str, Part]) -> None:
    """Keep where training stands, whole or not at all; ``parts``: all that it changes, by name."""
    tensors = dict(_named(parts))
    facts = _STANDING.dump_json(standing).decode()
    write_whole(path, save(tensors, {"standing": facts, "sha256": digest_of(facts, dict(sorted(tensors.items())))}))


def read_standing(path: Path) -> tuple[Standing, Params]:
    """Return what ``write_standing`` has written. Raises UserError for a file that is damaged."""
    content = read_whole(path)
    try:
        tensors, said = load(content), metadata_in(content)
        standing = _STANDING.validate_json(said["standing"])
        if said["sha256"] != digest_of(said["standing"], dict(sorted(tensors.items()))):
            raise ValueError("its checksum is another")  # noqa: TRY301 (one message for all that is wrong with a file)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = "what it says of itself is not readable" if isinstance(error, ValidationError) else error
        raise UserError(f"{path} is damaged ({reason}): delete it, and the student begins anew") from error
    return standing, tensors


def put_back(path: Path, tensors: Params, parts: Mapping[str, Part]) -> None:
    """Make ``parts`` what they were. Raises UserError where they are others now."""
    fresh = {name for name, part in parts.items() if not isinstance(part, torch.optim.Optimizer)}
    wanted = {name: value.shape for name, value in _named({name: parts[name] for name in fresh})}
    found = {name: value.shape for name, value in tensors.items() if name.split("/")[0] in fresh}
    if sorted(wanted) != sorted(found) or {name.split("/")[0] for name in tensors} - set(parts):
        raise UserError(f"{path} does not fit: the code of the student has changed; delete it, and it begins anew")
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        try:
            part.load_state_dict(_of_optimizer(part, own) if isinstance(part, torch.optim.Optimizer) else own)
        except (RuntimeError, ValueError) as error:  # other shapes
            raise UserError(f"{path} does not fit: {name}: {error}; delete it, and the student begins anew") from error


def _named(parts: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every tensor by a name: its part, and where in it that is."""
    for name, part in parts.items():
        state = part.state_dict()
        if isinstance(part, torch.optim.Optimizer):  # its groups say nothing that settings do not
            state = {f"{index}/{key}": value for index, of in state["state"].items() for key, value in of.items()}
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), f"{name}: {key} is no tensor"
            yield f"{name}/{key}", value.detach().cpu().contiguous().clone()


def _of_optimizer(optimizer: torch.optim.Optimizer, tensors: Params) -> dict[str, Any]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, kind = key.split("/")
        like = weights[int(index)]
        # Fused optimisers take it for granted that numbers lie in memory as those of the weights do.
        laid_out = torch.empty_like(like).copy_(value) if value.shape == like.shape else value
        state.setdefault(int(index), {})[kind] = laid_out
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
