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

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""The variables that Ray reads: whether its servers ask for a token, and which."""

DONE = b"done"
"""The last word of the run's process where it ends by itself. Before that it sends host:port of Ray's node."""

CONNECT_SECONDS = 2.0
"""How long Ray's node may take to accept a connection."""

MOST_SECONDS = 8.0
"""How long killing may take: the kernel may hold a process back that waits for a disk."""

_chosen: set[str] = set()


def choose_token() -> None:
    """Have the Ray that this process will start ask for a random token; a setting of the user's own stays.

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
    """Return True if this process chose Ray's token, so that no other Ray knows it."""
    return os.environ.get(TOKEN) in _chosen


def node_gone(address: str) -> str:
    """Return the error message for a node of Ray that is gone."""
    return (
        f"Ray's node at {address} (raylet) is gone: start the same command again, and the run goes on after its last "
        "finished round"
    )


def is_there(address: str) -> bool:
    """Return True if a process accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def processes_of(folder: str) -> list[int]:
    """Return the processes of the Ray in ``folder``; none where the system does not show their open files.

    Each of them has a log there that ends in .out, its own or that of the process that started it; a process that only
    joins has none.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
            if any(target.startswith(f"{folder}/") and target.endswith(".out") for target in targets):
                found.append(int(process.name))
    return found


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
    """Wait until standard input is closed, then clear the folder of the first argument, if any.

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
