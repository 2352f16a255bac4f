"""A run's directory: what is written when, and read back after a crash.

``config.toml`` first, a line of ``rounds.jsonl`` and ``checkpoint.safetensors`` after every round, at the end
``model.safetensors`` and ``result.json`` - of a run that failed or was interrupted, too.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fl_sim.store import load_groups, save_groups
from fl_sim.types import ServerState, UserError

CONFIG, ROUNDS, CHECKPOINT, MODEL, RESULT, STATE = (
    "config.toml", "rounds.jsonl", "checkpoint.safetensors", "model.safetensors", "result.json", "clients",
)  # fmt: skip


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.jsonl``.

    ``test_accuracy`` in [0, 1] and ``test_loss`` are None in rounds without evaluation; ``train_loss`` is the clients'
    mean; it and ``cohort`` are None where they may not leave the round (under privacy); ``epsilon`` None means
    no guarantee; ``seconds`` is the whole round.
    """

    round: int
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    epsilon: float | None
    cohort: int | None
    learning_rate: float
    seconds: float


def write_config(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the resolved experiment."""
    write_text(out / CONFIG, tomli_w.dumps(settings))


def append_round(out: Path, record: RoundRecord) -> None:
    """Add a round to the log."""
    with (out / ROUNDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_rounds(out: Path) -> list[RoundRecord]:
    """Read the log back; a last line that a crash cut short is left out."""
    records = []
    path = out / ROUNDS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(RoundRecord(**json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            break
    return records


def keep_rounds(out: Path, last_round: int) -> list[RoundRecord]:
    """Cut the log after ``last_round`` and return what is left."""
    records = [record for record in read_rounds(out) if record.round <= last_round]
    write_text(out / ROUNDS, "".join(json.dumps(asdict(record)) + "\n" for record in records))
    return records


def write_checkpoint(out: Path, server_round: int, server: ServerState, clipping_norm: float | None = None) -> None:
    """Keep the server's state after a round: the whole of it or, after a crash while writing, the one before.

    ``clipping_norm``: the next round's, where the run is private.
    """
    groups = {f"broadcast.{name}": params for name, params in server.broadcast.items()}
    groups |= {f"memory.{name}": params for name, params in server.memory.items()}
    progress = {"round": torch.tensor([server_round])}
    if clipping_norm is not None:
        progress["clipping_norm"] = torch.tensor([clipping_norm], dtype=torch.float64)
    save_groups(out / CHECKPOINT, {"params": server.params, "progress": progress, **groups})


def read_checkpoint(out: Path) -> tuple[int, ServerState, float | None] | None:
    """Return (last finished round, state after it, clipping norm of the next), or None where there is no checkpoint."""
    path = out / CHECKPOINT
    if not path.exists():
        return None
    try:
        groups = load_groups(path)
        params, progress = groups.pop("params"), groups.pop("progress")
        last, norm = int(progress["round"]), progress.get("clipping_norm")
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is not a checkpoint of this program ({error}): delete it to start this run again"
        ) from error
    broadcast = {
        name.removeprefix("broadcast."): group for name, group in groups.items() if name.startswith("broadcast.")
    }
    memory = {name.removeprefix("memory."): group for name, group in groups.items() if name.startswith("memory.")}
    return last, ServerState(params, broadcast, memory), None if norm is None else float(norm)


def write_model(out: Path, params: Mapping[str, torch.Tensor]) -> None:
    """Write the global model, readable by ``safetensors.torch.load_file``."""
    partial = out / f".{MODEL}.part"
    save_file({name: value.contiguous() for name, value in params.items()}, partial)
    partial.replace(out / MODEL)


def write_result(out: Path, result: Mapping[str, Any]) -> None:
    """Write ``result.json``: its presence with status "finished" is what marks a run as done."""
    write_text(out / RESULT, json.dumps(result, indent=2) + "\n")


def read_result(out: Path) -> dict[str, Any] | None:
    """Return a run's result, or None where there is none that can be read."""
    try:
        result = json.loads((out / RESULT).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return result if isinstance(result, dict) else None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, surviving a power cut."""
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
