"""Natural: groups stay whole, and who gets which does not depend on how large they are."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from partitions import ByGroup, ImpossibleSplit, Natural

GROUPS = np.array([7, 3, 7, 9, 3, 3, 12, 9])
LABELS = np.zeros(len(GROUPS), dtype=np.int64)


def split(num_clients: int, seed: int = 0, groups: np.ndarray = GROUPS) -> list[list[int]]:
    parts = Natural().split_groups(np.zeros(len(groups), np.int64), groups, num_clients, np.random.default_rng(seed))
    return [part.tolist() for part in parts]


def test_with_as_many_groups_as_clients_they_come_in_the_order_of_their_numbers() -> None:
    assert split(4) == split(4, seed=1) == [[1, 4, 5], [0, 2], [3, 7], [6]]


@pytest.mark.parametrize("num_clients", [1, 2, 3])
def test_with_more_groups_every_client_holds_equally_many_whole_ones(num_clients: int) -> None:
    parts = split(num_clients)
    assert sorted(record for part in parts for record in part) == list(range(8))
    held = [set(GROUPS[part]) for part in parts]
    assert sum(map(len, held)) == len(set.union(*held)) == 4
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_who_gets_which_group_is_drawn_by_the_seed_and_not_by_sizes() -> None:
    many = np.arange(40)
    assert split(3, 1, many) == split(3, 1, many) != split(3, 2, many)
    held = [set(part) for part in split(3, 1, many)]
    again = np.concatenate([many, many[:20]])  # twenty groups are twice as large
    assert [{int(again[record]) for record in part} for part in split(3, 1, again)] == held


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    with pytest.raises(ImpossibleSplit, match="its records come from 4 sources; use at most 4 clients"):
        split(5)
    assert isinstance(Natural(), ByGroup)
    with pytest.raises(ImpossibleSplit, match="does not say where its records come from"):
        Natural().split(LABELS, 2, np.random.default_rng(0))


def test_the_benchmark_splits_by_writer(
    load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load_benchmark("natural_split")
    assert (benchmark.WRITERS, benchmark.RECORDS) == (3_500, 800_000)
    monkeypatch.setattr(benchmark, "WRITERS", 70)
    monkeypatch.setattr(benchmark, "RECORDS", 4_000)
    benchmark.main()
    assert "4,000 records of 70 writers over 7 clients" in capsys.readouterr().out
