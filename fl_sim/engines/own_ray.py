"""A Ray of the run's own: its secret token, and a process that removes what it leaves, however the run ends.

Where Ray's node is gone, Ray ends the run's process at once, without a word: the cleanup process says why. It runs this
file by itself, so the file imports Python's own modules alone; and not Ray, which reads the token when it is imported.
"""

import os
import secrets
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

MOST_SECONDS = 8.0
"""How long killing may take: the kernel may hold a process back that waits for a disk."""

DONE = b"done"
"""What the run's process says last where it ends by itself. Before that it says where Ray's node listens: host:port."""

KNOCK_SECONDS = 2.0

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""What Ray reads: whether its servers ask for a token, and which."""


def node_gone(address: str) -> str:
    """Return what the user is told of a node of Ray that is gone."""
    return (
        f"Ray's node at {address} (raylet) is gone: start the same command again, and the run goes on after its last "
        "finished round"
    )


def is_there(address: str) -> bool:
    """Say whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def processes_of(folder: str) -> list[int]:
    """Return the processes of the Ray in ``folder``; none where the system does not show what they have open.

    Each of them has a log there that ends in .out, its own or that of the process that started it; a process that only
    joins has none.
    """
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _logs_to(process, f"{folder}/")]


def clear(folder: str) -> None:
    """Kill the processes of the Ray in ``folder`` and delete the folder."""
    deadline, times_empty = time.monotonic() + MOST_SECONDS, 0
    while times_empty < 3 and time.monotonic() < deadline:  # a process that was just killed may have started another
        left = processes_of(folder)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        times_empty = 0 if left else times_empty + 1
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait until nobody holds the other end of standard input, then clear the folder of the first argument, if any.

    Before that, where the run's process did not end by itself and Ray's node is gone, tell the user.
    """
    said = sys.stdin.buffer.read().split()
    if said and said[-1] != DONE and not is_there(address := said[0].decode()):
        sys.stderr.write(f"error: {node_gone(address)}\n")
        sys.stderr.flush()
    if folder := sys.argv[1]:
        clear(folder)


if __name__ == "__main__":
    main()


def choose_token() -> None:
    """Have the Ray that this process will start ask for a random token; one that the user has set up stays.

    Raises UserError where Ray is imported already, so that it would ask for none.
    """
    if MODE in os.environ:
        return
    if "ray" in sys.modules:
        from fl_sim.errors import UserError  # noqa: PLC0415 (the cleanup process may not find fl_sim)

        raise UserError(
            "Ray was imported before it could be given a secret token, without which other users of this machine can "
            "run code in the run: start the run in a fresh Python that has not imported ray"
        )
    os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
    _chosen.add(os.environ[TOKEN])


def is_own_token() -> bool:
    """Say whether Ray's token is one that this process chose, which no other Ray knows."""
    return os.environ.get(TOKEN) in _chosen


_chosen: set[str] = set()


def _logs_to(process: Path, start: str) -> bool:
    try:
        targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
    except OSError:  # it has ended meanwhile, or is another user's
        return False
    return any(target.startswith(start) and target.endswith(".out") for target in targets)
