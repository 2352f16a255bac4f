"""PATE's votes and noisy labels: each is made once for all runs that would make the same.

Votes lie below ``$FL_SIM_POOLS`` (else the user's cache), in a folder named by all that determines them. They are
PRIVATE: they are computed from the teachers' records, and nobody but their owner may read the files (mode 0600).

Labels lie beside the votes, each labelling in a folder of its own: ``labels.json``, which holds the receipt of
``ledger.jsonl``; ``key``, the key of the noise, until the labels are out; ``published.json``, where the data-dependent
cost was published, and its ``cost-key``, which stays, so that the same figure comes out however often it is asked for.
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fl_sim.data import fingerprint
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.identity import code_in
from fl_sim.experiment.job import Job
from fl_sim.privacy.ledger import Ledger, Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.pate import smooth_sensitivity
from fl_sim.privacy.pate.labelling_cost import ConfidentCost, GNMaxCost, LNMaxCost
from fl_sim.simulation.stage import pools_root
from fl_sim.stages.pate.procedure import ask_teachers
from fl_sim.store.files import explain, folder_lock, read_whole
from fl_sim.store.tensors import write_private
from strategies.pate.labelling import UNANSWERED, Labelled, Labelling, NoNoise, answer_to, count_votes, label
from strategies.pate.settings import Pate

_VOTES, _FACTS = "votes.npy", "votes.json"
_VOTES_FORMAT, _MOST_FACTS = 1, 2**16


@dataclass(frozen=True)
class Votes:
    """PRIVATE. ``counts``: votes per public record and class, (pool, classes), one of each teacher.

    ``predictions``: (teachers, pool). ``rows``: the records of the public pool. ``folder``: of the files. ``seconds``:
    the time it took to make them.
    """

    predictions: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    folder: Path
    seconds: float
    reused: bool

    def about(self, rows: NDArray[np.int64]) -> "Votes":
        """Return the votes on the records ``rows`` of the public pool, in this order."""
        return replace(self, predictions=self.predictions[:, rows], counts=self.counts[rows], rows=self.rows[rows])


def prepare_votes(job: Job, settings: Pate, grid: Grid, order: TaskConfig) -> Votes:
    """Return the votes of the job's teachers on its public pool, from an earlier run where there is one.

    A teacher that fails votes for class 0 throughout, where labels are to be private: see ``ask_teachers``. Raises
    RunError where labels are not, UserError where what is kept is damaged.
    """
    folder = pools_root() / votes_key(job)
    public = settings.public_split(job.dataset, job.experiment.seed_of_partition).pool
    shape = _VoteShape(job.experiment.clients, len(public), job.dataset.num_classes)
    private = not isinstance(settings.labelling.mechanism, NoNoise)
    with alone_in_cache(folder):
        reused = (folder / _FACTS).exists()
        if not reused:
            start = time.perf_counter()
            predictions, silent = ask_teachers(
                grid, order, job.experiment.round_timeout, **asdict(shape), private=private
            )
            content = as_npy(predictions.astype(shape.dtype))
            write_private(folder / _VOTES, content)
            facts = {"seconds": time.perf_counter() - start, "silent": silent, "sha256": _digest(content)}
            write_private(folder / _FACTS, json.dumps(facts).encode())
        votes, kept = _read_votes(folder, shape)
    if kept.silent and not private:
        raise RunError(
            f"teachers {', '.join(map(str, kept.silent))} failed when the votes in {folder} were made: delete {_VOTES} "
            f"and {_FACTS} there, and the teachers are trained again"
        )
    counts, rows = count_votes(votes, shape.classes), np.arange(shape.records, dtype=np.int64)
    return Votes(votes, counts, rows, folder, kept.seconds, reused)


def votes_key(job: Job) -> str:
    """Return the name of the votes: a digest of all that determines them, the students and the noise left out."""
    experiment = job.experiment
    names = ("partition", "clients", "seed", "partition_seed", "model_seed", "model", "local", "features")
    settings = experiment.chosen(*names)
    algorithm = experiment.chosen("algorithm")["algorithm"]
    pate = {name: algorithm[name] for name in ("teachers", "public", "public_records", "overlap")}
    records = fingerprint(experiment.data, job.root, with_test=True)
    determining = [_VOTES_FORMAT, settings, pate, records, *code_in({**settings, "pate": pate})]
    digest = hashlib.sha256(json.dumps(determining, sort_keys=True).encode())
    return f"{experiment.data.partition(':')[0]}-votes-{digest.hexdigest()[:20]}"


@contextmanager
def alone_in_cache(folder: Path) -> Iterator[None]:
    """Make a folder that its owner alone may read, and lock it for this process.

    Raises RunError, with the cure, where that or writing into it fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        with folder_lock(folder):
            yield
    except OSError as error:
        if not str(error.filename or "").startswith(str(folder)):
            raise
        raise RunError(f"{explain(error)}; FL_SIM_POOLS names another place for what is kept between runs") from error


