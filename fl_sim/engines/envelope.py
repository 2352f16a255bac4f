"""What goes to processes elsewhere and comes back: closed, where others could read it on its way.

Ray keeps objects in a node's memory, and writes them to its disk where that runs short.
"""

import os
import pickle
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fl_sim.errors import RunError

_NONCE_BYTES: Final = 12


@dataclass(frozen=True)
class Envelopes:
    """Closes values for the processes that have the key; without a key values stay as they are.

    A closed value is AES-GCM's: nobody without the key can read it, or make one that opens.
    """

    key: bytes = field(default=b"", repr=False)

    @classmethod
    def closed(cls) -> "Envelopes":
        """Return envelopes with a key that nobody else has."""
        return cls(AESGCM.generate_key(256))

    def close(self, value: Any) -> Any:
        """Return ``value`` as it may be seen."""
        if not self.key:
            return value
        nonce = os.urandom(_NONCE_BYTES)
        return nonce, AESGCM(self.key).encrypt(nonce, pickle.dumps(value, protocol=5), None)

    def open(self, closed: Any) -> Any:
        """Return what was closed. Raises RunError where that was done by somebody without the key."""
        if not self.key:
            return closed
        try:
            nonce, encrypted = closed
            content = AESGCM(self.key).decrypt(nonce, encrypted, None)
        except InvalidTag as error:
            raise RunError(
                "what came from another machine was changed on its way: start the same command again"
            ) from error
        return pickle.loads(content)  # noqa: S301 (made by a process that has this run's key)
