"""What goes to processes elsewhere and comes back: closed, where others could read it on its way.

Ray keeps objects in a node's memory, and writes them to its disk where that runs short.
"""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

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
        parts = [memoryview(frame), *(buffer.raw() for buffer in buffers)]
        sizes = [_NONCE_BYTES + len(part) + _TAG_BYTES for part in parts]
        cipher, whole = AESGCM(self.key), os.urandom(_NONCE_BYTES)
        # One array for all of them: Ray takes twice as long for the same bytes in a hundred.
        content = np.empty(sum(sizes), np.uint8)
        for place, (part, sealed) in enumerate(zip(parts, _cut(content, sizes), strict=True)):
            sealed[:_NONCE_BYTES] = nonce = os.urandom(_NONCE_BYTES)
            cipher.encrypt_into(nonce, part, _place(whole, place, len(buffers)), sealed[_NONCE_BYTES:])
        return whole, sizes, content

    def open(self, closed: Any) -> Any:
        """Return what was closed. Raises RunError where that was done by somebody without the key."""
        if not self.key:
            return closed
        try:
            whole, sizes, content = closed
            cipher, last = AESGCM(self.key), len(sizes) - 1
            opened = [np.empty(size - _NONCE_BYTES - _TAG_BYTES, np.uint8) for size in sizes]
            for place, (sealed, to) in enumerate(zip(_cut(content, sizes), opened, strict=True)):
                nonce, secret = bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:]
                cipher.decrypt_into(nonce, secret, _place(whole, place, last), to.data)
            frame, *buffers = opened
        except (InvalidTag, ValueError) as error:
            raise RunError(
                "what came from another machine was changed on its way: start the same command again"
            ) from error
        return pickle.loads(frame.data, buffers=buffers)  # noqa: S301 (made by a process that has this run's key)


def num_bytes(closed: Any) -> int:
    """Return how large a closed value is."""
    _, _, content = closed
    return int(content.nbytes)


def _cut(content: NDArray[np.uint8], sizes: Sequence[int]) -> list[memoryview]:
    """Return the parts of ``content``, one after another. Raises ValueError where they are not all of it."""
    ends = list(accumulate(sizes))
    if ends[-1:] != [len(content)]:
        raise ValueError("parts are missing")
    return [content.data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _place(whole: bytes, place: int, last: int) -> bytes:
    """Return of which value a part is, and the how manieth of how many: so none can be left out or moved."""
    return b"%b %d %d" % (whole, place, last)
