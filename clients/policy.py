"""A client's own policy and ledger. Without a policy a client accepts any epsilon that the server sends.

The policy is a TOML file of the client's, which no task of a server can change:

    epsilon = 10.0               # the largest, per record, over ALL releases that this client ever makes
    delta = 1e-5
    allow_raw_updates = false    # may it train on its own records, and send what it learnt without noise?
    allow_votes = false          # may it vote as a teacher? Votes leave it without noise

Beside it, in ``<file>.private``, lie the ledger of everything released under it and what the client keeps until a share
is out. There is one ledger, whatever experiment, seed, split or data set a task names: so new tasks do not buy fresh
epsilons. Only secret noise is made. No refusal contains anything about the records.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from dp_accounting import dp_event
from pydantic import Field, ValidationError

from fl_sim.errors import RunError, UserError
from fl_sim.mistakes import explain
from fl_sim.own_code import in_one_line
from fl_sim.privacy.accounting import epsilon_at, fixed_order
from fl_sim.privacy.ledger import Charge, Ledger, Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Adjacency, Terms
from fl_sim.settings import Settings, parse_table
from fl_sim.store.files import folder_lock
from fl_sim.store.tensors import write_private

RECORD_TERMS: Final = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, 1e-5)
"""The terms of every client's ledger. It takes releases of any budget and delta, which are checked elsewhere."""

KEY: Final = "key"
"""The file of the noise key, to be deleted when the release is out."""

_POOL: Final = re.compile(r"synthetic-[0-9a-f]{16}\.safetensors")

_LONGEST: Final = 64 * 1024  # bytes of a policy or a receipt

_KEY_BYTES: Final = 32


class _PolicyFile(Settings):
    """The contents of the TOML file."""

    epsilon: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    allow_raw_updates: bool = False
    allow_votes: bool = False


