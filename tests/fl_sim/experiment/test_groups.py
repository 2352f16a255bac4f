"""Records held out for validation: whose, how many, and when there are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.data import load
from fl_sim.engines.remote import Signer
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.groups import held_out
from fl_sim.experiment.job import job_of
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.remote_workers import WorkerSetup
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from partitions import Parts


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def _shards(*sizes):
    ends = np.cumsum(sizes)
    return Parts.of([np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)])


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
    alone = held_out(_shards(30, 12), 0.5, 0)[1]
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[0], alone[0])
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[1] - 30)


def test_a_client_left_without_training_records_is_named():
    with pytest.raises(UserError, match=r"evaluate.validation=0.9 .*all 2 records of client 1"):
        held_out(_shards(20, 2), 0.9, 0)


def test_a_validation_of_no_records_is_refused():
    with pytest.raises(UserError, match="holds no records out, because no client has two records"):
        held_out(_shards(1, 0, 1), 0.1, 0)


def test_a_job_trains_on_what_validation_leaves_of_the_same_split():
    plain, held = (
        job_of(_made("partition=dirichlet:0.5")),
        job_of(_made("partition=dirichlet:0.5", "evaluate.validation=0.2")),
    )
    assert len(plain.validation) == 0
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
    with pytest.raises(UserError, match=r"evaluate.validation=0.1 reads records without noise"):
        _made(*private, "evaluate.validation=0.1")


def test_a_run_that_measures_nothing_is_refused():
    with pytest.raises(UserError, match=r"evaluate.test=never .*evaluate.validation"):
        _made("evaluate.test=never")


@pytest.fixture
def with_validation(tmp_path):
    digits = load("digits", None)
    parts = {"train": digits.train, "val": digits.test.take(np.arange(50)), "test": digits.test}
    arrays = {f"x_{name}": part.inputs[:, 0] for name, part in parts.items()}
    np.savez(tmp_path / "own.npz", **arrays, **{f"y_{name}": part.labels for name, part in parts.items()})
    return f"data=npz:{tmp_path}/own.npz"


def test_given_validation_records_are_measured_and_clients_keep_all_of_theirs(with_validation, tmp_path):
    settings = ("partition=iid", "model=logistic", "rounds=2", "evaluate.test=last")
    job = job_of(_made(with_validation, "evaluate.validation=given", *settings))
    plain = job_of(_made("data=digits", *settings))
    assert job.num_validated == 50
    assert all(np.array_equal(one, other) for one, other in zip(job.shards, plain.shards, strict=True))
    result = run(job.experiment, tmp_path / "run")
    assert result["validation"]["records"] == 50
    [first, last] = read_rounds(tmp_path / "run")
    assert first.test_accuracy is None
    assert last.validation_accuracy == result["validation"]["final_accuracy"]
    examples = load(job.experiment.data).validation
    own = Measuring.of(job)
    assert own.validation is not None
    assert np.array_equal(own.validation.labels.numpy(), examples.labels)


def test_validation_records_that_nothing_uses_or_that_are_not_there_are_refused(with_validation):
    for used in ("evaluate.validation=0", "evaluate.validation=0.1"):
        with pytest.raises(UserError, match="comes with 50 validation records, which these settings do not use: set"):
            job_of(_made(with_validation, used))
    with pytest.raises(UserError, match="digits has no validation records of its own"):
        job_of(_made("evaluate.validation=given"))
    with pytest.raises(UserError, match="features=scattering are computed for training and test images"):
        job_of(_made(with_validation, "evaluate.validation=given", "features=scattering"))


def test_given_validation_records_do_not_travel_to_workers_which_measure_nothing(with_validation):
    setup = WorkerSetup.of(job_of(_made(with_validation, "evaluate.validation=given")), Signer.fresh())
    assert setup.dataset.validation is None
    assert setup.runtime.num_clients == 10


def test_a_run_does_not_go_on_with_other_validation_records(with_validation, tmp_path):
    job = job_of(_made(with_validation, "evaluate.validation=given", "model=logistic", "rounds=1"))
    run(job.experiment, tmp_path / "run")
    path = tmp_path / "own.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "y_val": arrays["y_val"][::-1]})
    with pytest.raises(UserError, match="other records"):
        run(job.experiment.model_copy(update={"rounds": 2}), tmp_path / "run")


@pytest.mark.parametrize("wrong", ["1", "-0.1", "gven", "nan"])
def test_what_is_no_share_is_refused_with_what_is(wrong):
    with pytest.raises(UserError, match="at least 0 and below 1, or the word 'given'"):
        _made(f"evaluate.validation={wrong}")
