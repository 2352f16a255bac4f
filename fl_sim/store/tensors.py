"""Tensors on disk: files named by the hash of their content, and client states.

Client states are private: their files are created with access for their owner only. A resumed run verifies the checksum
of all client states. Without this check, a client whose state is lost would start like a new client, and the results of
the run would change. The checksum is computed from the client states, and is as private as the states. Therefore the
checksum is stored in the folder of the client states, and not in the checkpoint.
"""

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from fl_sim.errors import RunError, UserError
from fl_sim.params import FlatParams, Layout, flattened, layout_of, num_in
from fl_sim.store.files import read_whole, readable_os_errors, write_all, write_whole
from fl_sim.types import Params, Payloads

STATES, LAYOUT = "states.bin", "layout.json"
"""The names of two files: all client states, and the schema of one state."""

_PAGE = 4096
# The header of a stored client state has two integers: the round (0: no state is stored) and a checksum of the state.
_HEAD = struct.Struct("<qq")

SEAL = "seal.json"

_LONGEST = 2**20  # the maximum size of the file SEAL, in bytes
_MODULUS = 1 << 256


def save_by_content(folder: Path, stem: str, tensors: Params, *, mode: int = 0o666) -> Path:
    """Write tensors to a safetensors file named by the hash of its content, and return its path.

    So two files with the same name have the same content. ``mode``: the permissions of the file, such as 0o600.
    """
    content = save(dict(tensors))
    path = folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    write_whole(path, content, mode=mode)
    return path


