"""What goes to processes elsewhere and comes back: closed, where others could read it on its way.

Ray keeps objects in a node's memory, and writes them to its disk where that runs short.
"""

import os
import pickle
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fl_sim.errors import RunError

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16


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
        buffers: list[pickle.PickleBuffer] = []
        frame = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        cipher, whole = AESGCM(self.key), os.urandom(_NONCE_BYTES)
        # Every part says of which value it is, and the how manieth of how many: none can be left out or moved.
        closed = []
        for place, part in enumerate((memoryview(frame), *(buffer.raw() for buffer in buffers))):
            nonce = os.urandom(_NONCE_BYTES)
            content = np.empty(len(part) + _TAG_BYTES, np.uint8)  # an array: Ray need not copy it
            cipher.encrypt_into(nonce, part, _place(whole, place, len(buffers)), content.data)
            closed.append((nonce, content))
        return whole, closed

    def open(self, closed: Any) -> Any:
        """Return what was closed. Raises RunError where that was done by somebody without the key."""
        if not self.key:
            return closed
        try:
            whole, parts = closed
            cipher, last = AESGCM(self.key), len(parts) - 1
            opened = [np.empty(len(content) - _TAG_BYTES, np.uint8) for _, content in parts]
            for place, ((nonce, content), to) in enumerate(zip(parts, opened, strict=True)):
                cipher.decrypt_into(nonce, content, _place(whole, place, last), to.data)
            frame, *buffers = opened
        except (InvalidTag, ValueError) as error:
            raise RunError(
                "what came from another machine was changed on its way: start the same command again"
            ) from error
        return pickle.loads(frame.data, buffers=buffers)  # noqa: S301 (made by a process that has this run's key)


def _place(whole: bytes, place: int, last: int) -> bytes:
    return b"%b %d %d" % (whole, place, last)
