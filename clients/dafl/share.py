"""DA-FL on one client: pick labels privately, train a private generator, release records (Tang, Wang, Liu 2023).

PLS says how many records of each class to make, PSG makes them. Privacy unit: one record, add or remove; how many
records a client holds, gamma and the range are public. Both releases are charged to the client's ledger before they are
made. What a client keeps until its share is out lies in a folder of its own, which nobody else may read: the noise key
(so that a run that was killed makes the same release again, at no further cost) and the share. The ledger lies
elsewhere: it outlives the folder, and whatever was released about the same records is on it.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from clients.dafl.generator import Bill, Made, PrivateRecords, Request, generate_all, nothing
from clients.dafl.settings import DaFl
from clients.policy import Policy, open_ledger
from clients.release import KEY, kept_noise, pay, seeded_noise
from fl_sim.errors import RunError, UserError
from fl_sim.kinds import kind_of
from fl_sim.privacy import events
from fl_sim.privacy.charge_log import Receipt
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from fl_sim.store.files import explain
from fl_sim.store.tensors import write_private

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_SHARE = "share.safetensors"


@dataclass(frozen=True)
class Share:
    """What one client gives to the pool. All of it is a private release; ``refused`` says why it may be empty.

    ``inputs``: float32 in [-1, 1], (records, *input shape), sorted by class; ``counts``: (num_classes,).
    ``facts`` state what was paid (``facts_of``) and ``receipt`` with what: {} and None where nothing was released.
    """

    inputs: torch.Tensor
    counts: NDArray[np.int64]
    refused: str
    facts: dict[str, Any]
    receipt: Receipt | None


@dataclass(frozen=True)
class Client:
    """One client: its number, its records, the folder for what its share takes, its ledger and, if any, its policy.

    The ledger of a client with a policy is the policy's.
    """

    number: int
    records: PrivateRecords
    folder: Path
    ledger: Path
    policy: Policy | None = None

    def open_ledger(self, receipt: Receipt) -> Ledger:
        """Return the ledger, which must hold what ``receipt`` says. Raises RunError where it does not."""
        path = self.policy.ledger if self.policy else self.ledger
        return open_ledger(path, receipt, f"the share in {self.folder}")


@dataclass(frozen=True)
class Paid:
    """What a generator is to make for one client, and the receipt for it: to be kept from all but that client."""

    request: Request
    receipt: Receipt


def make_share(settings: DaFl, client: Client, *, seed: int, public_records: int) -> Share:
    """Return the share of one ``client`` by itself: see ``make_shares``."""
    [share] = make_shares(settings, [client], seed=seed, public_records=public_records)
    if isinstance(share, Exception):
        raise share
    return share


def make_shares(
    settings: DaFl,
    clients: Sequence[Client],
    *,
    seed: int,
    public_records: int,
    check: Callable[[], None] = nothing,
) -> list[Share | Exception]:
    """Return every client's share, or what it raised; their generators are trained together.

    A share is made once: a second call with the same folder hands out the first one's. ``public_records`` bounds what
    any client may hold of a class, and is known without looking at it. What ``check`` raises ends all that is not done.
    """
    begun = [_caught(begin_share, settings, client, seed, public_records) for client in clients]
    requests = [one.request for one in begun if isinstance(one, Paid)]
    try:
        made = iter(generate_all(settings.generator, requests, check))
    except Exception as error:
        raise _without_its_words(error) from error
    return [
        _caught(finish_share, settings, client, one, next(made)) if isinstance(one, Paid) else one
        for client, one in zip(clients, begun, strict=True)
    ]


def begin_share(settings: DaFl, client: Client, seed: int, public_records: int) -> Share | Paid:
    """Pay for the share, and pick its labels; or return it, where there is one already, or none can be."""
    folder, records = client.folder, client.records
    if client.policy:
        client.policy.check_noise(settings.noise, "preprocess.noise")
        client.policy.check_code(kind_of(settings.generator), "preprocess.generator")
    if (folder / _SHARE).exists():
        return _read(client)
    bill = settings.generator.bill(
        len(records.labels), records.num_classes, settings.generator_epsilon(records.num_classes), settings.delta
    )
    if bill.refused:
        return _empty(records, bill.refused)
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    seeded = settings.noise == "seeded"
    noise = seeded_noise(f"{seed}/da-fl/{client.number}") if seeded else kept_noise(folder)
    releases = _releases(settings, bill, client, seed)
    receipt = pay(client.policy, client.ledger, releases, noise)
    counts = pick_labels(settings, records, settings.gamma_of(client.number), public_records, noise)
    return Paid(Request(records, counts, bill, noise, rng(seed, "generator", client.number)), receipt)


def generate_elsewhere(
    settings: DaFl, number: int, records: PrivateRecords, counts: NDArray[np.int64], noise: Noise, *, seed: int
) -> torch.Tensor:
    """Return what a client's generator makes where neither its folder nor its ledger is: what was paid for at home.

    ``counts``, ``noise``: of ``begin_share``'s request. Raises what may be said of whatever goes wrong.
    """
    held, num_classes = len(records.labels), records.num_classes
    bill = settings.generator.bill(held, num_classes, settings.generator_epsilon(num_classes), settings.delta)
    try:
        [made] = generate_all(
            settings.generator, [Request(records, counts, bill, noise, rng(seed, "generator", number))]
        )
    except Exception as error:
        raise _without_its_words(error) from error
    if isinstance(made, Exception):
        raise _without_its_words(made)
    return made


def finish_share(settings: DaFl, client: Client, paid: Paid, made: Made) -> Share:
    """Keep what the generator made, which is the release, and let the key go."""
    if isinstance(made, Exception):
        raise _without_its_words(made)
    request = paid.request
    gamma, held = settings.gamma_of(client.number), len(client.records.labels)
    share = Share(
        inputs=made,
        counts=request.counts,
        refused="" if request.counts.sum() else f"no label was picked: gamma {gamma:g} of {held} records is too few",
        facts=facts_of(settings, request.bill, client.records.num_classes),
        receipt=paid.receipt,
    )
    _write(client.folder / _SHARE, share)
    (client.folder / KEY).unlink(missing_ok=True)
    return share


def _caught(
    what: Callable[Arguments, Returned], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Returned | Exception:
    try:
        return what(*arguments, **named)
    except (RunError, UserError) as error:
        return error
    except Exception as error:  # noqa: BLE001 (whatever a client's data raises is this one client's failure)
        return _without_its_words(error)


def _without_its_words(error: Exception) -> Exception:
    """Return what may be said of an error: its text may quote records, and goes to the server."""
    if isinstance(error, RunError | UserError):
        return error
    if isinstance(error, OSError) and error.strerror == os.strerror(error.errno or 0):
        return RunError(explain(error))  # the system's own words, about a file
    kept = RunError(f"making the share failed with {type(error).__name__}, whose words may quote records")
    kept.__cause__ = error
    return kept


def facts_of(settings: DaFl, bill: Bill, num_classes: int) -> dict[str, Any]:
    """Return what was paid, as JSON values: enough for anybody to add it up again."""
    return {
        "labels": events.to_json(label_event(settings, num_classes)),
        "labels_epsilon": settings.labels.total_epsilon(num_classes),
        "generator": events.to_json(bill.event),
        "generator_steps": bill.steps,
    }


def pick_labels(
    settings: DaFl, records: PrivateRecords, gamma: float, public_records: int, noise: Noise
) -> NDArray[np.int64]:
    """Return how many records of each class to make, (num_classes,), by PLS; exactly gamma n_k where epsilon is inf."""
    held = np.bincount(records.labels.numpy(), minlength=records.num_classes)
    if math.isinf(settings.epsilon):
        exact: NDArray[np.int64] = np.rint(gamma * held).astype(np.int64)
        return exact
    return settings.labels.select(held, gamma, settings.labels.largest_count(gamma, public_records), noise)


def label_event(settings: DaFl, num_classes: int) -> dp_event.DpEvent:
    """Return what the labels of a share cost: known to all before anybody looks at a record."""
    return dp_event.NonPrivateDpEvent() if math.isinf(settings.epsilon) else settings.labels.event(num_classes)


def _releases(settings: DaFl, bill: Bill, client: Client, seed: int) -> dict[str, dp_event.DpEvent]:
    name = settings.release_of(client.number, seed, client.records.features)
    return {
        f"labels {name}": label_event(settings, client.records.num_classes),
        f"generator {name}": dp_event.SelfComposedDpEvent(bill.event, bill.steps),
    }


def _empty(records: PrivateRecords, reason: str) -> Share:
    """Return the share of a client that releases nothing, and so pays nothing."""
    none = np.zeros(records.num_classes, dtype=np.int64)
    return Share(records.inputs[:0], none, reason, {}, None)


def _write(path: Path, share: Share) -> None:
    assert share.receipt is not None
    said = {"refused": share.refused, "facts": json.dumps(share.facts), "receipt": json.dumps(share.receipt.to_json())}
    tensors = {"inputs": share.inputs.contiguous(), "counts": torch.from_numpy(share.counts)}
    write_private(path, save(tensors, said))


def _read(client: Client) -> Share:
    """Read the share that was made before. Raises RunError where it is damaged, or the ledger does not honour it."""
    path, records = client.folder / _SHARE, client.records
    share: Share | None = None
    fitting, cause = False, None
    try:
        share = _parsed(path)
        counts = share.counts.tolist()
        whole = len(counts) == records.num_classes and min(counts) >= 0 and sum(counts) == len(share.inputs)
        fitting = whole and share.inputs.shape[1:] == records.inputs.shape[1:] and bool(share.inputs.isfinite().all())
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, RecursionError, RunError) as error:
        share, cause = None, error
    if share is None or share.receipt is None or not fitting:
        raise RunError(
            f"{path} is damaged: delete it, and the share is made again, which is another release and pays again"
        ) from cause
    client.open_ledger(share.receipt)
    return share


def _parsed(path: Path) -> Share:
    with safe_open(path, "pt") as file:
        said = file.metadata()
        return Share(
            inputs=file.get_tensor("inputs").float(),
            counts=file.get_tensor("counts").long().numpy(),
            refused=said["refused"],
            facts=json.loads(said["facts"]),
            receipt=Receipt.from_json(json.loads(said["receipt"])),
        )
