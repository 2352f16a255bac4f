"""DA-FL on one client: the release of the client's share, its part of the pool of synthetic records.

After Tang, Wang, Liu 2023. Private label selection (PLS) determines the number of synthetic records of each class; the
private generator (PSG) makes the records. Privacy unit: one record, add or remove; the number of records of a client,
gamma and the range of selected counts are public. Both releases are charged to the client's ledger before they are
made. A private folder of the client stores the noise key, so that a run that was killed makes the same release again at
no further cost, and then the finished share. The ledger is in another place: it remains when the folder is deleted, and
contains all releases about the same records.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from dp_accounting import dp_event
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from clients.dafl.generator import Check, GeneratorBill, GeneratorRequest, Made, PrivateRecords, generate_all
from clients.dafl.settings import DaFl
from clients.policy import KEY, Policy, open_ledger, pay
from fl_sim.errors import RunError, UserError
from fl_sim.kinds import kind_of
from fl_sim.privacy import events
from fl_sim.privacy.ledger import Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from fl_sim.store.files import explain
from fl_sim.store.tensors import write_private

Returned = TypeVar("Returned")

_SHARE = "share.safetensors"


@dataclass(frozen=True)
class SyntheticShare:
    """One client's part of the pool of synthetic records. All its contents are private releases.

    ``inputs``: float32 in [-1, 1], (records, *input shape), sorted by class. ``counts``: the number of records of each
    class, (num_classes,). ``refused``: the reason if the share has no records, else empty. ``facts``: the privacy
    events of the release as JSON values, from which its epsilon can be computed again; {} if nothing was released.
    ``receipt``: the ledger's receipt for the charge; None if nothing was released.
    """

    inputs: torch.Tensor
    counts: NDArray[np.int64]
    refused: str
    facts: dict[str, Any]
    receipt: Receipt | None


@dataclass(frozen=True)
class ReleasingClient:
    """A client that releases a share of synthetic records.

    ``folder``: the private folder for its noise key and its share. ``ledger``: the ledger that is charged, unless the
    client's owner has set a ``policy``; then the policy's ledger is charged.
    """

    number: int
    records: PrivateRecords
    folder: Path
    ledger: Path
    policy: Policy | None = None


@dataclass(frozen=True)
class PaidRequest:
    """A request to a client's generator, and the ledger's receipt for its charge. SENSITIVE: it contains records."""

    request: GeneratorRequest
    receipt: Receipt


def make_shares(
    settings: DaFl,
    clients: Sequence[ReleasingClient],
    *,
    seed: int,
    public_records: int,
    check: Check = lambda: None,
) -> list[SyntheticShare | Exception]:
    """Return every client's share of synthetic records, or its error. All clients' generators are trained together.

    A share is made once: a second call with the same folder returns the first share. ``public_records``: a public upper
    bound on the number of records of any client in a class. An exception from ``check`` aborts all unfinished shares.
    """
    begun = [_outcome(partial(begin_share, settings, client, seed, public_records)) for client in clients]
    made = iter(_generated(settings, [one.request for one in begun if isinstance(one, PaidRequest)], check))
    return [
        _outcome(partial(finish_share, settings, client, one, next(made))) if isinstance(one, PaidRequest) else one
        for client, one in zip(clients, begun, strict=True)
    ]


def begin_share(
    settings: DaFl, client: ReleasingClient, seed: int, public_records: int
) -> SyntheticShare | PaidRequest:
    """Charge a client's synthetic records to its privacy ledger; return the request for the generator to make them.

    The request contains the number of synthetic records of each class, selected privately. If the client's share (its
    synthetic records) exists already, return the share instead. The same holds for an empty share, if the privacy
    budget allows no useful release.
    """
    records, policy, num_classes = client.records, client.policy, client.records.num_classes
    if policy:
        policy.check_noise(settings.noise, "preprocess.noise")
        policy.check_code(kind_of(settings.generator), "preprocess.generator")
    if (client.folder / _SHARE).exists():
        return _read(client)
    bill = _bill(settings, records)
    if bill.refused:
        return SyntheticShare(records.inputs[:0], np.zeros(num_classes, np.int64), bill.refused, {}, None)
    name = settings.release_of(client.number, seed, records.features)
    cost = {
        f"labels {name}": label_event(settings, num_classes),
        f"generator {name}": dp_event.SelfComposedDpEvent(bill.event, bill.steps),
    }
    seeded = f"{seed}/da-fl/{client.number}" if settings.noise == "seeded" else ""
    paid = pay(cost, client.folder, client.ledger, policy, seeded=seeded)
    counts = _selected_counts(settings, records, settings.gamma_of(client.number), public_records, paid.noise)
    request = GeneratorRequest(records, counts, bill, paid.noise, rng(seed, "generator", client.number))
    return PaidRequest(request, paid.receipt)


def generate_elsewhere(
    settings: DaFl, number: int, records: PrivateRecords, counts: NDArray[np.int64], noise: Noise, *, seed: int
) -> torch.Tensor:
    """Return a client's synthetic records, computed in a process without access to the client's folder and ledger.

    ``counts``, ``noise``: the values in the request from ``begin_share``. Error messages contain nothing private.
    """
    request = GeneratorRequest(records, counts, _bill(settings, records), noise, rng(seed, "generator", number))
    [made] = _generated(settings, [request])
    if isinstance(made, Exception):
        raise _without_quotes(made)
    return made


def finish_share(settings: DaFl, client: ReleasingClient, paid: PaidRequest, made: Made) -> SyntheticShare:
    """Store the synthetic records ``made`` as the client's share, delete the noise key, and return the share.

    If ``made`` is an exception, raise it with a message that quotes no records.
    """
    if isinstance(made, Exception):
        raise _without_quotes(made)
    request, num_classes = paid.request, client.records.num_classes
    gamma, held = settings.gamma_of(client.number), len(client.records.labels)
    share = SyntheticShare(
        inputs=made,
        counts=request.counts,
        refused="" if request.counts.sum() else f"no class was selected: gamma {gamma:g} of {held} records is too few",
        facts={
            "labels": events.to_json(label_event(settings, num_classes)),
            "labels_epsilon": settings.labels.total_epsilon(num_classes),
            "generator": events.to_json(request.bill.event),
            "generator_steps": request.bill.steps,
        },
        receipt=paid.receipt,
    )
    said = {"refused": share.refused, "facts": json.dumps(share.facts), "receipt": json.dumps(paid.receipt.to_json())}
    tensors = {"inputs": share.inputs.contiguous(), "counts": torch.from_numpy(share.counts)}
    write_private(client.folder / _SHARE, save(tensors, said))
    (client.folder / KEY).unlink(missing_ok=True)
    return share


def label_event(settings: DaFl, num_classes: int) -> dp_event.DpEvent:
    """Return the privacy event of the private selection of class counts. It does not depend on any record."""
    return dp_event.NonPrivateDpEvent() if math.isinf(settings.epsilon) else settings.labels.event(num_classes)


def _outcome(function: Callable[[], Returned]) -> Returned | Exception:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 (an error from one client's records is this client's failure)
        return _without_quotes(error)


def _without_quotes(error: Exception) -> Exception:
    """Return an error that is safe to send to the server, because its message does not quote records.

    RunError, UserError and the operating system's errors about files are safe. Other messages are removed.
    """
    if isinstance(error, RunError | UserError):
        return error
    if isinstance(error, OSError) and error.strerror == os.strerror(error.errno or 0):
        return RunError(explain(error))  # a message of the operating system about a file
    kept = RunError(f"making synthetic records failed with {type(error).__name__}, whose message may quote records")
    kept.__cause__ = error
    return kept


def _generated(settings: DaFl, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
    try:
        return generate_all(settings.generator, requests, check)
    except Exception as error:
        raise _without_quotes(error) from error


def _bill(settings: DaFl, records: PrivateRecords) -> GeneratorBill:
    epsilon = settings.generator_epsilon(records.num_classes)
    return settings.generator.bill(len(records.labels), records.num_classes, epsilon, settings.delta)


def _selected_counts(
    settings: DaFl, records: PrivateRecords, gamma: float, public_records: int, noise: Noise
) -> NDArray[np.int64]:
    """Return the number of synthetic records of each class, (num_classes,), by private label selection.

    If epsilon is inf, return gamma times the number of records of each class, rounded.
    """
    held = np.bincount(records.labels.numpy(), minlength=records.num_classes)
    if math.isinf(settings.epsilon):
        exact: NDArray[np.int64] = np.rint(gamma * held).astype(np.int64)
        return exact
    return settings.labels.select(held, gamma, settings.labels.largest_count(gamma, public_records), noise)


def _read(client: ReleasingClient) -> SyntheticShare:
    """Return the client's stored synthetic records.

    Raises RunError for a damaged file or a ledger without their charge.
    """
    path, records = client.folder / _SHARE, client.records
    share, cause = None, None
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata()
            share = SyntheticShare(
                inputs=file.get_tensor("inputs").float(),
                counts=file.get_tensor("counts").long().numpy(),
                refused=said["refused"],
                facts=json.loads(said["facts"]),
                receipt=Receipt.from_json(json.loads(said["receipt"])),
            )
        counts = share.counts.tolist()
        whole = len(counts) == records.num_classes and min(counts) >= 0 and sum(counts) == len(share.inputs)
        if not (whole and share.inputs.shape[1:] == records.inputs.shape[1:] and bool(share.inputs.isfinite().all())):
            share = None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError, RecursionError, RunError) as error:
        share, cause = None, error
    if share is None or share.receipt is None:
        raise RunError(
            f"{path} is damaged: delete it; the share is then made again, which is a new release and is charged again"
        ) from cause
    ledger = client.policy.ledger if client.policy else client.ledger
    open_ledger(ledger, share.receipt, f"the share in {client.folder}")
    return share
