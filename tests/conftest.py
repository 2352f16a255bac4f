"""What several test files share: a model whose loss is written down by hand, and a federation without an engine."""

import gc
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from hypothesis import settings as hypothesis_settings
from torch import nn

from fl_sim.engines import wire
from fl_sim.engines.grid import LocalGrid
from fl_sim.engines.ray_token import choose_token
from fl_sim.params import detached
from fl_sim.privacy import loss_distribution, renyi
from fl_sim.seeding import rng
from fl_sim.tables import worker, workers
from fl_sim.training.loop import train
from fl_sim.types import ClientUpdate, Cohort, LocalSettings, LocalTask, Params, Payloads, Reply, ServerState
from strategies.aggregators import WeightedMean
from strategies.algorithm import weighting_of
from strategies.answers import Population
from strategies.flower import FederatedStrategy
from strategies.samplers import Everyone, Sampler

hypothesis_settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis_settings.load_profile("repeatable")

gc.disable()  # until all tests are imported: what that makes stays to the end, and none of it is garbage


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and only in what the tests themselves make."""
    gc.freeze()
    gc.enable()


choose_token()  # for tests that start a Ray of their own, before any test imports Ray

_INTERVAL, _COARSE_INTERVAL = loss_distribution._INTERVAL, 1e-2
_SERIES, _FEW_ORDERS = renyi._SERIES, renyi._SERIES[::16]

Shard = tuple[torch.Tensor, torch.Tensor]


LONGEST = (
    "fl_sim/engines/test_ray.py", "test_engines_agree.py", "fl_sim/simulation/test_flower_deployment.py",
    "fl_sim/cli/test_table.py", "fl_sim/simulation/test_flower_app.py", "fl_sim/engines/test_ray_doors.py",
)  # fmt: skip
"""Files that take half a minute and more, much of it in waiting for processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker is left alone with one of them in the end."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """Load a script of benchmarks/ from where it lies: other distributions have a package of that name."""

    def load(name: str) -> ModuleType:
        script = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """Heed Ctrl-C, here and in all processes of the tests: a shell that starts them with ``&`` has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_users_ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what Ray starts once for many tests from writing to the user's own ledgers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FL_SIM_LEDGERS", str(tmp_path_factory.mktemp("ledgers")))
        yield


@pytest.fixture(autouse=True)
def _own_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pools of synthetic records and ledgers from going from one test to the next, and from the user's own."""
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / ".pools"))
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / ".ledgers"))


@pytest.fixture(autouse=True)
def _fineness_of_accounting(request: pytest.FixtureRequest) -> None:
    """Let the accountants work as finely as the test asks for; what they remember lasts until a test asks otherwise."""
    quick = "quick_accounting" in request.fixturenames
    coarse = quick or "coarse_losses" in request.fixturenames
    if (interval := _COARSE_INTERVAL if coarse else _INTERVAL) != loss_distribution._INTERVAL:
        loss_distribution._INTERVAL = interval  # type: ignore[misc]
        loss_distribution.epsilon.cache_clear()
    if len(renyi._SERIES) != len(series := _FEW_ORDERS if quick else _SERIES):
        renyi._SERIES = series  # type: ignore[misc]
        renyi.rdp_curve.cache_clear()


@pytest.fixture
def coarse_losses() -> None:
    """Let the PLD accountant work on a grid a hundred times coarser: still an upper bound, in a tenth of the time."""


@pytest.fixture
def quick_accounting() -> None:
    """Let both accountants find a larger upper bound in a tenth of the time, where the figure is not what is tested."""


@pytest.fixture
def cells_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run cells in threads of this process: a worker process takes seconds to start."""

    def spawn() -> tuple[SimpleNamespace, Connection]:
        ours, theirs = Pipe()
        thread = threading.Thread(target=worker.work, args=(os.dup(theirs.fileno()),), daemon=True)
        thread.start()
        theirs.close()
        return SimpleNamespace(terminate=ours.close, wait=thread.join, stdin=None), ours

    monkeypatch.setattr(workers, "_spawn", spawn)
    monkeypatch.setattr(worker, "_die_with_parent", lambda: None)


class Bowl(nn.Module):
    """One weight w. A record (a, b, g) has the loss 50 + a/2 (w - b)^2 + g w, exact in float64.

    Label 0 and logits (0, q) have the cross-entropy log(1 + e^q), which rounds to q from q = 40 on, with slope 1.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        a, b, g = records.T
        loss = 50 + a / 2 * (self.w - b) ** 2 + g * self.w
        return torch.stack([torch.zeros_like(loss), loss], 1)


