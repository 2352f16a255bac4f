"""The file behind a ledger: one line for each charge, in a chain of hashes, locked and read again before every charge.

The first line holds a random id and the terms. Every further line holds a charge, and the SHA-256 of the line before it
in the chain followed by the charge. So a log that was cut, edited or exchanged differs from the receipts given out for
it. The chain is no signature: whoever rewrites a log and every receipt for it is not found out.
"""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from dp_accounting import dp_event
from filelock import lock_descriptor

from fl_sim.errors import RunError, UserError
from fl_sim.privacy import events
from fl_sim.store.files import sync_folder

_FORMAT: Final = 2
_LONGEST_LINE: Final = 64 * 1024  # bytes; what this program writes has a few hundred
_PAUSE: Final = 0.01  # seconds between two tries for the lock
_LARGEST: Final = 256 * 1024**2  # bytes: most of a million charges
_WAYS_ON: Final = "put an unchanged copy of it back, or start a new run in a fresh directory, which pays again"


@dataclass(frozen=True)
class Charge:
    """One release that was paid for, or several at once where ``event`` is a repeated one.

    ``noise`` identifies the noise key, so that a repetition is recognised. ``epsilon``: what was spent after it, None
    for no guarantee; it is for the reader of the log and never believed.
    """

    release: str
    noise: str
    event: dp_event.DpEvent
    epsilon: float | None


@dataclass(frozen=True)
class Receipt:
    """What something was paid with: the first ``charges`` charges of the ledger with this id, in this chain."""

    ledger: str
    charges: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, which ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Receipt":
        """Return the receipt that ``to_json`` wrote. Raises RunError for anything else."""
        match value:
            case {"ledger": str(ledger), "charges": int(charges), "digest": str(digest), **more} if (
                not more and type(charges) is int and charges >= 0
            ):
                return cls(ledger, charges, digest)
        raise RunError(f"{repr(value)[:200]} is not the receipt of a privacy ledger: the file that holds it is damaged")


