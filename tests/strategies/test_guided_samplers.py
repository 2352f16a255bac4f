"""Samplers with feedback: laws against fixed-size cohorts, unbiased means, questions that are counted, and resume."""

import json
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached
from fl_sim.seeding import rng
from fl_sim.simulation.forecast import num_predicted_at_start, work_of_rounds
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.testing_runs import check_run
from fl_sim.types import Aggregate, Cohort, Reply, ServerState
from strategies.aggregators import WeightedMean
from strategies.divfl import DivFL, representatives
from strategies.global_dp import GlobalDP
from strategies.guided_cohorts import GuidedCohorts
from strategies.guided_sampler import Feedback, GuidedSampler, Met
from strategies.importance import inclusion
from strategies.nothing import NoPreprocess
from strategies.oort import Oort
from strategies.power_of_choice import PowerOfChoice
from strategies.samplers import FixedSize

EQUAL = np.full(8, 5)
ALL_MET = {client: Met(1 + client % 2, 0.5 + client, 1.0, 1.0) for client in range(8)}
POWER = {"kind": "power-of-choice", "cohort_size": 2, "candidates_asked": 4}


def coins(seed: int) -> Any:
    return rng(seed, "sampler", 1).random


@pytest.mark.parametrize(
    ("sampler", "met"),
    [
        (PowerOfChoice(cohort_size=3, candidates_asked=3), {}),
        (Oort(cohort_size=3, alpha=0, exploration=1, least_exploration=1), {}),
        (Oort(cohort_size=3, alpha=0, exploration=1, least_exploration=1), ALL_MET),
    ],
    ids=repr,
)
def test_without_choice_a_cohort_is_that_of_a_fixed_size(sampler: GuidedSampler, met: Any) -> None:
    for seed in range(100):
        wanted = FixedSize(cohort_size=3).sample(8, coins(seed), 7)
        assert not len(sampler.candidates(coins(seed), Feedback(EQUAL, met)))
        assert sampler.select(coins(seed), 7, Feedback(EQUAL, met)).tolist() == wanted.tolist()
        assert sampler.sample(8, coins(seed), 7).tolist() == wanted.tolist()


def model_of(directory: Path, sampler: Any, **settings: Any) -> Any:
    run(experiment_from({"model": "logistic", "rounds": 3, "sampler": sampler, **settings}), directory)
    return load_file(directory / "model.safetensors")


def test_runs_without_choice_have_the_bits_of_plain_samplers(tmp_path: Path) -> None:
    """The training records are 3 times 479; with as many places as clients, every probability is 1."""
    equal = {"clients": 3, "partition": "iid"}
    pairs = {
        "fixed": ({"kind": "power-of-choice", "cohort_size": 2, "candidates_asked": 2}, "fixed-size:2"),
        "all": ({"kind": "power-of-choice", "cohort_size": 3, "candidates_asked": 3}, "full"),
        "certain": ({"kind": "importance", "cohort_size": 3}, "full"),
    }
    for name, (guided, plain) in pairs.items():
        one, other = (model_of(tmp_path / f"{name}-{i}", each, **equal) for i, each in enumerate((guided, plain)))
        assert all(torch.equal(one[key], other[key]) for key in one), name


def test_candidates_are_drawn_by_numbers_of_records_and_the_largest_losses_train() -> None:
    sizes, counts = np.array([1, 2, 0, 7]), np.zeros(4)
    for seed in range(4000):
        [drawn] = PowerOfChoice(cohort_size=1, candidates_asked=1).select(coins(seed), 1, Feedback(sizes))
        counts[drawn] += 1
    assert np.abs(counts / 4000 - sizes / 10).max() < 4.5 * np.sqrt(0.21 / 4000)
    sampler = PowerOfChoice(cohort_size=2, candidates_asked=4)
    assert sampler.candidates(coins(0), Feedback(sizes)).tolist() == [0, 1, 3]  # a client without records is not asked
    chosen = sampler.select(coins(0), 1, Feedback(sizes, asked={0: 2.0, 1: 0.5, 3: 2.0}))
    assert chosen.tolist() == [0, 3]
    assert sampler.select(coins(0), 1, Feedback(sizes, asked={0: 0.5, 1: 0.5, 3: 0.1})).tolist() == [0, 1]


