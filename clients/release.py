"""What every private release of a client takes: a noise key that is kept until it is out, and a charge beforehand."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dp_accounting import dp_event

from clients.policy import Policy, open_ledger
from fl_sim.errors import RunError
from fl_sim.privacy.ledger import Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.store.tensors import write_private

KEY: Final = "key"
"""The file of the noise key, to be deleted when the release is out."""

_KEY_BYTES: Final = 32


def seeded_noise(text: str) -> Noise:
    """Return noise that ``text``, which names seed, release and client, determines: a simulation only."""
    return Noise.seeded(int.from_bytes(hashlib.sha256(text.encode()).digest()))


def kept_noise(folder: Path) -> Noise:
    """Return secret noise whose key lies in ``folder``: the same again where a client was killed before it was out."""
    path = folder / KEY
    if not path.exists():
        write_private(path, os.urandom(_KEY_BYTES))
    if path.stat().st_size != _KEY_BYTES:
        raise RunError(f"{path} is damaged: delete it, and the release is made with another key, which pays again")
    return Noise(path.read_bytes(), simulation_only=False)


def pay(policy: Policy | None, ledger: Path, releases: Mapping[str, dp_event.DpEvent], noise: Noise) -> Receipt:
    """Charge all of ``releases`` (name -> event) before any is made, to the policy's ledger, or else to ``ledger``."""
    if policy:
        return policy.pay(releases, noise.identity)
    own = open_ledger(ledger)
    for name, event in releases.items():
        own.charge(event, release=name, noise=noise.identity)
    return own.receipt
