"""A pool of synthetic records on disk: what clients answered is checked before it is kept, and when it is read again.

``pool.json`` says what was paid, and with which charges of which client's ledger. A ledger that does not hold them is
refused: otherwise a pool would be shown for less than it cost.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from dp_accounting import dp_event
from safetensors import SafetensorError

from clients.dafl.generator import Compiled
from clients.dafl.settings import DaFl
from clients.dafl.share import label_event
from clients.policy import open_ledger
from fl_sim.data import version_of
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.privacy import events
from fl_sim.privacy.charge_log import Receipt
from fl_sim.privacy.events import adjacency
from fl_sim.privacy.terms import Adjacency
from fl_sim.simulation.client_ledgers import Together, all_together, ledger_path
from fl_sim.simulation.client_runtime import as_kept, read_pool
from fl_sim.store.files import read_whole
from fl_sim.store.run_directory import coarse, write_text
from fl_sim.store.tensors import save_by_content
from fl_sim.types import Dataset

FACTS: Final = "pool.json"
_NAME: Final = re.compile(r"synthetic-[0-9a-f]{16}\.safetensors")
_MOST_WORDS: Final = 1000  # characters of a client's reason
_MOST_SAID: Final = 64 * 1024  # bytes of what one client says
_MOST_STEPS: Final = 10**9


@dataclass(frozen=True)
class ClientPart:
    """One client's part of a pool: released values and public facts only.

    ``receipt``: what it was paid with, None where nothing was released; ``here``: whether that ledger is on this
    machine, and not with a client elsewhere.
    """

    counts: tuple[int, ...]
    refused: str
    facts: dict[str, Any]
    receipt: Receipt | None
    here: bool = False


@dataclass(frozen=True)
class Pool:
    """A pool as the server holds it.

    ``path``: safetensors, records as ``as_kept`` has them and int64 labels, sorted by client. ``together``: what
    all releases about these records cost, this one and those of other settings, seeds and deleted pools; None where not
    all ledgers are here. ``trainer``: who took the generators' steps, in words; empty where nobody says.
    """

    path: Path
    parts: tuple[ClientPart, ...]
    seconds: float
    reused: bool
    together: Together | None
    trainer: str = ""

    @property
    def num_synthetic(self) -> int:
        """Return the number of records."""
        return sum(sum(part.counts) for part in self.parts)


def da_fl(experiment: Experiment) -> DaFl:
    """Return the settings of an experiment that has such a pool."""
    assert isinstance(experiment.preprocess, DaFl)
    return experiment.preprocess


def store(folder: Path, answers: Sequence[tuple[torch.Tensor, str]], job: Job, seconds: float) -> None:
    """Keep what clients answered: (records, what they say of them as JSON), by client.

    Raises RunError, with nothing kept, that names the first client whose answer is none.
    """
    said = []
    for client, (records, text) in enumerate(answers):
        try:
            part = _part(json.loads(text[:_MOST_SAID]), job)
            _check_records(records, part, job.dataset)
        except (ValueError, RecursionError, RunError) as error:
            raise RunError(f"client {client} sent no synthetic records that can be used: {_words(error)}") from error
        here = part.receipt is not None and _is_at(ledger_path(job, client), part.receipt)
        said.append({**json.loads(text), "here": here})
    inputs = torch.cat([as_kept(records, job) for records, _ in answers])
    labels = _labels([one["counts"] for one in said])
    path = save_by_content(folder, "synthetic", {"inputs": inputs.contiguous(), "labels": labels})
    facts = {"pool": path.name, "seconds": coarse(seconds), "clients": said, "trainer": _trainer(job, said)}
    write_text(folder / FACTS, json.dumps(facts))


def load(folder: Path, job: Job, *, reused: bool) -> Pool:
    """Read a pool back.

    Raises UserError where it is damaged, RunError where a client's ledger does not hold what was paid for it.
    """
    try:
        pool = _read(folder, job, reused=reused)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, SafetensorError, RunError) as error:
        raise UserError(
            f"the pool in {folder} is damaged: delete that folder, and it is made again, which is a second release "
            f"({_words(error)})"
        ) from error
    for client, part in enumerate(pool.parts):
        if part.here:  # a client elsewhere holds its share against its own ledger
            _hold_against_ledger(folder, part, job, client)
    return replace(pool, together=_together(pool, job))


def _trainer(job: Job, said: Sequence[dict[str, Any]]) -> str:
    """Return who took the generators' steps; empty where there were none, or of a kind that nothing is compiled for."""
    generator, here = da_fl(job.experiment).generator, [one["here"] for one in said if one["receipt"] is not None]
    if not here or not isinstance(generator, Compiled):
        return ""
    return (
        generator.trainer()
        if all(here)
        else "unknown: each node trains with what it has, the native trainer or PyTorch"
    )


def _part(value: object, job: Job, *, stored: bool = False) -> ClientPart:
    """Return what one client says. Raises ValueError or RunError where it says something else."""
    match value:
        case {"counts": list(counts), "refused": str(refused), "facts": dict(facts), "receipt": receipt, **more}:
            here = more.pop("here", False) if stored else False
        case _:
            raise ValueError("it does not say counts, refused, facts and receipt")
    num_classes = job.dataset.num_classes
    if more or type(here) is not bool or len(refused) > _MOST_WORDS or not refused.isprintable():
        raise ValueError("it says more than it should")
    if len(counts) != num_classes or not all(map(events.is_count, counts)):
        raise ValueError(f"its counts are not {num_classes} whole numbers from 0 up, one for each class")
    if bool(facts) != (receipt is not None) or (any(counts) and not facts):
        raise ValueError("it does not say what its records cost, and with what that was paid")
    if facts:
        _check_facts(facts, da_fl(job.experiment), num_classes)
    return ClientPart(tuple(counts), refused, facts, Receipt.from_json(receipt) if facts else None, here)


