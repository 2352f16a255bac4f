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

_keepers: list["subprocess.Popen[bytes]"] = []  # of the Ray that this process started; there is at most one


@dataclass(frozen=True)
class RayResources:
    """What to take from Ray.

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
    """Start or join Ray and return how many actors to use.

    Raises UserError where Ray cannot be joined, has no room for an actor or not the GPU asked for.
    """
    alone = not resources.address and not ray.is_initialized()
    if alone:
        num_actors = _wanted(resources, num_clients)
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
    with _loose_ends():
        ray.shutdown()
    while _keepers:
        keeper = _keepers.pop()
        keeper.communicate(b"\n" + own_ray.DONE)


def head_address() -> str:
    """Return host:port of the process that knows all others of the Ray that was started or joined (gcs_server)."""
    return str(ray.get_runtime_context().gcs_address)


def check_head(address: str) -> None:
    """Raise RunError where that process is gone: Ray itself would wait for a minute and then end this one."""
    try:
        _knock(address)
    except OSError as error:
        raise RunError(
            f"Ray's head process (gcs_server) at {address} is gone ({last_line(error)}): start the same command again, "
            "and the run goes on after its last finished round"
        ) from error


def node_address() -> str:
    """Return host:port of the process that plays this machine's part in the Ray that was started or joined (raylet)."""
    own = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return next((f"{one['NodeManagerAddress']}:{one['NodeManagerPort']}" for one in nodes if one["NodeID"] == own), "")


def check_node(address: str) -> None:
    """Raise RunError where that process is gone."""
    if address and not own_ray.is_there(address):
        raise RunError(own_ray.node_gone(address))


def _keep(folder: str) -> "subprocess.Popen[bytes]":
    """Start what sees to ``folder``, and to the user, when this process is gone; no Ctrl-C for the run ends it."""
    keeper = [sys.executable, "-I", own_ray.__file__, folder]
    _keepers.append(subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True))  # noqa: S603 (our own file)
    return _keepers[-1]


def _say_where(keeper: "subprocess.Popen[bytes]") -> None:
    """Tell the keeper where Ray's node listens."""
    assert keeper.stdin is not None
    keeper.stdin.write(node_address().encode())
    keeper.stdin.flush()


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text; Ray puts a traceback before it."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def import_path() -> str:
    """Return our import path without the interpreter's own directories, which other machines have elsewhere."""
    entries = dict.fromkeys(Path(entry).absolute() for entry in sys.path)
    return os.pathsep.join(str(entry) for entry in entries if not is_installed(entry))


def is_installed(file: Path) -> bool:
    """Say whether a file lies where Python keeps what is installed, which other machines have elsewhere."""
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.absolute().is_relative_to(place) for place in places)


def _start(num_cpus: int) -> None:
    """Start a Ray that nobody else reaches: on 127.0.0.1, with a random token, its files in a folder of our own."""
    choose_token()
    folder = tempfile.mkdtemp(prefix="fl-sim-ray-", dir=os.environ.get("RAY_TMPDIR") or _short_folder())
    keeper = _keep(folder)
    # Processes import whatever this one can, an uninstalled checkout included.
    with _environment({"PYTHONPATH": import_path()}), _loose_ends():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{folder}/ray",  # Ray opens this one to all users of the machine, but not the one around it
        )
    _say_where(keeper)


def _short_folder() -> str | None:
    """Return where temporary files may have short names: a socket's path has at most 107 bytes, on macOS 103."""
    return "/tmp" if os.name == "posix" else None  # noqa: S108 (mkdtemp makes a folder there that only we can read)


def _join(address: str) -> None:
    if is_own_token():
        raise UserError(
            f"this process has had a Ray of its own, whose token the cluster at {address!r} does not know: join the "
            "cluster in a fresh Python"
        )
    try:
        if address != "auto":
            _knock(address)
        with _environment(DIRECT), _loose_ends():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _say_where(_keep(""))
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"cannot join the Ray cluster at {address!r}: {last_line(error)}; "
            "start one with `ray start --head`, or leave engine.address empty"
        ) from error


def _knock(address: str) -> None:
    """Raise OSError or ValueError where nobody listens: Ray itself tries for minutes and then ends the process."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ValueError("an address is host:port (no ray://), or auto for the cluster on this machine")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _wanted(resources: RayResources, num_clients: int) -> int:
    """Return how many actors a Ray of our own gets: those asked for, even where they outnumber the processors."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    room = int(processors / resources.cpus) if resources.cpus else processors
    return min(num_clients, resources.actors or max(1, room))


def _room_for(resources: RayResources) -> int:
    """Return how many actors a cluster that others started has room for, at most those asked for."""
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
def _loose_ends() -> Iterator[None]:
    """Ignore that Ray leaves files on /dev/null open and processes unwaited for, which is no leak of ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file .*/dev/null|subprocess .* is still running", ResourceWarning)
        yield


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Let what starts in this block see ``values`` in its environment."""
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
