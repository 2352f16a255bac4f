"""A job on its way to workers that see no disk of the driver's: records and shards as arrays, nothing by path."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from flwr.clientapp import ClientApp
from safetensors.torch import load

from clients.app import build_client_app, train_together
from clients.client_task import ClientRuntime
from fl_sim.engines import remote
from fl_sim.engines.batching import BatchHandler
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, device_of
from fl_sim.simulation.procedure import procedure_of
from fl_sim.types import Dataset, Examples, Params
from partitions import Parts


@dataclass(frozen=True, eq=False)
class TravellingJob:
    """What a worker elsewhere needs to play any client of a job, without a file of its own.

    ``shards``, ``validation``: as of the job. ``digest``: of all arrays. ``signer``: whose tickets the worker takes.
    ``files``: what came later, by name.
    """

    experiment: str
    dataset: Dataset
    shards: Parts
    validation: Parts
    digest: str
    signer: remote.Signer
    files: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, signer: remote.Signer) -> "TravellingJob":
        """Pack ``job``, for workers that take what ``signer`` signs."""
        # Models are measured at home: validation records stay there.
        dataset = replace(job.dataset, train=_plain(job.dataset.train), test=_plain(job.dataset.test), validation=None)
        digest = _digest(dataset, job.shards, job.validation)
        return cls(job.experiment.model_dump_json(), dataset, job.shards, job.validation, digest, signer)

    @cached_property
    def runtime(self) -> ClientRuntime:
        """Return what plays the job's clients. Raises RunError where other records came than were sent."""
        if _digest(self.dataset, self.shards, self.validation) != self.digest:
            raise RunError("other records arrived than were sent: start the same command again")
        experiment = Experiment.model_validate_json(self.experiment)
        device = device_of(experiment)
        job = Job(experiment, self.dataset, self.shards, device, None, self.validation, self._read)
        return procedure_of(job).runtime()

    @cached_property
    def _tensors(self) -> dict[str, Params]:
        return {}

    def _read(self, name: str) -> Params:
        if name not in self._tensors:
            self._tensors[name] = load(self.files[name])
        return self._tensors[name]


def travelling_app(goods: TravellingJob) -> ClientApp:
    """Return the ClientApp of a worker that was sent ``goods``, ready to train."""
    goods.runtime.trainer  # noqa: B018 (made once, before any client waits for it)
    return build_client_app(lambda *_: goods.runtime, goods.signer)


def travelling_player(goods: TravellingJob, *, stacked: bool) -> BatchHandler:
    """Return what trains several clients at a time on a worker that was sent ``goods``."""
    return train_together(lambda *_: goods.runtime, stacked=stacked)


def _plain(examples: Examples) -> Examples:
    """Return records as arrays in memory, which a map of a file is not once it is somewhere else."""
    groups = None if examples.groups is None else examples.groups.view(np.ndarray)
    return Examples(examples.inputs.view(np.ndarray), examples.labels.view(np.ndarray), groups)


def _digest(dataset: Dataset, *splits: Parts) -> str:
    digest = hashlib.sha256()
    dealt = [array for split in splits for array in (split.records, split.bounds)]
    for array in (*dataset.train.arrays, *dataset.test.arrays, *dealt):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
