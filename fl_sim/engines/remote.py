"""Workers on other machines, which do not share a disk with the driver (the process that runs the server).

This file defines the parts of messages to such workers, the encryption, signed tickets, and the import of the user's
own modules on workers. A ticket is the proof that a client's privacy ledger contains the cost of a private output. This
file does not import Ray. Messages are encrypted, because Ray keeps objects in a node's memory, and writes them to the
node's disk if memory runs short.
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
    "the message contains a ticket (a proof that the privacy cost is charged) that this worker cannot accept, so it "
    "made no private output: only workers of the run's own driver accept tickets; send the message without a ticket"
)
"""The error message for a ticket that is refused.

A ticket is the driver's proof that a client's privacy ledger contains the cost of a private output.
"""


@dataclass(frozen=True)
class Parcel:
    """The parts of a message that is sent to a worker.

    ``content``: the Flower records that all messages of the exchange share, as one Python object. ``own``: the Flower
    records for this client only. ``files``: the files that the worker needs, as {name in the content: path on the
    driver's disk}.
    """

    content: RecordDict
    own: Mapping[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


class DriverStore(Protocol):
    """Stores the states and files of clients that run on other machines, on the disk of the driver."""

    def before(self, message: Message) -> Parcel | Message:
        """Return the ``Parcel`` to send to a worker for ``message``, or the answer itself if no worker is needed.

        If a message is sent again, this method is called again and must return an equal result.
        """
        ...

    def after(self, message: Message, answer: Message) -> Message:
        """Store the client state from a worker's answer, and return the answer without this state, for the server."""
        ...


@dataclass(frozen=True)
class RemoteWorkers:
    """The settings of workers that do not share a disk with the driver.

    ``setup``: a value that is sent to every worker once. The functions that make the worker's app and its batch handler
    are called with this value. The value must have a dictionary ``files``, to which a worker adds the content of files
    by name. ``store``: the driver's storage of client states and files. ``modules``: names of the user's own modules
    that workers need.
    """

    setup: Any
    store: DriverStore
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encryption:
    """An object that encrypts and decrypts values by AES-GCM. If ``key`` is empty, values stay unchanged.

    Without the key, nobody can read an encrypted value, or make a value that ``decrypt`` accepts.
    """

    key: bytes = field(default=b"", repr=False)

    @classmethod
    def with_new_key(cls) -> "Encryption":
        """Return an Encryption with a new random key of 256 bits."""
        return cls(AESGCM.generate_key(256))

    def encrypt(self, value: Any) -> Any:
        """Return the encrypted form of ``value``, or ``value`` itself if there is no key."""
        if not self.key:
            return value
        buffers: list[pickle.PickleBuffer] = []
        frame = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(frame), *(buffer.raw() for buffer in buffers)]
        sizes = [_NONCE_BYTES + len(part) + _TAG_BYTES for part in parts]
        cipher, whole = AESGCM(self.key), os.urandom(_NONCE_BYTES)
        # All encrypted parts are in one array: Ray takes twice as long for the same bytes in a hundred arrays.
        content = np.empty(sum(sizes), np.uint8)
        for place, (part, sealed) in enumerate(zip(parts, _cut(content, sizes), strict=True)):
            sealed[:_NONCE_BYTES] = nonce = os.urandom(_NONCE_BYTES)
            cipher.encrypt_into(nonce, part, _place(whole, place, len(buffers)), sealed[_NONCE_BYTES:])
        return whole, sizes, content

    def decrypt(self, encrypted: Any) -> Any:
        """Return the decrypted value. Raises RunError if the value was changed or was encrypted with another key."""
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
                "a message from another machine was changed in transit, or was encrypted with another key: start the "
                "same command again"
            ) from error
        return pickle.loads(frame.data, buffers=buffers)  # noqa: S301 (made by a process that has this run's key)


def encrypted_bytes(encrypted: Any) -> int:
    """Return the size of an encrypted value in bytes."""
    _, _, content = encrypted
    return int(content.nbytes)


