"""Records held out for validation: whose, how many, and when there are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.evaluate import held_out
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def _shards(*sizes):
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.floats(0.01, 0.5), st.integers(0, 3))
def test_each_clients_records_are_parted_and_two_or_more_leave_one_on_each_side(sizes, share, seed):
    if max(sizes) < 2:
        return
    shards = _shards(*sizes)
    trained_on, validated_on = held_out(shards, share, seed)
    for shard, kept, out in zip(shards, trained_on, validated_on, strict=True):
        assert np.array_equal(np.sort(np.concatenate([kept, out])), shard)
        assert len(out) == (max(1, round(share * len(shard))) if len(shard) > 1 else 0)
        assert len(kept) > 0 or not len(shard)


def test_what_is_held_out_follows_the_seed_and_the_client_alone():
    shards = _shards(30, 30)
    (_, first), (_, again), (_, other) = (held_out(shards, 0.5, seed) for seed in (0, 0, 1))
    alone = held_out([shards[0], _shards(30, 12)[1]], 0.5, 0)[1]
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[0], alone[0])
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[1] - 30)


def test_a_client_left_without_training_records_is_named():
    with pytest.raises(UserError, match=r"evaluate.validation=0.9 leaves client 1, which holds 2 records, none"):
        held_out(_shards(20, 2), 0.9, 0)


def test_a_validation_of_no_records_is_refused():
    with pytest.raises(UserError, match="holds nothing out, as no client holds two records"):
        held_out(_shards(1, 0, 1), 0.1, 0)


def test_a_job_trains_on_what_validation_leaves_of_the_same_split():
    plain, held = (
        job_of(_made("partition=dirichlet:0.5")),
        job_of(_made("partition=dirichlet:0.5", "evaluate.validation=0.2")),
    )
    assert plain.validation == ()
    for shard, kept, out in zip(plain.shards, held.shards, held.validation, strict=True):
        assert set(kept) | set(out) == set(shard)
        assert len(out) == round(0.2 * len(shard))
    total = sum(map(len, held.shards)) + sum(map(len, held.validation))
    assert total == len(load("digits", None).train)


@pytest.mark.parametrize(
    "private",
    [
        ["aggregator=global-dp", "aggregator.noise_multiplier=1"],
        ["algorithm=pate"],
        ["preprocess=da-fl"],
        ["calibrate=ccvr", "calibrate.epsilon=1"],
    ],
)
def test_validation_has_no_place_in_a_run_that_promises_privacy(private):
    with pytest.raises(UserError, match=r"evaluate.validation=0.1 reads clients' own records without noise"):
        _made(*private, "evaluate.validation=0.1")


def test_a_run_that_measures_nothing_is_refused():
    with pytest.raises(UserError, match=r"evaluate.test=never without evaluate.validation measures nothing"):
        _made("evaluate.test=never")
