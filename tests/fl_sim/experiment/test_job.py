"""A job: what an experiment needs to run, found once, and what data, split and device must be for that."""

import numpy as np
import pytest
import torch

from fl_sim.data import load
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import device_of, job_of, precision_of, resolved
from fl_sim.types import UserError


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_resolved_fills_in_the_model_that_fits_and_keeps_one_that_was_named():
    assert resolved(_made(), None).model == "dafl-cnn"
    assert resolved(_made("model=logistic"), None).model == "logistic"


def test_shards_are_disjoint_cover_all_records_and_follow_the_seed():
    shards = job_of(_made("partition=dirichlet:0.5")).shards
    total = len(load("digits", None).train)
    assert len(shards) == 10
    assert sorted(np.concatenate(shards).tolist()) == list(range(total))
    again = job_of(_made("partition=dirichlet:0.5", "algorithm=scaffold", "rounds=3")).shards
    other = job_of(_made("partition=dirichlet:0.5", "seed=1")).shards
    assert all(np.array_equal(*pair) for pair in zip(shards, again, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(shards, other, strict=True))


def test_centralized_training_is_one_client_with_everything():
    made = _made("algorithm=centralized", "partition=label-1")
    (shard,) = job_of(made).shards
    assert made.num_clients == 1
    assert shard.tolist() == list(range(len(load("digits", None).train)))


def test_an_impossible_split_is_the_users_mistake():
    with pytest.raises(UserError, match=r"partition label-k of digits over 10 clients: .*11"):
        job_of(_made("partition=label-11"))


def test_the_model_starts_from_the_seed():
    first, again, other = (job_of(_made(f"seed={seed}")).model() for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_the_device_is_the_one_asked_for(monkeypatch):
    assert device_of(_made("device=cpu")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(_made()).type == "cpu"
    with pytest.raises(UserError, match=r"device=cuda, but .*no CUDA device.*; take device=cpu"):
        device_of(_made("device=cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(_made()).type == "cuda"


def test_a_precision_is_refused_where_it_would_change_nothing(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    stacked = ("engine=inprocess", "engine.stack=4")
    assert precision_of(_made(), cpu) == "float32"
    assert precision_of(_made("local.precision=bfloat16", *stacked), cpu) == "bfloat16"
    for overrides in (["local.precision=bfloat16"], ["local.precision=tf32"], ["local.precision=tf32", *stacked]):
        with pytest.raises(UserError, match="changes nothing on a CPU"):
            precision_of(_made(*overrides), cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision_of(_made("local.precision=tf32"), gpu) == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match=r"local\.precision=tf32 changes nothing on a GPU older than"):
        precision_of(_made("local.precision=tf32"), gpu)
    with pytest.raises(UserError, match="bfloat16"):
        _made("local.precision=float16")
