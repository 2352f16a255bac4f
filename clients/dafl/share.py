"""DA-FL on one client: the client makes its share of the pool, which is its set of synthetic records.

The method was published by Tang, Wang, Liu 2023. Private label selection (PLS) determines the number of synthetic
records of each class. The private generator makes the records. The privacy unit is one record, which is added or
removed. Three things are public: the number of records of a client, gamma, and the range of the selected numbers.
Before the records are made, the privacy costs of label selection and generator are written into the client's privacy
ledger. A private folder of the client stores the noise key (the secret seed of the noise). If a run is killed and
resumed, it makes the same synthetic records again with this key, at no further privacy cost. Later the folder stores
the finished share. The privacy ledger is in another place, and remains when the folder is deleted. It contains the
privacy costs of everything that was published about the client's records.
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
    """One client's part of the pool of synthetic records. All contents are differentially private.

    ``inputs``: float32 in [-1, 1], (records, *input shape), sorted by class. ``counts``: the number of synthetic
    records of each class, (num_classes,). ``refused``: the reason if no synthetic records were made, else empty.
    ``facts``: the privacy events of label selection and generator as JSON values, from which the epsilon can be
    computed again; {} if no synthetic records were made. ``receipt``: the privacy ledger's proof that the privacy cost
    is charged; None if no synthetic records were made.
    """

    inputs: torch.Tensor
    counts: NDArray[np.int64]
    refused: str
    facts: dict[str, Any]
    receipt: Receipt | None


@dataclass(frozen=True)
class ReleasingClient:
    """A client that makes synthetic records from its own records.

    ``folder``: the private folder for the client's noise key and synthetic records. ``ledger``: the privacy ledger for
    the privacy costs. If the client's owner has set a ``policy``, the policy's privacy ledger is used instead.
    """

    number: int
    records: PrivateRecords
    folder: Path
    ledger: Path
    policy: Policy | None = None


@dataclass(frozen=True)
class PaidRequest:
    """The arguments for a client's generator, and a receipt: the ledger's proof that the privacy cost is charged.

    SENSITIVE: the arguments contain the client's records.
    """

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
    """Return every client's synthetic records, or its error. All clients' generators are trained together.

    Each client makes its synthetic records once. A second call with the same folder returns the records of the first
    call. ``public_records``: a public upper bound on the number of records of any client in a class. An exception from
    ``check`` aborts all unfinished clients.
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
    """Write the privacy cost of a client's synthetic records into its privacy ledger.

    Return the arguments with which the generator then makes the records. These arguments contain the privately selected
    number of synthetic records of each class. If the synthetic records exist already, return them instead. If the
    privacy budget allows no useful synthetic records, return an empty set of records. The ledger does not change in
    these two cases.
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
    """Make a client's synthetic records in a process without access to the client's folder and privacy ledger.

    ``counts``, ``noise``: the values in the result of ``begin_share``. Error messages contain nothing private.
    """
    request = GeneratorRequest(records, counts, _bill(settings, records), noise, rng(seed, "generator", number))
    [made] = _generated(settings, [request])
    if isinstance(made, Exception):
        raise _without_quotes(made)
    return made


def finish_share(settings: DaFl, client: ReleasingClient, paid: PaidRequest, made: Made) -> SyntheticShare:
    """Store the synthetic records ``made`` as the client's share of the pool, and return this share.

    The function also deletes the noise key (the secret seed of the noise). If ``made`` is an exception, it is raised
    with a message that quotes no records.
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
    """Return the privacy event of a client's label selection. It depends on public numbers only, not on records.

    Label selection privately determines the client's number of synthetic records of each class.
    """
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
        return RunError(explain(error))  # the operating system's error about a file does not quote its content
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

    Raises RunError if the file is damaged, or if the privacy ledger lacks the privacy cost of these records.
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
