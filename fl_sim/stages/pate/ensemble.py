"""PATE's votes, made once for all runs whose teachers would cast the same.

They lie beside DA-FL's pools ($FL_SIM_POOLS, else the user's cache), in a folder named by everything that determines
them. They are PRIVATE: they are computed from the teachers' records, and nobody but their owner may read the files
(mode 0600).
"""

import hashlib
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fl_sim.data import fingerprint
from fl_sim.engines.wire import TaskConfig
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.identity import code_in
from fl_sim.experiment.job import Job
from fl_sim.simulation.pools import pools_root
from fl_sim.stages.pate.asking import ask_teachers
from fl_sim.store.files import explain, folder_lock, read_whole
from fl_sim.store.tensors import write_private
from strategies.pate.labelling import count_votes
from strategies.pate.mechanisms import NoNoise
from strategies.pate.settings import Pate

_VOTES, _FACTS = "votes.npy", "votes.json"
_FORMAT, _MOST_FACTS = 1, 2**16


@dataclass(frozen=True)
class Votes:
    """PRIVATE. ``counts``: votes per public record and class, (pool, classes), each teacher's being one.

    ``predictions``: (teachers, pool). ``rows``: which record of the public pool each is about. ``folder``: where they
    are kept. ``seconds``: what they took when they were made.
    """

    predictions: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    folder: Path
    seconds: float
    reused: bool

    def about(self, rows: NDArray[np.int64]) -> "Votes":
        """Return the votes on these records of the public pool, in this order."""
        return replace(self, predictions=self.predictions[:, rows], counts=self.counts[rows], rows=self.rows[rows])


def prepare_votes(job: Job, settings: Pate, grid: Grid, order: TaskConfig) -> Votes:
    """Return the votes of the job's teachers on its public pool, from an earlier run where there is one.

    A teacher that fails votes for class 0 throughout, where labels are to be private: see ``ask_teachers``. Raises
    RunError where labels are not, UserError where what is kept is damaged.
    """
    folder, booth = pools_root() / votes_key(job), _booth(job, settings)
    private = not isinstance(settings.labelling.mechanism, NoNoise)
    with alone_in_cache(folder):
        reused = (folder / _FACTS).exists()
        if not reused:
            start = time.perf_counter()
            predictions, silent = ask_teachers(
                grid, order, job.experiment.round_timeout, **asdict(booth), private=private
            )
            content = as_npy(predictions.astype(booth.dtype))
            write_private(folder / _VOTES, content)
            facts = {"seconds": time.perf_counter() - start, "silent": silent, "sha256": _digest(content)}
            write_private(folder / _FACTS, json.dumps(facts).encode())
        votes, kept = _read_votes(folder, booth)
    if kept.silent and not private:
        raise RunError(
            f"teachers {', '.join(map(str, kept.silent))} failed when the votes in {folder} were made: delete {_VOTES} "
            f"and {_FACTS} there, and the teachers are trained again"
        )
    counts, rows = count_votes(votes, booth.classes), np.arange(booth.records, dtype=np.int64)
    return Votes(votes, counts, rows, folder, kept.seconds, reused)


def votes_key(job: Job) -> str:
    """Return the name of the votes: a digest of all that determines them, the students and the noise left out."""
    experiment = job.experiment
    names = ("partition", "clients", "seed", "partition_seed", "model_seed", "model", "local", "features")
    settings = experiment.chosen(*names)
    algorithm = experiment.chosen("algorithm")["algorithm"]
    pate = {name: algorithm[name] for name in ("teachers", "public", "public_records", "overlap")}
    records = fingerprint(experiment.data, job.root, with_test=True)
    determining = [_FORMAT, settings, pate, records, *code_in({**settings, "pate": pate})]
    digest = hashlib.sha256(json.dumps(determining, sort_keys=True).encode())
    return f"{experiment.data.partition(':')[0]}-votes-{digest.hexdigest()[:20]}"


@contextmanager
def alone_in_cache(folder: Path) -> Iterator[None]:
    """Make a folder that its owner alone may read, and be the only process that works in it.

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
    """Write the raw counts of the queries into a run directory whose owner asked for them."""
    write_private(out / _VOTES, as_npy(votes.counts[:num_queries]))


@dataclass(frozen=True)
class _Booth:
    """How many teachers vote on how many public records, for one of how many classes."""

    teachers: int
    records: int
    classes: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Return the smallest type that holds every class."""
        return np.min_scalar_type(self.classes - 1)


class _Facts(BaseModel):
    """What is kept beside the votes; ``silent``: the teachers that gave none. PRIVATE."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    silent: list[int] = []
    sha256: str


def _booth(job: Job, settings: Pate) -> _Booth:
    pool = settings.public_split(job.dataset, job.experiment.seed_of_partition).pool
    return _Booth(job.experiment.clients, len(pool), job.dataset.num_classes)


def _read_votes(folder: Path, booth: _Booth) -> tuple[NDArray[np.int64], _Facts]:
    """Return the votes, shape (teachers, records), and the facts. Raises UserError where they are not as written."""
    head, size = _head_of(booth), booth.teachers * booth.records * booth.dtype.itemsize
    try:
        facts = _Facts.model_validate_json(read_whole(folder / _FACTS, _MOST_FACTS + 16 * booth.teachers))
        content = read_whole(folder / _VOTES, len(head) + size)
    except (OSError, ValueError):
        content = b""
    if len(content) == len(head) + size and content.startswith(head) and _digest(content) == facts.sha256:
        votes = np.frombuffer(content, booth.dtype, offset=len(head)).reshape(booth.teachers, booth.records)
        if votes.max() < booth.classes:
            return votes.astype(np.int64), facts
    raise UserError(
        f"the votes in {folder} are damaged: delete {_VOTES} and {_FACTS} there, and the teachers are trained again; "
        "leave the labels beside them, which are paid for"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _head_of(booth: _Booth) -> bytes:
    """Return how ``numpy.save`` begins a file with these votes."""
    buffer = io.BytesIO()
    shape = (booth.teachers, booth.records)
    np.lib.format.write_array_header_1_0(buffer, {"descr": booth.dtype.str, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def as_npy(array: NDArray[np.generic]) -> bytes:
    """Return an array as ``numpy.save`` writes it."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()
