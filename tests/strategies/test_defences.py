"""Defences after 2020, and Bulyan: laws, values by hand, and memories that a checkpoint keeps."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.settings import kinds_of
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate, Cohort, Reply
from strategies.aggregators import Robust, WeightedMean
from strategies.bulyan import Bulyan
from strategies.centred_clipping import CentredClipping
from strategies.coordinate_median import CoordinateMedian
from strategies.dnc import DnC
from strategies.flame import Flame
from strategies.foolsgold import FoolsGold, foolsgold_weights
from strategies.geometric_median import GeometricMedian
from strategies.krum import Krum
from strategies.mixing import Bucketing, NearestNeighbourMixing
from strategies.norm_bound import NormBound
from strategies.signguard import SignGuard

RULES = [made() for made in kinds_of("aggregator").values() if issubclass(made, Robust) and made is not Flame]
RULES.append(Flame(noise=0))
NINE = np.random.default_rng(2).normal(size=(9, 5)).astype(np.float32)


def cohort(rows: Any, server_round: int = 1, clients: Any = None, seed: int = 0, **more: Any) -> Cohort:
    numbers = clients or range(len(rows))
    replies = [
        Reply(client, {"delta": {"w": torch.tensor(row, dtype=torch.float32)}}, 7, 1.0)
        for client, row in zip(numbers, rows, strict=True)
    ]
    own = more.pop("own", replies[0].payloads)  # the server's own update, which only one rule reads
    return Cohort(server_round, tuple(replies), 9, float(len(rows)), seed=seed, own=own, **more)


def made(rule: Any, rows: Any, **more: Any) -> Aggregate:
    aggregate = rule.mean(cohort(rows, **more), "examples")
    assert aggregate is not None
    return aggregate


def row(rule: Any, rows: Any, **more: Any) -> Any:
    return made(rule, rows, **more).payloads["delta"]["w"].tolist()


@pytest.mark.parametrize("rule", RULES, ids=lambda one: one.kind)
def test_clients_that_agree_have_their_common_update(rule: Any) -> None:
    common = [0.25, -0.5, 0.125]
    assert row(rule, [common] * 9) == pytest.approx(common, abs=1e-6)


MEANS = {
    "dnc without hostile clients": DnC(hostile=0),
    "dnc that leaves nothing out": DnC(filter_share=0),
    "clipped far away": CentredClipping(tau=1e9),
    "bulyan without hostile clients": Bulyan(hostile=0),
    "all are neighbours": NearestNeighbourMixing(hostile=0, over=Krum(hostile=3)),
    "one bucket": Bucketing(size=9, over=CoordinateMedian()),
    "mean of buckets": Bucketing(size=3, over=WeightedMean()),
    "a bound above all": NormBound(norm_bound=1e6),
}


@pytest.mark.parametrize("name", MEANS)
def test_without_a_defence_the_result_is_the_mean(name: str) -> None:
    memory = {"delta/w": torch.ones(5)}
    assert row(MEANS[name], NINE, memory=memory) == pytest.approx(NINE.mean(axis=0).tolist(), abs=1e-6)


@pytest.mark.parametrize("over", [CoordinateMedian(), Krum(hostile=2), CentredClipping(tau=0.5)], ids=repr)
def test_buckets_of_one_are_the_inner_rule(over: Any) -> None:
    assert row(Bucketing(size=1, over=over), NINE) == pytest.approx(row(over, NINE), abs=1e-6)


def test_buckets_are_means_of_different_updates_drawn_anew_by_seed_and_round() -> None:
    """Powers of two: a sum tells which updates are in it."""
    rows, found = [[2.0**power] for power in range(5)], set()
    for seed, server_round in ((0, 1), (0, 2), (1, 1)):
        means = Bucketing(size=2).means(torch.tensor(rows), cohort(rows, server_round, seed=seed)).flatten().tolist()
        sums = [int(mean * size) for mean, size in zip(means, (2, 2, 1), strict=True)]
        assert sum(sums) == 31
        assert [one.bit_count() for one in sums] == [2, 2, 1]
        found.add(tuple(sums))
    assert len(found) > 1


def test_nearest_neighbours_by_hand() -> None:
    rows = [[0.0], [1.0], [3.0], [7.0], [100.0]]
    mixed = NearestNeighbourMixing(hostile=2).means(torch.tensor(rows), cohort(rows))
    assert mixed.flatten().tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 11 / 3, 110 / 3])
    assert row(NearestNeighbourMixing(hostile=2, over=CoordinateMedian()), rows) == pytest.approx([4 / 3])


def test_centred_clipping_by_hand_with_its_memory() -> None:
    rule = CentredClipping(tau=1.0)
    first = made(rule, [[3.0, 4.0], [0.3, 0.4]])
    assert first.payloads["delta"]["w"].tolist() == pytest.approx([0.45, 0.6])
    # From (0.45, 0.6): (3, 4) is 4.25 away along (0.6, 0.8), and moves by 1; (0.45, 0.6) itself by 0.
    assert row(rule, [[3.0, 4.0], [0.45, 0.6]], memory=first.memory) == pytest.approx([0.75, 1.0])
    assert row(CentredClipping(tau=1.0, iterations=2), [[3.0, 4.0], [0.3, 0.4]]) == pytest.approx([0.675, 0.9])
    far = np.linalg.norm(row(rule, [[1e8, 0.0], *[[0.0, 0.0]] * 9]))
    assert far == pytest.approx(0.1)  # tau / n, however far


FIVE = [[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [10.0, 10.0], [2.0, 2.0]]
BYZFL: dict[str, tuple[Any, list[float]]] = {
    "NNM 1, median": (NearestNeighbourMixing(hostile=1, over=CoordinateMedian()), [1.25, 1.5]),
    "CenteredClipping 2": (CentredClipping(tau=2.0), [1.1234563013492043, 1.144570863149221]),
    "Clipping 2": (NormBound(norm_bound=2.0), [1.1234563013492043, 1.144570863149221]),
    "Krum 2": (Krum(hostile=1), [2.0, 1.0]),  # it adds one neighbour more than the paper
    "GeometricMedian": (GeometricMedian(iterations=5000), [1.9999993654669082, 1.9999992598935212]),
}


@pytest.mark.parametrize("name", BYZFL)
def test_values_of_byzfl(name: str) -> None:
    """They are those of ByzFL 0.0.11 (benchmarks/peers/robust_byzfl.py has all rules on random vectors)."""
    rule, value = BYZFL[name]
    assert row(rule, FIVE) == pytest.approx(value, abs=1e-5)
    rule_twice, memory = CentredClipping(tau=2.0), made(CentredClipping(tau=2.0), FIVE).memory
    assert row(rule_twice, FIVE, memory=memory) == pytest.approx([1.5253822664047143, 1.6824986804930173], abs=1e-6)


def test_dnc_leaves_out_those_along_the_direction_of_the_largest_spread() -> None:
    rows = [[0.0, 0.1], [0.1, 0.0], [0.0, 0.0], [0.1, 0.1], [0.05, 0.05], [9.0, 9.0], [9.0, 9.1]]
    assert row(DnC(hostile=2), rows) == pytest.approx(np.mean(rows[:5], axis=0).tolist(), abs=1e-6)
    assert row(DnC(hostile=4, filter_share=0.5), [*rows, [0.05, 0.05], [0.05, 0.05]]) == pytest.approx([0.05, 0.05])


def test_bulyan_by_hand() -> None:
    """Krum selects 2.1, 3.3, 1, 6.1 and 4.6, in this order; the three next to their median are 2.1, 3.3 and 4.6."""
    rows = [[value] for value in (0.0, 1.0, 2.1, 3.3, 4.6, 6.1, 100.0)]
    assert row(Bulyan(hostile=1), rows) == pytest.approx([10 / 3])
    assert row(Bulyan(hostile=1), rows[::-1]) == pytest.approx([10 / 3])


def test_signguard_by_hand() -> None:
    """A norm ten times the median's is left out, and so are opposite signs; the longest is scaled to the median."""
    honest = [[1.0, 1.0, 1.0, -1.0]] * 5
    rows = [*honest, [2.0, 2.0, 2.0, -2.0], [-1.0, -1.0, -1.0, 1.0], [30.0, 30.0, 30.0, -30.0]]
    assert row(SignGuard(coordinate_share=1.0), rows) == pytest.approx([1.0, 1.0, 1.0, -1.0])


