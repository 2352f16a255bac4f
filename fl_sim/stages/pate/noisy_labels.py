"""The teachers' votes in PATE, and the noisy labels. Runs that need the same votes or labels use the same files.

The votes are stored below ``$FL_SIM_POOLS`` (else in the user's cache). The name of their folder is a digest of all
settings that determine the votes. Votes are PRIVATE, because they depend on the teachers' records. So only the owner
may read the files (mode 0600).

Each set of noisy labels has a folder in the folder of the votes. It contains these files: ``labels.json``, the labels
and a receipt (a proof that the privacy ledger contains their cost); ``ledger.jsonl``, the privacy ledger; ``key``, the
key of the noise, until the labels are stored; ``published.json``, the published data-dependent privacy cost, if any;
``cost-key``, the key of the noise on this cost. ``cost-key`` is never removed, so that the published number is the same
each time.
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
    """The votes of all teachers on public records. They are PRIVATE.

    ``predictions``: the class for which each teacher votes, (teachers, pool). ``counts``: the number of votes for each
    class, (pool, classes); every teacher has one vote on each record. ``rows``: the row numbers of the records in the
    public pool. ``folder``: the folder of the files. ``seconds``: the time that training and voting took. ``reused``:
    True if an earlier run made the votes.
    """

    predictions: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    folder: Path
    seconds: float
    reused: bool

    def about(self, rows: NDArray[np.int64]) -> "Votes":
        """Return the votes on a subset of the records. ``rows``: the indices of these records, in the new order."""
        return replace(self, predictions=self.predictions[:, rows], counts=self.counts[rows], rows=self.rows[rows])


def prepare_votes(job: Job, settings: Pate, grid: Grid, order: TaskConfig) -> Votes:
    """Return the votes of the job's teachers on its public pool: those of an earlier run, or new ones.

    If noise will be added to the votes, a failed teacher counts as a vote for class 0 in every query (see
    ``ask_teachers``). Without noise, a failed teacher raises RunError. Raises UserError if the stored votes are
    damaged.
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
            f"and {_FACTS} there; the teachers are then trained again"
        )
    counts, rows = count_votes(votes, shape.classes), np.arange(shape.records, dtype=np.int64)
    return Votes(votes, counts, rows, folder, kept.seconds, reused)


def votes_key(job: Job) -> str:
    """Return the name of the votes' folder, with a digest of everything that determines the votes.

    The student and the noise do not change the votes, so the digest does not depend on them.
    """
    experiment = job.experiment
    names = (
        "partition", "clients", "seed", "partition_seed", "model_seed", "model", "local", "features", "forgotten",
        "left_out",
    )  # fmt: skip
    settings = experiment.chosen(*names)
    algorithm = experiment.chosen("algorithm")["algorithm"]
    pate = {name: algorithm[name] for name in ("teachers", "public", "public_records", "overlap")}
    records = fingerprint(experiment.data, job.root, with_test=True)
    determining = [_VOTES_FORMAT, settings, pate, records, *code_in({**settings, "pate": pate})]
    digest = hashlib.sha256(json.dumps(determining, sort_keys=True).encode())
    return f"{experiment.data.partition(':')[0]}-votes-{digest.hexdigest()[:20]}"


@contextmanager
def alone_in_cache(folder: Path) -> Iterator[None]:
    """Create a folder that only its owner may read, and lock it for this process inside a ``with`` block.

    Raises RunError, with the cure, if the folder cannot be created, locked or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        with folder_lock(folder):
            yield
    except OSError as error:
        if not str(error.filename or "").startswith(str(folder)):
            raise
        raise RunError(
            f"{explain(error)}; or set FL_SIM_POOLS to another folder for the files that runs share"
        ) from error


def write_private_votes(out: Path, votes: Votes, num_queries: int) -> None:
    """Write the PRIVATE counts of votes on the first ``num_queries`` records into the run directory ``out``."""
    write_private(out / _VOTES, as_npy(votes.counts[:num_queries]))


@dataclass(frozen=True)
class _VoteShape:
    """The shape of the stored votes: the numbers of teachers, public records and classes."""

    teachers: int
    records: int
    classes: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Return the smallest integer type that can represent every class number."""
        return np.min_scalar_type(self.classes - 1)


class _VoteFacts(BaseModel):
    """The content of ``votes.json``. It is PRIVATE.

    ``seconds``: the time that training and voting took. ``silent``: the teachers that failed. ``sha256``: the digest of
    the file of votes.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    silent: list[int] = []
    sha256: str


def _read_votes(folder: Path, shape: _VoteShape) -> tuple[NDArray[np.int64], _VoteFacts]:
    """Read the votes, (teachers, records), and the content of ``votes.json``. Raises UserError for damaged files."""
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
        f"the votes in {folder} are damaged: delete {_VOTES} and {_FACTS} there; the teachers are then trained again; "
        "keep the folders of labels there, because their privacy cost is charged already"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _head_of(shape: _VoteShape) -> bytes:
    """Return the header that a ``numpy.save`` file with votes of this shape has, to recognise a valid file."""
    buffer = io.BytesIO()
    header = {"descr": shape.dtype.str, "fortran_order": False, "shape": (shape.teachers, shape.records)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def as_npy(array: NDArray[np.generic]) -> bytes:
    """Return ``array`` as the bytes of a ``numpy.save`` file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


