"""What clients keep between rounds (SCAFFOLD's c_i), on disk, keyed by client and round."""

import hashlib
import os
from pathlib import Path

from safetensors.torch import load_file, save, save_file

from fl_sim.types import Params, Payloads


def save_groups(path: Path, groups: Payloads) -> None:
    """Write named groups of tensors to one safetensors file; a reader sees the old file or the whole new one."""
    named = [(group, name, value) for group, params in groups.items() for name, value in params.items()]
    # safetensors sorts by name; numbers first keep our order, on which last bits and the noise of privacy depend.
    flat = {f"{number:06}/{group}/{name}": value.contiguous() for number, (group, name, value) in enumerate(named)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    save_file(flat, partial)
    partial.replace(path)


def load_groups(path: Path) -> Payloads:
    """Read what ``save_groups`` wrote, in the order in which it was written."""
    groups: dict[str, Params] = {}
    for key, value in sorted(load_file(path).items()):
        _, group, name = key.split("/", 2)
        groups.setdefault(group, {})[name] = value
    return groups


def save_by_content(folder: Path, stem: str, tensors: Params) -> Path:
    """Write tensors to a safetensors file named by its content, so that a name never means two things; return it."""
    content = save(tensors)
    path = folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def save_state(state_dir: Path, client: int, server_round: int, state: Payloads) -> None:
    """Keep ``state`` as what ``client`` knows after ``server_round``, and drop all but the state it started from.

    Running a round again reads the same older state and writes the same file, so a retry or a resume changes nothing.
    """
    if not state:
        return
    path = _path(state_dir, client, server_round)
    save_groups(path, state)
    for stale in _rounds_before(path.parent, server_round)[:-1]:
        (path.parent / f"{stale}.safetensors").unlink(missing_ok=True)


def load_state(state_dir: Path | str, client: int, server_round: int) -> Payloads:
    """Return what ``client`` kept in its last round before ``server_round``; nothing if it has not taken part yet."""
    if not os.path.isdir(state_dir):  # noqa: PTH112 (most algorithms keep nothing, and this is asked for every client)
        return {}
    folder = _path(Path(state_dir), client, server_round).parent
    earlier = _rounds_before(folder, server_round)
    return load_groups(folder / f"{earlier[-1]}.safetensors") if earlier else {}


def _rounds_before(folder: Path, server_round: int) -> list[int]:
    if not folder.is_dir():
        return []
    rounds = sorted(int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal())
    return [done for done in rounds if done < server_round]


def _path(state_dir: Path, client: int, server_round: int) -> Path:
    return state_dir / f"client-{client}" / f"{server_round}.safetensors"
