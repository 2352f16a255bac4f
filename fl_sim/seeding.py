"""Randomness derived by purpose: every generator is a pure function of the seed, what it is for, and for whom."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def rng(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator for ``purpose``, independent of all others.

    ``keys`` are non-negative integers such as (client, server_round). The same arguments give the same stream in every
    process; nothing is shared or global. These streams are for simulation, not for noise that protects people.

    >>> rng(0, "batches", 3, 1).integers(100) == rng(0, "batches", 3, 1).integers(100)
    np.True_
    """
    digest = hashlib.sha256(purpose.encode()).digest()
    entropy = [seed, int.from_bytes(digest[:8], "big")]
    # Keys as a spawn key: numpy fills a short entropy up with zeros, so that no key and the key 0 would be the same.
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=keys))


@contextmanager
def torch_seeded(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Seed torch's global generators for a block and put them back afterwards.

    Layer initialisation and dropout know no others. (``torch.manual_seed`` would also queue a call with a whole stack
    trace for every GPU that was never used.)
    """
    number = int(rng(seed, purpose, *keys).integers(2**63))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    before = torch.get_rng_state()
    before_on_gpus = [torch.cuda.get_rng_state(device) for device in devices]
    torch.default_generator.manual_seed(number)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        for device, state in zip(devices, before_on_gpus, strict=True):
            torch.cuda.set_rng_state(state, device)
