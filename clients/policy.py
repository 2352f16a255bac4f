"""The policy of a client: the owner's limits on its privacy costs. Without a policy a client accepts any epsilon.

The policy is a TOML file on the client's machine, which no task of a server can change:

    epsilon = 10.0               # the largest epsilon per record over ALL that this client ever publishes
    delta = 1e-5
    allow_raw_updates = false    # may the client train on its own records, and send updates without noise?
    allow_votes = false          # may the client send the votes of a PATE teacher, without noise?

The folder ``<file>.private`` next to the policy contains the privacy ledger, with the privacy costs of all tasks under
the policy. The folder also contains temporary files. All tasks share this privacy ledger, even if they name different
experiments, seeds, partitions or data sets. So a new task does not start with a new privacy budget. Only secret noise
is allowed. If the client refuses a task, the server gets an error message without information about the records.
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
"""The privacy unit, adjacency and delta of every client's privacy ledger.

The ledger accepts any privacy budget and any delta. ``Policy`` checks the limits."""

KEY: Final = "key"
"""The name of the file with the noise key. The file is deleted when the private result is stored."""

_POOL: Final = re.compile(r"synthetic-[0-9a-f]{16}\.safetensors")

# the largest size of a policy file or of a stored receipt, in bytes: longer files are refused
_LONGEST: Final = 64 * 1024

_KEY_BYTES: Final = 32


class _PolicyFile(Settings):
    """The fields of the policy's TOML file, with their types and defaults."""

    epsilon: float = Field(gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    allow_raw_updates: bool = False
    allow_votes: bool = False


@dataclass(frozen=True)
class Policy:
    """The limits that a client's owner has set in a policy file (see the module's docstring). ``path``: the file."""

    path: Path
    epsilon: float
    delta: float
    allow_raw_updates: bool
    allow_votes: bool

    @property
    def home(self) -> Path:
        """Return the folder with the privacy ledger and temporary files. Only the client's owner can read it."""
        return self.path.with_name(f"{self.path.name}.private")

    @property
    def ledger(self) -> Path:
        """Return the path of the privacy ledger, with the privacy costs of all tasks ever done under this policy."""
        return self.home / "ledger.jsonl"

    def check_noise(self, noise: str, setting: str) -> None:
        """Raise RunError for seeded noise, which the server could subtract, because it knows the seed.

        ``noise``: "secret" or "seeded". ``setting``: the name of the setting of the noise, for the error message.
        """
        if noise != "secret":
            raise RunError(
                f'this client\'s policy allows secret noise only, and the server asks for noise = "{noise}": '
                f"leave {setting} at its default"
            )

    def check_code(self, kind: str, setting: str) -> None:
        """Raise RunError for a mechanism that is not part of fl-sim: the client cannot verify its privacy cost.

        ``kind``: the name or import path of the mechanism. ``setting``: the name of its setting, for the error message.
        """
        if ":" in kind:
            raise RunError(
                f"this client's policy cannot verify the privacy cost of code from outside fl-sim, and the server asks "
                f"for {setting} = {in_one_line(repr(kind))}: set a value that is part of fl-sim"
            )

    def check_pool(self, path: str) -> None:
        """Raise RunError if the file at ``path`` is not named like a pool of synthetic records.

        The server names the file, and the node reads it. Without this check the server could name any file, such as the
        owner's records.
        """
        if not _POOL.fullmatch(Path(path).name):
            raise RunError(
                "this client's policy allows training only on a pool of synthetic records, and the server names a file "
                "without the name of such a pool: use a file that fl-sim made, synthetic-<digest>.safetensors"
            )

    def check_training(self, *, own_records: bool) -> None:
        """Raise RunError for training on the client's own records, unless the policy allows updates without noise.

        Noise that the server adds later is no protection: the server has already seen the update without noise.
        """
        if own_records and not self.allow_raw_updates:
            raise RunError(
                "this client's policy allows no updates and no averages from its own records, because they are sent "
                'without noise: train on synthetic records alone (preprocess.train_on = "synthetic"), or ask its '
                "owner for allow_raw_updates = true"
            )

    def check_vote(self) -> None:
        """Raise RunError unless the policy allows the votes of a PATE teacher, which have no noise."""
        if not self.allow_votes:
            raise RunError(
                "this client's policy allows no votes, because they are sent without noise: ask its owner for "
                "allow_votes = true"
            )

    def pay(self, releases: Mapping[str, dp_event.DpEvent], noise: str) -> Receipt:
        """Write the privacy costs of planned ``releases`` into the privacy ledger, and return the ledger's receipt.

        ``releases``: the private outputs, as {name: privacy event}. Raises RunError, and writes nothing, if the total
        would exceed the policy's epsilon. The server may choose each private output after it has seen the earlier
        outputs (adaptive composition). So the privacy costs are added at one Renyi order (a Renyi filter). The first
        entries of the ledger determine this order. ``noise``: an identifier of the noise key (the secret seed of the
        noise). If an earlier entry of the ledger has the same name and the same noise key, the output is the same, and
        has no further cost.
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
                    "releases, and the request would exceed it: ask for less, with a smaller preprocess.epsilon, "
                    "calibrate.epsilon or local.privacy.epsilon"
                )
            for name, event in new.items():
                ledger.charge(event, release=name, noise=noise)
            write_private(self._receipt, json.dumps(ledger.receipt.to_json()).encode())
        return ledger.receipt

    def _spent(self, charges: Sequence[Charge]) -> float:
        """Return the epsilon of ``charges``, the privacy costs in the ledger, at a fixed Renyi order.

        The first charges in the ledger determine this order: all charges up to the first one whose noise has another
        secret key.
        """
        if not charges:
            return 0.0
        first = takewhile(lambda charge: charge.noise == charges[0].noise, charges)
        order = fixed_order(Counter(charge.event for charge in first), self.epsilon, self.delta)
        return epsilon_at(order, Counter(charge.event for charge in charges), self.delta)

    def open_ledger(self) -> Ledger:
        """Return the privacy ledger.

        Raises RunError if its file was deleted or shortened after a privacy cost was written.
        """
        earlier = Receipt.from_json(_json(self._receipt)) if self._receipt.exists() else None
        return open_ledger(self.ledger, earlier, f"what was released under {self.path}")

    @property
    def _receipt(self) -> Path:
        return self.home / "receipt.json"


def read_policy(path: Path) -> Policy:
    """Return the policy in a file. Raises UserError if the file is missing, is not TOML, or is not a valid policy."""
    text = _text(path)
    try:
        table = parse_table(text, str(path))
    except UserError as error:
        raise UserError(f"{path} is no policy, because it is not TOML: write a line such as epsilon = 10.0") from error
    try:
        return Policy(path.absolute(), **_PolicyFile.model_validate(table).model_dump())
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, _PolicyFile, '')}") from error


def open_ledger(path: Path, receipt: Receipt | None = None, holder: str = "") -> Ledger:
    """Return a client's privacy ledger in the file ``path``.

    A missing file is created, and only its owner can read it. It is not created if a ``receipt`` shows that the file
    existed before. ``receipt``, ``holder``: the arguments of ``Ledger``. Raises UserError if the file cannot be
    created.
    """
    if receipt is None and not path.exists():
        try:
            for folder in reversed([path.parent, *path.parent.parents]):
                folder.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:
            raise UserError(
                f"{path} cannot be created ({error.strerror}), and nothing is released without a ledger: set "
                "FL_SIM_LEDGERS to a folder that you may write"
            ) from error
    return Ledger(RECORD_TERMS, path, receipt=receipt, holder=holder)


@dataclass(frozen=True)
class PaidNoise:
    """The noise for a planned private output, and a receipt: the ledger's proof that the privacy cost is charged."""

    noise: Noise
    receipt: Receipt


def pay(
    releases: Mapping[str, dp_event.DpEvent], folder: Path, ledger: Path, policy: Policy | None, *, seeded: str = ""
) -> PaidNoise:
    """Write the privacy costs of planned ``releases`` into a privacy ledger, and return noise and receipt.

    ``releases``: the private outputs, as {name: privacy event}. The costs are written into the policy's privacy ledger,
    or into ``ledger`` if there is no policy. The noise is secret, and its key is stored in ``folder``. If a client is
    killed before it has stored an output, it later computes the same output again. ``seeded``: empty for secret noise.
    In simulations it may be a text that names seed, output and client; the noise is then derived from this text.
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
            raise RunError(f"{path} is damaged: delete it; the release is then made with a new key, and charged again")
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
            raise UserError(f"{path} is too long: give a file of at most {_LONGEST} bytes")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give the path of a text file") from error


def _json(path: Path) -> object:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError):
        return None