def _check_facts(facts: dict[str, Any], settings: DaFl, num_classes: int) -> None:
    """Raise ValueError or RunError for costs that are not such as the settings ask for."""
    match facts:
        case {"labels": labels, "labels_epsilon": epsilon, "generator": dict(generator), "generator_steps": steps}:
            pass
        case _:
            raise ValueError("it does not say what labels and generator cost")
    expected = events.to_json(label_event(settings, num_classes)), settings.labels.total_epsilon(num_classes)
    if len(facts) != 4 or (labels, epsilon) != expected:
        raise ValueError("its labels cost other than was asked for")
    if type(steps) is not int or not 0 < steps <= _MOST_STEPS:
        raise ValueError("its generator took no number of steps")
    if adjacency(events.from_json(generator)) not in {None, Adjacency.ADD_OR_REMOVE_ONE}:
        raise ValueError("its generator is not charged for adding or removing one record")


def _check_records(records: torch.Tensor, part: ClientPart, dataset: Dataset) -> None:
    if records.shape != (sum(part.counts), *dataset.input_shape):
        raise ValueError("its records are not as many as its counts say, or have another shape than the data")
    if not bool(((records >= -1) & (records <= 1)).all()):
        raise ValueError("its records are not all numbers in [-1, 1]")


def _read(folder: Path, job: Job, *, reused: bool) -> Pool:
    dataset, num_clients = job.dataset, job.experiment.num_clients
    facts = json.loads(_bounded(folder / FACTS, _MOST_SAID * (1 + num_clients)))
    match facts:
        case {"pool": str(name), "seconds": seconds, "clients": list(clients), **more}:
            trainer = more.pop("trainer", "")
        case _:
            raise ValueError(f"{FACTS} holds no pool")
    if type(trainer) is not str or len(trainer) > _MOST_WORDS or not trainer.isprintable():
        raise ValueError(f"{FACTS} does not say who trained")
    if more or not _NAME.fullmatch(name) or not events.is_number(seconds) or len(clients) != num_clients:
        raise ValueError(f"{FACTS} holds another pool")
    parts = tuple(_part(one, job, stored=True) for one in clients)
    labels = _labels([part.counts for part in parts])
    kept = "uint8" if job.experiment.features == "none" else "float32"
    size = len(labels) * (math.prod(dataset.input_shape) * np.dtype(kept).itemsize + labels.element_size())
    content = _bounded(folder / name, size + _MOST_SAID)
    if hashlib.sha256(content).hexdigest()[:16] not in name:
        raise ValueError(f"{name} is not what its name says")
    records = read_pool(folder / name)
    if records.inputs.shape != (len(labels), *dataset.input_shape) or records.inputs.dtype != kept:
        raise ValueError(f"{name} holds other records than {FACTS} says")
    if kept == "float32" and not (np.abs(records.inputs) <= 1).all():
        raise ValueError(f"{name} holds records that are not all numbers in [-1, 1]")
    if not torch.equal(torch.from_numpy(records.labels), labels):
        raise ValueError(f"{name} holds other labels than {FACTS} says")
    return Pool(folder / name, parts, seconds, reused, None, trainer)


def _is_at(path: Path, receipt: Receipt) -> bool:
    """Return whether the ledger at ``path`` is the one that the receipt is for."""
    try:
        return path.exists() and open_ledger(path).identity == receipt.ledger
    except (RunError, UserError):
        return False


def _hold_against_ledger(folder: Path, part: ClientPart, job: Job, client: int) -> None:
    path, settings = ledger_path(job, client), da_fl(job.experiment)
    try:
        charges = open_ledger(path, part.receipt, f"client {client}'s part of the pool in {folder}").charges
    except RunError as error:
        raise RunError(
            f"{error}. Here a new run means to delete {folder} first: the pool is then made again and paid for again"
        ) from error
    name, generator = (
        settings.release_of(client, job.experiment.seed, version_of(job.experiment.features)),
        events.from_json(part.facts["generator"]),
    )
    said = {
        f"labels {name}": events.from_json(part.facts["labels"]),
        f"generator {name}": dp_event.SelfComposedDpEvent(generator, part.facts["generator_steps"]),
    }
    paid = {charge.release: charge.event for charge in charges}
    if any(paid.get(release) != event for release, event in said.items()):
        raise UserError(
            f"the pool in {folder} is damaged: {FACTS} says another cost for client {client} than {path} holds; delete "
            "that folder, and it is made again, which is a second release"
        )


def _together(pool: Pool, job: Job) -> Together | None:
    if not all(part.here for part in pool.parts if part.receipt):
        return None
    try:
        return all_together(job, da_fl(job.experiment).delta)
    except (RunError, UserError):
        return None


def _labels(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the class of each record, client by client."""
    return torch.cat([torch.repeat_interleave(torch.arange(len(one)), torch.tensor(one)) for one in counts])


def _bounded(path: Path, most: int) -> bytes:
    """Return the content of a plain file of at most ``most`` bytes."""
    try:
        return read_whole(path, most)
    except (OSError, UserError) as error:
        raise ValueError(f"{path.name} is missing or far too large") from error


def _words(error: Exception) -> str:
    """Return why something was refused: our own words, and never what it held."""
    return str(error) if type(error) in {ValueError, RunError} else f"it cannot be read, {type(error).__name__}"