@dataclass
class Federation:
    """A federation in a dozen lines, with no engine: what the server holds, and what each client keeps."""

    algorithm: Any
    model: nn.Module
    shards: list[Shard]
    settings: LocalSettings
    server: ServerState = field(init=False)
    states: list[Payloads] = field(init=False)
    server_round: int = 0
    num_classes: int = 2

    def __post_init__(self) -> None:
        self.server = self.algorithm.init(detached(self.model.named_parameters()))
        self.states = [{} for _ in self.shards]

    def client(self, client: int) -> ClientUpdate:
        """Play one client of the coming round; nothing is kept."""
        inputs, labels = self.shards[client]
        task = LocalTask(
            self.server_round + 1, client, len(self.shards), len(labels), self.settings,
            self.server.params, self.server.broadcast, self.states[client],
            class_counts=tuple(torch.bincount(labels, minlength=self.num_classes).tolist()),
        )  # fmt: skip
        generator = rng(0, "batches", client, self.server_round + 1)
        return self.algorithm.finish(
            task, train(self.model, task, self.algorithm.plan(task), inputs, labels, generator)
        )

    def round(self, *cohort: int) -> list[ClientUpdate]:
        """Play one round with the clients of ``cohort`` (all if none are given)."""
        clients = cohort or tuple(range(len(self.shards)))
        updates = [self.client(client) for client in clients]
        replies = tuple(
            Reply(client, update.payloads, update.num_examples, update.loss)
            for client, update in zip(clients, updates, strict=True)
        )
        self.server_round += 1
        aggregate = WeightedMean().mean(
            Cohort(self.server_round, replies, len(self.shards), len(clients)), weighting_of(self.algorithm)
        )
        if aggregate is not None:
            self.server = self.algorithm.merge(self.server, aggregate)
        for client, update in zip(clients, updates, strict=True):
            self.states[client] = update.state or self.states[client]
        return updates

    @property
    def w(self) -> float:
        """The global weight of a ``Bowl``."""
        return float(self.server.params["w"])


@pytest.fixture
def bowl() -> Callable[[float], Bowl]:
    return Bowl


@pytest.fixture
def federation() -> type[Federation]:
    return Federation


@pytest.fixture
def records() -> Callable[..., Shard]:
    """Records of a ``Bowl``: (a, b, g) each."""

    def make(*rows: tuple[float, float, float]) -> Shard:
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3), torch.zeros(len(rows), dtype=torch.int64)

    return make


@pytest.fixture
def settings() -> Callable[..., LocalSettings]:
    def make(learning_rate: float = 0.1, momentum: float = 0.0, **others: Any) -> LocalSettings:
        return LocalSettings(learning_rate, momentum, **{"weight_decay": 0.0, "batch_size": 100, "epochs": 1, **others})

    return make


@pytest.fixture
def strategy_of() -> Callable[..., FederatedStrategy]:
    """A strategy whose clients are the nodes of a LocalGrid, with the whole population as its cohort."""

    def make(
        algorithm: Any, params: Params, num_clients: int, sampler: Sampler | None = None, seed: int = 0
    ) -> FederatedStrategy:
        grid = LocalGrid(num_clients)
        strategy = FederatedStrategy(
            algorithm, WeightedMean(), sampler or Everyone(), algorithm.init(params),
            wire.Order("", 0, 0.0, "", "", ""), num_clients, seed,
            population=Population(tuple(grid.get_node_ids())),
        )  # fmt: skip
        strategy.cohort = strategy.sampler.sample(num_clients, rng(seed, "sampler", 1).random)
        return strategy

    return make


@pytest.fixture
def reply_of() -> Callable[[int, RecordDict], Message]:
    """What the server receives when client i of a LocalGrid answers with some content."""

    def make(client: int, content: RecordDict) -> Message:
        LocalGrid(1)  # sets the identity that Flower wants before a message can be made
        sent = Message(RecordDict(), 1000 + client, wire.TRAIN)
        sent.metadata.__dict__["_message_id"] = f"message-{client}"
        return Message(content, reply_to=sent)

    return make
