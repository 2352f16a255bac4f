"""Teachers by themselves: they learn their shard, differ from each other, and admit when they have diverged."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from clients.teacher import RandomForest, forest_votes, network_votes, votes_of
from fl_sim import models
from fl_sim.data import load
from fl_sim.errors import RunError
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import Records
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import LocalSettings, Trained

BUILD = partial(models.build, "logistic", (1, 8, 8), 10)
SETTINGS = LocalSettings(0.03, 0.9, 5e-3, 32, 10)


def _records() -> tuple[Records, torch.Tensor, np.ndarray]:
    dataset = load("digits")
    inputs, labels = to_tensors(dataset.train, dataset)
    pool, true = to_tensors(dataset.test, dataset)
    return Records.of(inputs[:300], labels[:300]), pool, true.numpy()


def test_a_teacher_learns_its_shard_and_its_votes_repeat() -> None:
    records, pool, true = _records()
    trainer = Trainer(BUILD(0), None)
    votes = network_votes(trainer, BUILD, SETTINGS, records, pool, client=3, seed=0, model_seed=0)
    assert votes.dtype == np.int64
    assert (votes == true).mean() > 0.85
    assert np.array_equal(votes, network_votes(trainer, BUILD, SETTINGS, records, pool, client=3, seed=0, model_seed=0))
    other = network_votes(trainer, BUILD, SETTINGS, records, pool, client=4, seed=0, model_seed=0)
    assert 0 < (votes != other).mean() < 0.2  # the same shard, other initial weights


def test_teachers_differ_in_their_weights_batches_and_coins() -> None:
    records, pool, _ = _records()
    drawn: dict[tuple[int, int], list[object]] = {}

    class Watched(Trainer):
        def train(self, job: LocalJob) -> Trained:
            with torch.random.fork_rng(devices=[]):
                job.seed()
                coins = torch.rand(3).tolist()
            batches = copy.deepcopy(job.generator).permutation(300).tolist()
            drawn[key] = [job.task.params["1.weight"].flatten()[:3].tolist(), batches, coins]
            return super().train(job)

    trainer, settings = Watched(BUILD(0), None), replace(SETTINGS, epochs=1)
    for key in ((3, 0), (4, 0), (3, 1)):
        network_votes(trainer, BUILD, settings, records, pool, client=key[0], seed=key[1], model_seed=key[1])
    for part in range(3):
        assert len({str(draws[part]) for draws in drawn.values()}) == 3


def test_forests_of_two_teachers_differ() -> None:
    records, pool, _ = _records()
    votes = [forest_votes(RandomForest(trees=3), records, pool, client=client, seed=0) for client in (0, 1)]
    assert not np.array_equal(*votes)


def test_a_forest_votes_too() -> None:
    records, pool, true = _records()
    votes = forest_votes(RandomForest(trees=30), records, pool, client=0, seed=0)
    assert (votes == true).mean() > 0.8
    assert np.array_equal(votes, forest_votes(RandomForest(trees=30), records, pool, client=0, seed=0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_no_vote_and_are_not_told(value: float) -> None:
    logits = torch.full((5, 3), 0.125)
    logits[2, 1] = value
    with pytest.raises(RunError, match="its training diverged") as caught:
        votes_of(logits)
    assert not any(part in str(caught.value) for part in ("0.125", "nan", "inf", "["))
    assert votes_of(torch.eye(3)).tolist() == [0, 1, 2]


def test_a_balanced_forest_decides_for_a_rare_class_where_it_is_the_likelier_one_by_its_own_records() -> None:
    generator = np.random.default_rng(0)
    labels = (np.arange(1500) % 15 == 0).astype(np.int64)
    inputs = generator.standard_normal((1500, 3)).astype(np.float32)
    inputs[:, 0] += 1.5 * labels
    plain, balanced = (
        RandomForest(trees=30, min_leaf=20, balanced=chosen).fit(inputs, labels, np.random.default_rng(1))
        for chosen in (False, True)
    )
    found, right = (forest.predict(inputs)[labels == 1].mean() for forest in (plain, balanced))
    assert found < 0.2
    assert right > 0.6
    assert balanced.predict(inputs)[labels == 0].mean() < 0.35