def test_questions_are_answered_by_the_received_model_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[dict[int, float]]()
    select = PowerOfChoice.select
    monkeypatch.setattr(
        PowerOfChoice, "select", lambda self, *given: seen.append(dict(given[2].asked)) or select(self, *given)
    )
    settings = {"clients": 6, "partition": "dirichlet:0.5", "model": "logistic", "rounds": 3}
    experiment = experiment_from({**settings, "sampler": POWER, "devices": "log-normal"})
    run(experiment, tmp_path / "asked")
    run(experiment_from({**settings, "sampler": "fixed-size:2", "devices": "log-normal"}), tmp_path / "plain")
    job = job_of(experiment)
    runtime = procedure_of(job).runtime()
    params = detached(job.model().named_parameters())
    assert [len(asked) for asked in seen] == [4, 4, 4]
    for client, loss in seen[0].items():
        assert loss == runtime.trainer.evaluate(params, *runtime.own_records(client).tensors()).loss
    asked, plain = (read_rounds(tmp_path / name) for name in ("asked", "plain"))
    for one, other in zip(asked, plain, strict=True):
        assert (one.bytes_down, one.bytes_up) == (3 * (other.bytes_down or 0), other.bytes_up)
    assert procedure_of(job).traffic()["rounds"].down == sum(one.bytes_down or 0 for one in asked)
    procedure: Any = procedure_of(job)
    works = work_of_rounds(procedure, procedure.algorithm, 3)
    assert works[3].pieces == pytest.approx(3 * 4 * job.shards.sizes.mean())
    assert num_predicted_at_start(job, procedure.algorithm, 6) == 0


def test_asking_takes_virtual_time(tmp_path: Path) -> None:
    """A download at a megabyte a second, and a third of a record's training time for each of 479 records."""
    profile = tmp_path / "devices.csv"
    profile.write_text("records_per_second,download_mbps,upload_mbps\n" + "100,8,8\n" * 3)
    settings = {"clients": 3, "partition": "iid", "rounds": 1, "model": "logistic", "devices": f"profile:{profile}"}
    taken = {}
    for name, sampler in (("asked", {**POWER, "cohort_size": 1, "candidates_asked": 2}), ("plain", "fixed-size:1")):
        run(experiment_from({**settings, "sampler": sampler}), tmp_path / name)
        [line] = read_rounds(tmp_path / name)
        taken[name] = (line.virtual_seconds or 0.0, line.bytes_up or 0)
    sent = taken["plain"][1] / 1e6
    assert taken["asked"][0] - taken["plain"][0] == pytest.approx(479 * 0.01 / 3 + sent, rel=1e-6)


def sent(client: int, value: float, size: int) -> Reply:
    return Reply(client, {"delta": {"w": torch.tensor([value], dtype=torch.float64)}}, size, 0.5)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("by", ["records", "norms"])
def test_the_mean_of_importance_sampling_is_unbiased(weighting: str, by: str) -> None:
    """The expectation over all cohorts, weighted by their probabilities, is the mean over all clients."""
    sizes, updates = [4, 1, 0, 9, 2], [1.0, -3.0, 0.0, 0.25, 8.0]
    experiment = experiment_from({"clients": 5, "sampler": {"kind": "importance", "cohort_size": 2, "by": by}})
    layer = GuidedCohorts(experiment, {0: Met(1, 0.5, 3.0, 0.0), 3: Met(1, 0.5, 0.0, 0.0)})
    layer._sizes = np.array(sizes)
    layer.inner = SimpleNamespace(aggregate=lambda cohort, *_: WeightedMean().mean(cohort, weighting))  # type: ignore[assignment]
    rates = layer._sampler.rates(layer._feedback())
    assert rates.sum() == pytest.approx(2)
    algorithm: Any = SimpleNamespace(weighting=weighting)
    expected, met = 0.0, dict(layer.met)
    for cohort in chain.from_iterable(combinations(range(5), count) for count in range(6)):
        layer.met, layer._rates = dict(met), rates
        chance = np.prod([rates[i] if i in cohort else 1 - rates[i] for i in range(5)])
        if not chance or not cohort:
            continue
        replies = tuple(sent(client, updates[client], sizes[client]) for client in cohort)
        found = layer.aggregate(Cohort(2, replies, 5, 2), algorithm, ServerState({}))
        assert isinstance(found, Aggregate)
        expected += chance * float(found.payloads["delta"]["w"])
    weights = sizes if weighting == "examples" else [int(size > 0) for size in sizes]
    assert expected == pytest.approx(np.average(updates, weights=weights))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 9))
def test_probabilities_sum_to_the_size_and_keep_the_order(scores: list[float], size: int) -> None:
    given, rates = np.array(scores), inclusion(np.array(scores), size)
    assert rates.sum() == pytest.approx(min(size, np.count_nonzero(given)))
    assert ((rates >= 0) & (rates <= 1)).all()
    assert ((rates > 0) == (given > 0)).all() or given[given > 0].min() < 1e-290 * given.max()
    order = np.argsort(given)
    assert (np.diff(rates[order]) >= -1e-12).all()


