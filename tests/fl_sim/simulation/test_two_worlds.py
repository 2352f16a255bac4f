"""One adjacency for every mechanism: both worlds are run by real clients, and what noise is added to is compared.

In world 1 the last client's records are replaced by nothing, or, where cohorts have a fixed size, by others. All else
is equal, and so is what earlier rounds released: world 1 is told what world 0 was. The statement's words are in
``fl_sim.privacy.statement``, the user's in docs/privacy/global-dp.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.privacy import modular_sums
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.modular_sums import SumGrid
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate, ClientUpdate, Cohort, LocalTask, Payloads, Trained
from strategies.algorithm import Averaging
from strategies.correlated_noise import coefficients
from strategies.distributed_sums import ClientShares
from strategies.global_dp import GlobalDP

pytestmark = pytest.mark.usefixtures("quick_accounting")

CLIENTS = 4
HONEST = 5
"""A seed with which the last client is honest, beside two and beside three hostile clients."""
World = Literal["there", "nothing", "others"]


@dataclass(frozen=True)
class Worlds:
    """Clients of very different sizes; ``world`` says what the last one, the largest, holds."""

    world: World = "there"

    def split(
        self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        order = np.random.Generator(np.random.Philox(1)).permutation(len(labels))[:1000]
        *rest, last, others = np.split(order, [20, 70, 190, 600])
        held = {"there": last, "nothing": last[:0], "others": others[:40]}[self.world]
        return [*map(np.sort, rest), np.sort(held)]


@dataclass
class Seen:
    """What noise was added to in one world, release by release, and what was released."""

    sums: list[NDArray[np.float64]] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    released: list[tuple[Aggregate, float]] = field(default_factory=list)


def experiment(world: World, **changes: Any) -> Experiment:
    aggregator = {"kind": "global-dp", "noise": "seeded", "clipping_norm": 0.3, **changes.pop("aggregator", {})}
    base = {
        "data": "digits", "clients": CLIENTS, "model": "logistic", "sampler": "full", "rounds": 2,
        "engine": "inprocess",
        "local": {"learning_rate": 0.3, "batch_size": 32, "epochs": 3, "weight_decay": 0.01},
        "partition": {"kind": f"{__name__}:Worlds", "world": world},
    }  # fmt: skip
    return experiment_from({**base, "aggregator": aggregator, **changes})


def played(world: World, out: Path, monkeypatch: pytest.MonkeyPatch, told: Seen | None, changes: Any) -> Seen:
    """Run a world; what is released is what ``told`` was released, so that all that came before is equal."""
    seen, release = Seen(), GlobalDP.release

    def spy(
        self: GlobalDP, cohort: Cohort, *, template: Payloads, clipping_norm: float, **others: Any
    ) -> tuple[Aggregate, float]:
        total, count = self.sums(cohort, template, clipping_norm)
        found = release(self, cohort, template=template, clipping_norm=clipping_norm, **others)
        seen.sums.append(total)
        seen.counts.append(count)
        seen.norms.append(clipping_norm)
        seen.released.append(told.released[len(seen.sums) - 1] if told else found)
        return seen.released[-1]

    with monkeypatch.context() as spied:
        spied.setattr(GlobalDP, "release", spy)
        run(experiment(world, **changes), out)
    return seen


Play = Callable[..., tuple[Seen, Seen]]


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    def play(other: World = "nothing", **changes: Any) -> tuple[Seen, Seen]:
        first = played("there", tmp_path / "there", monkeypatch, None, dict(changes))
        return first, played(other, tmp_path / "other", monkeypatch, first, dict(changes))

    return play


def moved(first: Seen, second: Seen) -> list[float]:
    """Return by how many clipping norms each release's sum differs."""
    assert first.norms == second.norms
    pairs = zip(first.sums, second.sums, first.norms, strict=True)
    return [float(np.linalg.norm(one - other)) / norm for one, other, norm in pairs]


def counts_moved(first: Seen, second: Seen) -> list[float]:
    return [abs(one - other) for one, other in zip(first.counts, second.counts, strict=True)]


