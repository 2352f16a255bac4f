"""Masks that cancel in a sum: the arithmetic of secure aggregation (Bonawitz et al. 2017, without signatures).

Each client u of a cohort has a key k_u and a seed b_u. Two clients u and v agree on a seed s_uv, which follows from the
key of one and the public key g^k of the other. Client u adds masks to its numbers x_u, modulo R = 2^bits:

y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)

PRG is a pseudo-random generator, which expands a seed into a mask. In the sum over all clients the masks of pairs
cancel. Each client also splits k_u and b_u into secret shares, one for every other client (Shamir 1979). Any
``threshold`` shares determine the secret; fewer shares reveal nothing about it.
If clients drop out before they send y_u, the other clients send shares of the lost keys k_u. From these shares the
server computes the masks of pairs that do not cancel. For clients that sent y_u, the others send shares of b_u. No
client sends shares of both k_u and b_u of one client u.

This is a simulation of the arithmetic in one process, without real protection: all secrets come from the run's seed,
and the group for the key agreement has only 127 bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.seeding import rng

PRIME: Final = 2**127 - 1
"""The size of the finite field of Shamir's shares, and the modulus of the key agreement."""
_GENERATOR: Final = 43

KEY_BYTES, SHARE_BYTES, SEAL_BYTES, NAME_BYTES = 32, 32, 28, 4
"""Numbers of bytes in a deployment with keys of 256 bits: of a public key; of a share; of the nonce and tag of an
encrypted message (AES-GCM); of a client ID."""


@dataclass(frozen=True)
class MaskSecrets:
    """The secrets of one client in one round, both below ``PRIME``.

    ``key``: k_u, from which the seeds of pairs are computed. ``own``: b_u, the seed of the client's own mask.
    """

    key: int
    own: int


@lru_cache(maxsize=4096)
def secrets_of(seed: int, client: int, server_round: int) -> MaskSecrets:
    """Return the secrets of a client in a round, from the run's ``seed``."""
    drawn = rng(seed, "secure aggregation", client, server_round).bytes(32)
    key, own = (int.from_bytes(drawn[start : start + 16]) % PRIME for start in (0, 16))
    return MaskSecrets(key, own)


@lru_cache(maxsize=4096)
def public_key(key: int) -> int:
    """Return the public key g^k that belongs to the secret ``key`` k."""
    return pow(_GENERATOR, key, PRIME)


def mask(secret: int, count: int, bits: int) -> NDArray[np.int64]:
    """Return the mask PRG(``secret``): ``count`` uniform integers from 0 to 2^``bits`` - 1, with at most 32 bits."""
    drawn = rng(secret, "mask of secure aggregation").bytes(4 * count)
    return np.frombuffer(drawn, "<u4").astype(np.int64) & ((1 << bits) - 1)


def mask_between(key: int, client: int, other: int, other_key: int, count: int, bits: int) -> NDArray[np.int64]:
    """Return the mask that ``client`` adds for its pair with ``other``; ``other`` adds the negative of this mask.

    ``key``: the key of ``client``. ``other_key``: the public key of ``other``.
    """
    found = mask(pow(other_key, key, PRIME), count, bits)
    return found if client < other else -found


def masked(
    numbers: NDArray[np.int64], client: int, cohort: Sequence[int], seed: int, server_round: int, bits: int
) -> NDArray[np.int64]:
    """Return the numbers that ``client`` sends: its ``numbers`` plus all its masks, modulo 2^``bits``."""
    mine, total = secrets_of(seed, client, server_round), numbers.copy()
    total += mask(mine.own, len(numbers), bits)
    for other in cohort:
        if other != client:
            theirs = public_key(secrets_of(seed, other, server_round).key)
            total += mask_between(mine.key, client, other, theirs, len(numbers), bits)
    return total % (1 << bits)


def share_of_secret(secret: int, place: int, threshold: int) -> int:
    """Return the Shamir share of ``secret`` with index ``place``, from 1: a polynomial's value at this index.

    The polynomial has degree ``threshold`` - 1. Its coefficients are hashes of the secret, so this is only a
    simulation.
    """
    value = 0
    for power in range(threshold - 1, 0, -1):
        digest = hashlib.sha256(f"{secret}/{power}".encode()).digest()
        value = (value + int.from_bytes(digest) % PRIME) * place % PRIME
    return (value + secret) % PRIME


def rebuilt(shares: Mapping[int, int]) -> int:
    """Return the secret from its ``shares``, {index of the share: share}, by Lagrange interpolation at 0.

    With fewer shares than the threshold, the result is a wrong number.
    """
    secret = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        secret += share * above * pow(below, -1, PRIME)
    return secret % PRIME


def unmasked(
    total: NDArray[np.int64], cohort: Sequence[int], present: Sequence[int],
    *, threshold: int, seed: int, server_round: int, bits: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Return the unmasked sum, modulo 2^``bits``, of the numbers of the clients ``present``.

    ``total``: the sum of their masked numbers. ``cohort``: the clients that agreed on masks. Raises ValueError if fewer
    than ``threshold`` clients are present, because no secret can then be rebuilt.
    """
    if len(present) < threshold:
        raise ValueError(f"{len(present)} clients answered, and {threshold} shares are needed to unmask the sum")
    places = {client: place for place, client in enumerate(cohort, 1)}
    holders, there, total = present[:threshold], frozenset(present), total.copy()
    for client in cohort:
        secrets = secrets_of(seed, client, server_round)
        lost = secrets.own if client in there else secrets.key
        secret = rebuilt({places[one]: share_of_secret(lost, places[one], threshold) for one in holders})
        if client in there:
            total -= mask(secret, len(total), bits)
            continue
        for other in present:
            theirs = public_key(secrets_of(seed, other, server_round).key)
            total += mask_between(secret, client, other, theirs, len(total), bits)
    return total % (1 << bits)


def exchange_bytes(cohort: int, present: int) -> tuple[int, int]:
    """Return the numbers of bytes (to clients, from clients) that secure aggregation adds to a round.

    ``cohort``: the number of clients that agree on masks. ``present``: the number of clients that then send masked
    numbers. The bytes are those of public keys (two per client), of encrypted pairs of shares, of the IDs of the
    present clients, and of one share for each client of the cohort.
    """
    others, pair = max(0, cohort - 1), 2 * SHARE_BYTES + SEAL_BYTES
    down = cohort * others * (2 * KEY_BYTES + NAME_BYTES + pair) + present * present * NAME_BYTES
    up = cohort * (2 * KEY_BYTES + others * pair) + present * cohort * SHARE_BYTES
    return down, up