def test_utilities_of_oort_by_hand() -> None:
    sizes = np.array([10, 20, 30, 40])
    met = {0: Met(1, 2.0, 1.0, 1.0), 1: Met(4, 0.5, 1.0, 4.0), 3: Met(2, 1.0, 1.0, 2.0)}
    found = Oort(alpha=2, preferred_percentile=50).utilities(5, Feedback(sizes, met))
    cut = np.percentile([20, 10, 40], 95)
    since = np.sqrt(0.1 * np.log(5) / np.array([1, 4, 2]))
    assert found == pytest.approx([20 + since[0], (10 + since[1]) * (2 / 4) ** 2, 0, cut + since[2]])
    assert Oort(alpha=0).utilities(5, Feedback(sizes, met))[1] == pytest.approx(10 + since[1])


def test_oort_takes_the_best_and_new_clients() -> None:
    """Round 100 explores a fifth: one of five places. Nobody but 0 to 3 is within 95 % of the fourth-best utility."""
    losses = [50.0, 60.0, 70.0, 80.0, 1.0, 1.0]
    met = {client: Met(99, loss, 1.0, 0.0) for client, loss in enumerate(losses)}
    sizes = np.array([1, 1, 1, 1, 1, 1, 1, 1, 0])
    for seed in range(50):
        chosen = Oort(cohort_size=5).select(coins(seed), 100, Feedback(sizes, met)).tolist()
        assert chosen[:4] == [0, 1, 2, 3]
        assert chosen[4] in (6, 7)
    chosen = Oort(cohort_size=8).select(coins(0), 1, Feedback(sizes, met)).tolist()
    assert chosen == list(range(8))  # too few new clients: known ones have the places that are left


def test_the_pacer_raises_the_percentile_where_the_sum_of_a_window_falls() -> None:
    """Windows of 2 rounds have the sums 20, 15, 15 and 3: the second and the fourth are falls."""
    gains = dict(enumerate([12.0, 8.0, 10.0, 5.0, 7.0, 8.0, 1.0, 2.0], start=1))
    sizes, met = np.array([10, 10]), {0: Met(8, 1.0, 1.0, 1.0), 1: Met(8, 1.0, 1.0, 5.0)}
    paced = Oort(pacer_window=2, pacer_step=40, preferred_percentile=30)
    feedback = Feedback(sizes, met, gains=gains)
    assert [paced.percentile(number, feedback) for number in range(1, 10)] == [30, 30, 30, 30, 70, 70, 70, 70, 100]
    assert Oort(preferred_percentile=30).percentile(9, feedback) == 30
    for number, preferred in ((4, 2.2), (5, 3.8), (9, 5.0)):  # percentiles of the durations 1 and 5
        one, other = paced.utilities(number, feedback)
        assert other / one == pytest.approx((preferred / 5) ** 2)


def test_the_pacer_changes_nothing_before_two_windows_and_is_off_by_default(tmp_path: Path) -> None:
    settings = {"clients": 6, "devices": "log-normal", "rounds": 6, "local": {"steps": 2, "learning_rate": 0.1}}
    off, *paced = (
        model_of(tmp_path / str(window), {"kind": "oort", "cohort_size": 2, "pacer_window": window}, **settings)
        for window in (0, 3, 50)
    )
    assert all(torch.equal(one[name], off[name]) for one in paced for name in off)
    [remark] = experiment_from({**settings, "sampler": {"kind": "oort", "cohort_size": 2, "pacer_window": 3}}).remarks
    assert "after 6 rounds" in remark


def value_of(distances: Any, chosen: Any) -> float:
    """Return the facility location function of the choice."""
    return float((distances.max() - distances[:, list(chosen)].min(axis=1)).sum())


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 4))
def test_the_greedy_choice_has_nearly_the_best_value(seed: int, num_clients: int, count: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(num_clients, 2)).round(1)
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    chosen = representatives(vectors, count)
    assert len(set(chosen)) == len(chosen) == min(count, num_clients)
    best = max(value_of(distances, one) for one in combinations(range(num_clients), len(chosen)))
    assert value_of(distances, chosen) >= (1 - 1 / np.e) * best - 1e-9
    single = max(value_of(distances, [one]) for one in range(num_clients))
    assert value_of(distances, chosen[:1]) == pytest.approx(single)


