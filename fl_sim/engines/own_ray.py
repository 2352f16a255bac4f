"""Support for a Ray cluster that the run itself starts: its secret token, and a process that cleans up after the run.

The cleanup process ends Ray's processes and deletes Ray's files, also after a crash of the run. If Ray's node dies, Ray
ends the run's process at once without a message, so the cleanup process prints the reason. The cleanup process executes
this file as a script. Therefore the file imports the standard library only, and not Ray, which reads the token during
its import.
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
"""Two environment variables that Ray reads: the authentication mode ("token" if Ray requires one), and the token."""

DONE = b"done"
"""The message that the run's process sends to the cleanup process before a normal end. The first message to the cleanup
process is host:port of Ray's node.
"""

CONNECT_SECONDS = 2.0
"""Seconds that Ray's node may take to accept a connection."""

CLOSING_SECONDS = 3.0
"""Seconds that Ray's dying node may take to close its port. Before closing it, the node ends the run's process."""

MOST_SECONDS = 8.0
"""The time limit, in seconds, for killing processes. A process that waits for a disk may end only after this time."""

_chosen: set[str] = set()


def choose_token() -> None:
    """Set environment variables so that a Ray cluster started by this process requires a random token.

    If the user has set RAY_AUTH_MODE already, nothing changes. Raises UserError if Ray is imported already, because
    Ray would then ignore the token.
    """
    if MODE in os.environ:
        return
    if "ray" in sys.modules:
        from fl_sim.errors import UserError  # noqa: PLC0415 (the cleanup process may not find fl_sim)

        raise UserError(
            "Ray was imported before this run could set a secret token. Without the token, other users of this machine "
            "can run code in the run: start the run in a fresh Python that has not imported ray"
        )
    os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
    _chosen.add(os.environ[TOKEN])


def is_own_token() -> bool:
    """Return True if ``choose_token`` made the present token in this process. Then no other cluster has this token."""
    return os.environ.get(TOKEN) in _chosen


def node_gone(address: str) -> str:
    """Return the error message for a run whose Ray node process has ended. The run cannot continue."""
    return (
        f"Ray's node at {address} (raylet) is gone: start the same command again, and the run goes on after its last "
        "finished round"
    )


def is_there(address: str) -> bool:
    """Return True if a process accepts connections at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def processes_of(folder: str) -> list[int]:
    """Return the process ids of the Ray cluster with its files in ``folder``; empty on systems without /proc.

    Every process of this cluster keeps a log file in this folder open. The name of the log file ends in .out. A process
    that only joins the cluster has no such file open.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # an OSError means: the process has ended, or belongs to another user
            targets = [str(link.readlink()) for link in (process / "fd").iterdir()]
            if any(target.startswith(f"{folder}/") and target.endswith(".out") for target in targets):
                found.append(int(process.name))
    return found


def clear(folder: str) -> None:
    """Kill the processes of the Ray cluster with its files in ``folder``, and delete the folder."""
    deadline, times_empty = time.monotonic() + MOST_SECONDS, 0
    # search again, because a process that was just killed may have started another process
    while times_empty < 3 and time.monotonic() < deadline:
        left = processes_of(folder)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        times_empty = 0 if left else times_empty + 1
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait until standard input is closed, which means that the run's process has ended. Then clean up.

    The first argument is the folder of the Ray cluster to end; if it is empty, no cluster is ended. If the run's
    process did not end normally and Ray's node is gone, print an error message first.
    """
    said = sys.stdin.buffer.read().split()
    if said and said[-1] != DONE:
        address, deadline = said[0].decode(), time.monotonic() + CLOSING_SECONDS
        while (there := is_there(address)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not there:
            sys.stderr.write(f"error: {node_gone(address)}\n")
            sys.stderr.flush()
    if folder := sys.argv[1]:
        clear(folder)


if __name__ == "__main__":
    main()
