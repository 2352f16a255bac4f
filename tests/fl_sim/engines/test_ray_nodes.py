"""Ray nodes that see neither the run directory nor the data: each in a mount namespace of its own on this machine."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import Silent, run
from fl_sim.store.run_directory import RoundRecord, read_rounds

start = pytest.importorskip("fl_sim.engines.ray_start")  # before Ray itself: it sets what Ray reads when imported
import ray  # noqa: E402

from fl_sim.engines import actor_pool  # noqa: E402

SLOW = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)

    def forward(self, inputs):
        if self.training:
            time.sleep(0.02)
        return self.linear(inputs.flatten(1))

def model(input_shape, num_classes):
    return Slow(input_shape[0] * input_shape[1] * input_shape[2], num_classes)
"""
"""A module that nodes do not have, whose rounds take long enough for a node to be lost in the middle of one."""

PROJECT = Path(__file__).parents[3]
pytestmark = pytest.mark.cluster
Cluster: TypeAlias = Any  # of benchmarks/ray_nodes.py

PATIENCE = 120.0
"""Seconds for what takes a few on an idle machine."""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What only the driver sees: runs, pools, ledgers, and the records of 6 clients."""
    folder = tmp_path_factory.mktemp("drivers")
    coins = np.random.default_rng(3)
    centres = coins.integers(0, 256, size=(4, 8, 8))
    labels = coins.integers(0, 4, size=600)
    images = np.clip(centres[labels] + coins.normal(0, 40, size=(600, 8, 8)), 0, 255).astype(np.uint8)
    (folder / "users_slow.py").write_text(SLOW)
    np.savez(folder / "own.npz", x_train=images[:480], y_train=labels[:480], x_test=images[480:], y_test=labels[480:])
    return folder


@pytest.fixture(scope="module")
def cluster(hidden: Path, load_benchmark: Callable[[str], ModuleType]) -> Iterator[Cluster]:
    """A head and two nodes."""
    nodes = load_benchmark("ray_nodes")
    if not nodes.may_unshare():
        pytest.skip("no mount namespaces here: nodes would see the driver's disk")
    made = nodes.Cluster.of(hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(hidden)
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setattr("fl_sim.engines.ray_start.is_own_token", lambda: False)  # the cluster inherits it
        try:
            made.begin()
            other = Path(f"{made.folder}.npz")  # other records where the driver's are
            np.savez(other, **{name: array[::-1] for name, array in np.load(hidden / "own.npz").items()})
            made.nodes = [made.node(), made.node(f"cp {other} {hidden}/own.npz")]
            yield made
        finally:
            ray.shutdown()
            made.end()


def settings(hidden: Path, engine: object, **others: Any) -> dict[str, Any]:
    return {
        "data": f"npz:{hidden / 'own.npz'}", "model": "logistic", "clients": 6, "rounds": 3, "engine": engine,
        "partition": "dirichlet:0.3", "local": {"batch_size": 16}, **others,
    }  # fmt: skip


def on_nodes(cluster: Cluster) -> dict[str, Any]:
    return {"kind": "ray", "address": cluster.address}


def assert_same(left: Path, right: Path, *, kept: bool = False) -> None:
    """Compare models and rounds, and what clients keep where they do."""
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    rounds = [[vars(record) | {"seconds": 0} for record in read_rounds(out)] for out in (left, right)]
    assert rounds[0] == rounds[1]
    states = [out / "clients/states.bin" for out in (left, right)]
    assert states[0].exists() == kept
    if kept:
        assert states[0].read_bytes() == states[1].read_bytes()


def test_scaffold_on_nodes_without_a_shared_disk_ends_in_the_bits_of_one_process(
    cluster: Cluster, hidden: Path
) -> None:
    cluster.wait_for(2)
    method = {"algorithm": "scaffold", "sampler": "fixed-size:4"}
    for name, engine in (("nodes", on_nodes(cluster)), ("alone", "inprocess")):
        run(experiment_from(settings(hidden, engine, **method)), hidden / f"scaffold-{name}")
    assert_same(hidden / "scaffold-alone", hidden / "scaffold-nodes", kept=True)


def test_what_clients_share_and_release_is_paid_for_and_kept_where_the_driver_is(
    cluster: Cluster, hidden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.wait_for(2)
    monkeypatch.setattr("fl_sim.engines.ray.MOST_WITH_A_CALL", 0)  # through the nodes' stores, as large models go
    release = {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded", "gamma": 0.2}
    method = {
        "algorithm": "fedmix", "preprocess": release, "rounds": 2,
        "calibrate": {"kind": "ccvr", "epsilon": 8.0, "noise": "seeded"}, "evaluate": {"test_is_public": True},
    }  # fmt: skip
    for name, engine in (("nodes", on_nodes(cluster)), ("alone", "inprocess")):
        for variable in ("FL_SIM_POOLS", "FL_SIM_LEDGERS"):
            monkeypatch.setenv(variable, str(hidden / f"{variable}-{name}"))
        run(experiment_from(settings(hidden, engine, **method)), hidden / f"pools-{name}")
    assert_same(hidden / "pools-alone", hidden / "pools-nodes")
    for pattern in ("pool-*", "synthetic-*"):  # named by content
        assert {one.name for one in hidden.glob(f"pools-alone/{pattern}")} == {
            one.name for one in hidden.glob(f"pools-nodes/{pattern}")
        }
    charges = [
        [line.split(", \"chain\"")[0] for path in sorted(hidden.glob(f"FL_SIM_LEDGERS-{name}/*/*/*.jsonl"))
         for line in path.read_text().splitlines()[1:]]
        for name in ("nodes", "alone")
    ]  # fmt: skip
    assert charges[0] == charges[1]
    assert len(charges[0]) >= 12  # labels, generator and moments of each client with records enough
    assert len([*hidden.glob("FL_SIM_POOLS-nodes/*/clients/*/share.safetensors")]) >= 4
    assert not [*hidden.glob("FL_SIM_POOLS-nodes/*/clients/*/key")]


class Killing(Silent):
    """Kills nodes in the middle of the second round."""

    def __init__(self, *nodes: "subprocess.Popen[bytes]") -> None:
        self._nodes = nodes

    def finished_round(self, record: RoundRecord) -> None:
        if record.round == 1:
            threading.Timer(0.3, lambda: [node.kill() for node in self._nodes]).start()


def slow(hidden: Path, engine: object) -> dict[str, Any]:
    local = {"batch_size": 8, "epochs": 2}
    return settings(hidden, engine, algorithm="scaffold", model="users_slow:model", partition="iid", local=local)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, hidden: Path) -> Path:
    """A run in one process of what others run on nodes that are lost."""
    run(experiment_from(slow(hidden, "inprocess")), hidden / "undisturbed")
    return hidden / "undisturbed"


def test_a_run_whose_driver_was_killed_goes_on_with_the_same_bits(
    cluster: Cluster, hidden: Path, undisturbed: Path
) -> None:
    cluster.wait_for(2)
    out, command = hidden / "killed", [sys.executable, "-m", "fl_sim", "run", str(hidden / "slow.toml"), "--out"]
    (hidden / "slow.toml").write_text(tomli_w.dumps(slow(hidden, on_nodes(cluster))))
    driver = subprocess.Popen([*command, str(out)], cwd=hidden, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    deadline = time.monotonic() + PATIENCE
    while not (out / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    assert len(read_rounds(out)) in {1, 2}
    run(experiment_from(slow(hidden, on_nodes(cluster))), out)
    assert_same(undisturbed, out, kept=True)


def test_what_a_lost_node_was_given_is_done_elsewhere_and_a_node_of_another_version_is_never_used(
    cluster: Cluster, hidden: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wait_for(2)
    other = cluster.folder.with_name(f"{cluster.folder.name}-other.py")
    other.write_text((PROJECT / "strategies/fedavg.py").read_text() + "\n# another version\n")
    cluster.nodes.append(cluster.node(f"mount --bind {other} {PROJECT}/strategies/fedavg.py"))
    run(experiment_from(slow(hidden, on_nodes(cluster))), hidden / "lost", observer=Killing(cluster.nodes[1]))
    said = capsys.readouterr().err
    assert re.search(
        r"fl-sim: node \w+ at [\d.]+ of the Ray cluster is lost: other nodes repeat its unfinished work\n", said
    )
    assert_same(undisturbed, hidden / "lost", kept=True)

    cluster.wait_for(2)  # the other one has come
    with pytest.raises(RunError) as refused:
        run(experiment_from(slow(hidden, on_nodes(cluster))), hidden / "alone", observer=Killing(cluster.nodes[0]))
    versions = (
        r"it has fl-sim \S+ \(digest (\w+)\), and this machine has \S+ \(digest (\w+)\); install the same version there"
    )
    for text in (capsys.readouterr().err, str(refused.value)):
        found = re.search(rf"node \w+ at [\d.]+.*: {versions}", text)
        assert found
        assert found[1] != found[2]
    assert json.loads((hidden / "alone/result.json").read_text())["status"] == "failed"
    run(experiment_from(slow(hidden, "inprocess")), hidden / "alone")  # all that was finished was kept
    assert_same(undisturbed, hidden / "alone", kept=True)


def test_a_cluster_without_nodes_is_waited_for_and_then_the_run_stops_and_can_go_on(
    cluster: Cluster,
    hidden: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for node in cluster.nodes:
        node.kill()
    cluster.wait_for(0)
    patience = actor_pool.WAIT_SECONDS
    monkeypatch.setattr(actor_pool, "WAIT_SECONDS", 0.5)
    with pytest.raises(RunError, match=r"no node joined .* the same command again"):
        run(experiment_from(slow(hidden, on_nodes(cluster))), hidden / "waiting")
    monkeypatch.setattr(actor_pool, "WAIT_SECONDS", patience)
    assert "has no node with room for an actor (engine.cpus=1" in capsys.readouterr().err
    cluster.node()
    run(experiment_from(slow(hidden, on_nodes(cluster))), hidden / "waiting")
    assert_same(undisturbed, hidden / "waiting", kept=True)