def test_divfl_takes_one_client_of_each_group_and_any_of_equal_ones() -> None:
    met = {client: Met(1, 1.0, 1.0, 0.0, (10.0 * (client // 3), 0.0)) for client in range(9)}
    cohorts = {tuple(DivFL(cohort_size=3).select(coins(seed), 2, Feedback(np.ones(9, int), met))) for seed in range(60)}
    assert all([client // 3 for client in one] == [0, 1, 2] for one in cohorts)
    assert {client for one in cohorts for client in one} == set(range(9))
    equal = {client: replace(one, sketch=(1.0, 2.0)) for client, one in met.items()}
    cohorts = {
        tuple(DivFL(cohort_size=3).select(coins(seed), 2, Feedback(np.ones(9, int), equal))) for seed in range(60)
    }
    assert len(cohorts) > 30
    some = {client: met[client] for client in (0, 1, 2, 3, 4)}
    chosen = DivFL(cohort_size=3).select(coins(0), 2, Feedback(np.array([1] * 7 + [0, 0]), some)).tolist()
    assert chosen[1:] == [5, 6]  # new clients first; clients without records never
    assert (
        DivFL(cohort_size=3).sample(9, coins(1), 1).tolist() == FixedSize(cohort_size=3).sample(9, coins(1), 1).tolist()
    )


def test_sketches_keep_distances() -> None:
    draw, sampler = np.random.default_rng(0), DivFL(sketch_size=400)
    one, other = draw.random((2, 30_000)) * draw.integers(1, 9, 30_000)
    one += 5  # without signs, sums of numbers with one sign would be far too large
    assert sampler.sketch(torch.from_numpy(one[:400])) == tuple(one[:400])
    sketches = [np.array(sampler.sketch(torch.from_numpy(update))) for update in (one, other, one - other)]
    np.testing.assert_allclose(sketches[0] - sketches[1], sketches[2], atol=1e-9)
    assert np.linalg.norm(sketches[2]) == pytest.approx(np.linalg.norm(one - other), rel=4 / np.sqrt(2 * 400))


@pytest.mark.parametrize(
    "sampler",
    [
        POWER,
        {"kind": "divfl", "cohort_size": 2},
        {"kind": "importance", "cohort_size": 2},
        {"kind": "oort", "cohort_size": 2, "pacer_window": 1, "pacer_step": 50},
    ],
    ids=str,
)
def test_runs_are_repeated_resumed_and_shared_by_workers_to_the_bit(sampler: Any) -> None:
    check_run(sampler=sampler, devices="log-normal", local={"learning_rate": 0.1})


def test_the_checkpoint_has_what_clients_sent(tmp_path: Path) -> None:
    experiment = experiment_from({"clients": 3, "sampler": {"kind": "oort", "cohort_size": 2}})
    layer = GuidedCohorts(experiment, {2: Met(3, 0.1, 1 / 3, 0.0, (0.1, 2.0))}, {1: 0.1, 2: 1 / 3})
    again = GuidedCohorts.of(experiment, tmp_path, json.loads(json.dumps(layer.state())))
    assert isinstance(again, GuidedCohorts)
    assert (again.met, again.gains) == (layer.met, layer.gains)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampler": POWER, "aggregator": "global-dp"}, "its effect on the privacy cost is not known"),
        ({"sampler": "oort:2", "aggregator": "distributed-dp:8"}, "distributed-dp"),
        ({"sampler": "oort:2", "local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "local.privacy=dp-sgd"),
        ({"sampler": "divfl:2", "aggregator": "distributed-dp:8"}, "distributed-dp"),
        ({"sampler": "divfl:2", "clients": 5001}, "compares all pairs of clients"),
        ({"sampler": "oort:9"}, "sampler.cohort_size=9 is more than the run's 6 clients"),
        ({"sampler": {**POWER, "candidates_asked": 1}}, "must be from sampler.cohort_size=2 to clients=6"),
        ({"sampler": {**POWER, "candidates_asked": 7}}, "must be from sampler.cohort_size=2 to clients=6"),
        ({"sampler": "importance:2", "algorithm": "scaffold"}, "cannot be divided by a probability"),
        ({"sampler": "importance:2", "algorithm": "term"}, "cannot be divided by a probability"),
        ({"sampler": "importance:2", "aggregator": "median"}, "leave aggregator out"),
        ({"sampler": "importance:2", "local": {"batch_norm": "average"}}, "leave local.batch_norm out"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        experiment_from({"clients": 6, "partition": "iid", **settings})


def test_no_aggregator_that_promises_privacy_is_beside_a_guided_sampler() -> None:
    chosen: Any = SimpleNamespace(clients=6, aggregator=GlobalDP(), local=SimpleNamespace(privacy=NoPreprocess()))
    with pytest.raises(ValueError, match="oort cannot run with aggregator=global-dp: the cohort depends on"):
        Oort(cohort_size=2).check(chosen)


def test_clients_that_never_train_are_not_asked(tmp_path: Path) -> None:
    evaluate = {"clients": "class-shares", "held_out_clients": 0.3}
    settings = {"clients": 6, "partition": "iid", "sampler": POWER, "rounds": 1, "evaluate": evaluate}
    with pytest.raises(UserError, match=r"leave evaluate\.held_out_clients out"):
        run(experiment_from(settings), tmp_path)
