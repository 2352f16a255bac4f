"""A job on its way to workers that see no disk of the driver's: records and shards as arrays, nothing by path."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from safetensors.torch import load

from clients.app import Site, build_client_app, train_together
from fl_sim.engines.pieces import Play
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, device_of
from fl_sim.simulation.procedure import procedure_of
from fl_sim.types import Dataset, Examples, Params


@dataclass(frozen=True, eq=False)
class TravellingJob:
    """What a worker elsewhere needs to play any client of a job, without a file of its own.

    ``shards``, ``validation``: as of the job, one array each, and how long the parts are. ``digest``: of all arrays.
    ``files``: what came later, by name.
    """

    experiment: str
    dataset: Dataset
    shards: tuple[NDArray[np.int64], NDArray[np.int64]]
    validation: tuple[NDArray[np.int64], NDArray[np.int64]]
    digest: str
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job) -> "TravellingJob":
        """Pack ``job``."""
        dataset = replace(job.dataset, train=_plain(job.dataset.train), test=_plain(job.dataset.test))
        shards, validation = _joined(job.shards), _joined(job.validation)
        return cls(
            job.experiment.model_dump_json(), dataset, shards, validation, _digest(dataset, *shards, *validation)
        )

    @cached_property
    def site(self) -> Site:
        """Return what plays the job's clients. Raises RunError where other records came than were sent."""
        if _digest(self.dataset, *self.shards, *self.validation) != self.digest:
            raise RunError("other records arrived than were sent: start the same command again")
        experiment = Experiment.model_validate_json(self.experiment)
        shards, validation = _parts(*self.shards), _parts(*self.validation)
        job = Job(experiment, self.dataset, shards, device_of(experiment), None, validation, self._read)
        return procedure_of(job).site()

    @cached_property
    def _tensors(self) -> dict[str, Params]:
        return {}

    def _read(self, name: str) -> Params:
        if name not in self._tensors:
            self._tensors[name] = load(self.files[name])
        return self._tensors[name]


def travelling_app(goods: TravellingJob) -> ClientApp:
    """Return the ClientApp of a worker that was sent ``goods``."""
    return build_client_app(lambda *_: goods.site)


def travelling_player(goods: TravellingJob, *, stacked: bool) -> Play:
    """Return what trains several clients at a time on a worker that was sent ``goods``."""
    return train_together(lambda *_: goods.site, stacked=stacked)


def _plain(examples: Examples) -> Examples:
    """Return records as arrays in memory, which a map of a file is not once it is somewhere else."""
    groups = None if examples.groups is None else examples.groups.view(np.ndarray)
    return Examples(examples.inputs.view(np.ndarray), examples.labels.view(np.ndarray), groups)


def _joined(parts: tuple[NDArray[np.int64], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *parts]), np.array([len(part) for part in parts], dtype=np.int64)


def _parts(joined: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.split(joined, np.cumsum(sizes)[:-1])) if len(sizes) else ()


def _digest(dataset: Dataset, *arrays: NDArray[np.int64]) -> str:
    digest = hashlib.sha256()
    for part in (dataset.train, dataset.test):
        for array in (part.inputs, part.labels, part.groups):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()