def test_foolsgold_by_hand_and_over_rounds() -> None:
    assert foolsgold_weights(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), 1.0).tolist() == [0.0, 0.0, 1.0]
    # Cosine 0.6 between the first two, 0.8 between the last two: a is 0.2 / 0.25, 0 and 1 after pardoning.
    histories = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    pardoned = 0.6 * 0.6 / 0.8
    shares = torch.tensor([1 - pardoned, 0.2, 0.2], dtype=torch.float64) / (1 - pardoned)
    assert foolsgold_weights(histories, 1.0).tolist() == pytest.approx(
        [1.0, *[max(0.0, float(share.logit()) + 0.5) for share in shares[1:]]]
    )
    rule, first = FoolsGold(), [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    memory = made(rule, first, clients=[2, 4, 5]).memory
    assert {name: value.tolist() for name, value in memory.items()} == {
        "2/delta/w": [1.0, 0.0], "4/delta/w": [1.0, 0.0], "5/delta/w": [0.0, 1.0],
    }  # fmt: skip
    later = made(rule, [[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]], clients=[2, 4, 5], memory=memory)
    assert later.payloads["delta"]["w"].tolist() == pytest.approx([3.0, 3.0])  # 2 and 4 are still too similar


def test_flame_leaves_a_far_minority_out_clips_to_the_median_norm_and_adds_noise_in_its_proportion() -> None:
    generator = np.random.default_rng(0)
    honest = np.concatenate([generator.normal(1, 0.1, size=(6, 400)), 3 * generator.normal(1, 0.1, size=(1, 400))])
    attacked = np.concatenate([honest, generator.normal(-5, 0.1, size=(3, 400))])
    kept = np.array(row(Flame(noise=0), attacked))
    assert kept.mean() == pytest.approx(1.05, abs=0.1)
    middle = np.median(np.linalg.norm(attacked, axis=1))
    assert np.linalg.norm(kept) <= middle
    noisy = np.array(row(Flame(noise=0.5), attacked)) - kept
    assert noisy.std() == pytest.approx(0.5 * middle, rel=0.1)
    assert (noisy != np.array(row(Flame(noise=0.5), attacked, server_round=2)) - kept).all()


@pytest.mark.parametrize("harm", [-1e8, 1e8])
def test_no_size_of_two_hostile_updates_of_nine_moves_the_geometric_median(harm: float) -> None:
    honest = np.random.default_rng(0).normal(0, 0.1, size=(7, 20))
    attacked = np.concatenate([honest, np.full((2, 20), harm)])
    moved = np.array(row(GeometricMedian(), attacked)) - np.array(row(GeometricMedian(), honest))
    assert np.linalg.norm(moved) < np.linalg.norm(honest, axis=1).max()


def test_noise_beside_a_norm_bound_has_its_deviation_and_comes_from_seed_and_round() -> None:
    noisy, rows = NormBound(norm_bound=1.0, noise=0.5), np.zeros((2, 20_000), dtype=np.float32)
    one, again, other, later = (
        np.array(row(noisy, rows, **more)) for more in ({}, {}, {"seed": 1}, {"server_round": 2})
    )
    assert one.std() == pytest.approx(0.5, rel=0.03)
    assert (one == again).all()
    assert abs(np.corrcoef([one, other, later]) - np.eye(3)).max() < 0.03


@pytest.mark.parametrize(
    ("rule", "count", "needed"),
    [(Bulyan(hostile=2), 10, 11), (DnC(hostile=3), 6, 7), (DnC(hostile=2, iterations=4), 8, 9),
     (NearestNeighbourMixing(hostile=2), 4, 5), (NearestNeighbourMixing(hostile=0, over=Krum(hostile=1)), 4, 5),
     (Bucketing(size=3, over=Krum(hostile=0)), 6, 7)],
)  # fmt: skip
def test_too_few_clients_are_refused_with_the_bound(rule: Any, count: int, needed: int) -> None:
    assert made(rule, np.zeros((needed, 2)))
    with pytest.raises(RunError, match=f"has {count} clients with records: {rule.kind} needs at least {needed}; set"):
        rule.mean(cohort(np.zeros((count, 2))), "uniform")
    with pytest.raises(UserError, match=f"aggregator {rule.kind} needs {needed} clients in a round, and rounds have"):
        experiment_from({"aggregator": rule, "clients": count})


@pytest.mark.parametrize("over", ["global-dp", "distributed-dp", "foolsgold"])
def test_means_of_clients_are_refused_where_single_clients_are_needed(over: str) -> None:
    needed = {"kind": over, "epsilon": 8.0} if over == "distributed-dp" else over
    with pytest.raises(UserError, match=f"nnm cannot run over {over}.*needs the updates of single.*aggregator.over"):
        experiment_from({"aggregator": {"kind": "nnm", "over": needed}})


REMEMBERING = {
    "buckets": {"kind": "bucketing", "over": {"kind": "centred-clipping", "tau": 0.3}},
    "foolsgold": "foolsgold",
    "fltrust": "fltrust:60",
}


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam"])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Any, stop_after: Any, name: str, algorithm: str) -> None:
    settings = {"aggregator": REMEMBERING[name], "algorithm": algorithm, "model": "logistic", "rounds": 4,
                "clients": 6, "partition": "dirichlet:0.5", "attack": "ipm:1"}  # fmt: skip
    whole = fl_sim.run(settings, out=tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        run(experiment_from(settings), tmp_path / "cut", observer=stop_after(2))
    fl_sim.run(settings, out=tmp_path / "cut", progress=False)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    short = fl_sim.run({**settings, "aggregator": "mean"}, out=tmp_path / "mean", progress=False)
    assert short.facts["measures"] != whole.facts["measures"]


def test_a_rule_that_changes_nothing_is_told(tmp_path: Any) -> None:
    settings = {"aggregator": "centred-clipping:1e6", "model": "logistic", "rounds": 1, "partition": "iid"}
    told = fl_sim.run(settings, out=tmp_path / "run", progress=False).facts["warnings"]
    assert any("aggregator.tau=1e+06 has no effect: no update was further" in one for one in told)
