"""Tensors on disk: files named by their content, and what clients keep between rounds (SCAFFOLD's c_i), with its seal.

What clients keep is theirs: nobody but its owner may read the files, from the first byte on. By the seal a run that
goes on notices that some of it is lost or foreign: a client whose state is gone would start again as one that has not
taken part yet, and the run would end in other numbers. The seal is computed from what clients keep, so it is as
private, and lies with it; the checkpoint has none.
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
from fl_sim.store.files import naming, read_whole, readable_os_errors, write_all, write_whole
from fl_sim.types import Params, Payloads

STATES, LAYOUT = "states.bin", "layout.json"
"""The file of all clients' states, and what a state consists of."""

_PAGE = 4096
_HEAD = struct.Struct("<qq")  # the round after which the client knew this, 0 for none; the numbers' checksum

SEAL = "seal.json"

_LONGEST = 2**20  # bytes
_MODULUS = 1 << 256


def save_by_content(folder: Path, stem: str, tensors: Params, *, mode: int = 0o666) -> Path:
    """Write tensors to a safetensors file named by its content, so that a name never means two things; return it.

    ``mode``: as for ``write_whole``.
    """
    content = save(dict(tensors))
    path = folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    write_whole(path, content, mode=mode)
    return path


@lru_cache(maxsize=1)
def read_by_content(path: str) -> Params:
    """Return the tensors in a file of ``save_by_content``, whose name never means two things.

    Raises RunError where it holds something else than its name says.
    """
    with readable_os_errors():
        content = read_whole(Path(path))
    if not Path(path).stem.endswith(f"-{hashlib.sha256(content).hexdigest()[:16]}"):
        raise RunError(
            f"{path} is damaged, or was written by something else: it does not hold what its name says; delete it, and "
            "start the same command again"
        )
    tensors: Params = load(content)
    return tensors


def write_private(path: Path, content: bytes) -> None:
    """Write, whole or not at all, a file that nobody but its owner may read."""
    write_whole(path, content, mode=0o600)


def save_state(state_dir: Path | str, client: int, server_round: int, state: Payloads) -> None:
    """Keep ``state`` as what ``client`` knows after ``server_round``, in place of all but the state it started from.

    All clients of a run keep tensors of the same names, shapes and type; one file holds two states of each. Running a
    round again reads the same older state and writes the same numbers, so a retry or a resume changes nothing, whenever
    a process dies. Several may save at once, each its own clients. Raises RunError, with the cure, where the file
    cannot be written.
    """
    if not state:
        return
    groups = {name: flattened(params) for name, params in state.items()}
    vectors = [group.flat for group in groups.values()]
    numbers = (vectors[0] if len(vectors) == 1 else torch.cat(vectors)).numpy(force=True)
    path = Path(state_dir) / STATES
    with readable_os_errors(), naming(path):
        slots = _make(path.parent, _slots_of(state))
    with readable_os_errors(), naming(path), path.open("r+b", buffering=0) as file:
        started_from = _latest(slots.heads(file, client), server_round)
        place = slots.place(client, 1 if started_from == 0 else 0)
        _write(file, place, bytes(_HEAD.size))  # until the numbers are whole, there are none
        _write(file, place + _HEAD.size, numbers.data)
        _write(file, place, _HEAD.pack(server_round, _checksum(numbers)))


def load_state(state_dir: Path | str, client: int, server_round: int) -> Payloads:
    """Return what ``client`` kept in its last round before ``server_round``; nothing if it has not taken part yet.

    Raises RunError where the file is damaged.
    """
    if not os.path.isdir(state_dir):  # noqa: PTH112 (most algorithms keep nothing, and this is asked for every client)
        return {}
    path = Path(state_dir) / STATES
    try:
        slots = _read_layout(read_whole(path.with_name(LAYOUT)))
    except FileNotFoundError:
        return {}
    with readable_os_errors(), naming(path), path.open("rb", buffering=0) as file:
        heads = slots.heads(file, client)
        latest = _latest(heads, server_round)
        if latest is None:
            return {}
        numbers = np.zeros(slots.size, slots.dtype)
        file.seek(slots.place(client, latest) + _HEAD.size)
        read = file.readinto(numbers.data.cast("B"))
    written_in, checksum = heads[latest]
    if read != numbers.nbytes or _checksum(numbers) != checksum:
        raise RunError(f"{path} is damaged: it does not hold what client {client} kept in round {written_in}")
    return slots.named(torch.from_numpy(numbers))


