"""Peer frameworks beside ours in benchmarks/speed.py: the turns they play, and what is refused, without any of them."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from fl_sim.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
SIZES = [130, 64, 20]  # 3 + 1 + 1 minibatch steps of at most 64 records


@pytest.fixture(scope="module")
def peer_job(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    load_benchmark("peers/networks")
    return load_benchmark("peers/job")


@pytest.fixture
def job(peer_job: ModuleType) -> Any:
    generator = torch.Generator().manual_seed(0)
    shards = []
    for size in SIZES:
        labels = torch.randint(0, 10, (size,), generator=generator)
        inputs = torch.randn(size, 1, 28, 28, generator=generator)
        inputs[torch.arange(size), 0, labels] += 3.0  # a bright row tells the class
        shards.append((inputs, labels))
    torch.manual_seed(0)
    return peer_job.Job(shards, peer_job.Network().state_dict())


class Framework:
    """What a peer does in a round, with the ways in which it could do less than the job."""

    def __init__(
        self, job: Any, optimizer: Callable[..., torch.optim.Optimizer], clients: int, batch_size: int
    ) -> None:
        self.job, self.optimizer, self.clients, self.batch_size = job, optimizer, clients, batch_size
        self.network = job.network()

    def round(self) -> None:
        start = {name: value.clone() for name, value in self.network.state_dict().items()}
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for inputs, labels in self.job.shards[: self.clients]:
            self.network.load_state_dict(start)
            optimizer = self.optimizer(self.network.parameters())
            for batch in torch.randperm(len(labels)).split(self.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(self.network(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            for name, value in self.network.state_dict().items():
                mean[name] += value * (len(labels) / sum(SIZES))
        self.network.load_state_dict(mean)


def the_job(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def keep_on(framework: Framework, turns: Any) -> None:
    while True:
        framework.round()
        turns.end_of_round()


def play(peer_job: ModuleType, framework: Framework, requests: str) -> list[str]:
    """Play rounds until no more are wanted; return what was said."""
    answers = io.StringIO()
    turns = peer_job.Turns(framework.job, lambda: framework.network, io.StringIO(requests), answers)
    try:
        with pytest.raises(SystemExit):
            keep_on(framework, turns)
    finally:
        turns.close()
    return answers.getvalue().splitlines()


def test_an_honest_peer_says_ready_and_then_the_seconds_of_every_round(peer_job: ModuleType, job: Any) -> None:
    said = play(peer_job, Framework(job, the_job, 3, 64), "go\ngo\n")
    assert said[0] == "ready"
    assert len(said) == 3
    assert all(0 < float(seconds) < 60 for seconds in said[1:])


@pytest.mark.parametrize(
    ("optimizer", "clients", "batch_size", "complaint"),
    [
        (the_job, 2, 64, "5 minibatch steps, and this one had 4"),
        (the_job, 3, 128, "5 minibatch steps, and this one had 4"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.01), 3, 64, "minibatch steps, and this one had 0"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 3, 64, "had 0"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, maximize=True), 3, 64, "the loss went"),
    ],
)
def test_a_peer_that_does_something_else_is_stopped(
    peer_job: ModuleType, job: Any, optimizer: Any, clients: int, batch_size: int, complaint: str
) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        play(peer_job, Framework(job, optimizer, clients, batch_size), "go\n")


def test_momentum_that_outlives_a_client_is_noticed(peer_job: ModuleType, job: Any) -> None:
    framework = Framework(job, the_job, 3, 64)
    kept = the_job(framework.network.parameters())
    framework.optimizer = lambda _: kept
    with pytest.raises(RuntimeError, match="3 fresh optimizers, and this one had 1"):
        play(peer_job, framework, "go\n")


def test_records_that_are_left_out_are_noticed(peer_job: ModuleType, job: Any) -> None:
    framework = Framework(job, the_job, 3, 64)
    inputs, labels = job.shards[0]
    less = peer_job.Job([(inputs[:129], labels[:129]), *job.shards[1:]], job.weights)
    framework.job = less  # as many steps, and one record less
    answers = io.StringIO()
    turns = peer_job.Turns(job, lambda: framework.network, io.StringIO(), answers)
    try:
        framework.round()
        with pytest.raises(RuntimeError, match="214 records, and this one had 213"):
            turns.end_of_round()
    finally:
        turns.close()
    assert not answers.getvalue()


def test_the_network_is_the_one_of_the_plain_loop(peer_job: ModuleType) -> None:
    ours, theirs = MODELS["niid-cnn"]((1, 28, 28), 10), peer_job.Network()
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(inputs), theirs(inputs))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 44_426


def test_a_job_goes_through_its_file(peer_job: ModuleType, job: Any, tmp_path: Path) -> None:
    peer_job.write(tmp_path / "job.npz", job.shards, job.weights)
    read = peer_job.read(tmp_path / "job.npz")
    assert (read.clients, [*read.records], [*read.steps]) == (3, [214], [5])
    for (inputs, labels), (expected_inputs, expected_labels) in zip(read.shards, job.shards, strict=True):
        assert torch.equal(inputs, expected_inputs)
        assert torch.equal(labels, expected_labels)
    assert read.weights.keys() == job.weights.keys()
    assert all(torch.equal(read.weights[name], job.weights[name]) for name in job.weights)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--peers", "{}"], "python benchmarks/peers/install.py {}"),
        (["--peers", "{}", "--only", "fedlab"], "python benchmarks/peers/install.py {} fedlab"),
        (["--only", "fedlab"], "--peers DIR"),
    ],
)
def test_peers_that_are_not_installed_end_in_what_to_run(tmp_path: Path, arguments: list[str], advice: str) -> None:
    missing = str(tmp_path / "nowhere")
    command = [sys.executable, str(ROOT / "benchmarks/speed.py"), *(word.format(missing) for word in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert advice.format(missing) in done.stderr
    assert "Traceback" not in done.stderr


def test_environments_do_not_go_into_the_project() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/peers/install.py"), str(ROOT / "environments")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "inside the project" in done.stderr
    assert not (ROOT / "environments").exists()
