"""The public pool: the first test records or a draw from the training records, and whose records are in both."""

import numpy as np
import pytest

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.types import Examples
from strategies.pate.settings import overlap, split_off


def test_the_pool_is_the_first_test_records_and_the_rest_is_for_evaluation() -> None:
    dataset = load("digits")
    split = split_off(dataset, "test", 100, seed=0)
    assert np.array_equal(split.pool.inputs, dataset.test.inputs[:100])
    assert np.array_equal(split.evaluation.labels, dataset.test.labels[100:])
    assert np.array_equal(split.private, np.arange(len(dataset.train)))
    assert len(split_off(dataset, "test", None, seed=0).pool) == 324


def test_a_pool_of_training_records_is_drawn_by_the_seed_and_leaves_the_others_to_teachers() -> None:
    dataset = load("digits")
    first, again, other = (split_off(dataset, "train", 200, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.private, again.private)
    assert not np.array_equal(first.private, other.private)
    assert len(first.private) == len(dataset.train) - 200
    assert not overlap(dataset.train.take(first.private), first.pool).any()
    assert first.evaluation is dataset.test


@pytest.mark.parametrize(("source", "size"), [("test", 360), ("test", 0), ("train", 1437)])
def test_a_part_that_would_be_empty_is_refused(source: str, size: int) -> None:
    with pytest.raises(UserError, match=f"a public pool of {size} out of"):
        split_off(load("digits"), source, size, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_overlap_is_a_matter_of_content_whatever_the_label(dtype: type) -> None:
    inputs = np.arange(40, dtype=dtype).reshape(10, 4)
    private = Examples(inputs, np.zeros(10, dtype=np.int64))
    pool = Examples(inputs[[3, 3, 7]].copy(order="F"), np.ones(3, dtype=np.int64))
    assert np.flatnonzero(overlap(private, pool)).tolist() == [3, 7]
