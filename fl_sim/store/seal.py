"""The seal on what clients keep between rounds: by it a run that goes on notices that some of it is lost or foreign.

A client whose state is gone would start again as one that has not taken part yet, and the run would end in other
numbers. The seal is computed from what clients keep, so it is as private, and lies with it; the checkpoint has none.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from fl_sim.errors import UserError
from fl_sim.store.files import read_whole, write_whole
from fl_sim.store.tensors import forget_from, keeps, kept, met
from fl_sim.types import Payloads

SEAL = "seal.json"

_LONGEST = 2**20  # bytes
_MODULUS = 1 << 256


class Seal:
    """The sum of a hash over each client's state: one client's part of it changes without looking at the others'.

    ``num_clients``: how many the run has. The files are those of ``save_state``; a client on another machine keeps its
    own there, and has no part in this.
    """

    def __init__(self, state_dir: Path, num_clients: int, last_round: int) -> None:
        self._state_dir = state_dir
        self._parts: dict[int, int] = {}
        self._total = 0
        self._count(met(state_dir, num_clients), last_round)
        self._last = (last_round, self._sum())

    def put(self, server_round: int, cohort: Iterable[int]) -> None:
        """Seal what clients know after a round, of which ``cohort`` took part in it, and what they knew before."""
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
        for client, written_in, checksum in kept(self._state_dir, clients, server_round + 1):
            part = int.from_bytes(hashlib.sha256(f"{client} {written_in} {checksum}".encode()).digest())
            self._total += part - self._parts.get(client, 0)
            self._parts[client] = part

    def _sum(self) -> str:
        return f"{self._total % _MODULUS:064x}"


def open_seal(state_dir: Path, num_clients: int, last_round: int, state: Payloads) -> Seal:
    """Return the seal of a run that goes on after ``last_round``, 0 for one that begins.

    ``state``: what one of its clients keeps, by names and shapes. Raises UserError where the folder does not hold what
    clients kept up to then.
    """
    if not last_round:
        return Seal(state_dir, num_clients, last_round)
    if not keeps(state_dir, state):
        raise UserError(
            f"{state_dir} holds what clients of another model or algorithm keep: put this run's own back, or start "
            "again in a fresh directory"
        )
    seal = Seal(state_dir, num_clients, last_round)
    seal.check()
    forget_from(state_dir, num_clients, last_round + 1)
    return seal
