"""Workers on other machines, which see no disk of the driver: their messages, encryption, signed tickets and sources.

Knows no Ray. Ray keeps objects in a node's memory, and writes them to its disk where that runs short.
"""

import hashlib
import hmac
import importlib.util
import json
import os
import pickle
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fl_sim.errors import RunError

_TICKET: Final = "ticket"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16

NO_TICKET: Final = (
    "the order brings a ticket, which says that its release was paid for elsewhere, and nothing was released: only a "
    "worker that the run's own driver started takes one, signed by that driver for this message; send the order without"
)


@dataclass(frozen=True)
class Parcel:
    """The form in which a message goes to a worker.

    ``content``: the part that all messages of the exchange share, one object for all of them. ``own``: the records of
    this client's message alone. ``files``: the paths, here, of the files that the content names.
    """

    content: RecordDict
    own: Mapping[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


class DriverStore(Protocol):
    """The driver's part in the work of clients that run elsewhere: their files lie here."""

    def before(self, message: Message) -> Parcel | Message:
        """Return the parcel for a worker, or the answer where there is nothing for a worker to do.

        Asked again where a message is sent again, and then the same.
        """
        ...

    def after(self, message: Message, answer: Message) -> Message:
        """Store the client state of an answer, and return the message for the server."""
        ...


@dataclass(frozen=True)
class RemoteWorkers:
    """The settings of workers that share no disk with the driver.

    ``setup``: sent to every worker once, and given to the factories of its app and of its batch handler. It has a
    dictionary ``files``, in which a worker puts the content of files by name. ``modules``: the user's own that workers
    need.
    """

    setup: Any
    store: DriverStore
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encryption:
    """Encrypts values for the processes that have the key, by AES-GCM; without a key values stay as they are.

    Nobody without the key can read an encrypted value, or make one that can be decrypted.
    """

    key: bytes = field(default=b"", repr=False)

    @classmethod
    def with_new_key(cls) -> "Encryption":
        """Return encryption by a key that nobody else has."""
        return cls(AESGCM.generate_key(256))

    def encrypt(self, value: Any) -> Any:
        """Return ``value`` as others may see it."""
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

    def decrypt(self, encrypted: Any) -> Any:
        """Return the value. Raises RunError where somebody without the key encrypted or changed it."""
        if not self.key:
            return encrypted
        try:
            whole, sizes, content = encrypted
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


def encrypted_bytes(encrypted: Any) -> int:
    """Return the size of an encrypted value."""
    _, _, content = encrypted
    return int(content.nbytes)


def _cut(content: NDArray[np.uint8], sizes: Sequence[int]) -> list[memoryview]:
    """Return the parts of ``content``, one after another. Raises ValueError where they are not all of it."""
    ends = list(accumulate(sizes))
    if ends[-1:] != [len(content)]:
        raise ValueError("parts are missing")
    return [content.data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _place(whole: bytes, place: int, last: int) -> bytes:
    """Return the associated data of a part, its value and place: so none can be left out or moved."""
    return b"%b %d %d" % (whole, place, last)


@dataclass(frozen=True)
class Ticket:
    """The proof that the driver has paid for a release that a worker makes.

    ``key``: of its noise, a secret. ``counts``: of a share, the number of records of each class to make. Only a
    ``Signer`` reads one.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Signer:
    """Signs the tickets of one run, and reads them where the driver started the worker and gave it ``secret``.

    A signature holds for one message alone: its kind, its client and all of its content, of which the run and the round
    are a part. So no server, no other run and no message that was sent before can have a worker release what its client
    has not paid for.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "Signer":
        """Return the signer of a run, with a secret that nobody else has."""
        return cls(secrets.token_bytes(32))

    def records(self, ticket: Ticket, kind: str, client: int, content: RecordDict) -> Mapping[str, ConfigRecord]:
        """Pack a ticket, signed, to be added to the ``content`` of one client's message of this ``kind``."""
        record = ConfigRecord({"key": ticket.key, "simulation-only": ticket.simulation_only})
        record["counts"] = list(ticket.counts)
        record["signature"] = self._signature(ticket, kind, client, content)
        return {_TICKET: record}

    def read(self, kind: str, client: int, content: RecordDict) -> Ticket:
        """Unpack the ticket of a message. Raises RunError for one that this run's driver did not sign for it."""
        match dict(content[_TICKET]):
            case {"key": bytes(key), "simulation-only": bool(secret), "counts": list(counts), "signature": bytes(sign)}:
                ticket = Ticket(key, secret, tuple(int(count) for count in counts))
            case _:
                raise RunError(NO_TICKET)
        if not hmac.compare_digest(sign, self._signature(ticket, kind, client, content)):
            raise RunError(NO_TICKET)
        return ticket

    def _signature(self, ticket: Ticket, kind: str, client: int, content: RecordDict) -> bytes:
        said = [kind, client, ticket.key.hex(), ticket.simulation_only, ticket.counts, _digests(content)]
        return hmac.digest(self.secret, json.dumps(said).encode(), "sha256")


def has_ticket(content: RecordDict) -> bool:
    """Return True if a message brings a record named as a ticket."""
    return _TICKET in content


def _digests(content: RecordDict) -> list[list[str]]:
    """Return the names of all records but the ticket, and digests of their content."""
    found = []
    for name in sorted(content):
        if name == _TICKET:
            continue
        digest, record = hashlib.sha256(), content[name]
        if isinstance(record, ArrayRecord):
            for array_name, array in record.items():
                digest.update(json.dumps([array_name, list(array.shape)]).encode())
                digest.update(array.data)
        else:
            assert isinstance(record, ConfigRecord), "messages to clients hold settings and tensors"
            digest.update(json.dumps(sorted(record.items())).encode())
        found.append([name, digest.hexdigest()])
    return found


def importable(sources: Mapping[str, bytes]) -> None:
    """Let modules be imported from ``sources``, {path on the import path: content}, where there are no others.

    They stay in memory: nothing is written.
    """
    if sources:
        sys.meta_path.append(_ModulesInMemory(sources))


class _ModulesInMemory(MetaPathFinder, InspectLoader):
    """Finds and loads modules in a dictionary; behind all other finders."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that was sent along."""
        del path, target
        name = self._file(fullname)
        if name is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=f"<sent along: {name}>")

    def get_source(self, fullname: str) -> str:
        """Return a module's source."""
        name = self._file(fullname)
        if name is None:
            raise ImportError(f"{fullname} was not sent along")
        return importlib.util.decode_source(self._sources[name])

    def is_package(self, fullname: str) -> bool:
        """Return True if a module is a package."""
        return (self._file(fullname) or "").endswith("/__init__.py")

    def _file(self, fullname: str) -> str | None:
        stem = fullname.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self._sources), None)
