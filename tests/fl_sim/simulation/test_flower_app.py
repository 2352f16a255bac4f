"""The same apps on Flower's own runtime."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from fl_sim.engines.grid import InProcessGrid
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation import flower_app
from fl_sim.simulation.engine_choice import client_app
from fl_sim.simulation.flower_app import read_experiment, read_out, server_app
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_result, read_rounds

PROJECT = Path(__file__).parents[3]
QUICK = {"model": "logistic", "rounds": 2, "clients": 3, "partition": "dirichlet:0.3", "engine": "inprocess"}
METRIC = """
def margin(server_round, model, test):
    first, second = model(test.tensors[0]).softmax(1).topk(2, 1).values.T
    return {"margin": (first - second).mean()}
"""


def context(experiment: str, out: str) -> Context:
    return Context(1, 1, {}, RecordDict(), {"experiment": experiment, "out": out})


def test_the_experiment_is_toml_text_or_a_path_or_the_default(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("rounds = 7\n")
    assert read_experiment(str(tmp_path / "mine.toml")).rounds == 7
    assert read_experiment('rounds = 3\nalgorithm = "scaffold"').algorithm.kind == "scaffold"
    assert read_experiment("  ") == experiment_from({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "is not a TOML file"),
        ("/nowhere.toml", "no such file"),
        ("round = 3", "did you mean 'rounds'"),
    ],
)
def test_mistakes_in_the_experiment_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_experiment(text)


@pytest.mark.parametrize("out", ["", "results", "./results"])
def test_the_run_directory_must_be_absolute(out: str) -> None:
    with pytest.raises(UserError, match="must be an absolute path"):
        read_out(out)


def test_the_server_app_runs_on_the_grid_it_is_given(tmp_path: Path) -> None:
    grid = InProcessGrid(client_app(), 3)
    server_app(grid, context(tomli_w.dumps(QUICK), str(tmp_path / "flower")))
    run(experiment_from(QUICK), tmp_path / "own")
    assert_same(tmp_path / "flower", tmp_path / "own")
    flower, own = (read_result(tmp_path / name) or {} for name in ("flower", "own"))
    assert (flower["engine"], flower["trainer"].partition(":")[0]) == ("flower", "unknown")
    assert "train" in own["trainer"]


def test_the_client_app_can_be_sent_to_another_process(tmp_path: Path) -> None:
    pytest.importorskip("fl_sim.engines.ray_start")  # before Ray itself: it sets what Ray reads when imported
    from ray import cloudpickle  # noqa: PLC0415 (as Flower's simulation does for its actors)

    copy = pickle.loads(cloudpickle.dumps(flower_app.client_app))
    run(experiment_from(QUICK), tmp_path / "copy", grid=InProcessGrid(copy, 3))
    run(experiment_from(QUICK), tmp_path / "own", grid=InProcessGrid(client_app(), 3))
    assert_same(tmp_path / "copy", tmp_path / "own")


def assert_same(left: Path, right: Path) -> None:
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    rounds = [[vars(record) | {"seconds": 0} for record in read_rounds(out)] for out in (left, right)]
    assert rounds[0] == rounds[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def flwr(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a Flower of its own; the daemon that ``flwr run`` leaves behind is stopped afterwards."""
    ports = {name: str(free_port()) for name in ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")}
    yield {
        **os.environ,
        **ports,
        "FLWR_HOME": str(tmp_path / "flower-home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    }
    for pid in daemons(ports["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 120
    while daemons(ports["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert daemons(ports["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]) == []


def daemons(port: str) -> list[int]:
    """Return the processes of the SuperLink that listens on ``port``."""
    command = ["ps", "-e", "-ww", "-o", "pid=,stat=,args="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    ours = [row for row in rows if "flower-super" in row[2] and port in row[2]]
    return [int(row[0]) for row in ours if not row[1].startswith("Z")]


def test_flowers_copy_holds_all_that_the_app_reads() -> None:
    """Flower packs text files of these kinds alone.

    The kernel, whose sources are no such, is looked for elsewhere, and the report's page is not made by the app.
    """
    packed, unread = {".py", ".toml", ".json", ".md", ".yaml"}, {".pyc", ".cpp", ".h", ".so"}
    page = PROJECT / "fl_sim" / "report" / "web"
    rooms = [PROJECT / name for name in ("fl_sim", "strategies", "clients", "partitions")]
    files = [path for room in rooms for path in room.rglob("*") if path.is_file()]
    assert len(files) > 100
    others = [path for path in files if path.suffix not in packed | unread and path.name != "py.typed"]
    assert [path for path in others if path.parent != page] == []


def flwr_run(experiment: Path, out: Path, environment: dict[str, str]) -> str:
    """Run an experiment of two clients by ``flwr run``, and return what it prints."""
    command = [
        "flwr", "run", str(PROJECT), "--stream",
        "--federation-config", "num-supernodes=2 client-resources-num-cpus=2",
        "-c", f'experiment="{experiment}" out="{out}"',
    ]  # fmt: skip
    log, tries = "Failed to start local SuperLink", 0
    while "Failed to start local SuperLink" in log and tries < 4:  # flwr gives it 15 s, too few on a busy machine
        done = subprocess.run(
            command, env=environment, cwd=out.parent, capture_output=True, text=True, timeout=300, check=False
        )
        log, tries = done.stdout + done.stderr, tries + 1
    return log


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform == "win32", reason="Flower's local SuperLink is a POSIX daemon")
def test_flwr_run_ends_in_the_same_bits_as_the_inprocess_engine(
    tmp_path: Path, flwr: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the measures of clients' own models, metrics of the user's own, and records that move between clients."""
    (tmp_path / "users_metrics.py").write_text(METRIC)
    monkeypatch.syspath_prepend(tmp_path)
    flwr = {**flwr, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    evaluate = {"clients": "class-shares", "metrics": "users_metrics:margin"}
    two = {**QUICK, "clients": 2, "calibrate": "ccvr", "compress": "top-k:0.2", "evaluate": evaluate}
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(two))
    out = tmp_path / "flower"
    log = flwr_run(tmp_path / "experiment.toml", out, flwr)
    # flwr's exit code says nothing about the run, so what counts is what the run left.
    assert (read_result(out) or {}).get("status") == "finished", log
    run(experiment_from(two), tmp_path / "own", grid=InProcessGrid(client_app(), 2))
    assert_same(out, tmp_path / "own")
    result, own = read_result(out) or {}, read_result(tmp_path / "own") or {}
    assert result["engine"] == "flower"
    assert result["personal"] == own["personal"]
    assert result["personal"]["clients_with_metric"]["own_margin"] == 2

    drift = {"kind": "drift", "over": "iid", "to": "label-2", "first_round": 1, "last_round": 3}
    moving = {**QUICK, "clients": 2, "rounds": 3, "partition": drift}
    (tmp_path / "moving.toml").write_text(tomli_w.dumps(moving))
    log = flwr_run(tmp_path / "moving.toml", tmp_path / "moving-flower", flwr)
    assert (read_result(tmp_path / "moving-flower") or {}).get("status") == "finished", log
    run(experiment_from(moving), tmp_path / "moving-own", grid=InProcessGrid(client_app(), 2))
    assert_same(tmp_path / "moving-flower", tmp_path / "moving-own")