ADAPTIVE = {"adaptive_clipping": {"target_quantile": 0.5}}
POOL = {
    "kind": "da-fl", "generator": {"kind": "mean-embedding", "frequencies": 8}, "noise": "seeded",
    "client_gammas": [1.0] * (CLIENTS - 1) + [0.0], "labels": {"kind": "exponential", "epsilon": 1.0},
}  # fmt: skip
START = {"kind": "private-start", "images": 50, "server_epochs": 1, "frequencies": 10}
MECHANISMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long way": {"aggregator": {"clipping_norm": 1e-3}},
    "short way": {"aggregator": {"clipping_norm": 100.0}},
    "adaptive": {"aggregator": ADAPTIVE},
    "adaptive, all clipped": {"aggregator": {**ADAPTIVE, "clipping_norm": 1e-3}},
    "adaptive, none clipped": {"aggregator": {**ADAPTIVE, "clipping_norm": 100.0}},
    "poisson": {"sampler": "poisson:0.9", "rounds": 3},
    "turns": {"sampler": {"kind": "cyclic", "groups": 2}, "rounds": 4},
    "compressed": {"compress": "rand-k:0.25"},
    "private start": {"preprocess": START},
    "pool beside own records": {"preprocess": {**POOL, "train_on": "own-and-synthetic"}},
    "pool alone": {"preprocess": {**POOL, "train_on": "synthetic"}},
    "pool, adaptive": {"preprocess": {**POOL, "train_on": "own-and-synthetic"}, "aggregator": ADAPTIVE},
    "control variates": {"algorithm": "scaffold", "rounds": 3, "local": {"momentum": 0.0, "learning_rate": 0.3}},
    "control variates, adaptive": {"algorithm": "scaffold", "rounds": 3, "aggregator": ADAPTIVE},
    "hostile clients": {"attack": {"kind": "sign-flip", "strength": 1e6}, "seed": HONEST, "aggregator": ADAPTIVE},
    "hostile clients together": {"attack": "alie", "seed": HONEST},
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_client_whose_records_are_replaced_by_nothing_moves_what_noise_is_added_to_by_at_most_its_share(
    mechanism: str, both: Play
) -> None:
    first, second = both(**MECHANISMS[mechanism])
    found = moved(first, second)
    assert max(found) <= 1 + 1e-9
    assert max(counts_moved(first, second)) <= 0.5
    if mechanism == "pool alone":
        assert max(found) == 0  # no record of any client is looked at
        return
    assert max(found) > 1e-3  # the worlds differ
    if "adaptive" in mechanism:
        assert max(counts_moved(first, second)) == 0.5


@pytest.mark.parametrize("kind", ["mimic", "min-max"])
def test_forged_updates_from_those_of_honest_clients_break_the_bound_and_are_refused_with_secret_noise(
    kind: str, both: Play
) -> None:
    assert max(moved(*both(attack={"kind": kind, "clients": 3}, seed=HONEST))) > 1.1
    assert "no epsilon would hold" in refused(attack=kind, aggregator={"noise": "secret"})


def test_where_updates_are_longer_than_the_norm_the_bound_is_reached(both: Play) -> None:
    assert moved(*both(aggregator={"clipping_norm": 1e-3})) == pytest.approx([1.0, 1.0], rel=1e-4)


def test_a_client_that_is_exchanged_for_another_moves_it_by_at_most_twice_that(both: Play) -> None:
    first, second = both("others", sampler="fixed-size:3", rounds=3, aggregator=ADAPTIVE)
    assert max(moved(first, second)) <= 2 + 1e-9
    assert max(counts_moved(first, second)) <= 1
    assert max(moved(first, second)) > 1e-3


def test_under_correlated_noise_a_client_moves_what_is_hidden_by_one_norm_for_each_of_its_turns(both: Play) -> None:
    """What noise hides is C x, of all rounds together, and a client has one turn in three rounds."""
    rounds, bands = 6, 3
    first, second = both(
        sampler={"kind": "cyclic", "groups": bands}, rounds=rounds, aggregator={"noise_bands": bands},
    )  # fmt: skip
    difference = np.stack(first.sums) - np.stack(second.sums)
    c = sum(value * np.eye(rounds, k=-band) for band, value in enumerate(coefficients(bands)))
    assert np.count_nonzero(np.linalg.norm(difference, axis=1)) == rounds // bands
    whole = float(np.linalg.norm(c @ difference)) / first.norms[0]
    assert 0.1 < whole <= math.sqrt(rounds / bands) + 1e-9