def state_checksums(state_dir: Path, clients: Iterable[int], server_round: int) -> Iterator[tuple[int, int, int]]:
    """Give (client, round, checksum) of what each client kept in its last round before ``server_round``.

    Clients that kept nothing are left out. The checksum is computed from what the client knows: it is private.
    """
    if not (state_dir / STATES).exists() or not (state_dir / LAYOUT).exists():
        return
    slots = _read_layout(read_whole(state_dir / LAYOUT))
    with (state_dir / STATES).open("rb", buffering=0) as file:
        for client in clients:
            heads = slots.heads(file, client)
            if (latest := _latest(heads, server_round)) is not None:
                yield client, *heads[latest]


def clients_with_state(state_dir: Path, num_clients: int) -> Iterator[int]:
    """Give, ascending, all clients that may have kept something: the places of those never met are holes in the file.

    Where a file system does not tell holes, these are all clients.
    """
    if not (state_dir / STATES).exists() or not (state_dir / LAYOUT).exists():
        return
    each = _read_layout(read_whole(state_dir / LAYOUT)).place(1, 0)
    with (state_dir / STATES).open("rb", buffering=0) as file:
        client = 0
        while (client := max(client, _next_data(file, client * each) // each)) < num_clients:
            yield client
            client += 1


def delete_states_from(state_dir: Path, num_clients: int, server_round: int) -> None:
    """Forget what clients kept in ``server_round`` and later: in a round that did not finish, nobody took part."""
    if not (state_dir / STATES).exists() or not (state_dir / LAYOUT).exists():
        return
    slots = _read_layout(read_whole(state_dir / LAYOUT))
    with (state_dir / STATES).open("r+b", buffering=0) as file:
        for client in clients_with_state(state_dir, num_clients):
            for slot, (written_in, _) in enumerate(slots.heads(file, client)):
                if written_in >= server_round:
                    _write(file, slots.place(client, slot), bytes(_HEAD.size))


def fits_layout(state_dir: Path, state: Payloads) -> bool:
    """Say whether the folder is for states of these names, shapes and type; one without any state is."""
    path = state_dir / LAYOUT
    return not path.exists() or _read_layout(read_whole(path)) == _slots_of(state)


class StateChecksum:
    """The sum of a hash over each client's state: one client's part of it changes without looking at the others'.

    ``num_clients``: how many the run has. The files are those of ``save_state``; a client on another machine keeps its
    own there, and has no part in this.
    """

    def __init__(self, state_dir: Path, num_clients: int, last_round: int) -> None:
        self._state_dir = state_dir
        self._parts: dict[int, int] = {}
        self._total = 0
        self._count(clients_with_state(state_dir, num_clients), last_round)
        self._last = (last_round, self._sum())

    def put(self, server_round: int, cohort: Iterable[int]) -> None:
        """Write the checksums after this round, in which ``cohort`` took part, and after the one before."""
        self._count(cohort, server_round)
        before, self._last = self._last, (server_round, self._sum())
        said = {str(number): value for number, value in (before, self._last)}
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._state_dir / SEAL, json.dumps(said).encode(), mode=0o600)

    def check(self) -> None:
        """Raise UserError where the folder does not hold what it held when it was sealed."""
        path = self._state_dir / SEAL
        server_round, now = self._last
        try:
            said = json.loads(read_whole(path, _LONGEST))
            then = said.get(str(server_round)) if isinstance(said, dict) else None
        except (FileNotFoundError, ValueError, RecursionError):
            then = None
        if then != now:
            raise UserError(
                f"{self._state_dir} does not hold what clients knew after round {server_round} (something was deleted, "
                "changed or comes from another run): put an unchanged copy of it back, or start again in a fresh "
                "directory"
            )

    def _count(self, clients: Iterable[int], server_round: int) -> None:
        for client, written_in, checksum in state_checksums(self._state_dir, clients, server_round + 1):
            part = int.from_bytes(hashlib.sha256(f"{client} {written_in} {checksum}".encode()).digest())
            self._total += part - self._parts.get(client, 0)
            self._parts[client] = part

    def _sum(self) -> str:
        return f"{self._total % _MODULUS:064x}"


def open_state_checksum(state_dir: Path, num_clients: int, last_round: int, state: Payloads) -> StateChecksum:
    """Return the seal of a run that goes on after ``last_round``, 0 for one that begins.

    ``state``: what one of its clients keeps, by names and shapes. Raises UserError where the folder does not hold what
    clients kept up to then.
    """
    if not last_round:
        return StateChecksum(state_dir, num_clients, last_round)
    if not fits_layout(state_dir, state):
        raise UserError(
            f"{state_dir} holds what clients of another model or algorithm keep: put this run's own back, or start "
            "again in a fresh directory"
        )
    seal = StateChecksum(state_dir, num_clients, last_round)
    seal.check()
    delete_states_from(state_dir, num_clients, last_round + 1)
    return seal


def _next_data(file: FileIO, place: int) -> int:
    """Return where, from ``place`` on, the next written byte lies; at least the file's size where there is none."""
    if not hasattr(os, "SEEK_DATA"):  # Windows
        return place
    try:
        return os.lseek(file.fileno(), place, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(place, os.fstat(file.fileno()).st_size)


@dataclass(frozen=True)
class _Slots:
    """What a state consists of, and where a client's two states lie in the file: each a head, then its numbers."""

    dtype: str
    groups: tuple[tuple[str, Layout], ...]

    @cached_property
    def size(self) -> int:
        """Return how many numbers a state has."""
        return sum(num_in(layout) for _, layout in self.groups)

    def place(self, client: int, slot: int) -> int:
        """Return the first byte of a slot; no two share a page."""
        pages = -(-(_HEAD.size + np.dtype(self.dtype).itemsize * self.size) // _PAGE)
        return (2 * client + slot) * pages * _PAGE

    def heads(self, file: FileIO, client: int) -> list[tuple[int, int]]:
        """Return (round, checksum) of both slots."""
        heads = []
        for slot in (0, 1):
            file.seek(self.place(client, slot))
            heads.append(_HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0")))
        return heads

    def named(self, numbers: torch.Tensor) -> Payloads:
        """Return the groups that ``numbers`` holds one behind the other."""
        parts = numbers.split_with_sizes([num_in(layout) for _, layout in self.groups])
        return {name: FlatParams(part, layout) for (name, layout), part in zip(self.groups, parts, strict=True)}


def _latest(heads: Sequence[tuple[int, int]], server_round: int) -> int | None:
    """Return the slot of the last round before ``server_round``."""
    earlier = [(written_in, slot) for slot, (written_in, _) in enumerate(heads) if 0 < written_in < server_round]
    return max(earlier)[1] if earlier else None


def _slots_of(state: Payloads) -> _Slots:
    layouts = tuple((name, layout_of(params)) for name, params in state.items())
    first = next(iter(next(iter(state.values())).values()))
    return _Slots(first.numpy(force=True).dtype.str, layouts)


def _make(state_dir: Path, wanted: _Slots) -> _Slots:
    """Make the file where nobody has; of several processes that do, all write the same."""
    path = state_dir / LAYOUT
    try:
        slots = _read_layout(read_whole(path))
    except FileNotFoundError:
        slots = wanted
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state_dir / STATES).touch(mode=0o600)
        write_private(path, json.dumps(asdict(wanted)).encode())
    assert slots == wanted, "a run's clients all keep the same tensors"
    return slots


@lru_cache(maxsize=8)
def _read_layout(content: bytes) -> _Slots:
    """Raise RunError for anything but what ``_make`` wrote."""
    try:
        read = json.loads(content)
        groups = ((group, tuple((name, tuple(shape)) for name, shape in layout)) for group, layout in read["groups"])
        return _Slots(read["dtype"], tuple(groups))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(
            f"{LAYOUT} in the folder of what clients keep is damaged: put it back, or start again in a fresh directory"
        ) from error


def _checksum(numbers: NDArray[Any]) -> int:
    """Return the sum of the numbers' bits: tells pages that never reached the disk, at the cost of reading once."""
    return int(numbers.view(np.int32).sum(dtype=np.int64))


def _write(file: FileIO, place: int, content: bytes | memoryview) -> None:
    file.seek(place)
    write_all(file, content)