def write_private_votes(out: Path, votes: Votes, num_queries: int) -> None:
    """Write the raw counts of the queries into a run directory, as its settings say."""
    write_private(out / _VOTES, as_npy(votes.counts[:num_queries]))


@dataclass(frozen=True)
class _VoteShape:
    """The numbers of teachers, of public records and of classes."""

    teachers: int
    records: int
    classes: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Return the smallest type that holds every class."""
        return np.min_scalar_type(self.classes - 1)


class _VoteFacts(BaseModel):
    """The facts beside the votes; ``silent``: the teachers without votes. PRIVATE."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    silent: list[int] = []
    sha256: str


def _read_votes(folder: Path, shape: _VoteShape) -> tuple[NDArray[np.int64], _VoteFacts]:
    """Return the votes, (teachers, records), and the facts. Raises UserError where they are damaged."""
    head, size = _head_of(shape), shape.teachers * shape.records * shape.dtype.itemsize
    try:
        facts = _VoteFacts.model_validate_json(read_whole(folder / _FACTS, _MOST_FACTS + 16 * shape.teachers))
        content = read_whole(folder / _VOTES, len(head) + size)
    except (OSError, ValueError):
        content = b""
    if len(content) == len(head) + size and content.startswith(head) and _digest(content) == facts.sha256:
        votes = np.frombuffer(content, shape.dtype, offset=len(head)).reshape(shape.teachers, shape.records)
        if votes.max() < shape.classes:
            return votes.astype(np.int64), facts
    raise UserError(
        f"the votes in {folder} are damaged: delete {_VOTES} and {_FACTS} there, and the teachers are trained again; "
        "leave the labels beside them, which are paid for"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _head_of(shape: _VoteShape) -> bytes:
    """Return the header of a file of ``numpy.save`` with these votes."""
    buffer = io.BytesIO()
    header = {"descr": shape.dtype.str, "fortran_order": False, "shape": (shape.teachers, shape.records)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def as_npy(array: NDArray[np.generic]) -> bytes:
    """Return the content of a file of ``numpy.save``."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


LEDGER = "ledger.jsonl"
_LABELS, _KEY, _PUBLISHED, _COST_KEY = "labels.json", "key", "published.json", "cost-key"
_FORMAT, _MOST_BYTES, _BYTES_PER_LABEL = 1, 2**16, 32


@dataclass(frozen=True)
class Released:
    """The noisy labels, their ledger, and the content of its file."""

    labelled: Labelled
    ledger: Ledger
    charges: bytes
    folder: Path
    reused: bool


def release_labels(settings: Pate, votes: Votes, seed: int, out: Path) -> Released:
    """Return the noisy labels of the first ``settings.queries`` records of ``votes``, charged once.

    A run that was killed in the middle resumes with the same noise, at no further cost. Raises RunError where a ledger
    is missing: that of stored labels, or one whose copy is in the run directory ``out``.
    """
    labelling, counts = settings.labelling, votes.counts[: settings.queries]
    asked = votes.rows[: settings.queries]
    digest = hashlib.sha256(f"{_FORMAT} {labelling.model_dump_json()} ".encode() + asked.tobytes())
    folder = votes.folder / f"labels-{digest.hexdigest()[:20]}"
    with alone_in_cache(folder):
        _hold_against_copy(folder / LEDGER, out / LEDGER)
        kept = _read_labels(folder, counts.shape) if (folder / _LABELS).exists() else None
        ledger = _open_ledger(labelling, folder, kept)
        if kept is None:
            noise = _noise(labelling, folder, f"{seed}/{votes.folder.name}", counts)
            labelled = label(counts, labelling, ledger=ledger, noise=noise)
            made = {"labels": labelled.labels.tolist(), "num_asked": labelled.num_asked}
            content = json.dumps({**made, "receipt": ledger.receipt.to_json()}).encode()
            write_private(folder / _LABELS, content)
        else:
            labelled = kept.labelled(ledger, folder)
        (folder / _KEY).unlink(missing_ok=True)
        charges = (folder / LEDGER).read_bytes()
    return Released(labelled, ledger, charges, folder, reused=kept is not None)


def publish_cost(
    settings: Pate, votes: Votes, released: Released
) -> tuple[dict[str, Any], smooth_sensitivity.PublicationTerms]:
    """Return a publishable noisy upper bound on the data-dependent epsilon, and its terms.

    It is the same every time: the key of its noise is never removed.
    """
    path = released.folder / _PUBLISHED
    counts, cost = votes.counts[: released.labelled.num_asked], settings.labelling.mechanism.cost()
    assert isinstance(cost, LNMaxCost | GNMaxCost | ConfidentCost)
    answered = released.labelled.labels[: len(counts)] != UNANSWERED
    delta = settings.labelling.delta
    # The terms depend on how many queries are certain beforehand, not on how far the votes let the budget go.
    queries = settings.labelling.certain_queries(len(released.labelled.labels), len(counts))
    shape = {"queries": queries, "teachers": len(votes.predictions), "classes": counts.shape[1]}
    terms = smooth_sensitivity.planned(cost, delta, **shape)
    with alone_in_cache(path.parent):
        if not path.exists():
            noise = Noise(_key(path.with_name(_COST_KEY), counts), simulation_only=False)
            published = smooth_sensitivity.release(counts, cost, delta, terms, noise=noise, answered=answered)
            made = {**asdict(published), "own_cost": terms.divergence(), "terms": asdict(terms)}
            write_private(path, json.dumps(made).encode())
        try:
            said = _Published.model_validate_json(read_whole(path, _MOST_BYTES))
        except (OSError, ValueError, UserError) as error:
            raise RunError(f"{path} is damaged: delete it, and the same figure is published again") from error
    if said.terms != terms:
        raise RunError(
            f"{path} holds a figure that an earlier version published on terms that the votes chose, so what it costs "
            "is not known: run with another seed, which labels and pays anew, or leave algorithm.publish_cost out"
        )
    return said.model_dump(), said.terms


_Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Published(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    epsilon: _Positive
    delta: _Positive
    order: _Positive
    divergence: _Positive
    failure: _Positive
    own_cost: _Positive
    terms: smooth_sensitivity.PublicationTerms


class _Labels(BaseModel):
    """The content of ``labels.json``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    labels: list[int]
    num_asked: int = Field(ge=0)
    receipt: dict[str, Any]

    def fit(self, queries: int, classes: int) -> bool:
        """Return True if these are labels of ``queries`` queries, of which the first ``num_asked`` were asked."""
        inside = all(UNANSWERED <= one < classes for one in self.labels)
        later = set(self.labels[self.num_asked :])
        return len(self.labels) == queries >= self.num_asked and inside and later <= {UNANSWERED}

    def labelled(self, ledger: Ledger, folder: Path) -> Labelled:
        """Return the labels. Raises RunError where the ledger was charged for fewer."""
        paid = {charge.release for charge in ledger.charges}
        unpaid = [query for query, one in enumerate(self.labels) if one != UNANSWERED and answer_to(query) not in paid]
        if unpaid:
            raise RunError(
                f"{folder / _LABELS} holds {len(unpaid)} labels that {folder / LEDGER} was not charged for, the first "
                f"is that of query {unpaid[0]}: put unchanged copies of both back, or delete {_LABELS}, and the "
                "labelling is made and paid for again"
            )
        return Labelled(np.array(self.labels, dtype=np.int64), self.num_asked)


def _read_labels(folder: Path, shape: tuple[int, ...]) -> _Labels:
    queries, classes = shape
    try:
        kept = _Labels.model_validate_json(read_whole(folder / _LABELS, _MOST_BYTES + _BYTES_PER_LABEL * queries))
        Receipt.from_json(kept.receipt)
    except (OSError, ValueError, RunError):
        kept = None
    if kept is None or not kept.fit(queries, classes):
        raise RunError(
            f"{folder / _LABELS} is damaged: put an unchanged copy of it back, or delete it, and the labelling is made "
            "and paid for again"
        )
    return kept


def _open_ledger(labelling: Labelling, folder: Path, kept: _Labels | None) -> Ledger:
    paid_with = Receipt.from_json(kept.receipt) if kept else None
    try:
        return labelling.open_ledger(folder / LEDGER, paid_with, holder=str(folder / _LABELS))
    except RunError as error:
        raise RunError(f"{error}: labels are kept below FL_SIM_POOLS, so name a fresh directory there") from error


def _hold_against_copy(ledger: Path, copy: Path) -> None:
    """Raise RunError where the ledger lacks charges that its copy in a run directory has."""
    if not copy.exists():
        return
    charges, seen = (ledger.read_bytes() if ledger.exists() else b""), copy.read_bytes()
    if not charges.startswith(seen):
        raise RunError(
            f"{copy} shows charges for labels about these records that {ledger} does not hold: put an unchanged copy "
            "of that folder back, or choose another --out, and the labels are made and paid for again"
        )


def _noise(labelling: Labelling, folder: Path, purpose: str, counts: NDArray[np.int64]) -> Noise:
    """Return the noise of a release: the same after a run was killed before its labels were stored."""
    if labelling.noise == "seeded":
        return Noise.seeded(int.from_bytes(hashlib.sha256(f"pate/{purpose}".encode()).digest()))
    return Noise(_key(folder / _KEY, counts), simulation_only=False)


def _key(path: Path, counts: NDArray[np.int64]) -> bytes:
    """Return the secret key in ``path`` for the noise on these ``counts``; made where there is none.

    Raises RunError for other counts: two releases under one noise would show their difference.
    """
    if not path.exists():
        key = os.urandom(32)
        write_private(path, key + _use_of(key, counts))
    try:
        content = read_whole(path, 64)
    except (OSError, ValueError):
        content = b""
    key = content[:32]
    if content != key + _use_of(key, counts):
        raise RunError(
            f"{path} is damaged, or the votes are no longer those that this noise was drawn for: put unchanged copies "
            f"of both back, or delete {path.name}, and what was released with it is paid for again"
        )
    return key


def _use_of(key: bytes, counts: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(repr(counts.shape).encode() + counts.tobytes(), key=key, digest_size=32).digest()
