"""Model attacks: values by hand, closed forms against a search, and what the attackers may know."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.types import Cohort, Reply, ServerState
from strategies.aggregators import WeightedMean, as_rows
from strategies.attacks import ALittleIsEnough, HostileUpdates, Seen, SignFlip, with_row
from strategies.fedavg import FedAvg
from strategies.model_attacks import (
    FangTrim,
    FreeRider,
    GaussianUpdates,
    InnerProductManipulation,
    Mimic,
    MinMax,
    MinSum,
    OptimalALittleIsEnough,
    OptimalInnerProductManipulation,
    strongest,
)
from strategies.trimmed_mean import TrimmedMean


def replies(rows: Any, first: int = 0) -> list[Reply]:
    return [
        Reply(client, {"delta": {"w": torch.tensor(row, dtype=torch.float32)}}, 5, 1.0)
        for client, row in enumerate(rows, first)
    ]


def forged(attack: Any, hostile: Any, honest: Any = (), seed: int = 0) -> np.ndarray[Any, Any]:
    seen = Seen(replies(honest, 10), len(hostile) + len(honest), np.random.default_rng(seed))
    return np.array([one.payloads["delta"]["w"].tolist() for one in attack.forged(replies(hostile), seen)])


OWN, OTHERS = [[9.0, 9.0], [7.0, 5.0]], [[1.0, 2.0], [3.0, 2.0], [2.0, -1.0]]


def test_inner_product_manipulation_by_hand() -> None:
    assert forged(InnerProductManipulation(eps=0.5), OWN, OTHERS).tolist() == [[-1.0, -0.5]] * 2
    assert forged(InnerProductManipulation(eps=2.0, knows="own"), OWN, OTHERS).tolist() == [[-16.0, -14.0]] * 2
    assert forged(InnerProductManipulation(eps=0.5), OWN).tolist() == [[-4.0, -3.5]] * 2  # nobody is honest


def test_the_mean_turns_around_where_eps_is_above_honest_clients_per_hostile_one() -> None:
    for eps, sign in ((1.4, 1), (1.6, -1)):
        sent = forged(InnerProductManipulation(eps=eps), OWN, OTHERS)
        assert np.sign([*sent, *OTHERS]).shape == (5, 2)
        assert np.sign(np.mean([*sent, *OTHERS], axis=0)).tolist() == [sign, sign]


def search(holds: Any) -> float:
    """Return the largest g for which ``holds(g)``, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@pytest.mark.parametrize("seed", range(5))
def test_closed_forms_of_the_largest_step_equal_a_search(seed: int) -> None:
    coins = np.random.default_rng(seed)
    rows = coins.normal(size=(coins.integers(2, 9), 6)) * coins.uniform(0.1, 3, size=6)
    centred, way = rows - rows.mean(axis=0), coins.normal(size=6)
    way /= np.linalg.norm(way)
    apart = ((centred[:, None] - centred[None]) ** 2).sum(axis=2)

    def to(g: float) -> Any:
        return ((g * way - centred) ** 2).sum(axis=1)

    for attack, one in (
        (MinMax(), search(lambda g: to(g).max() <= apart.max())),
        (MinSum(), search(lambda g: to(g).sum() <= apart.sum(axis=1).max())),
    ):
        found = attack.largest_step(torch.from_numpy(centred), torch.from_numpy(way))
        assert found == pytest.approx(one, rel=1e-12)


def test_directions_of_min_max_by_hand() -> None:
    """Two updates at distance 2: mean (2, 0), deviation (1, 0); Min-Max and Min-Sum go to the lower one."""
    honest = [[1.0, 0.0], [3.0, 0.0]]
    for direction in ("deviation", "sign", "mean"):
        assert forged(MinMax(direction=direction), OWN, honest) == pytest.approx(np.array([[1.0, 0.0]] * 2))
        assert forged(MinSum(direction=direction), OWN, honest) == pytest.approx(np.array([[1.0, 0.0]] * 2))
    flat = [[1.0, 1.0], [1.0, 5.0]]  # mean (1, 3)
    moved = {way: (forged(MinSum(direction=way), OWN, flat)[0] - [1, 3]) / 2 for way in ("deviation", "sign", "mean")}
    assert moved["deviation"] == pytest.approx([0, -1])
    assert moved["sign"] == pytest.approx([-(0.5**0.5)] * 2)
    assert moved["mean"] == pytest.approx([-(0.1**0.5), -(0.9**0.5)])
    assert forged(MinMax(), OWN, [[2.0, 1.0]] * 3).tolist() == [[2.0, 1.0]] * 2  # no deviation


