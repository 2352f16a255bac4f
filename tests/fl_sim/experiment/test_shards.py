"""How training records are divided among clients, and what is refused as no division."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import job_of
from fl_sim.types import Dataset
from strategies.algorithm import Split
from strategies.fedavg import FedAvg


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_shards_are_disjoint_cover_all_records_and_follow_the_seed():
    shards = job_of(_made("partition=dirichlet:0.5")).shards
    total = len(load("digits", None).train)
    assert len(shards) == 10
    assert sorted(np.concatenate(shards).tolist()) == list(range(total))
    again = job_of(_made("partition=dirichlet:0.5", "algorithm=scaffold", "rounds=3")).shards
    other = job_of(_made("partition=dirichlet:0.5", "seed=1")).shards
    assert all(np.array_equal(*pair) for pair in zip(shards, again, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(shards, other, strict=True))


def test_an_impossible_split_is_the_users_mistake():
    with pytest.raises(UserError, match=r"partition label-k of digits over 10 clients: .*11"):
        job_of(_made("partition=label-11"))


@dataclass(frozen=True)
class Given:
    """A scheme that deals out what it is told to, right or wrong."""

    parts: tuple[tuple[float, ...], ...] = ()

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> list[Any]:
        return [np.array(part) if part else np.array([]) for part in self.parts]


def test_an_own_scheme_may_leave_clients_empty():
    first, second = job_of(Experiment(partition=Given(((5, 3), ())), clients=2)).shards
    assert (first.tolist(), second.tolist(), second.dtype) == ([5, 3], [], np.int64)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((1,), (2,), (3,)), "Given gave 3 shards for 2 clients: it must give one for each"),
        (((1,), (2, 1)), "Given gave record 1 to several clients: shards must be disjoint"),
        (((1,), (0.5,)), "Given gave shards that are not arrays of record indices from 0 to 1436"),
        (((1,), (-1,)), "not arrays of record indices from 0 to 1436"),
        (((1437,), (2,)), "not arrays of record indices from 0 to 1436"),
    ],
)
def test_parts_that_are_none_are_refused_with_the_name_of_who_gave_them(parts, message):
    with pytest.raises(UserError, match=message):
        job_of(Experiment(partition=Given(parts), clients=2))


@dataclass(frozen=True)
class Answering:
    """A scheme that answers with what is no list of arrays, or fails."""

    kind: str = "dict"

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Any:
        if self.kind == "fails":
            return labels.no_such_thing
        parts = [np.arange(3), np.arange(3, 5)]
        empty = [np.zeros(0, np.int64)] * 2
        return {"dict": dict(enumerate(parts)), "generator": iter(parts), "none": None, "text": "ab",
                "numbers": np.arange(2), "ragged": [[[1], [2, 3]], [4]], "nobody": empty}[self.kind]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "dict",
            r"Answering gave dict; it must give a list of arrays .* one for each client: return list\(parts.values",
        ),
        ("generator", "Answering gave list_iterator; it must give a list of arrays"),
        ("none", "Answering gave NoneType; it must give a list of arrays"),
        ("text", "Answering gave str; it must give a list of arrays of record indices, one for each client$"),
        ("numbers", "Answering gave shards that cannot be arrays of indices .*; it must give a list of arrays"),
        ("ragged", "Answering gave shards that cannot be arrays of indices .*; it must give a list of arrays"),
        ("nobody", "Answering gave no record to any of 2 clients: give records to at least one client"),
        ("fails", "Answering failed with AttributeError: .*no_such_thing"),
    ],
)
def test_what_is_no_list_of_parts_is_refused_in_one_line(kind, message):
    with pytest.raises(UserError, match=message) as refused:
        job_of(Experiment(partition=Answering(kind), clients=2))
    assert "\n" not in str(refused.value)


class Dealer(FedAvg):
    """Has a mistake in its ``deal``."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        raise KeyError("groups")


def test_an_error_in_an_own_deal_names_the_algorithm():
    with pytest.raises(UserError, match=r"algorithm .*Dealer: deal failed with KeyError: 'groups'"):
        job_of(Experiment(algorithm=Dealer()))


class Hoarding(FedAvg):
    """Client 0 gets the last record of everybody else's part as well; it ends after 3 rounds."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        parts = split(np.arange(len(dataset.train)))
        taken = np.array([part[-1] for part in parts[1:]])
        return [np.concatenate([parts[0], taken]), *(part[:-1] for part in parts[1:])]

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        return min(rounds, 3)


class ByLabels(FedAvg):
    """Takes labels for records."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        return split(dataset.train.labels)


def test_an_own_algorithm_splits_records_and_not_their_labels():
    with pytest.raises(UserError, match=r"ByLabels: .* pass each index at most once"):
        job_of(Experiment(algorithm=ByLabels()))


def test_an_own_algorithm_may_deal_the_records_and_end_by_itself():
    plain = job_of(Experiment(partition="iid", clients=4))
    made = job_of(Experiment(partition="iid", clients=4, algorithm=Hoarding(), rounds=8))
    assert [len(shard) for shard in made.shards] == [
        len(plain.shards[0]) + 3,
        *(len(one) - 1 for one in plain.shards[1:]),
    ]
    assert (plain.experiment.rounds, made.experiment.rounds) == (20, 3)