LEDGER = "ledger.jsonl"
_LABELS, _KEY, _PUBLISHED, _COST_KEY = "labels.json", "key", "published.json", "cost-key"
_FORMAT, _MOST_BYTES, _BYTES_PER_LABEL = 1, 2**16, 32


@dataclass(frozen=True)
class Released:
    """The noisy labels, which may be published, and their privacy ledger.

    ``charges``: the content of the privacy ledger's file. ``folder``: the folder of the labels. ``reused``: True if an
    earlier run made the labels.
    """

    labelled: Labelled
    ledger: Ledger
    charges: bytes
    folder: Path
    reused: bool


def release_labels(settings: Pate, votes: Votes, seed: int, out: Path) -> Released:
    """Return the noisy labels of the first ``settings.queries`` records of ``votes``.

    Their privacy cost is written once into a privacy ledger. A run that was killed in the middle resumes with the same
    noise, at no further cost. The run directory ``out`` contains a copy of the privacy ledger. Raises RunError if the
    ledger of stored labels is missing, or lacks costs that the copy contains.
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
    """Return a noisy upper bound on the data-dependent epsilon, and the parameters that give the bound's own cost.

    Every call returns the same bound, because the key of its noise is never removed.
    """
    path = released.folder / _PUBLISHED
    counts, cost = votes.counts[: released.labelled.num_asked], settings.labelling.mechanism.cost()
    assert isinstance(cost, LNMaxCost | GNMaxCost | ConfidentCost)
    answered = released.labelled.labels[: len(counts)] != UNANSWERED
    delta = settings.labelling.delta
    # The number of queries in ``terms`` (the privacy parameters of this publication) must not depend on the votes.
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
            raise RunError(f"{path} is damaged: delete it; the same epsilon is then published again") from error
    if said.terms != terms:
        raise RunError(
            f"{path} contains an epsilon that an earlier version of fl-sim published; the cost of publishing it "
            "depends on the votes and is unknown: leave algorithm.publish_cost out, or run with another seed, which "
            "makes and charges new labels"
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
    """The content of ``labels.json``: the noisy labels, the number of queries, and a receipt.

    The receipt proves that the privacy ledger contains the cost of the labels.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    labels: list[int]
    num_asked: int = Field(ge=0)
    receipt: dict[str, Any]

    def fit(self, queries: int, classes: int) -> bool:
        """Return True if there are ``queries`` valid labels, and no query after the first ``num_asked`` is answered."""
        inside = all(UNANSWERED <= one < classes for one in self.labels)
        later = set(self.labels[self.num_asked :])
        return len(self.labels) == queries >= self.num_asked and inside and later <= {UNANSWERED}

    def labelled(self, ledger: Ledger, folder: Path) -> Labelled:
        """Return the labels. Raises RunError if the privacy ledger lacks the cost of some labels."""
        paid = {charge.release for charge in ledger.charges}
        unpaid = [query for query, one in enumerate(self.labels) if one != UNANSWERED and answer_to(query) not in paid]
        if unpaid:
            raise RunError(
                f"{folder / _LABELS} contains {len(unpaid)} labels without a charge in {folder / LEDGER} (first: query "
                f"{unpaid[0]}): restore unchanged copies of both files, or delete {_LABELS}; the labels are then made "
                "and charged again"
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
            f"{folder / _LABELS} is damaged: restore an unchanged copy of this file, or delete it; the labels are then "
            "made and charged again"
        )
    return kept


def _open_ledger(labelling: Labelling, folder: Path, kept: _Labels | None) -> Ledger:
    paid_with = Receipt.from_json(kept.receipt) if kept else None
    try:
        return labelling.open_ledger(folder / LEDGER, paid_with, holder=str(folder / _LABELS))
    except RunError as error:
        raise RunError(f"{error}; or set FL_SIM_POOLS, the folder of the labels, to a new folder") from error


def _hold_against_copy(ledger: Path, copy: Path) -> None:
    """Raise RunError if the privacy ledger lacks privacy costs that its copy in a run directory contains."""
    if not copy.exists():
        return
    charges, seen = (ledger.read_bytes() if ledger.exists() else b""), copy.read_bytes()
    if not charges.startswith(seen):
        raise RunError(
            f"{copy} contains charges for labels that are missing in {ledger}: restore an unchanged copy of the folder "
            f"{ledger.parent}, or choose another --out; the labels are then made and charged again"
        )


def _noise(labelling: Labelling, folder: Path, purpose: str, counts: NDArray[np.int64]) -> Noise:
    """Return the noise for a set of noisy labels.

    If a run was killed before it stored the labels, the resumed run gets the same noise.
    """
    if labelling.noise == "seeded":
        return Noise.seeded(int.from_bytes(hashlib.sha256(f"pate/{purpose}".encode()).digest()))
    return Noise(_key(folder / _KEY, counts), simulation_only=False)


def _key(path: Path, counts: NDArray[np.int64]) -> bytes:
    """Return the secret key of the noise on ``counts``, the teachers' votes. It is read from ``path``, or created.

    Raises RunError if the key was made for other counts. If different counts got the same noise, an attacker could
    subtract the noisy counts and learn the exact difference.
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
            f"{path} is damaged, or the votes have changed since the noise was drawn from this key: restore unchanged "
            f"copies of both, or delete {path.name}; the release is then made and charged again"
        )
    return key


def _use_of(key: bytes, counts: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(repr(counts.shape).encode() + counts.tobytes(), key=key, digest_size=32).digest()
