"""SuperLink and SuperNodes with TLS and a key for each node, by the commands that docs/flower.md gives."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from fl_sim.data import load
from fl_sim.store.run_directory import PRIVATE_ERRORS, read_result, read_rounds

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform == "win32", reason="the commands are for a POSIX shell"),
    pytest.mark.skipif(
        not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="needs openssl, ssh-keygen"
    ),
]

PROJECT = Path(__file__).parents[3]
RECIPES = dict(
    re.findall(r"<!-- recipe: (\w+) -->\n```\w+\n(.*?)```", (PROJECT / "docs/flower.md").read_text(), re.DOTALL)
)
PATIENCE = 240.0
"""Seconds for what takes ten on an idle machine."""


@dataclass
class Deployment:
    """A folder with keys, a SuperLink at ``port``, and all processes started for it."""

    folder: Path
    port: int
    environment: dict[str, str]
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def command(self, recipe: str) -> str:
        """Return a recipe's commands for this deployment."""
        text = RECIPES[recipe].replace("127.0.0.1:42000", f"127.0.0.1:{self.port}")
        return text.replace("--port 42000", f"--port {self.port}").replace("/path/of", str(self.folder))

    def start(self, command: str, log: str) -> "subprocess.Popen[bytes]":
        """Start a command that stays; what it says goes to a file."""
        with (self.folder / log).open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
        self.started.append(process)
        return process

    def node(self, number: int, key: str, config: str = "", tls: str = "--root-certificates ca.pem") -> str:
        """Return the command of a node with some key ("" for none)."""
        command = self.command("node").replace("partition-id=0", f"partition-id={number}")
        command = command.replace(f'policy="{self.folder}/policy.toml"', config)
        command = command.replace("--port 42100", f"--port {free_port()}").replace("--root-certificates ca.pem", tls)
        return command.replace("--auth-supernode-private-key node-0", key and f"--auth-supernode-private-key {key}")

    def do(self, command: str, cwd: Path | None = None) -> str:
        """Do a command to its end, and return what it says."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=cwd or self.folder, env=self.environment,
            capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def said(self, log: str, text: str) -> None:
        """Wait until a log says something."""
        deadline = time.monotonic() + PATIENCE
        while text not in (self.folder / log).read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert text in (self.folder / log).read_text()

    def run(self, out: Path, *settings: str) -> dict[str, object]:
        """Submit a run and return its result."""
        (self.folder / "two_clients.toml").write_text("\n".join(['model = "logistic"', "clients = 2", *settings]))
        command = self.command("run").replace("$PWD/two_clients.toml", str(self.folder / "two_clients.toml"))
        output = self.do(command.replace("$PWD/results/on-supernodes", str(out)), cwd=PROJECT)
        result = read_result(out)
        assert result is not None, output
        return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def superlink(folder: Path) -> Iterator[Deployment]:
    """Start a SuperLink that knows the keys of nodes 0 and 1."""
    environment = {
        **os.environ, "PYTHONPATH": str(folder / "own"),
        "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    }  # fmt: skip
    (folder / "own").mkdir()
    shutil.copy(PROJECT / "examples/feddyn.py", folder / "own")
    made = Deployment(folder, free_port(), environment)
    made.do(made.command("keys"))
    (folder / "home").mkdir()
    (folder / "home/config.toml").write_text(made.command("config"))
    try:
        made.start(made.command("superlink"), "superlink.log")
        made.said("superlink.log", "Uvicorn running on https://")
        assert made.do(made.command("register")).count("registered successfully") == 2
        yield made
    finally:
        end(made)


def end(made: Deployment) -> None:
    processes = [psutil.Process(started.pid) for started in made.started if started.poll() is None]
    everything = [child for process in processes for child in [*process.children(recursive=True), process]]
    for process in everything:
        process.send_signal(signal.SIGKILL)
    for started in made.started:
        started.wait()
    psutil.wait_procs(everything, timeout=PATIENCE)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with superlink(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink with nodes 0 and 1, each with records of its own, 90 and 120 of those of digits."""
    train = load("digits", None).train
    with superlink(tmp_path_factory.mktemp("two-nodes")) as made:
        for number, part in enumerate((slice(0, 90), slice(100, 220))):
            place = made.folder / f"owner-{number}"
            place.mkdir()
            images, labels = train.inputs[part, 0], train.labels[part]
            np.savez(place / "own.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
            config = f'data="npz:{place}/own.npz" state="{place}/state"'
            made.start(made.node(number, f"node-{number}", config), f"node-{number}.log")
        yield made


def test_a_superlink_takes_the_nodes_whose_keys_it_knows_and_no_others(two_nodes: Deployment) -> None:
    with pytest.raises(OSError, match=r"(?i)closed|reset"):  # TLS is not left to those who connect
        urllib.request.urlopen(f"http://127.0.0.1:{two_nodes.port}", timeout=60)
    two_nodes.do("ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger")
    refused = {
        "stranger": (two_nodes.node(1, "stranger"), "could not establish a connection to the SuperLink"),
        "no-key": (two_nodes.node(1, ""), "could not establish a connection to the SuperLink"),
        "no-tls": (two_nodes.node(1, "", tls="--insecure"), "Connection attempt failed"),
    }
    for name, (command, _) in refused.items():
        two_nodes.start(command, f"{name}.log")
    for name, (_, said) in refused.items():
        two_nodes.said(f"{name}.log", said)
    for number in (0, 1):
        two_nodes.said(f"node-{number}.log", "SuperNode ID")
    assert (two_nodes.folder / "superlink.log").read_text().count("[Fleet.ActivateNode] Activated") == 2


def test_two_nodes_train_on_records_of_their_own_by_an_algorithm_from_a_file_of_ones_own(two_nodes: Deployment) -> None:
    if os.getloadavg()[0] > 3 * (os.cpu_count() or 1):
        pytest.skip("Flower gives each of its processes a minute to start, and this machine is too busy for that")
    for number in (0, 1):
        two_nodes.said(f"node-{number}.log", "SuperNode ID")
    out = two_nodes.folder / "run"
    result = two_nodes.run(out, "rounds = 1", 'algorithm = "feddyn:FedDyn"')
    assert (result["status"], result["engine"], result["algorithm"]) == ("finished", "flower", "feddyn:FedDyn")
    assert result["titles"] == {"algorithm": "FedDyn", "preprocess": "NoPreprocess"}
    assert [record.cohort for record in read_rounds(out)] == [2]
    for number in (0, 1):  # FedDyn's state lies with its owner, and the server learned of no place
        assert len([*two_nodes.folder.glob(f"owner-{number}/state/client-{number}/*/states.bin")]) == 1
    assert not (out / "clients/states.bin").exists()
    told = [file for file in [two_nodes.folder / "superlink.log", *out.rglob("*")] if file.is_file()]
    assert not [file for file in told if b"owner-" in file.read_bytes()]


@pytest.mark.slow
def test_a_node_with_a_policy_refuses_and_the_run_says_so(deployment: Deployment) -> None:
    (deployment.folder / "policy.toml").write_text("epsilon = 10.0\n")
    policy = f'policy="{deployment.folder}/policy.toml"'
    deployment.start(deployment.node(0, "node-0"), "node-0.log")
    deployment.start(deployment.node(1, "node-1", policy), "node-1.log")
    for number in (0, 1):
        deployment.said(f"node-{number}.log", "SuperNode ID")
    raw = deployment.run(deployment.folder / "raw", "rounds = 1")
    assert raw["status"] == "failed"
    assert "client 1 in round 1" in str(raw["error"])
    assert "policy allows no updates" in str(raw["error"])
    pools = '[preprocess]\nkind = "da-fl"\ntrain_on = "synthetic"\ngenerator = "mean-embedding"\nepsilon = 20.0'
    pooled = deployment.run(deployment.folder / "pooled", "rounds = 1", pools)
    assert pooled["status"] == "failed"
    assert "client 1" in str(pooled["error"])  # whose words, where records are to stay private, are for the owner alone
    assert "policy allows epsilon 10" in (deployment.folder / "pooled" / PRIVATE_ERRORS).read_text()


@pytest.mark.slow
def test_two_nodes_of_one_number_end_the_run_with_a_message(deployment: Deployment) -> None:
    for key in ("node-0", "node-1"):
        deployment.start(deployment.node(1, key), f"{key}.log")
        deployment.said(f"{key}.log", "SuperNode ID")
    result = deployment.run(deployment.folder / "run", "rounds = 1")
    assert "give each supernode a different partition-id, from 0 to 1" in str(result["error"])