@dataclass(frozen=True)
class Policy:
    """The limits that a client sets; ``path`` is its file. Read by ``read_policy``."""

    path: Path
    epsilon: float
    delta: float
    allow_raw_updates: bool
    allow_votes: bool

    @property
    def home(self) -> Path:
        """Return the folder, readable by its owner alone, of the ledger and of shares that are not out yet."""
        return self.path.with_name(f"{self.path.name}.private")

    @property
    def ledger(self) -> Path:
        """Return the ledger of everything that was ever released under this policy."""
        return self.home / "ledger.jsonl"

    def check_noise(self, noise: str, setting: str) -> None:
        """Raise RunError for seeded noise, which the sender of the task could remove. ``setting``: asks for it."""
        if noise != "secret":
            raise RunError(
                f'this client\'s policy allows secret noise only, and the server asks for noise = "{noise}": '
                f"leave {setting} at its default"
            )

    def check_code(self, kind: str, setting: str) -> None:
        """Raise RunError for a mechanism of another project, which states its cost itself. ``setting``: asks for it."""
        if ":" in kind:
            raise RunError(
                f"this client's policy takes no foreign code's word for what a release costs, and the server asks for "
                f"{setting} = {in_one_line(repr(kind))}: take one that comes with fl-sim"
            )

    def check_pool(self, path: str) -> None:
        """Raise RunError for a pool whose file name is not of the form that this program gives pools.

        A server names the file, and the node reads it: it could be any, such as one with records of the owner's.
        """
        if not _POOL.fullmatch(Path(path).name):
            raise RunError(
                "this client's policy allows training on a pool of synthetic records alone, and the server names a "
                "file that is not called as fl-sim calls them, synthetic-<digest>.safetensors: name such a one"
            )

    def check_training(self, *, own_records: bool) -> None:
        """Raise RunError for updates made from raw records: the server's noise does not protect from the server."""
        if own_records and not self.allow_raw_updates:
            raise RunError(
                "this client's policy allows no updates and no averages made from its own records, which would leave "
                'it without noise: train on synthetic records alone (preprocess.train_on = "synthetic"), or ask its '
                "owner for allow_raw_updates = true"
            )

    def check_vote(self) -> None:
        """Raise RunError for votes: the noise on them is the server's."""
        if not self.allow_votes:
            raise RunError(
                "this client's policy allows no votes, which would leave it without noise: ask its owner for "
                "allow_votes = true"
            )

    def pay(self, releases: Mapping[str, dp_event.DpEvent], noise: str) -> Receipt:
        """Charge all of ``releases`` (name -> event) before any is made, or none. Raises RunError beyond epsilon.

        Whoever asks for a release has seen the ones before it, so they add up at one Renyi order, which the first ones
        fixed (a Renyi filter). ``noise`` identifies the noise key: a release that was charged under it
        already is the same release, and free.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        with folder_lock(self.home):
            ledger = self.open_ledger()
            paid = {(charge.release, charge.noise) for charge in ledger.charges}
            new = {name: event for name, event in releases.items() if (name, noise) not in paid}
            charges = [*ledger.charges, *(Charge(name, noise, event, None) for name, event in new.items())]
            if self._spent(charges) > self.epsilon:
                raise RunError(
                    f"this client's policy allows epsilon {self.epsilon:g} at delta {self.delta:g} per record over all "
                    "releases, and the request would exceed it: ask for less, with a smaller preprocess.epsilon or "
                    "calibrate.epsilon"
                )
            for name, event in new.items():
                ledger.charge(event, release=name, noise=noise)
            write_private(self._receipt, json.dumps(ledger.receipt.to_json()).encode())
        return ledger.receipt

    def _spent(self, charges: Sequence[Charge]) -> float:
        """Return the epsilon of ``charges`` at the Renyi order that the first of them fixed, which share a key."""
        if not charges:
            return 0.0
        first = takewhile(lambda charge: charge.noise == charges[0].noise, charges)
        order = fixed_order(Counter(charge.event for charge in first), self.epsilon, self.delta)
        return epsilon_at(order, Counter(charge.event for charge in charges), self.delta)

    def open_ledger(self) -> Ledger:
        """Return the ledger. Raises RunError if it is missing or cut after a payment."""
        earlier = Receipt.from_json(_json(self._receipt)) if self._receipt.exists() else None
        return open_ledger(self.ledger, earlier, f"what was released under {self.path}")

    @property
    def _receipt(self) -> Path:
        return self.home / "receipt.json"


def read_policy(path: Path) -> Policy:
    """Return the policy in a file. Raises UserError if the file is missing, no TOML, or no policy."""
    text = _text(path)
    try:
        table = parse_table(text, str(path))
    except UserError as error:
        raise UserError(f"{path} is no policy, since it is not TOML: write one such as epsilon = 10.0") from error
    try:
        return Policy(path.absolute(), **_PolicyFile.model_validate(table).model_dump())
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, _PolicyFile, '')}") from error


def open_ledger(path: Path, receipt: Receipt | None = None, holder: str = "") -> Ledger:
    """Return a client's ledger, created if there is none, readable by its owner alone.

    ``receipt``, ``holder``: as for ``Ledger``.
    """
    if receipt is None and not path.exists():
        try:
            for folder in reversed([path.parent, *path.parent.parents]):
                folder.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:
            raise UserError(
                f"{path} cannot be made ({error.strerror}), and nothing is released without a ledger: set "
                "FL_SIM_LEDGERS to a folder that you may write"
            ) from error
    return Ledger(RECORD_TERMS, path, receipt=receipt, holder=holder)


@dataclass(frozen=True)
class PaidNoise:
    """The noise of a release that is paid for and not made yet, and the receipt."""

    noise: Noise
    receipt: Receipt


def pay(
    releases: Mapping[str, dp_event.DpEvent], folder: Path, ledger: Path, policy: Policy | None, *, seeded: str = ""
) -> PaidNoise:
    """Charge all of ``releases`` (name -> event) before any is made, to the policy's ledger, or else to ``ledger``.

    The noise is secret and its key lies in ``folder``: the same again if a client was killed before its release was
    out. ``seeded``: a text that names seed, release and client and determines the noise, in simulations only.
    """
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    if seeded:
        noise = Noise.seeded(int.from_bytes(hashlib.sha256(seeded.encode()).digest()))
    else:
        path = folder / KEY
        if not path.exists():
            write_private(path, os.urandom(_KEY_BYTES))
        if path.stat().st_size != _KEY_BYTES:
            raise RunError(f"{path} is damaged: delete it, and the release is made with another key, which pays again")
        noise = Noise(path.read_bytes(), simulation_only=False)
    if policy:
        return PaidNoise(noise, policy.pay(releases, noise.identity))
    own = open_ledger(ledger)
    for name, event in releases.items():
        own.charge(event, release=name, noise=noise.identity)
    return PaidNoise(noise, own.receipt)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise UserError(f"{path} is too long: it should hold a few lines")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give the path of a text file") from error


def _json(path: Path) -> object:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError):
        return None