def test_fang_sends_values_beyond_all_honest_ones_against_their_mean() -> None:
    honest = [[1.0, -4.0, 0.5, 2.0], [3.0, -2.0, -2.0, -4.0], [2.0, -3.0, 6.0, -4.0]]  # means 2, -3, 1.5, -2
    sent = forged(FangTrim(clients=500), [[0.0] * 4] * 500, honest)
    bounds = [(0.5, 1.0), (-2.0, -1.0), (-4.0, -2.0), (2.0, 4.0)]
    for values, (low, high) in zip(sent.T, bounds, strict=True):
        assert low <= values.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < values.max() <= high
    own = forged(FangTrim(knows="own"), [[1.0, -2.0], [3.0, -6.0]])
    assert ((own >= [-2.0, 2.0]) & (own <= [-1.0, 4.0])).all()  # 3 to 4 deviations of 1 and of 2 from 2 and -4


def test_mimics_repeat_the_first_honest_client() -> None:
    assert forged(Mimic(), OWN, OTHERS).tolist() == [OTHERS[0]] * 2
    assert forged(Mimic(), OWN).tolist() == OWN


def test_noise_and_free_riders() -> None:
    wide = [[5.0] * 20_000] * 2
    for attack in (GaussianUpdates(deviation=3.0), FreeRider(deviation=3.0)):
        sent = forged(attack, wide)
        assert sent.mean() == pytest.approx(0, abs=0.06)
        assert sent.std() == pytest.approx(3.0, rel=0.02)
        assert abs(np.corrcoef(sent)[0, 1]) < 0.03
        assert (sent != forged(attack, wide, seed=1)).all()
    assert not forged(FreeRider(), OWN, OTHERS).any()


class Inner:
    """A layer's inner layer, which takes the mean, and returns the cohort that it is given as the aggregate."""

    hides_clients = False

    def aggregate(self, cohort: Any, *_: Any) -> Any:
        return cohort

    def foreseen(self, cohort: Any, *_: Any) -> Any:
        return WeightedMean().mean(cohort, "examples")


def aggregated(attack: Any, hostile: Any, answers: Any, seed: int = 0, server_round: int = 1) -> Any:
    """Return the numbers that are aggregated."""
    layer = HostileUpdates(attack, frozenset(hostile), seed)
    layer.inner = Inner()  # type: ignore[assignment]
    given: Any = Cohort(server_round, tuple(answers), len(answers), len(answers))
    cohort: Any = layer.aggregate(given, FedAvg(), ServerState({}))
    return [one.payloads["delta"]["w"].tolist() for one in cohort.replies]


def test_attackers_see_the_honest_updates_of_clients_with_records_and_new_coins_in_every_round() -> None:
    answers = replies([[8.0], [1.0], [3.0], [50.0], [8.0]])
    answers[3] = replace(answers[3], num_examples=0)
    sent = aggregated(InnerProductManipulation(eps=1.0), {0, 4}, answers)
    assert sent == [[-2.0], [1.0], [3.0], [50.0], [-2.0]]

    def noise(seed: int, server_round: int) -> Any:
        return aggregated(GaussianUpdates(), {0, 4}, answers, seed, server_round)[0][0]

    assert len({noise(0, 1), noise(0, 1), noise(0, 2), noise(1, 1)}) == 3


