"""The pool of synthetic records on disk, made once and shared by all runs that need the same pool.

A pool is a folder below ``$FL_SIM_POOLS`` (else the user's cache). Its name is a digest of everything that determines
the pool. Runs that differ only in the algorithm or the rounds share one pool, so every client makes synthetic records
only once. Clients' answers are checked before they are stored, and again when they are read. The file ``pool.json``
contains the privacy costs, and receipts (proofs that the clients' privacy ledgers contain these costs). A privacy
ledger that lacks these costs is refused, because the stated cost of the pool would be too low.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from dp_accounting import dp_event
from safetensors import SafetensorError

from clients.dafl.generator import CompiledGenerator
from clients.dafl.settings import DaFl
from clients.dafl.share import label_event
from clients.policy import open_ledger
from fl_sim.data import fingerprint, version_of
from fl_sim.engines import arrays, wire
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.identity import code_in
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of
from fl_sim.privacy import events
from fl_sim.privacy.events import adjacency
from fl_sim.privacy.ledger import Receipt
from fl_sim.privacy.terms import Adjacency
from fl_sim.simulation.client_ledgers import JointCost, joint_cost, ledger_path
from fl_sim.simulation.client_runtime import as_kept, read_pool
from fl_sim.simulation.stage import Run, pools_root
from fl_sim.stages.dafl.stage import SYNTHESIZE, settings_of
from fl_sim.store.files import folder_lock, read_whole, write_whole
from fl_sim.store.run_directory import coarse, write_text
from fl_sim.store.tensors import save_by_content
from fl_sim.types import Dataset, Traffic

FACTS: Final = "pool.json"
_NAME: Final = re.compile(r"synthetic-[0-9a-f]{16}\.safetensors")
_MOST_WORDS: Final = 1000  # the maximum length of a client's reason for making no synthetic records
_MOST_SAID: Final = 64 * 1024  # maximum number of bytes of the JSON values about one client
_MOST_STEPS: Final = 10**9
_FORMAT = 2
_FEW = 20  # maximum number of classes that a warning lists


@dataclass(frozen=True)
class ClientPart:
    """The description of one client's synthetic records in a pool. It contains only values that may be published.

    ``counts``: the number of synthetic records of each class. ``refused``: the reason if the client made no synthetic
    records, else empty. ``facts``: the privacy costs. ``receipt``: the proof that the client's privacy ledger contains
    these costs, None without synthetic records. ``here``: True if the client's privacy ledger is on this machine; False
    if a remote client has it.
    """

    counts: tuple[int, ...]
    refused: str
    facts: dict[str, Any]
    receipt: Receipt | None
    here: bool = False


@dataclass(frozen=True)
class Pool:
    """A pool of synthetic records at the server.

    ``path``: a safetensors file with the records, in the number format of ``as_kept``, and int64 labels, sorted by
    client. ``together``: the joint privacy cost of all synthetic records ever made from the clients' records. This cost
    includes other settings, other seeds and deleted pools. It is None if not all privacy ledgers are on this machine.
    ``trainer``: a description of the generators' trainer, empty if it is not known.
    """

    path: Path
    parts: tuple[ClientPart, ...]
    seconds: float
    reused: bool
    together: JointCost | None
    trainer: str = ""

    @property
    def num_synthetic(self) -> int:
        """Return the number of synthetic records of all clients."""
        return sum(sum(part.counts) for part in self.parts)


def prepare_pool(run: Run) -> Pool:
    """Return the job's pool, made now or by an earlier run, and write a copy into the run directory.

    Raises RunError if a client fails, or if the pool is empty but needed for training. Raises UserError if the run's
    earlier rounds used another pool, because the epsilon of one pool does not cover two pools.
    """
    job = run.job
    folder = pools_root() / pool_key(job)
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        reused = (folder / FACTS).exists()
        if not reused:
            _check_earlier_rounds(run, folder, "")
            start = time.perf_counter()
            answers = ask_clients(run, replace(run.order, state_dir=str(folder / "clients")))
            store(folder, answers, job, time.perf_counter() - start)
        pool = load(folder, job, reused=reused)
    _check_earlier_rounds(run, folder, pool.path.name)
    if not pool.num_synthetic and settings_of(job.experiment).train_on != "own-and-synthetic":
        raise RunError(f"no client released a synthetic record: {pool.parts[0].refused}")
    copy = run.out.absolute() / pool.path.name
    write_whole(copy, pool.path.read_bytes())
    return replace(pool, path=copy)


def _check_earlier_rounds(run: Run, folder: Path, name: str) -> None:
    """Raise UserError if earlier rounds of the run used a pool other than the file ``name`` ("" for a new pool)."""
    used = {path.name for path in run.out.glob("synthetic-*.safetensors")} if run.log.rounds else set()
    if used and name not in used:
        raise UserError(
            f"the rounds in {run.out} used the pool {', '.join(sorted(used))}, which is not in {folder}: restore that "
            "folder, and the ledgers if the run comes from another machine; or choose another --out: the pool is then "
            "made and charged again"
        )


def ask_clients(run: Run, order: TaskConfig) -> list[tuple[torch.Tensor, str]]:
    """Ask every client for synthetic records. Return (records, their counts and costs as JSON) of each client.

    An answer is refused if its records have a wrong shape, or if it has more records than the number of classes times
    the size of the training set.
    """
    records, num_classes = run.job.dataset.train, run.job.dataset.num_classes
    return run.ask(
        SYNTHESIZE,
        lambda one: wire.read_synthetic(one, records.inputs.shape[1:], num_classes, num_classes * len(records)),
        quoted=False,
        order=order,
    )


def is_made(job: Job) -> bool:
    """Return True if an earlier run has made the job's pool."""
    return (pools_root() / pool_key(job) / FACTS).exists()


