"""Starting Ray on this machine, or joining a cluster: quiet, without telemetry, with our import path."""

import logging
import math
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_sim.engines import own_ray
from fl_sim.engines.own_ray import choose_token, is_own_token
from fl_sim.errors import RunError, UserError

MANY = 10**6
"""More actors than anybody has room for."""

CONNECT_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""

ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a FutureWarning in every process
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else Ray prints a paragraph per dead actor, to standard output
    "RAY_worker_niceness": "0",  # else actors run at nice 15 and lose every contest for a core
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # a Ray of our own listens on 127.0.0.1, as elsewhere by default

DIRECT = {"RAY_max_direct_call_object_size": str(16 * 2**20)}
"""Bytes up to which calls to other machines, and answers, go there directly: through the nodes' stores they cost two
copies more, and calls 9 ms."""

import ray  # noqa: E402 (reads the environment when it is imported)

_cleanups: list["subprocess.Popen[bytes]"] = []  # cleanup processes of this process's Ray; there is at most one


@dataclass(frozen=True)
class RayResources:
    """The resources to take from Ray.

    ``actors`` 0 means as many as there is room for. ``cpus`` and ``gpus`` are for one actor; fractions share one.
    ``address`` joins a running cluster: whoever may use that can run code in this run and read what it sends, unless it
    was started with a token (Ray's RAY_AUTH_MODE=token) that this process was given too.
    ``threads``: torch threads in each actor.
    """

    actors: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    address: str = ""
    threads: int = 1


def start_or_join(resources: RayResources, num_clients: int) -> int:
    """Start or join Ray and return the number of actors to use.

    Raises UserError where Ray cannot be joined, has no room for an actor or not the GPU asked for.
    """
    if not resources.address and not ray.is_initialized():
        # A Ray of our own gets the actors asked for, even where they outnumber the processors.
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        room = int(processors / resources.cpus) if resources.cpus else processors
        num_actors = min(num_clients, resources.actors or max(1, room))
        _start(max(1, math.ceil(num_actors * resources.cpus)))
    else:
        if not ray.is_initialized():
            _join(resources.address)
        num_actors = min(num_clients, _room_for(resources))
    if resources.gpus and _total("GPU") < resources.gpus and _total("CPU"):
        raise UserError(f"engine.gpus={resources.gpus:g}, and Ray finds no such GPU share here: set engine.gpus=0")
    return num_actors


def stop_or_leave() -> None:
    """Stop Ray where we started it, leave it where we joined it."""
    with _resource_warnings_off():
        ray.shutdown()
    while _cleanups:
        _cleanups.pop().communicate(b"\n" + own_ray.DONE)


def head_address() -> str:
    """Return host:port of Ray's head process, which knows all others (gcs_server)."""
    return str(ray.get_runtime_context().gcs_address)


def check_head(address: str) -> None:
    """Raise RunError where the head process is gone: Ray itself would wait for a minute and then end this process."""
    try:
        _connect(address)
    except OSError as error:
        raise RunError(
            f"Ray's head process (gcs_server) at {address} is gone ({last_line(error)}): start the same command again, "
            "and the run goes on after its last finished round"
        ) from error


def node_address() -> str:
    """Return host:port of Ray's node process on this machine (raylet)."""
    own = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next((f"{one['NodeManagerAddress']}:{one['NodeManagerPort']}" for one in nodes if one["NodeID"] == own), "")


def check_node(address: str) -> None:
    """Raise RunError where the node process is gone."""
    if address and not own_ray.is_there(address):
        raise RunError(own_ray.node_gone(address))


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text; Ray puts a traceback before it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def import_path() -> str:
    """Return the import path without the interpreter's own directories, which other machines have elsewhere."""
    entries = dict.fromkeys(Path(entry).absolute() for entry in sys.path)
    return os.pathsep.join(str(entry) for entry in entries if not is_installed(entry))


def is_installed(file: Path) -> bool:
    """Return True if a file lies in a folder of installed packages, which other machines have elsewhere."""
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.absolute().is_relative_to(place) for place in places)


def _start(num_cpus: int) -> None:
    """Start a Ray that nobody else reaches: on 127.0.0.1, with a random token, its files in a folder of our own."""
    choose_token()
    # A socket's path has at most 107 bytes, on macOS 103; mkdtemp makes a folder that only this user can read.
    short = "/tmp" if os.name == "posix" else None  # noqa: S108
    folder = tempfile.mkdtemp(prefix="fl-sim-ray-", dir=os.environ.get("RAY_TMPDIR") or short)
    cleanup = _start_cleanup(folder)
    # Processes import whatever this one can, an uninstalled checkout included.
    with _environment({"PYTHONPATH": import_path()}), _resource_warnings_off():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{folder}/ray",  # Ray opens this one to all users of the machine, but not the one around it
        )
    _send_address(cleanup)


def _start_cleanup(folder: str) -> "subprocess.Popen[bytes]":
    """Start the process that clears ``folder``, and tells the user, when this process is gone; no Ctrl-C ends it."""
    command = [sys.executable, "-I", own_ray.__file__, folder]
    _cleanups.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))  # noqa: S603 (our own file)
    return _cleanups[-1]


def _send_address(cleanup: "subprocess.Popen[bytes]") -> None:
    """Send the address of Ray's node to the cleanup process."""
    assert cleanup.stdin is not None
    cleanup.stdin.write(node_address().encode())
    cleanup.stdin.flush()


def _join(address: str) -> None:
    if is_own_token():
        raise UserError(
            f"this process has had a Ray of its own, whose token the cluster at {address!r} does not know: join the "
            "cluster in a fresh Python"
        )
    try:
        if address != "auto":
            _connect(address)
        with _environment(DIRECT), _resource_warnings_off():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _send_address(_start_cleanup(""))
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"cannot join the Ray cluster at {address!r}: {last_line(error)}; "
            "start one with `ray start --head`, or leave engine.address empty"
        ) from error


def _connect(address: str) -> None:
    """Raise OSError or ValueError where nobody listens: Ray itself tries for minutes and then ends the process."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError("an address is host:port (no ray://), or auto for the cluster on this machine")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _room_for(resources: RayResources) -> int:
    """Return the number of actors that a cluster of others has room for, at most the number asked for."""
    processors = _total("CPU")
    if not processors and resources.address:  # machines join later
        return resources.actors or MANY
    room = int(processors / resources.cpus) if resources.cpus else max(1, int(processors))
    if room < max(1, resources.actors):
        raise UserError(
            f"{max(1, resources.actors)} Ray actors with engine.cpus={resources.cpus:g} each do not fit a cluster of "
            f"{processors:g} processors: set fewer engine.actors or smaller engine.cpus"
        )
    return resources.actors or MANY


def _total(kind: str) -> float:
    return float(ray.cluster_resources().get(kind, 0.0))  # type: ignore[no-untyped-call]


@contextmanager
def _resource_warnings_off() -> Iterator[None]:
    """Ignore that Ray leaves files on /dev/null open and processes unwaited for, which is no leak of ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file .*/dev/null|subprocess .* is still running", ResourceWarning)
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set ``values`` in the environment during this block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