@lru_cache(maxsize=1)
def read_by_content(path: str) -> Params:
    """Return the tensors in a file of ``save_by_content``.

    Raises RunError if the hash of the content differs from the hash in the file name.
    """
    with readable_os_errors():
        content = read_whole(Path(path))
    if not Path(path).stem.endswith(f"-{hashlib.sha256(content).hexdigest()[:16]}"):
        raise RunError(
            f"{path} is damaged, or was written by another program: its content does not fit the hash in its name; "
            "delete the file, and start the same command again"
        )
    tensors: Params = load(content)
    return tensors


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, with permission for its owner only."""
    write_whole(path, content, mode=0o600)


def save_state(state_dir: Path | str, client: int, server_round: int, state: Payloads) -> None:
    """Save the state of ``client`` after ``server_round``, and keep the state from before this round.

    All clients of a run have states of the same names, shapes and type. The file has two slots for each client: for the
    newest state and for the state before it. So a round can be repeated, even if a process died while it saved a state.
    The repeated round starts from the same older state, and saves the same new state. Several processes may save at
    once, each for its own clients. Raises RunError, with the cure, if the file cannot be written.
    """
    if not state:
        return
    groups = {name: flattened(params) for name, params in state.items()}
    vectors = [group.flat for group in groups.values()]
    numbers = (vectors[0] if len(vectors) == 1 else torch.cat(vectors)).numpy(force=True)
    path = Path(state_dir) / STATES
    with readable_os_errors(path):
        slots = _create(path.parent, _slots_of(state))
    with readable_os_errors(path), path.open("r+b", buffering=0) as file:
        started_from = _latest(slots.heads(file, client), server_round)
        place = slots.place(client, 1 if started_from == 0 else 0)
        # While the state is being written, a header of zeros marks the slot as empty.
        _write(file, place, bytes(_HEAD.size))
        _write(file, place + _HEAD.size, numbers.data)
        _write(file, place, _HEAD.pack(server_round, _checksum(numbers)))


def load_state(state_dir: Path | str, client: int, server_round: int) -> Payloads:
    """Return a client's newest state from before ``server_round``; empty if the client has not taken part yet.

    Raises RunError if the file is damaged.
    """
    if not os.path.isdir(state_dir):  # noqa: PTH112 (fast: called for every client, and most algorithms have no state)
        return {}
    path = Path(state_dir) / STATES
    try:
        slots = _read_layout(read_whole(path.with_name(LAYOUT)))
    except FileNotFoundError:
        return {}
    with readable_os_errors(path), path.open("rb", buffering=0) as file:
        heads = slots.heads(file, client)
        latest = _latest(heads, server_round)
        if latest is None:
            return {}
        numbers = np.zeros(slots.size, slots.dtype)
        file.seek(slots.place(client, latest) + _HEAD.size)
        read = file.readinto(numbers.data.cast("B"))
    written_in, checksum = heads[latest]
    if read != numbers.nbytes or _checksum(numbers) != checksum:
        raise RunError(f"{path} is damaged: it does not hold the state of client {client} from round {written_in}")
    return slots.named(torch.from_numpy(numbers))


def state_checksums(state_dir: Path, clients: Iterable[int], server_round: int) -> Iterator[tuple[int, int, int]]:
    """Yield (client, round, checksum) of each client's newest state from before ``server_round``.

    Clients without a state are left out. The checksums are computed from private states, so they are private, too.
    """
    if (slots := _slots_in(state_dir)) is None:
        return
    with (state_dir / STATES).open("rb", buffering=0) as file:
        for client in clients:
            heads = slots.heads(file, client)
            if (latest := _latest(heads, server_round)) is not None:
                yield client, *heads[latest]


def clients_with_state(state_dir: Path, num_clients: int) -> Iterator[int]:
    """Yield, in ascending order, the IDs of all clients that may have a state.

    The file is sparse: it has a hole for each client without a state. If the file system does not report holes, all
    client IDs are yielded.
    """
    if (slots := _slots_in(state_dir)) is None:
        return
    each = slots.place(1, 0)
    with (state_dir / STATES).open("rb", buffering=0) as file:
        client = 0
        while (client := max(client, _next_data(file, client * each) // each)) < num_clients:
            yield client
            client += 1


def delete_states_from(state_dir: Path, num_clients: int, server_round: int) -> None:
    """Delete the states of ``server_round`` and of later rounds, which did not finish."""
    if (slots := _slots_in(state_dir)) is None:
        return
    with (state_dir / STATES).open("r+b", buffering=0) as file:
        for client in clients_with_state(state_dir, num_clients):
            for slot, (written_in, _) in enumerate(slots.heads(file, client)):
                if written_in >= server_round:
                    _write(file, slots.place(client, slot), bytes(_HEAD.size))


class StateChecksum:
    """The checksum of all client states: a sum of one hash per client.

    If one client's state changes, only this state is read to update the sum. The checksum covers the client states on
    this machine (see ``save_state``), but no client states on other machines.
    """

    def __init__(self, state_dir: Path, num_clients: int, last_round: int) -> None:
        self._state_dir = state_dir
        self._parts: dict[int, int] = {}
        self._total = 0
        self._count(clients_with_state(state_dir, num_clients), last_round)
        self._last = (last_round, self._sum())

    def put(self, server_round: int, cohort: Iterable[int]) -> None:
        """Update the checksum after ``server_round``, and write it together with the previous round's checksum.

        ``cohort``: the clients that took part in ``server_round``.
        """
        self._count(cohort, server_round)
        before, self._last = self._last, (server_round, self._sum())
        said = {str(number): value for number, value in (before, self._last)}
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._state_dir / SEAL, json.dumps(said).encode(), mode=0o600)

    def check(self) -> None:
        """Raise UserError if the client states have changed since the checksum was written."""
        path = self._state_dir / SEAL
        server_round, now = self._last
        try:
            said = json.loads(read_whole(path, _LONGEST))
            then = said.get(str(server_round)) if isinstance(said, dict) else None
        except (FileNotFoundError, ValueError, RecursionError):
            then = None
        if then != now:
            raise UserError(
                f"{self._state_dir} does not hold the client states after round {server_round} (a state was deleted, "
                "changed or comes from another run): restore an unchanged copy of the folder, or start again in a "
                "fresh directory"
            )

    def _count(self, clients: Iterable[int], server_round: int) -> None:
        for client, written_in, checksum in state_checksums(self._state_dir, clients, server_round + 1):
            part = int.from_bytes(hashlib.sha256(f"{client} {written_in} {checksum}".encode()).digest())
            self._total += part - self._parts.get(client, 0)
            self._parts[client] = part

    def _sum(self) -> str:
        return f"{self._total % _MODULUS:064x}"


def open_state_checksum(state_dir: Path, num_clients: int, last_round: int, state: Payloads) -> StateChecksum:
    """Return the checksum of the client states of a run that continues after ``last_round`` (0: a new run).

    ``state``: names and shapes of one client's state. Raises UserError if the folder does not have the client states
    after ``last_round``. States of later rounds are deleted.
    """
    if not last_round:
        return StateChecksum(state_dir, num_clients, last_round)
    layout = state_dir / LAYOUT
    if layout.exists() and _read_layout(read_whole(layout)) != _slots_of(state):
        raise UserError(
            f"{state_dir} contains client states of another model or algorithm: restore this run's client states, or "
            "start again in a fresh directory"
        )
    checksum = StateChecksum(state_dir, num_clients, last_round)
    checksum.check()
    delete_states_from(state_dir, num_clients, last_round + 1)
    return checksum


def _next_data(file: FileIO, place: int) -> int:
    """Return the offset of the first stored bytes in the sparse file at or after the offset ``place``.

    If there are only holes after ``place``, return the size of the file, or ``place`` if ``place`` is larger.
    """
    if not hasattr(os, "SEEK_DATA"):  # some systems, such as Windows, cannot skip the holes of a sparse file
        return place
    try:
        return os.lseek(file.fileno(), place, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(place, os.fstat(file.fileno()).st_size)


@dataclass(frozen=True)
class _Slots:
    """The schema of a client state (type, names and shapes), and the positions of all states in the file.

    Each client has two slots in the file. A slot contains one state: a header (round and checksum), then all numbers.
    """

    dtype: str
    groups: tuple[tuple[str, Layout], ...]

    @cached_property
    def size(self) -> int:
        return sum(num_in(layout) for _, layout in self.groups)

    def place(self, client: int, slot: int) -> int:
        """Return the position in the file of the first byte of ``slot`` (0 or 1) of ``client``.

        Each slot starts on a new memory page, so two slots never share a page.
        """
        pages = -(-(_HEAD.size + np.dtype(self.dtype).itemsize * self.size) // _PAGE)
        return (2 * client + slot) * pages * _PAGE

    def heads(self, file: FileIO, client: int) -> list[tuple[int, int]]:
        """Return the headers, (round, checksum), of the client's two slots. Round 0 means that a slot is empty."""
        heads = []
        for slot in (0, 1):
            file.seek(self.place(client, slot))
            heads.append(_HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0")))
        return heads

    def named(self, numbers: torch.Tensor) -> Payloads:
        """Convert ``numbers``, a client state as one vector, to named groups of named tensors."""
        parts = numbers.split_with_sizes([num_in(layout) for _, layout in self.groups])
        return {name: FlatParams(part, layout) for (name, layout), part in zip(self.groups, parts, strict=True)}


def _latest(heads: Sequence[tuple[int, int]], server_round: int) -> int | None:
    """Return the index of the slot with the newest state from before ``server_round``; None without such a state."""
    earlier = [(written_in, slot) for slot, (written_in, _) in enumerate(heads) if 0 < written_in < server_round]
    return max(earlier)[1] if earlier else None


def _slots_of(state: Payloads) -> _Slots:
    layouts = tuple((name, layout_of(params)) for name, params in state.items())
    first = next(iter(next(iter(state.values())).values()))
    return _Slots(first.numpy(force=True).dtype.str, layouts)


def _create(state_dir: Path, wanted: _Slots) -> _Slots:
    """Create the file of client states and the file with their schema (names, shapes and type), if they are missing.

    Several processes may call this function at the same time.
    """
    path = state_dir / LAYOUT
    try:
        slots = _read_layout(read_whole(path))
    except FileNotFoundError:
        slots = wanted
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state_dir / STATES).touch(mode=0o600)
        write_private(path, json.dumps(asdict(wanted)).encode())
    assert slots == wanted, "all client states of a run have the same schema"
    return slots


def _slots_in(state_dir: Path) -> _Slots | None:
    is_there = (state_dir / STATES).exists() and (state_dir / LAYOUT).exists()
    return _read_layout(read_whole(state_dir / LAYOUT)) if is_there else None


@lru_cache(maxsize=8)
def _read_layout(content: bytes) -> _Slots:
    """Return the schema of a client state that ``_create`` wrote. Raises RunError for any other content."""
    try:
        read = json.loads(content)
        groups = ((group, tuple((name, tuple(shape)) for name, shape in layout)) for group, layout in read["groups"])
        return _Slots(read["dtype"], tuple(groups))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"{LAYOUT} in the folder of client states is damaged: restore it, or start again in a fresh directory"
        ) from error


def _checksum(numbers: NDArray[Any]) -> int:
    """Return a checksum of a client state: the sum of all its numbers, with their bits read as 32-bit integers.

    The checksum is fast to compute. Its purpose is to detect a state that was only partly on the disk when the machine
    crashed.
    """
    return int(numbers.view(np.int32).sum(dtype=np.int64))


def _write(file: FileIO, place: int, content: bytes | memoryview) -> None:
    file.seek(place)
    write_all(file, content)