def pool_key(job: Job) -> str:
    """Return the name of the job's pool. It contains a digest of all settings and data that determine the pool."""
    experiment = job.experiment
    names = ("partition", "clients", "seed", "partition_seed", "preprocess", "forgotten", "left_out")
    settings = experiment.chosen(*names)
    for afterwards in ("train_on", "server_epochs"):
        del settings["preprocess"][afterwards]
    determining = [_FORMAT, settings, fingerprint(experiment.data, job.root)]
    determining += code_in(settings)
    if features := version_of(experiment.features):
        determining.append(features)
    if job.dataset.columns:
        determining.append([asdict(column) for column in job.dataset.columns])
    digest = hashlib.sha256(json.dumps(determining, sort_keys=True).encode())
    return f"{experiment.data.partition(':')[0]}-{digest.hexdigest()[:20]}"


def summary(pool: Pool, experiment: Experiment) -> dict[str, object]:
    """Return the fields of ``result.json`` that describe the pool."""
    settings = settings_of(experiment)
    return {
        "kind": settings.kind,
        "generator": kind_of(settings.generator),
        "gamma": settings.gamma,
        "train_on": settings.train_on,
        "server_epochs": settings.server_epochs,
        "num_synthetic": pool.num_synthetic,
        "clients": [
            {"counts": part.counts, "refused": part.refused, "facts": part.facts or None} for part in pool.parts
        ],
        "trainer": pool.trainer or None,
        "pool": pool.path.name,
        "seconds": pool.seconds,
        "reused": pool.reused,
    }


def traffic_of(pool: Pool, input_shape: tuple[int, ...]) -> Traffic:
    """Return the bytes of all messages about the pool: each client sends its records and receives the whole pool.

    The bytes are computed from the numbers of synthetic records, because in a simulation all clients read the pool from
    one disk.
    """
    released = [torch.empty(sum(part.counts), *input_shape) for part in pool.parts]
    up = sum(arrays.num_bytes(wire.synthetic_content(records, "")) for records in released)
    whole = read_pool(pool.path)
    return Traffic((whole.inputs.nbytes + whole.labels.nbytes) * len(pool.parts), up)


def warnings_of(pool: Pool, job: Job) -> list[str]:
    """Return warnings about clients and classes without synthetic records, each with a cure.

    The warnings depend only on values that may be published.
    """
    return [*filter(None, (_of_refusals(pool, job), _of_absent_classes(pool, job)))]


def _of_refusals(pool: Pool, job: Job) -> str:
    refused = [(client, part.refused) for client, part in enumerate(pool.parts) if part.refused]
    if not refused:
        return ""
    client, reason = refused[0]
    # True if the client has paid for a label selection that selected no class
    paid = bool(pool.parts[client].facts)
    cure = _cure(job) if paid else "take a larger preprocess.epsilon, or fewer clients"
    return (
        f"{len(refused)} of {len(pool.parts)} clients released no synthetic records; client {client}: {reason}; {cure}"
    )


def _of_absent_classes(pool: Pool, job: Job) -> str:
    counts = np.sum([part.counts for part in pool.parts], axis=0)
    absent = np.flatnonzero(counts == 0).tolist()
    if not absent or not pool.num_synthetic:
        return ""
    names = ", ".join(map(str, absent[:_FEW])) + (", ..." if len(absent) > _FEW else "")
    alone = settings_of(job.experiment).train_on == "synthetic"
    effect = (
        "models train only on it and never see these classes" if alone else "it teaches nothing about these classes"
    )
    return (
        f"the pool of {pool.num_synthetic:,} synthetic records has none of {len(absent)} of {len(counts)} classes "
        f"({names}): {effect}; {_cure(job)}"
    )


