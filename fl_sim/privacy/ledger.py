"""The privacy ledger of one privacy unit (a client or a record), and its file, the charge log.

A release is one published result, such as a round's noised mean. A charge is the ledger's entry with the cost of a
release. The ledger charges or refuses each cost before the release is made.

The ledger composes the events of all charges, by RDP or PLD, and compares the epsilon with the budget. The budget was
fixed before the first charge. For every charge the log is locked and read again, and the charge is on the disk before
``charge`` returns. So after a crash, the log may contain a charge without a release, but there is never a release
without a charge in the log. All processes that use one log share one budget.

The first line of the log contains a random id and the terms. Every further line contains a charge and its chain digest:
the SHA-256 of the previous digest in the chain followed by the charge. A receipt is the number of charges and the last
chain digest. A run stores the receipt with the results that the charges paid for. So a log that was cut, edited or
exchanged does not match its receipts. The chain is no signature: it does not detect that a log and all of its receipts
were rewritten.
"""

import hashlib
import json
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from dp_accounting import dp_event
from filelock import lock_descriptor

from fl_sim.errors import BudgetExhausted, RunError, UserError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import epsilon_of_counts, supports_pld
from fl_sim.privacy.events import adjacency, single_steps
from fl_sim.privacy.statement import Coverage, statement
from fl_sim.privacy.terms import Terms, none_if_infinite
from fl_sim.store.files import sync_folder

_FORMAT: Final = 2
_LONGEST_LINE: Final = 64 * 1024  # maximum length of a line in bytes; a line of fl-sim has a few hundred bytes
_PAUSE: Final = 0.01  # seconds between two attempts to lock the charge log
_LARGEST: Final = 256 * 1024**2  # maximum size of the charge log in bytes, enough for about a million charges
_CURE: Final = "put an unchanged copy of it back, or start a new run (charged again) in a fresh directory"


@dataclass(frozen=True)
class Charge:
    """One entry of the privacy ledger: the cost of one release, or of several if ``event`` is ``SelfComposedDpEvent``.

    ``release``: the name of the release, such as "round 7". ``noise``: an identity of the key from which the noise is
    drawn, so that a second charge of the same release is recognised. ``event``: the privacy event of the release.
    ``epsilon``: the epsilon spent after this charge, None for no guarantee. This field is for readers of the log; the
    ledger itself computes epsilon from the events.
    """

    release: str
    noise: str
    event: dp_event.DpEvent
    epsilon: float | None


@dataclass(frozen=True)
class Receipt:
    """Proof that a charge log contained certain charges (entries).

    A receipt is stored with the results that the charges paid for.

    ``ledger``: the random id of the charge log. ``charges``: the number of charges, counted from the first one.
    ``digest``: the chain digest after the last of these charges.
    """

    ledger: str
    charges: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as plain JSON values for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Receipt":
        """Return the receipt that ``to_json`` wrote. Raises RunError for any other value."""
        match value:
            case {"ledger": str(ledger), "charges": int(charges), "digest": str(digest), **more} if (
                not more and type(charges) is int and charges >= 0
            ):
                return cls(ledger, charges, digest)
        raise RunError(
            f"{repr(value)[:200]} is not the receipt of a privacy ledger: the file with this receipt is damaged"
        )


