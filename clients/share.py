"""DA-FL on one client: pick labels privately, train a private generator, release records (Tang, Wang, Liu 2023).

PLS says how many records of each class to make, PSG makes them. Privacy unit: one record, add or remove; how many
records a client holds, gamma and the range are public. Both releases are charged to the client's ledger before they are
made. What a client keeps until its share is out lies in a folder of its own: the noise key (so that a run that was
killed makes the same release again, at no further cost), the ledger, and the share.
"""

import hashlib
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
from safetensors import safe_open
from safetensors.torch import save_file

from clients.dafl import DaFl
from clients.generation import Bill, Made, PrivateRecords, Request, nothing
from fl_sim.privacy import events
from fl_sim.privacy.accounting import Adjacency
from fl_sim.privacy.ledger import Ledger, Terms
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from fl_sim.store import write_private

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_KEY, _LEDGER, _SHARE = "key", "ledger.jsonl", "share.safetensors"


@dataclass(frozen=True)
class Share:
    """What one client gives to the pool. All of it is a private release; ``refused`` says why it may be empty.

    ``inputs``: float32 in [-1, 1], (records, *input shape), sorted by class; ``counts``: (num_classes,).
    ``facts`` state what was paid (``facts_of``), nothing where nothing was released.
    """

    inputs: torch.Tensor
    counts: NDArray[np.int64]
    refused: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Client:
    """One client: its number, its records, and the folder in which it keeps what its share takes."""

    number: int
    records: PrivateRecords
    folder: Path


def make_share(
    settings: DaFl, records: PrivateRecords, client: int, folder: Path, *, seed: int, public_records: int
) -> Share:
    """Return the share of one ``client`` by itself: see ``make_shares``."""
    [share] = make_shares(settings, [Client(client, records, folder)], seed=seed, public_records=public_records)
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
    begun = [_caught(_begin, settings, client, seed, public_records) for client in clients]
    requests = [one for one in begun if isinstance(one, Request)]
    made = iter(settings.generator.generate_stacked(requests, check))
    return [
        _caught(_finish, settings, client, one, next(made)) if isinstance(one, Request) else one
        for client, one in zip(clients, begun, strict=True)
    ]


def _caught(
    what: Callable[Arguments, Returned], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Returned | Exception:
    try:
        return what(*arguments, **named)
    except Exception as error:  # noqa: BLE001 (whatever a client's data raises is this one client's failure)
        return error


def _begin(settings: DaFl, client: Client, seed: int, public_records: int) -> Share | Request:
    """Pay for the share, and pick its labels; or return it, where there is one already, or none can be."""
    folder, records = client.folder, client.records
    if (folder / _SHARE).exists():
        return _read(folder / _SHARE)
    bill = settings.generator.bill(
        len(records.labels), records.num_classes, settings.generator_epsilon(records.num_classes), settings.delta
    )
    if bill.refused:
        return _empty(records, bill.refused)
    folder.mkdir(parents=True, exist_ok=True)
    noise = _noise(settings, folder, seed, client.number)
    _pay(settings, bill, records.num_classes, folder, noise)
    counts = pick_labels(settings, records, settings.gamma_of(client.number), public_records, noise)
    return Request(records, counts, bill, noise, rng(seed, "generator", client.number))


def _finish(settings: DaFl, client: Client, request: Request, made: Made) -> Share:
    """Keep what the generator made, which is the release, and let the key go."""
    if isinstance(made, Exception):
        raise made
    gamma, held = settings.gamma_of(client.number), len(client.records.labels)
    share = Share(
        inputs=made,
        counts=request.counts,
        refused="" if request.counts.sum() else f"no label was picked: gamma {gamma:g} of {held} records is too few",
        facts=facts_of(settings, request.bill, client.records.num_classes),
    )
    _write(client.folder / _SHARE, share)
    (client.folder / _KEY).unlink(missing_ok=True)
    return share


def facts_of(settings: DaFl, bill: Bill, num_classes: int) -> dict[str, Any]:
    """Return what was paid, as JSON values: enough for anybody to add it up again."""
    return {
        "labels": events.to_json(_label_event(settings, num_classes)),
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


def _label_event(settings: DaFl, num_classes: int) -> dp_event.DpEvent:
    return dp_event.NonPrivateDpEvent() if math.isinf(settings.epsilon) else settings.labels.event(num_classes)


def _pay(settings: DaFl, bill: Bill, num_classes: int, folder: Path, noise: Noise) -> None:
    """Charge both releases before either is made."""
    ledger = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, settings.delta), folder / _LEDGER)
    ledger.charge(_label_event(settings, num_classes), release="labels", noise=noise.identity)
    ledger.charge(dp_event.SelfComposedDpEvent(bill.event, bill.steps), release="generator", noise=noise.identity)


def _noise(settings: DaFl, folder: Path, seed: int, client: int) -> Noise:
    """Return the client's noise: the same again where it was killed before its share was out."""
    if settings.noise == "seeded":
        return Noise.seeded(int.from_bytes(hashlib.sha256(f"{seed}/da-fl/{client}".encode()).digest()))
    path = folder / _KEY
    if not path.exists():
        write_private(path, os.urandom(32))
    return Noise(path.read_bytes(), simulation_only=False)


def _empty(records: PrivateRecords, reason: str) -> Share:
    """Return the share of a client that releases nothing, and so pays nothing."""
    none = np.zeros(records.num_classes, dtype=np.int64)
    return Share(records.inputs[:0], none, reason, {})


def _write(path: Path, share: Share) -> None:
    partial = path.with_name(f".{path.name}.part")
    said = {"refused": share.refused, "facts": json.dumps(share.facts)}
    save_file({"inputs": share.inputs.contiguous(), "counts": torch.from_numpy(share.counts)}, partial, said)
    partial.replace(path)


def _read(path: Path) -> Share:
    with safe_open(path, "pt") as file:
        said = file.metadata()
        return Share(
            file.get_tensor("inputs"), file.get_tensor("counts").numpy(), said["refused"], json.loads(said["facts"])
        )