def _cure(job: Job) -> str:
    """Return advice for the user about missing classes.

    The advice names the number of records that a client needs in a class. This number depends only on public values.
    """
    settings = settings_of(job.experiment)
    gamma = max(settings.client_gammas, default=settings.gamma)
    if math.isinf(settings.epsilon) or not gamma:
        return "take a larger preprocess.gamma"
    largest = settings.labels.largest_count(gamma, len(job.dataset.train))
    needed = settings.labels.threshold(gamma, largest) / gamma
    return (
        f"a client makes synthetic records of a class if it holds about {needed:,.0f} records of this class or more "
        f"(preprocess.labels.epsilon={settings.labels.epsilon:g}, gamma={gamma:g}): take a larger "
        "preprocess.labels.epsilon, or fewer clients"
    )


def store(folder: Path, answers: Sequence[tuple[torch.Tensor, str]], job: Job, seconds: float) -> None:
    """Check the answers of all clients, and write them as a pool into ``folder``.

    ``answers``: (records, their counts and costs as JSON) of each client. ``seconds``: the time that the clients took.
    If an answer is invalid, nothing is written, and a RunError names the first client with such an answer.
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
    """Read the pool in ``folder``, check its privacy costs against the clients' privacy ledgers, and return the pool.

    ``reused``: True if an earlier run made the pool. Raises UserError if the pool is damaged. Raises RunError if a
    client's privacy ledger lacks the cost.
    """
    try:
        pool = _read(folder, job, reused=reused)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, SafetensorError, RunError) as error:
        raise UserError(
            f"the pool in {folder} is damaged: delete that folder; the pool is then made again, which is a second "
            f"release ({_words(error)})"
        ) from error
    for client, part in enumerate(pool.parts):
        if part.here:  # a remote client checks the cost of its records against its own ledger
            _hold_against_ledger(folder, part, job, client)
    return replace(pool, together=_together(pool, job))


def _trainer(job: Job, said: Sequence[dict[str, Any]]) -> str:
    """Return a description of the generators' trainer.

    The description is empty if there are no synthetic records, or if the generator has no compiled C++ trainer.
    """
    generator, here = settings_of(job.experiment).generator, [one["here"] for one in said if one["receipt"] is not None]
    if not here or not isinstance(generator, CompiledGenerator):
        return ""
    return (
        generator.trainer() if all(here) else "unknown: each node uses the compiled trainer if it has one, else PyTorch"
    )


def _part(value: object, job: Job, *, stored: bool = False) -> ClientPart:
    """Check the JSON values that describe one client's synthetic records, and return them as a ``ClientPart``.

    ``stored``: True if ``value`` comes from ``pool.json``, and not from a client. Raises ValueError or RunError if the
    JSON values are invalid.
    """
    match value:
        case {"counts": list(counts), "refused": str(refused), "facts": dict(facts), "receipt": receipt, **more}:
            here = more.pop("here", False) if stored else False
        case _:
            raise ValueError("the client's description of its records lacks counts, refused, facts or receipt")
    num_classes = job.dataset.num_classes
    if more or type(here) is not bool or len(refused) > _MOST_WORDS or not refused.isprintable():
        raise ValueError("the client's description of its records has unknown keys, or values of a wrong form")
    if len(counts) != num_classes or not all(map(events.is_count, counts)):
        raise ValueError(f"the client's counts are not {num_classes} whole numbers from 0 up, one for each class")
    if bool(facts) != (receipt is not None) or (any(counts) and not facts):
        raise ValueError(
            "the client's description of its records lacks their privacy costs, or the ledger's receipt for these costs"
        )
    if facts:
        _check_facts(facts, settings_of(job.experiment), num_classes)
    return ClientPart(tuple(counts), refused, facts, Receipt.from_json(receipt) if facts else None, here)


def _check_facts(facts: dict[str, Any], settings: DaFl, num_classes: int) -> None:
    """Raise ValueError or RunError if a client's stated privacy costs do not follow from the settings."""
    match facts:
        case {"labels": labels, "labels_epsilon": epsilon, "generator": dict(generator), "generator_steps": steps}:
            pass
        case _:
            raise ValueError("the client's description of its records lacks the privacy costs of labels and generator")
    expected = events.to_json(label_event(settings, num_classes)), settings.labels.total_epsilon(num_classes)
    if len(facts) != 4 or (labels, epsilon) != expected:
        raise ValueError("the client's privacy cost of the labels differs from the cost that the settings imply")
    if type(steps) is not int or not 0 < steps <= _MOST_STEPS:
        raise ValueError("the client's number of generator steps is not a positive whole number")
    if adjacency(events.from_json(generator)) not in {None, Adjacency.ADD_OR_REMOVE_ONE}:
        raise ValueError("the client's privacy cost of the generator is not for adding or removing one record")


