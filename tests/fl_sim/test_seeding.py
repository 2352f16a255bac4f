"""Randomness by purpose: same arguments, same stream; other arguments, another one."""

from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_sim.seeding import _Key, rng, seed_torch, torch_kept


def _start(*arguments):
    return tuple(rng(*arguments).integers(2**62, size=2).tolist())


def test_streams_differ_by_seed_purpose_and_keys():
    arguments = [
        (seed, purpose, *keys)
        for seed, purpose in product((0, 1, 2**32, 2**40), ("batches", "share"))
        for keys in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**32 - 1,))
    ]
    assert len({_start(*argument) for argument in arguments}) == len(arguments)


@given(st.integers(0, 2**64), st.text(max_size=20), st.lists(st.integers(0, 2**32 - 1), max_size=3))
def test_the_same_arguments_give_the_same_stream(seed, purpose, keys):
    assert _start(seed, purpose, *keys) == _start(seed, purpose, *keys)


def test_streams_are_the_same_on_every_machine_and_in_every_version():
    assert _start(5, "batches", 3, 1) == (3178924547680202810, 284030045289686085)


def test_numpys_global_generator_is_neither_read_nor_moved():
    np.random.seed(0)  # noqa: NPY002 (the global generator is what is tested)
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    first = _start(0, "batches")
    np.random.seed(1)  # noqa: NPY002
    assert _start(0, "batches") == first
    np.random.seed(0)  # noqa: NPY002
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def _draw(*arguments):
    with torch_kept():
        seed_torch(*arguments)
        return tuple(torch.rand(4).tolist())


def test_torchs_streams_differ_by_seed_purpose_and_keys_and_come_again():
    arguments = [
        (seed, purpose, *keys)
        for seed, purpose in product((0, 1, 2**40), ("model", "local"))
        for keys in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,), (1, 10), (11, 0))
    ]
    draws = [_draw(*argument) for argument in arguments]
    assert len(set(draws)) == len(arguments)
    assert draws == [_draw(*argument) for argument in arguments]


def test_torchs_generator_is_as_before_after_the_block():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch_kept():
        seed_torch(0, "model")
        torch.rand(4)
    assert torch.equal(torch.rand(4), expected)


def test_torchs_generator_is_put_back_after_an_error_too():
    before = torch.get_rng_state()

    def fail():
        with torch_kept():
            torch.rand(4)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpus_are_seeded_and_put_back_too():
    torch.cuda.init()
    before = torch.cuda.get_rng_state()
    draws = []
    for _ in range(2):
        with torch_kept():
            seed_torch(0, "model")
            draws.append(torch.rand(4, device="cuda"))
    assert torch.equal(*draws)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_every_gpu_in_use_is_seeded_with_the_same_number_as_the_cpu(monkeypatch):
    """Without a GPU: two stand-ins for its generators."""

    class Generator:
        seeds: ClassVar[list[int]] = []

        def manual_seed(self, number):
            self.seeds.append(number)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(), Generator()))
    seed_torch(0, "model")
    assert Generator.seeds == [torch.initial_seed()] * 2


@given(st.integers(0, 2**128 - 1))
def test_a_key_is_philoxs_own_key_as_it_is(key):
    ours, numpys = np.random.Philox(_Key(key)), np.random.Philox(key=key)
    assert ours.state["state"]["key"].tolist() == numpys.state["state"]["key"].tolist()
    assert ours.random_raw(5).tolist() == numpys.random_raw(5).tolist()
