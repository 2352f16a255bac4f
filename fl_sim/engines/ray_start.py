"""Starts Ray on this machine, or joins a Ray cluster. Ray gets this process's import path.

Ray's output and telemetry are switched off.
"""

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
"""A number of actors that is larger than in any cluster. This number means that there is no limit."""

CONNECT_SECONDS = 5.0
"""Seconds that a cluster may take to accept a connection."""

ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without this variable, every process prints a FutureWarning
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # without this variable, Ray prints a paragraph for each dead actor
    # without this variable, actors run at nice 15, with less priority than all other processes
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# With this setting, a Ray cluster that this process starts listens on 127.0.0.1 on every system, as on Linux.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

DIRECT = {"RAY_max_direct_call_object_size": str(16 * 2**20)}
"""Ray's setting for the size in bytes up to which calls and answers are sent directly between machines. Larger calls
and answers go through the object stores of the nodes. That takes two more copies, and 9 ms more for a call.
"""

import ray  # noqa: E402 (reads the environment when it is imported)

# This list contains the cleanup process of the Ray cluster that this process started or joined; else it is empty.
_cleanups: list["subprocess.Popen[bytes]"] = []


@dataclass(frozen=True)
class RayResources:
    """The resources that a run takes from Ray.

    ``actors``: the number of actors; 0 means as many actors as fit. ``cpus`` and ``gpus``: the CPUs and GPUs of one
    actor; with a fraction, several actors share one CPU or GPU. ``address``: host:port of a running cluster to join.
    Without a token, every user of that cluster can run code in this run and read its messages. To require a token, the
    owner starts the cluster with RAY_AUTH_MODE=token, and gives the same token to this process. ``threads``: the number
    of torch threads in an actor.
    """

    actors: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    address: str = ""
    threads: int = 1


def start_or_join(resources: RayResources, num_clients: int) -> int:
    """Start or join Ray, and return the largest number of actors to use.

    Raises UserError if Ray cannot be joined, or lacks room for an actor or the requested GPU share.
    """
    if not resources.address and not ray.is_initialized():
        # If this process starts Ray, Ray gets all requested actors, even if this machine has fewer processors.
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        room = int(processors / resources.cpus) if resources.cpus else processors
        num_actors = min(num_clients, resources.actors or max(1, room))
        _start(max(1, math.ceil(num_actors * resources.cpus)))
    else:
        if not ray.is_initialized():
            _join(resources.address)
        num_actors = min(num_clients, _room_for(resources))
    if resources.gpus and _total("GPU") < resources.gpus and _total("CPU"):
        raise UserError(f"engine.gpus={resources.gpus:g}, but Ray finds no such GPU share here: set engine.gpus=0")
    return num_actors


def stop_or_leave() -> None:
    """Stop Ray if this process started Ray, or disconnect from a joined cluster; then end the cleanup process."""
    with _resource_warnings_off():
        ray.shutdown()
    while _cleanups:
        _cleanups.pop().communicate(b"\n" + own_ray.DONE)


def head_address() -> str:
    """Return host:port of Ray's head process (gcs_server), which manages the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def check_head(address: str) -> None:
    """Raise RunError if Ray's head process is gone: Ray itself would wait for a minute and then end this process."""
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
    """Raise RunError if Ray's node process (raylet) at ``address`` is gone."""
    if address and not own_ray.is_there(address):
        raise RunError(own_ray.node_gone(address))


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text; Ray puts a traceback before it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def import_path() -> str:
    """Return this process's import path, joined to one string, without the directories of installed packages.

    On other machines, installed packages are in other directories.
    """
    entries = dict.fromkeys(Path(entry).absolute() for entry in sys.path)
    return os.pathsep.join(str(entry) for entry in entries if not is_installed(entry))


def is_installed(file: Path) -> bool:
    """Return True if a file lies in a directory of the standard library or of installed packages."""
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.absolute().is_relative_to(place) for place in places)


def _start(num_cpus: int) -> None:
    """Start a private Ray cluster. It listens on 127.0.0.1, requires a random token, and has a separate folder."""
    choose_token()
    # Ray's sockets are files in this folder, and a socket's path has at most 107 bytes (103 bytes on macOS).
    # The function mkdtemp makes a folder that only this user can read.
    short = "/tmp" if os.name == "posix" else None  # noqa: S108
    folder = tempfile.mkdtemp(prefix="fl-sim-ray-", dir=os.environ.get("RAY_TMPDIR") or short)
    cleanup = _start_cleanup(folder)
    # Ray's processes get the import path of this process, so that they find the same modules, installed or not.
    with _environment({"PYTHONPATH": import_path()}), _resource_warnings_off():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Ray makes this inner folder readable by all users; the outer folder stays private
            _temp_dir=f"{folder}/ray",
        )
    _send_address(cleanup)


def _start_cleanup(folder: str) -> "subprocess.Popen[bytes]":
    """Start and return the cleanup process, which ends Ray and deletes ``folder`` when this process has ended.

    The cleanup process also reports a lost Ray node to the user. Ctrl-C does not end the cleanup process.
    """
    command = [sys.executable, "-I", own_ray.__file__, folder]
    _cleanups.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))  # noqa: S603 (our own file)
    return _cleanups[-1]


def _send_address(cleanup: "subprocess.Popen[bytes]") -> None:
    assert cleanup.stdin is not None
    cleanup.stdin.write(node_address().encode())
    cleanup.stdin.flush()


def _join(address: str) -> None:
    if is_own_token():
        raise UserError(
            f"this process has started its own Ray cluster, and the cluster at {address!r} does not know its token: "
            "join that cluster in a fresh Python"
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
    """Raise OSError if nothing listens at ``address``, and ValueError if ``address`` is not host:port.

    Without this check Ray would try to connect for minutes and then end the process.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError("an address is host:port (no ray://), or auto for the cluster on this machine")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _room_for(resources: RayResources) -> int:
    """Return the requested number of actors for a joined cluster; ``MANY`` (no limit) if the user sets no number.

    Raises UserError if the requested actors do not fit into the cluster.
    """
    processors = _total("CPU")
    # a cluster without processors is no error, because further machines may join it later
    if not processors and resources.address:
        return resources.actors or MANY
    room = int(processors / resources.cpus) if resources.cpus else max(1, int(processors))
    if room < max(1, resources.actors):
        raise UserError(
            f"{max(1, resources.actors)} Ray actors with engine.cpus={resources.cpus:g} do not fit into the cluster's "
            f"{processors:g} processors: set fewer engine.actors or smaller engine.cpus"
        )
    return resources.actors or MANY


def _total(kind: str) -> float:
    return float(ray.cluster_resources().get(kind, 0.0))  # type: ignore[no-untyped-call]


@contextmanager
def _resource_warnings_off() -> Iterator[None]:
    """Suppress ResourceWarnings that Ray itself causes: it leaves /dev/null open and does not wait for processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file .*/dev/null|subprocess .* is still running", ResourceWarning)
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables to ``values`` within the ``with`` block. Afterwards restore their former values."""
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
