"""Ray nodes on this one machine whose file systems are apart, and what they cost: a round on two of them.

Two nodes of one core each train 100 clients with 100 images (niid-cnn, MNIST), beside one process with two workers; a
round of one, a round of the other. Reported: medians of walls, and of the ratios of neighbouring rounds.

    python benchmarks/ray_nodes.py                 5 pairs of rounds (about a minute on two idle cores)
    python benchmarks/ray_nodes.py --pairs 25

As root each node has a mount namespace of its own, in which the driver's folders are empty. Without, nodes see them.
"""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


PATIENCE = 120.0
"""Timeout in seconds for steps that take a few seconds on an idle machine."""


def may_unshare() -> bool:
    """Return True if Ray nodes can have separate file systems on this machine."""
    if not shutil.which("unshare") or os.geteuid() != 0:
        return False
    return subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode == 0


@dataclass
class Cluster:
    """A head without processors in this process's file system, and nodes of one core that see none of ``hidden``."""

    hidden: Path
    folder: Path
    port: int
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    nodes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @classmethod
    def of(cls, hidden: Path) -> Self:
        """Return a cluster on a free port; its folder has a name short enough for sockets."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return cls(hidden, Path(tempfile.mkdtemp(dir="/tmp")), int(probe.getsockname()[1]))

    @property
    def address(self) -> str:
        """Return the value of the setting engine.address."""
        return f"127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start the head."""
        self._start(
            [
                "ray",
                "start",
                "--head",
                f"--port={self.port}",
                "--num-cpus=0",
                "--include-dashboard=false",
                f"--temp-dir={self.folder}",
            ]
        )

    def node(self, *before: str) -> "subprocess.Popen[bytes]":
        """Start a node, with commands of a shell ``before`` it in its own namespace; killing it kills all of it."""
        hide = [f"mount -t tmpfs tmpfs {folder}" for folder in (self.hidden, self.folder)]
        join = f"exec ray start --address={self.address} --num-cpus=1"
        script = "; ".join(["set -e", *hide, *before, f"{join} {' '.join(self._options)}"])
        return self._start([*UNSHARE, "bash", "-c", script] if may_unshare() else [*join.split()[1:], *self._options])

    def wait_for(self, nodes: int) -> None:
        """Wait until the given number of nodes is ready to train."""
        import ray  # not before whoever uses this has set what Ray reads when it is imported

        deadline = time.monotonic() + PATIENCE
        while not _listens(self.port) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        while ray.cluster_resources().get("CPU", 0) != nodes and time.monotonic() < deadline:
            time.sleep(0.05)
        ray.shutdown()  # a run joins by itself

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes of the cluster until now."""
        total = 0.0
        for started in self.processes:
            for process in [(one := psutil.Process(started.pid)), *one.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    total += sum(process.cpu_times()[:2])
        return total

    def end(self) -> None:
        """Kill all processes that this cluster started."""
        alive = [psutil.Process(one.pid) for one in self.processes if one.poll() is None]
        everything = [child for one in alive for child in [*one.children(recursive=True), one]]
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for one in self.processes:
            one.wait()
        psutil.wait_procs(everything, timeout=PATIENCE)
        shutil.rmtree(self.folder, ignore_errors=True)
        for beside in self.folder.parent.glob(f"{self.folder.name}[-.]*"):
            beside.unlink()

    @property
    def _options(self) -> list[str]:
        return ["--block", "--object-store-memory=100000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        options = self._options if "--head" in command else []
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        with Path(f"{self.folder}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self.processes.append(process)
        return process


def _listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Measure, and print a line for each contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    from speed import Contestant, contestant  # another script of this folder
    from speed_work import WORKS

    from fl_sim.engines.own_ray import choose_token

    choose_token()  # the cluster's, which the contestant inherits
    hidden = Path(tempfile.mkdtemp())
    cluster = Cluster.of(hidden)
    try:
        cluster.begin()
        cluster.nodes = [cluster.node(), cluster.node()]
        cluster.wait_for(2)
        os.environ["FL_SIM_NODES"] = cluster.address
        work = WORKS["100 clients x 100"]
        both: list[Contestant] = [contestant("inprocess", work, {}), contestant("nodes", work, {})]
        with both[0], both[1]:
            for one in both * 3:  # the first rounds find out how fast everybody is
                one.round()
            measured = []
            for _ in range(pairs):
                alone, before = both[0].round(), cluster.cpu_seconds()
                wall, driver = both[1].round()
                measured.append((*alone, wall, driver + cluster.cpu_seconds() - before))
    finally:
        cluster.end()
        shutil.rmtree(hidden, ignore_errors=True)
    for what, first, second in (("wall", 0, 2), ("CPU", 1, 3)):
        alone_ms, nodes_ms = (1000 * statistics.median(row[which] for row in measured) for which in (first, second))
        ratio = statistics.median(row[second] / row[first] for row in measured)
        print(
            f"{what:4} one process, two workers {alone_ms:6.1f} ms; Ray, two nodes of one core {nodes_ms:6.1f} ms; ",
            end="",
        )
        print(f"ratio {ratio:.2f} (median of {pairs} pairs)")


if __name__ == "__main__":
    main()