def played_in_whole_numbers(
    world: World, out: Path, monkeypatch: pytest.MonkeyPatch, told: list[NDArray[np.float64]], changes: Any
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float64]], SumGrid]:
    """Run a world without noise, and return its sums, what was released, and the grid. ``told``: see ``played``."""
    sums, released, grids = list[NDArray[np.int64]](), list[NDArray[np.float64]](), list[SumGrid]()

    def spy(total: NDArray[np.int64], present: int, grid: SumGrid, **more: int) -> NDArray[np.float64]:
        sums.append(modular_sums.centred(total, grid))
        grids.append(grid)
        released.append(told[len(sums) - 1] if told else mean_of_sum(total, present, grid, **more))
        return released[-1]

    def none(mechanism: str, variance: float, noise: Noise, count: int, **more: object) -> NDArray[np.int64]:
        return np.zeros(count, np.int64)

    def coins(self: ClientShares, client: int, server_round: int) -> Noise:
        return Noise.seeded(100 * client + server_round)  # the same rounding of the other clients in both worlds

    mean_of_sum = modular_sums.mean_of_sum
    with monkeypatch.context() as spied:
        spied.setattr("strategies.distributed_sums.mean_of_sum", spy)
        spied.setattr(modular_sums, "drawn", none)
        spied.setattr(ClientShares, "_noise", coins)
        run(experiment(world, **changes), out)
    return sums, released, grids[0]


@pytest.mark.parametrize("clipping_norm", [1e-3, 0.3, 100.0])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_client_moves_a_sum_of_whole_numbers_by_no_more_than_is_charged(
    algorithm: str, clipping_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "algorithm": algorithm, "rounds": 3, "local": {"momentum": 0.0, "learning_rate": 0.3},
        "aggregator": {"kind": "distributed-dp", "noise_multiplier": 2.0, "clipping_norm": clipping_norm},
    }  # fmt: skip
    first, released, grid = played_in_whole_numbers("there", tmp_path / "there", monkeypatch, [], changes)
    second, _, _ = played_in_whole_numbers("nothing", tmp_path / "other", monkeypatch, released, changes)
    for one, other in zip(first, second, strict=True):
        assert np.linalg.norm(one - other) <= grid.l2
        assert np.abs(one - other).sum() <= grid.l1
    if clipping_norm == 1e-3:
        assert np.linalg.norm(first[0] - second[0]) > 0.99 * grid.l2
    assert len(first) == 3


def refused(**changes: Any) -> str:
    try:
        experiment("there", **changes)
    except UserError as error:
        return str(error)
    return ""


KINDS = [kind for kind in kinds_of("algorithm") if not refused(algorithm=kind)]


def test_most_algorithms_may_be_private() -> None:
    assert {"fedavg", "scaffold", "feddyn", "moon", "fedadam"} <= set(KINDS)


@pytest.mark.parametrize("algorithm", KINDS)
def test_it_holds_for_all_that_any_algorithm_sends(algorithm: str, both: Play) -> None:
    has_part = hasattr(kinds_of("algorithm")[algorithm], "sends")
    model = "mlp" if has_part else "logistic"  # of which a part can stay with a client
    changes = {"model": model, "local": {"momentum": 0.0, "learning_rate": 0.1}}
    first, second = both(algorithm=algorithm, aggregator=ADAPTIVE, **changes)
    assert max(moved(first, second)) <= 1 + 1e-9
    assert max(counts_moved(first, second)) == 0.5


@pytest.mark.parametrize("algorithm", ["fedmix", "naivemix"])
def test_shares_of_records_without_noise_have_no_adjacency_and_are_refused(algorithm: str) -> None:
    assert "its clients share averages of their records without noise" in refused(algorithm=algorithm)


@pytest.mark.parametrize("batch_norm", ["average", "personal"])
def test_so_are_layers_that_travel_beside_the_update(batch_norm: str) -> None:
    assert "running statistics are means over a client's records" in refused(local={"batch_norm": batch_norm})


class Loud(Averaging):
    """An algorithm whose clients send ones where they have no records."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        if trained.num_steps:
            return update
        ones = {name: value + 1 for name, value in update.payloads["delta"].items()}
        return ClientUpdate({"delta": ones}, task.num_examples, trained.loss)


def test_an_algorithm_whose_clients_send_something_without_records_is_refused(tmp_path: Path) -> None:
    loud = experiment("there", algorithm=f"{__name__}:Loud")
    with pytest.raises(UserError, match=r"Loud .* global-dp: .*without records"):
        run(loud, tmp_path / "run")
