"""Whoever outlives a run tells of it where Ray's node is gone, which ends the run's process without a word."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_sim.engines import own_ray
from fl_sim.engines.own_ray import DONE
from fl_sim.engines.ray_start import check_node
from fl_sim.errors import RunError


@pytest.fixture
def listening() -> Iterator[str]:
    """Give an address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def gone() -> str:
    """Give an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def said_by_keeper(folder: Path | str, said: bytes) -> str:
    keeper = [sys.executable, "-I", own_ray.__file__, str(folder)]
    return subprocess.run(keeper, input=said, capture_output=True, check=True, timeout=60).stderr.decode()


def test_a_node_that_is_gone_is_told_in_one_line_with_the_way_on(gone: str, tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    said = said_by_keeper(folder, gone.encode())
    assert said == (
        f"error: Ray's node at {gone} (raylet) is gone: start the same command again, and the run goes on after its "
        "last finished round\n"
    )
    assert not folder.exists()


def test_a_node_that_closes_its_port_after_the_run_has_ended_is_told_too(tmp_path: Path) -> None:
    keeper = [sys.executable, "-I", own_ray.__file__, str(tmp_path / "ray")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        running = subprocess.Popen(keeper, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdin is not None
        running.stdin.write(address)
        running.stdin.close()
        running.stdin = None
        server.accept()[0].close()  # the first look finds the node
    assert f"error: Ray's node at {address} (raylet) is gone" in running.communicate(timeout=60)[1]
    assert running.returncode == 0


def test_where_the_run_was_killed_or_ended_by_itself_nothing_is_said(gone: str, listening: str, tmp_path: Path) -> None:
    for said in (listening.encode(), gone.encode() + b"\n" + DONE, b"\n" + DONE, b""):
        assert said_by_keeper(tmp_path / "ray", said) == ""


def test_a_cluster_that_was_joined_has_no_folder_to_clear(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    assert "is gone" in said_by_keeper("", gone.encode())
    assert (tmp_path / "mine").exists()


def test_an_error_of_ray_is_told_as_what_it_is(gone: str, listening: str) -> None:
    check_node(listening)
    check_node("")
    with pytest.raises(RunError, match=rf"Ray's node at {gone} \(raylet\) is gone: start the same command again"):
        check_node(gone)


@pytest.mark.cluster
@pytest.mark.parametrize("process", ["ray::DashboardAgent", "raylet/raylet"])
def test_a_run_whose_node_is_gone_ends_with_a_line_and_goes_on(process: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "fl_sim", "run", "clients=4", "rounds=4000", "model=logistic", "engine=ray:1",
        "engine.cpus=0.5", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    rounds = tmp_path / "run" / "rounds.jsonl"
    deadline = time.monotonic() + 120
    while not (rounds.exists() and rounds.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.1)
    while not (found := [pid for pid, title in _descendants(running.pid) if process in title]):
        assert time.monotonic() < deadline  # an agent names itself only after its imports
        assert running.poll() is None
        time.sleep(0.1)
    os.kill(found[0], signal.SIGKILL)
    assert running.wait(120) == 1
    while "is gone: start the same command again" not in (tmp_path / "log").read_text(errors="replace"):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            title = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if parent == pid:
            yield int(place.name), title
            yield from _descendants(int(place.name))