def _cut(content: NDArray[np.uint8], sizes: Sequence[int]) -> list[memoryview]:
    """Split ``content`` into consecutive parts of ``sizes`` bytes.

    Raises ValueError if ``sizes`` add up to another size.
    """
    ends = list(accumulate(sizes))
    if ends[-1:] != [len(content)]:
        raise ValueError("parts of the encrypted value are missing")
    return [content.data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _place(whole: bytes, place: int, last: int) -> bytes:
    """Return the associated data of AES-GCM for one part of an encrypted value.

    The associated data contain an identifier of the whole value, the number of this part, and the number of the last
    part. AES-GCM refuses to decrypt a part with wrong associated data. So decryption fails if parts of a value are
    moved or missing.
    """
    return b"%b %d %d" % (whole, place, last)


@dataclass(frozen=True)
class Ticket:
    """The driver's proof that a client's privacy ledger contains the cost of a private output of a worker.

    ``key``: the secret key from which the worker draws the noise of the private output. ``simulation_only``: True if
    the noise is derived from a seed. ``counts``: whole numbers that the client task needs, such as the number of
    synthetic records of each class. Only a ``Signer`` reads a ticket from a message.
    """

    key: bytes = field(repr=False)
    simulation_only: bool
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Signer:
    """Signs and verifies tickets, the proofs that a client's privacy ledger contains the cost of a private output.

    A signer is for one run. Only the driver and its workers know the signing key ``secret``.

    A signature is valid for one message only: its client task, its client and its whole content, which includes the run
    and the round. No other process, such as the driver of another run, can make a valid signature. The signature of an
    old message is invalid for any other message. So every private output that a worker sends has its cost in the
    client's privacy ledger.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "Signer":
        """Return the ``Signer`` of a new run. Its signing key is 32 random bytes."""
        return cls(secrets.token_bytes(32))

    def records(self, ticket: Ticket, kind: str, client: int, content: RecordDict) -> Mapping[str, ConfigRecord]:
        """Return a Flower record with the signed ticket. The caller adds this record to one client's message.

        ``kind``: the name of the client task, such as "synthesize". ``content``: the content of the message without the
        ticket. The signature covers ``kind``, ``client`` and ``content``.
        """
        record = ConfigRecord({"key": ticket.key, "simulation-only": ticket.simulation_only})
        record["counts"] = list(ticket.counts)
        record["signature"] = self._signature(ticket, kind, client, content)
        return {_TICKET: record}

    def read(self, kind: str, client: int, content: RecordDict) -> Ticket:
        """Return the ticket (the proof of a charged cost) in a message. Raises RunError for an invalid signature.

        The signature is valid if this run's driver signed this ticket for this message.
        """
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
    """Return True if a message contains a ticket, the proof of a charged privacy cost. No signature is checked."""
    return _TICKET in content


def _digests(content: RecordDict) -> list[list[str]]:
    """Return [name, SHA-256 digest] of every Flower record in a message, for the signature. The ticket is left out."""
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
    """Make the modules in ``sources``, {path relative to the import path: content}, importable in this process.

    Installed modules of the same name come first. The sources stay in memory; no file is written.
    """
    if sources:
        sys.meta_path.append(_ModulesInMemory(sources))


class _ModulesInMemory(MetaPathFinder, InspectLoader):
    """An import finder that loads modules from a dictionary of source files. Python asks other import finders first."""

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        name = self._file(fullname)
        if name is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=f"<sent along: {name}>")

    def get_source(self, fullname: str) -> str:
        name = self._file(fullname)
        if name is None:
            raise ImportError(f"module {fullname} was not sent to this worker")
        return importlib.util.decode_source(self._sources[name])

    def is_package(self, fullname: str) -> bool:
        return (self._file(fullname) or "").endswith("/__init__.py")

    def _file(self, fullname: str) -> str | None:
        stem = fullname.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self._sources), None)
