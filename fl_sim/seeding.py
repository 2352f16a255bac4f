"""Random generators for simulation.

A generator depends only on a seed, a purpose (a text such as "batches") and integers, such as the round number.

An experiment has several seeds. If only one seed changes between runs, such as the seed of the partition, the variance
from this seed can be measured. The purposes of each seed are:

``partition_seed``: "partition" (the assignment of records to clients), "validation" (the choice of validation records)
and "public pool" (the choice of PATE's public records). Partitions that change records also use "feature-noise" (also
for test and validation records) and "client groups".

``model_seed``: "model" (initial weights) and "teacher" (initial weights of PATE's networks).

``sampling_seed``: "sampler" (the choice of clients in each round).

``seed``: all other purposes, such as "batches", "local" (dropout), "hostile clients", "share", "generator", "server
epochs", "class gaussians", and PATE's random forests ("teacher" and students). Seeded noise, which a user may
choose for tests, also depends on ``seed``. Secret noise and the cohorts of Global DP do not come from a seed.

A user's own code may draw from the global generators of torch, NumPy or Python. These generators are seeded for the
purposes above, and for "data set" (with the seed 0). In a round, they are seeded before an algorithm's methods ``plan``
and ``finish`` on clients, and before the server's "sampling", "merging" and "evaluation". They are not seeded for code
that makes synthetic records.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from fl_sim.importing import torch

# The lock is reentrant, because one thread may acquire it twice: a user's model factory is called while this thread has
# the lock, and may call ``models.build``, which acquires the lock again.
_LOCK = RLock()


def rng(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a NumPy random generator for ``purpose``. Other purposes or keys give independent generators.

    ``keys``: integers such as (client, server_round). The same arguments give the same stream in every process. These
    streams are for simulation, not for noise that protects privacy.

    >>> rng(0, "batches", 3, 1).integers(100) == rng(0, "batches", 3, 1).integers(100)
    np.True_
    """
    key = _Key(_key(seed, purpose, keys) >> 128)
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # numpy's stubs know one ISeedSequence


def seed_torch(seed: int, purpose: str, *keys: int) -> None:
    """Seed torch's global generators, from which layer initialisation and dropout draw.

    Call this function only in a process that runs nothing but fl-sim, or inside ``torch_kept``. This function replaces
    ``torch.manual_seed``, which is slower: without an initialised GPU, it records a stack trace in each call.
    """
    number = _key(seed, purpose, keys) >> 193  # keeps 63 of 256 bits: torch needs fewer than 64
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)


def seed_process(seed: int, purpose: str, *keys: int) -> None:
    """Seed the global generators of torch, NumPy and Python, from which a user's own code may draw.

    Call this function only inside ``process_alone`` or ``process_kept``. Never use it for code that draws noise for
    privacy.
    """
    seed_torch(seed, purpose, *keys)
    number = _key(seed, purpose, keys)
    np.random.seed(number >> 224)  # noqa: NPY002 (32 bits; our own code draws from rng alone)
    random.seed(number >> 128)


class _Key(ISeedSequence):
    """A seed sequence that passes a given key unchanged to numpy's bit generator Philox.

    numpy's own SeedSequence would hash the key. ``Philox(key=key)`` gives the same random numbers, but it is slower: it
    first asks the operating system for a seed that it never uses.
    """

    def __init__(self, key: int) -> None:
        self._words = np.array([key & (2**64 - 1), key >> 64], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        """Return the key of Philox as two 64-bit words."""
        assert (n_words, dtype) == (2, np.uint64), "only Philox uses this key"
        return self._words


def _key(seed: int, purpose: str, keys: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{keys}/{purpose}".encode()).digest(), "big")


@contextmanager
def torch_kept() -> Iterator[None]:
    """Restore the states of torch's global generators at the end of this ``with`` block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def process_kept() -> Iterator[None]:
    """Restore the states of the global generators of torch, NumPy and Python at the end of this ``with`` block."""
    ours, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002 (restored, not drawn from)
    with torch_kept():
        try:
            yield
        finally:
            np.random.set_state(ours)  # noqa: NPY002
            random.setstate(pythons)


@contextmanager
def process_alone() -> Iterator[None]:
    """Lock the global generators of torch, NumPy and Python in a ``with`` block; restore their states afterwards.

    Such a block calls a user's own code, which may draw from the global generators.
    """
    with _LOCK, process_kept():
        yield


@contextmanager
def seeded_alone(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Lock and seed the global generators of torch, NumPy and Python in a ``with`` block; restore them afterwards."""
    with process_alone():
        seed_process(seed, purpose, *keys)
        yield


def process_state() -> tuple[object, ...]:
    """Return the states of the global generators of torch, NumPy and Python.

    Each draw changes the state of its generator, so equal states show that nothing was drawn.
    """
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, words, *place = state
    return kind, words.tobytes(), *place, random.getstate(), torch.random.get_rng_state().numpy().tobytes()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Lock the global generators in a ``with`` block that builds a model; restore torch's generators afterwards."""
    with _LOCK, torch_kept():
        yield