def test_the_search_finds_the_strength_that_moves_the_runs_own_aggregator_most() -> None:
    """The trimmed mean of five drops the forged value as soon as it is the lowest one."""
    rows = np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32)
    honest, rule = rows[1:].astype(np.float64), TrimmedMean(trim=0.2)

    def moved_by(sent: Any) -> float:
        aggregate: Any = rule.mean(Cohort(1, tuple(replies([sent, *rows[1:]])), 5, 5), "uniform")
        return float(np.linalg.norm(aggregate.payloads["delta"]["w"].numpy() - honest.mean(0)))

    class Trimmed(Inner):
        def foreseen(self, cohort: Any, *_: Any) -> Any:
            return rule.mean(cohort, "uniform")

    for attack, start, way in (
        (OptimalALittleIsEnough(), honest.mean(0), -honest.std(0)),
        (OptimalInnerProductManipulation(), 0 * honest[0], -honest.mean(0)),
    ):
        layer = HostileUpdates(attack, frozenset({0}), 0)
        layer.inner = Trimmed()  # type: ignore[assignment]
        cohort: Any = layer.aggregate(Cohort(1, tuple(replies(rows)), 5, 5.0), FedAvg(), ServerState({}))
        sent = cohort.replies[0].payloads["delta"]["w"].numpy()
        assert moved_by(sent) >= 0.97 * max(moved_by(start + z * way) for z in np.linspace(0, 20, 400))


def test_the_search_visits_the_strengths_of_byzfl() -> None:
    visited = []

    def harm(strength: float) -> float:
        visited.append(strength)
        return strength if strength < 34 else 0.0

    assert strongest(harm, 15) == pytest.approx(30 + 40 * 0.8**11)
    assert visited == pytest.approx([0, 10, 30, *(30 + 40 * 0.8**power for power in range(12))])


class Found(OptimalInnerProductManipulation):
    """Sends what a search of two strengths finds, without a search."""

    kind: str = "found"  # type: ignore[assignment]

    def forged(self, hostile: Any, seen: Seen) -> Any:
        sent = -10.0 * as_rows(seen.honest).double().mean(dim=0)
        return [with_row(reply, sent.float()) for reply in hostile]


def test_a_search_leaves_the_memory_of_the_aggregator_alone(tmp_path: Any) -> None:
    clipping = {"kind": "centred-clipping", "tau": 0.5}
    settings = {"partition": "iid", "model": "logistic", "rounds": 3, "aggregator": clipping, "clients": 6}
    found = []
    for name, attack in (("searched", "opt-ipm"), ("found", f"{__name__}:Found")):
        made = {**settings, "attack": {"kind": attack, "clients": 1, "evaluations": 2}}
        found.append(load_file(fl_sim.run(made, out=tmp_path / name, progress=False).directory / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_no_aggregate_with_a_privacy_cost_is_tried_out() -> None:
    with pytest.raises(UserError, match="opt-alie cannot run with aggregator global-dp: it tries out aggregates"):
        experiment_from({"attack": "opt-alie", "aggregator": {"kind": "global-dp", "noise": "seeded"}})


@pytest.mark.parametrize("kind", ["ipm", "min-max", "min-sum", "fang-trim", "gaussian-noise", "free-rider"])
def test_forged_updates_have_no_compressed_form(kind: str) -> None:
    with pytest.raises(UserError, match=f"attack {kind} cannot run with compress qsgd.*leave compress out"):
        experiment_from({"attack": kind, "compress": "qsgd"})
    assert experiment_from({"attack": "mimic", "compress": "qsgd"})


def test_alone_without_knowledge_is_told() -> None:
    for kind in ("min-max", "min-sum", "fang-trim"):
        told = experiment_from({"attack": {"kind": kind, "clients": 1, "knows": "own"}, "partition": "iid"}).remarks
        assert any(f"attack {kind} has no effect" in one and "set a larger attack.clients" in one for one in told)
        assert not experiment_from({"attack": {"kind": kind, "clients": 1}, "partition": "iid"}).remarks
    assert not experiment_from({"attack": {"kind": "ipm", "clients": 1, "knows": "own"}, "partition": "iid"}).remarks
    assert ALittleIsEnough().knows == "own"
    assert SignFlip(clients=1)