class Ledger:
    """The privacy ledger of one privacy unit: adds up the costs of all releases, and refuses costs beyond the budget.

    ``path``: the charge log, which is read, or created if none exists; None for a ledger in memory. ``receipt``: a
    receipt of the charges with which the log must begin. ``holder``: a name, for error messages, of the results that
    these charges paid for, such as "the checkpoint of round 7". Raises UserError if the log has other terms. Raises
    RunError if the log is missing, cut, edited or damaged.
    """

    def __init__(
        self, terms: Terms, path: Path | None = None, *, receipt: Receipt | None = None, holder: str = "this run"
    ) -> None:
        self.terms = terms
        self._charges: dict[tuple[str, str], Charge] = {}
        self._counts: Counter[dp_event.DpEvent] = Counter()
        self._spent: float | None = 0.0
        assert path is not None or receipt is None, "a ledger in memory has no earlier charges"
        self._log = None
        if path is not None:
            said = json.loads(json.dumps(asdict(terms)))
            self._log = ChargeLog(path, said, receipt, holder)
            self.catch_up()

    @property
    def identity(self) -> str:
        """Return the random id of the charge log (the ledger's file); "" for a ledger in memory."""
        return self._log.id if self._log else ""

    @property
    def receipt(self) -> Receipt:
        """Return the receipt (the proof) of all charges so far.

        The caller stores the receipt with the results that the charges paid for. A ledger in memory has no receipt, so
        the caller must not use this property.
        """
        assert self._log is not None
        return self._log.receipt

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Return all charges (entries) of the ledger so far, in the order in which they were made."""
        return tuple(self._charges.values())

    @property
    def epsilon(self) -> float | None:
        """Return the joint epsilon of all charges so far: 0 before the first charge, None if there is no guarantee."""
        return self._spent

    def affords(self, event: dp_event.DpEvent) -> bool:
        """Return True if the privacy budget allows one more release with the privacy event ``event``."""
        with self._up_to_date():
            return self.terms.budget is None or _finite_at_most(self._epsilon_after(event), self.terms.budget)

    def catch_up(self) -> None:
        """Read the charges that other processes have added to the charge log.

        Then ``epsilon`` includes the costs of these charges.
        """
        with self._up_to_date():
            pass

    def has_charged(self, release: str, noise: str) -> bool:
        """Return True if the ledger already contains a charge for the release ``release`` with the same noise.

        ``noise``: an identity of the key from which the noise is drawn. A second charge of this release costs nothing.
        """
        return (release, noise) in self._charges

    def charge(self, event: dp_event.DpEvent, *, release: str, noise: str) -> float | None:
        """Charge the cost of one release BEFORE it is made, and return the epsilon spent so far (None: no guarantee).

        ``release``: the name of the release, such as "round 7". ``noise``: the identity of its noise key. A second
        charge with the same name and key is free, because it publishes the same bits. With another key it is a second
        release, which costs again.

        Raises BudgetExhausted, and charges nothing, if the cost would exceed the budget. Raises UserError if the
        adjacency of ``event`` differs from the ledger's. Raises RunError if the ledger contains another event under the
        same name and key.
        """
        self._check_adjacency(event)
        with self._up_to_date() as append:
            if earlier := self._charges.get((release, noise)):
                if earlier.event != event:
                    raise RunError(
                        f"{release} was charged as {earlier.event} and is now {event}: the same noise must not serve "
                        "two different releases"
                    )
                return self._spent
            after = self._epsilon_after(event)
            if self.terms.budget is not None and not _finite_at_most(after, self.terms.budget):
                raise BudgetExhausted(
                    num_releases=len(self._charges),
                    spent=math.inf if self._spent is None else self._spent,
                    would_be=after,
                    budget=self.terms.budget,
                    delta=self.terms.delta,
                )
            charge = Charge(release, noise, event, none_if_infinite(after))
            append(charge)
            self._take(charge)
            self._spent = charge.epsilon
            return self._spent

    def statement(
        self,
        *,
        covers: str,
        does_not_cover: str,
        simulation_only: bool,
        planned: Mapping[dp_event.DpEvent, int] | None = None,
    ) -> dict[str, Any]:
        """Return the privacy statement as JSON values, for results and reports.

        In the result, ``epsilon`` is the guarantee, and ``epsilon_realised`` is the epsilon of all charges so far.
        ``planned``: {event: number of releases} for all releases that were fixed beforehand; None if only the budget
        limits the releases. ``Coverage`` explains the other arguments. A call takes seconds, because it computes the
        PLD.
        """
        charges = [(charge.release, charge.event) for charge in self.charges]
        said = statement(self.terms, charges, planned, Coverage(covers, does_not_cover, simulation_only))
        return {"ledger": self.identity, **said}

    def _epsilon_after(self, event: dp_event.DpEvent) -> float:
        counts = self._counts + single_steps({event: 1})
        if self.terms.accountant == "pld" and not supports_pld(event):
            raise UserError(f"the PLD accountant does not support {type(event).__name__}: choose the RDP accountant")
        return epsilon_of_counts(counts, self.terms.delta, accountant=self.terms.accountant)

    def _check_adjacency(self, event: dp_event.DpEvent) -> None:
        stated = adjacency(event)
        if stated not in {None, self.terms.adjacency}:
            raise UserError(
                f"a release under {stated} cannot be charged to a ledger under {self.terms.adjacency}: "
                "sample the same way in every step"
            )

    def _take(self, charge: Charge) -> None:
        self._charges[charge.release, charge.noise] = charge
        self._counts += single_steps({charge.event: 1})

    @contextmanager
    def _up_to_date(self) -> Iterator[Callable[[Charge], None]]:
        """Lock the charge log while the ``with`` block runs, and yield a function that appends a charge to the log.

        The new charges of other processes are read first.
        """
        if self._log is None:
            yield lambda _: None
            return
        with self._log.locked() as (news, append):
            for charge in news:
                self._check_adjacency(charge.event)
                self._take(charge)
            if news:  # the epsilon that the log states is not trusted: the ledger computes it from the events
                spent = epsilon_of_counts(self._counts, self.terms.delta, accountant=self.terms.accountant)
                self._spent = none_if_infinite(spent)
            yield append


class ChargeLog:
    """The charge log at ``path``, created if none exists.

    ``terms``: the terms of the ledger as plain JSON values; a log with other terms is refused. ``receipt``: with a
    receipt, the log must exist and must begin with the charges of this receipt. ``holder``: a name, for error messages,
    of the results that these charges paid for. Raises UserError for other terms. Raises RunError for a log that is
    missing, cut, edited or damaged.
    """

    def __init__(self, path: Path, terms: Mapping[str, Any], receipt: Receipt | None, holder: str) -> None:
        self.id = ""
        self._path = path
        self._terms = dict(terms)
        self._digests: list[str] = []  # digest of the first line, and then one chain digest per charge
        self._last = b""  # the last line of the log that was read or written
        self._end = 0  # the end of this last line in the log, in bytes
        self._unseen: list[Charge] = []
        if receipt is not None and not path.exists():
            raise RunError(
                f"{path} is missing, but {holder} was paid for with {receipt.charges} charges in this file: {_CURE}"
            )
        with self._opened() as file:
            self._unseen = self._catch_up(file)
            if not self._digests:
                header = _line({"ledger": _FORMAT, "id": secrets.token_hex(8), "terms": self._terms})
                self._write(file, header)
                sync_folder(path.parent)
                self._take(header)
        if receipt is not None:
            self._check_receipt(receipt, holder)

    @property
    def receipt(self) -> Receipt:
        """Return the receipt (the proof) of all charges that this object has read from the log or written to it."""
        return Receipt(self.id, len(self._digests) - 1, self._digests[-1])

    @contextmanager
    def locked(self) -> Iterator[tuple[list[Charge], Callable[[Charge], None]]]:
        """Lock the log; yield the charges since the last call, and a function that appends one charge.

        When the yielded function returns, the charge is on the disk. Raises RunError if earlier lines of the log
        have changed since the last call.
        """
        with self._opened() as file:
            news, self._unseen = [*self._unseen, *self._catch_up(file)], []

            def append(charge: Charge) -> None:
                line = self._line_of(charge)
                self._write(file, line)
                self._take(line)

            yield news, append

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self._digests else os.O_CREAT)
        try:
            descriptor = os.open(self._path, flags, 0o644)
        except FileNotFoundError as error:
            raise RunError(
                f"{self._path}, which had {len(self._digests) - 1} charges, no longer exists: {_CURE}"
            ) from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be opened for charging ({error.strerror}), so nothing may be released: "
                "make it a plain file, not a link, with write permission"
            ) from error
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise RunError(f"{self._path} is no plain file, or too large for a privacy ledger: {_CURE}")
            lock_descriptor(descriptor, poll_interval=_PAUSE)
            yield file

    def _catch_up(self, file: BinaryIO) -> list[Charge]:
        """Return the charges in the lines that were appended to the log since the last call."""
        file.seek(self._end - len(self._last))
        if file.read(len(self._last)) != self._last:
            raise RunError(f"{self._path} was cut or edited while this run was using it: {_CURE}")
        charges = []
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                charges += self._finished(file, line)
                break
            charges += self._take(line)
        return charges

    def _finished(self, file: BinaryIO, line: bytes) -> list[Charge]:
        """If the last line lacks only its newline, add the newline and return the line's charge. Else remove the line.

        An unfinished line means that the call of ``charge`` was interrupted before it returned, so nothing was
        published.
        """
        start = b'{"release": "' if self._digests else b'{"ledger": '
        if not (line.startswith(start) or start.startswith(line) or not line.strip(b"\0")):
            self._damaged("it does not have the format of a charge log")
        before = self._end
        try:
            charges = self._take(line + b"\n")
        except (RunError, UserError):
            os.ftruncate(file.fileno(), before)
            return []
        os.pwrite(file.fileno(), b"\n", self._end - 1)
        return charges

    def _take(self, line: bytes) -> list[Charge]:
        """Check one line of the log, add it to the chain of digests, and return its charge in a list.

        The list is empty for the first line of the log, which has no charge.
        """
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
                self._damaged("it does not have the format of a charge log")
        except (ValueError, RecursionError) as error:
            self._damaged("it is not JSON", error)
        return value

    def _identity(self, header: dict[str, Any]) -> str:
        match header:
            case {"ledger": int(number)} if number < _FORMAT:
                raise RunError(
                    f"{self._path} is from an older version, whose lines have no chain digests, so missing lines "
                    "cannot be detected: start a new run in a fresh directory, which is charged again"
                )
            case {"ledger": int(number), "id": str(identity), "terms": dict(terms), **more} if (
                number == _FORMAT and len(identity) == 16 and not more
            ):
                if terms == self._terms:
                    return identity
                raise UserError(
                    f"{self._path} was opened under {terms}, not {self._terms}: use a fresh output directory"
                )
        return self._damaged("it is not the first line of a privacy ledger")

    def _charge(self, value: dict[str, Any]) -> Charge:
        match value:
            case {"release": str(release), "noise": str(noise), "event": dict(event), "epsilon": spent, "chain": _}:
                pass
            case _:
                self._damaged("it is not a charge")
        if value["chain"] != _digest(self._digests, value) or len(value) != 5:
            self._damaged("its digest does not match the lines before it: a line was changed, added or removed")
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
            f"The privacy spent so far is unknown: {_CURE}"
        ) from cause

    def _write(self, file: BinaryIO, line: bytes) -> None:
        """Append ``line`` and wait until it is on the disk. If writing fails, remove the line and raise RunError."""
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

    def _check_receipt(self, receipt: Receipt, holder: str) -> None:
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
            f"{self._path} {wrong}, but {holder} was paid for with the first {receipt.charges} charges of ledger "
            f"{receipt.ledger}: {_CURE}"
        )


def _finite_at_most(epsilon: float, budget: float) -> bool:
    return math.isfinite(epsilon) and epsilon <= budget


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _digest(before: list[str], value: Mapping[str, Any]) -> str:
    """Return the chain digest of a line of the log: the SHA-256 of the last digest in ``before`` and this line."""
    unchained = {key: part for key, part in value.items() if key != "chain"}
    return hashlib.sha256((before[-1] if before else "").encode() + _line(unchained)).hexdigest()