def _check_records(records: torch.Tensor, part: ClientPart, dataset: Dataset) -> None:
    if records.shape != (sum(part.counts), *dataset.input_shape):
        raise ValueError(
            "the client's number of records is not the sum of its counts, or the records lack the data set's shape"
        )
    if not bool(((records >= -1) & (records <= 1)).all()):
        raise ValueError("the client's records are not all numbers in [-1, 1]")


def _read(folder: Path, job: Job, *, reused: bool) -> Pool:
    dataset, num_clients = job.dataset, job.experiment.num_clients
    facts = json.loads(_bounded(folder / FACTS, _MOST_SAID * (1 + num_clients)))
    match facts:
        case {"pool": str(name), "seconds": seconds, "clients": list(clients), **more}:
            trainer = more.pop("trainer", "")
        case _:
            raise ValueError(f"{FACTS} does not describe a pool")
    if type(trainer) is not str or len(trainer) > _MOST_WORDS or not trainer.isprintable():
        raise ValueError(f"{FACTS} does not name the trainer of the generators")
    if more or not _NAME.fullmatch(name) or not events.is_number(seconds) or len(clients) != num_clients:
        raise ValueError(f"{FACTS} describes another pool")
    parts = tuple(_part(one, job, stored=True) for one in clients)
    labels = _labels([part.counts for part in parts])
    kept = "uint8" if job.experiment.features == "none" else "float32"
    size = len(labels) * (math.prod(dataset.input_shape) * np.dtype(kept).itemsize + labels.element_size())
    content = _bounded(folder / name, size + _MOST_SAID)
    if hashlib.sha256(content).hexdigest()[:16] not in name:
        raise ValueError(f"the content of {name} does not fit the hash in its name")
    records = read_pool(folder / name)
    if records.inputs.shape != (len(labels), *dataset.input_shape) or records.inputs.dtype != kept:
        raise ValueError(f"{name} and {FACTS} disagree on the number, shape or type of the records")
    if kept == "float32" and not (np.abs(records.inputs) <= 1).all():
        raise ValueError(f"{name} contains records that are not all numbers in [-1, 1]")
    if not torch.equal(torch.from_numpy(records.labels), labels):
        raise ValueError(f"the labels in {name} differ from {FACTS}")
    return Pool(folder / name, parts, seconds, reused, None, trainer)


def _is_at(path: Path, receipt: Receipt) -> bool:
    """Return True if the file ``path`` is the privacy ledger for which ``receipt`` (a proof of a charge) was made."""
    try:
        return path.exists() and open_ledger(path).identity == receipt.ledger
    except (RunError, UserError):
        return False


def _hold_against_ledger(folder: Path, part: ClientPart, job: Job, client: int) -> None:
    path, settings = ledger_path(job, client), settings_of(job.experiment)
    try:
        charges = open_ledger(path, part.receipt, f"client {client}'s part of the pool in {folder}").charges
    except RunError as error:
        raise RunError(
            f"{error}. To start again, also delete {folder}: the pool is then made again, and charged again"
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
            f"the pool in {folder} is damaged: the privacy cost of client {client} in {FACTS} differs from the cost in "
            f"{path}; delete that folder; the pool is then made again, which is a second release"
        )


def _together(pool: Pool, job: Job) -> JointCost | None:
    if not all(part.here for part in pool.parts if part.receipt):
        return None
    try:
        return joint_cost(job, settings_of(job.experiment).delta)
    except (RunError, UserError):
        return None


def _labels(counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the class of each synthetic record, shape (records,), sorted by client, and by class within a client."""
    return torch.cat([torch.repeat_interleave(torch.arange(len(one)), torch.tensor(one)) for one in counts])


def _bounded(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises ValueError if the file is missing or larger than ``most`` bytes."""
    try:
        return read_whole(path, most)
    except (OSError, UserError) as error:
        raise ValueError(f"{path.name} is missing or far too large") from error


def _words(error: Exception) -> str:
    """Return the reason for refusing a pool file or a client's answer. The reason does not quote their content."""
    return str(error) if type(error) in {ValueError, RunError} else f"it cannot be read, {type(error).__name__}"