class ChargeLog:
    """The log at ``path``, made where there is none; ``terms`` are plain JSON values, and must be those it has.

    ``receipt``: where given, the log must exist and begin with those charges; ``holder`` says in an error what was paid
    with them. Raises UserError for other terms, RunError for a log that is missing, cut, edited or damaged.
    """

    def __init__(self, path: Path, terms: Mapping[str, Any], receipt: Receipt | None, holder: str) -> None:
        self.id = ""
        self._path = path
        self._terms = dict(terms)
        self._digests: list[str] = []  # of the header, and of the chain after each charge
        self._last = b""  # the last line that was read
        self._end = 0  # the byte after it
        self._unseen: list[Charge] = []
        if receipt is not None and not path.exists():
            raise RunError(
                f"{path} is missing, and {holder} was paid for with its {receipt.charges} charges: {_WAYS_ON}"
            )
        with self._locked() as file:
            self._unseen = self._catch_up(file)
            if not self._digests:
                header = _line({"ledger": _FORMAT, "id": secrets.token_hex(8), "terms": self._terms})
                self._write(file, header)
                sync_folder(path.parent)
                self._take(header)
        if receipt is not None:
            self._hold_against(receipt, holder)

    @property
    def receipt(self) -> Receipt:
        """Return the receipt for all charges that were read or written here."""
        return Receipt(self.id, len(self._digests) - 1, self._digests[-1])

    @contextmanager
    def held(self) -> Iterator[tuple[list[Charge], Callable[[Charge], None]]]:
        """Keep all others out; give the charges not yet seen here, and what appends one.

        A charge is on the disk when the appending returns. Raises RunError where the log was changed meanwhile.
        """
        with self._locked() as file:
            news, self._unseen = [*self._unseen, *self._catch_up(file)], []

            def append(charge: Charge) -> None:
                line = self._line_of(charge)
                self._write(file, line)
                self._take(line)

            yield news, append

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self._digests else os.O_CREAT)
        try:
            descriptor = os.open(self._path, flags, 0o644)
        except FileNotFoundError as error:
            raise RunError(f"{self._path} is gone, with {len(self._digests) - 1} charges: {_WAYS_ON}") from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be opened for charging ({error.strerror}), so nothing may be released: "
                "make it a plain file that you may write, not a link"
            ) from error
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise RunError(f"{self._path} is not a privacy ledger, but something else or far too large: {_WAYS_ON}")
            lock_descriptor(descriptor, poll_interval=_PAUSE)
            yield file

    def _catch_up(self, file: BinaryIO) -> list[Charge]:
        """Read what was appended since the last time."""
        file.seek(self._end - len(self._last))
        if file.read(len(self._last)) != self._last:
            raise RunError(f"{self._path} was cut or edited while this run was using it: {_WAYS_ON}")
        charges = []
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                charges += self._finished(file, line)
                break
            charges += self._take(line)
        return charges

    def _finished(self, file: BinaryIO, line: bytes) -> list[Charge]:
        """Return the charge of a last line that lacks its end alone; any other never returned, and is cut off."""
        start = b'{"release": "' if self._digests else b'{"ledger": '
        if not (line.startswith(start) or start.startswith(line) or not line.strip(b"\0")):
            self._damaged("it is not as this program writes it")
        before = self._end
        try:
            charges = self._take(line + b"\n")
        except (RunError, UserError):
            os.ftruncate(file.fileno(), before)
            return []
        os.pwrite(file.fileno(), b"\n", self._end - 1)
        return charges

    def _take(self, line: bytes) -> list[Charge]:
        """Put one more line into the chain; return the charge in it (the first line has none)."""
        value = self._parsed(line)
        charges = [self._charge(value)] if self._digests else []
        if not self._digests:
            self.id = self._identity(value)
        self._digests.append(_digest(self._digests, value))
        self._last = line
        self._end += len(line)
        return charges

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
            if not isinstance(value, dict) or _line(value) != line:
                self._damaged("it is not as this program writes it")
        except (ValueError, RecursionError) as error:
            self._damaged("it is not JSON", error)
        return value

    def _identity(self, header: dict[str, Any]) -> str:
        match header:
            case {"ledger": int(number)} if number < _FORMAT:
                raise RunError(
                    f"{self._path} is from an older version, whose lines are not chained, so nobody can tell whether "
                    "it is whole: start a new run in a fresh directory, which pays again"
                )
            case {"ledger": int(number), "id": str(identity), "terms": dict(terms), **more} if (
                number == _FORMAT and len(identity) == 16 and not more
            ):
                if terms == self._terms:
                    return identity
                raise UserError(
                    f"{self._path} was opened under {terms}, not {self._terms}: use a fresh output directory"
                )
        return self._damaged("it is not the head of a privacy ledger")

    def _charge(self, value: dict[str, Any]) -> Charge:
        match value:
            case {"release": str(release), "noise": str(noise), "event": dict(event), "epsilon": spent, "chain": _}:
                pass
            case _:
                self._damaged("it is not a charge")
        if value["chain"] != _digest(self._digests, value) or len(value) != 5:
            self._damaged("it does not follow from the lines before it: a line was changed, added or taken out")
        if spent is not None and not events.is_number(spent):
            self._damaged(f"epsilon {spent!r} is not a number from 0 up")
        try:
            return Charge(release, noise, events.from_json(event), spent)
        except (RunError, RecursionError) as error:
            return self._damaged(str(error), error)

    def _line_of(self, charge: Charge) -> bytes:
        value = asdict(charge) | {"event": events.to_json(charge.event)}
        return _line(value | {"chain": _digest(self._digests, value)})

    def _damaged(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise RunError(
            f"{self._path} is damaged, line {len(self._digests) + 1}: {what}. "
            f"The privacy spent so far is unknown: {_WAYS_ON}"
        ) from cause

    def _write(self, file: BinaryIO, line: bytes) -> None:
        """Append a line and wait until it is on the disk; leave nothing of it where that fails."""
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(file.fileno(), line[written:], self._end + written)
            os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file.fileno(), self._end)
            raise RunError(
                f"{self._path} cannot be written ({error.strerror or error}): nothing was charged or released; make "
                "room there, then start this run again"
            ) from error

    def _hold_against(self, receipt: Receipt, holder: str) -> None:
        number = len(self._digests) - 1
        if receipt.ledger != self.id:
            wrong = "is another ledger"
        elif number < receipt.charges:
            wrong = f"holds {number} charges"
        elif self._digests[receipt.charges] != receipt.digest:
            wrong = "holds other charges"
        else:
            return
        raise RunError(
            f"{self._path} {wrong}, and {holder} was paid for with the first {receipt.charges} charges of ledger "
            f"{receipt.ledger}: {_WAYS_ON}"
        )


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _digest(before: list[str], value: Mapping[str, Any]) -> str:
    """Return the chain after a line; the first line starts it."""
    unchained = {key: part for key, part in value.items() if key != "chain"}
    return hashlib.sha256((before[-1] if before else "").encode() + _line(unchained)).hexdigest()
