"""A run's own Ray: who can reach it, and what is left of it when its process is killed."""

import ipaddress
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from fl_sim.engines.own_ray import clear, processes_of
from fl_sim.store.run_directory import read_rounds

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads what processes have open from /proc"),
]

PROJECT = Path(__file__).parents[3]
PATIENCE = 60.0
"""Seconds for what takes one on an idle machine, and would never happen by itself."""

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats", "ObjectManagerService/Push",
    "CoreWorkerService/GetCoreWorkerStats",
)  # fmt: skip
"""A call for each of Ray's servers: gcs_server, raylet (two), and drivers and workers."""


@dataclass(frozen=True)
class OwnRay:
    """A run in a process of its own, with the Ray that it started in ``folder``."""

    driver: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def ports(self) -> dict[tuple[str, int], str]:
        """Return (address, port) -> name of the process, for all that the run's processes listen on."""
        found = {}
        for pid in [self.driver.pid, *processes_of(str(self.folder))]:
            process = psutil.Process(pid)
            listening = [door for door in process.net_connections("inet") if door.status == psutil.CONN_LISTEN]
            found.update({(door.laddr.ip, door.laddr.port): process.name() for door in listening})
        return found


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRay]:
    out = tmp_path_factory.mktemp("doors") / "run"
    command = [sys.executable, "-m", "fl_sim", "run", "model=logistic", "rounds=1000000", "engine=ray"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    driver = subprocess.Popen(
        [*command, "engine.actors=1", "--out", str(out)], cwd=PROJECT, stderr=subprocess.DEVNULL, env=environment
    )
    deadline = time.monotonic() + 240
    while not read_rounds(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    [folder] = [word for child in psutil.Process(driver.pid).children() for word in child.cmdline()[-1:]
                if "own_ray" in " ".join(child.cmdline())]  # fmt: skip
    yield OwnRay(driver, Path(folder))
    driver.kill()
    driver.wait()
    clear(folder)


def token_of(ray: OwnRay) -> str:
    """Return the run's token, as any process of the same user may."""
    for pid in processes_of(str(ray.folder)):
        if token := psutil.Process(pid).environ().get("RAY_AUTH_TOKEN"):
            return token
    raise AssertionError("Ray was started without a token")


def statuses(port: int, token: str | None) -> set[str]:
    """Return the status codes with which the server at a port answers calls of all kinds.

    Each call waits for a connection: on a busy machine the first attempt may fail, and that is no answer.
    """
    metadata = [("authorization", f"Bearer {token}")] if token else None
    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=PATIENCE, metadata=metadata, wait_for_ready=True)
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found


def test_a_runs_own_ray_listens_on_the_loopback_address_alone(own_ray: OwnRay) -> None:
    ports = own_ray.ports
    assert {"gcs_server", "raylet"} <= set(ports.values())
    assert len(ports) >= 6  # the driver, gcs_server, raylet twice, an agent, the actor
    for (address, _), name in ports.items():
        parsed = ipaddress.ip_address(address)
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        assert (mapped or parsed).is_loopback, (name, address)


def test_a_connection_to_another_address_of_this_machine_is_refused(own_ray: OwnRay) -> None:
    families = (socket.AF_INET, socket.AF_INET6)
    others = [
        (entry.family, entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families and not ipaddress.ip_address(entry.address.split("%")[0]).is_loopback
        and "%" not in entry.address
    ]  # fmt: skip
    if not others:
        pytest.skip("this machine has no other address")
    for _, port in own_ray.ports:
        for family, address in others:
            with socket.socket(family) as knocking:
                knocking.settimeout(5)
                with pytest.raises(ConnectionRefusedError):
                    knocking.connect((address, port))


def test_no_server_of_a_runs_own_ray_answers_without_its_token(own_ray: OwnRay) -> None:
    token, servers = token_of(own_ray), set()
    assert len(token) == 64
    for (_, port), name in own_ray.ports.items():
        if name.startswith("ray::RuntimeEnv"):  # speaks HTTP
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/get_or_create_runtime_env", data=b"", timeout=10)
            continue
        servers.add(name)
        for wrong in (None, "0" * 64):
            assert statuses(port, wrong) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}, name
        assert "OK" in statuses(port, token), name  # the calls above were refused for want of the token alone
    assert servers >= {"gcs_server", "raylet"}
    assert len(servers) >= 3  # an actor, too


def test_no_other_user_reads_the_files_of_a_runs_own_ray(own_ray: OwnRay) -> None:
    assert stat.S_IMODE(own_ray.folder.stat().st_mode) == 0o700
    logs = [Path(file.path) for pid in processes_of(str(own_ray.folder)) for file in psutil.Process(pid).open_files()]
    assert any(path.is_relative_to(own_ray.folder) for path in logs)


def test_nothing_of_ray_outlives_its_killed_run(own_ray: OwnRay) -> None:  # the last test of this run
    processes = [psutil.Process(pid) for pid in processes_of(str(own_ray.folder))]
    assert {"gcs_server", "raylet"} <= {process.name() for process in processes}
    os.kill(own_ray.driver.pid, signal.SIGKILL)
    own_ray.driver.wait()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert alive == []
    deadline = time.monotonic() + PATIENCE
    while own_ray.folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not own_ray.folder.exists()
