"""Workers that see no disk of the driver's: the job is sent to them as arrays, and the client states stay at home."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load

from clients.app import build_client_app, train_together
from clients.client_task import Begun, Client, ClientRuntime, PaidAtHome
from fl_sim.engines import remote, wire
from fl_sim.engines.batching import BatchHandler, partition_of, raised
from fl_sim.engines.remote import Parcel
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, device_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.store.tensors import load_state, save_state
from fl_sim.types import Dataset, Examples, Params
from partitions import Parts


@dataclass(frozen=True, eq=False)
class WorkerSetup:
    """A job as a worker without the driver's files receives it.

    ``shards``, ``validation``: as in the job. ``digest``: of all arrays. ``signer``: the signer of valid tickets.
    ``files``: the contents of files that came later, by name.
    """

    experiment: str
    dataset: Dataset
    shards: Parts
    validation: Parts
    digest: str
    signer: remote.Signer
    files: dict[str, bytes] = field(default_factory=dict)
    _tensors: dict[str, Params] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, signer: remote.Signer) -> "WorkerSetup":
        """Pack ``job`` for workers that accept the tickets of ``signer``."""
        # The driver measures models: validation records stay there.
        dataset = replace(job.dataset, train=_plain(job.dataset.train), test=_plain(job.dataset.test), validation=None)
        digest = _digest(dataset, job.shards, job.validation)
        return cls(job.experiment.model_dump_json(), dataset, job.shards, job.validation, digest, signer)

    @cached_property
    def runtime(self) -> ClientRuntime:
        """Return the client runtime of the job. Raises RunError where other records arrived than were sent."""
        if _digest(self.dataset, self.shards, self.validation) != self.digest:
            raise RunError("other records arrived than were sent: start the same command again")
        experiment = Experiment.model_validate_json(self.experiment)
        device = device_of(experiment)
        job = Job(experiment, self.dataset, self.shards, device, None, self.validation, self._read)
        return procedure_of(job).runtime()

    def _read(self, name: str) -> Params:
        if name not in self._tensors:
            self._tensors[name] = load(self.files[name])
        return self._tensors[name]


def worker_app(setup: WorkerSetup) -> ClientApp:
    """Return the ClientApp of a worker that was sent ``setup``, ready to train."""
    setup.runtime.trainer  # noqa: B018 (made once, before any client waits for it)
    return build_client_app(lambda *_: setup.runtime, setup.signer)


def worker_handler(setup: WorkerSetup, *, stacked: bool) -> BatchHandler:
    """Return the function that trains several clients at a time on a worker that was sent ``setup``."""
    return train_together(lambda *_: setup.runtime, stacked=stacked)


def _plain(examples: Examples) -> Examples:
    """Return records as arrays in memory: a memory map of a file is useless on another machine."""
    groups = None if examples.groups is None else examples.groups.view(np.ndarray)
    return Examples(examples.inputs.view(np.ndarray), examples.labels.view(np.ndarray), groups)


def _digest(dataset: Dataset, *splits: Parts) -> str:
    digest = hashlib.sha256()
    dealt = [array for split in splits for array in (split.records, split.bounds)]
    for array in (*dataset.train.arrays, *dataset.test.arrays, *dealt):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@dataclass
class ClientStore:
    """The files of one run's remote clients, at the driver: client states, noise keys and ledgers.

    They are the files of a run whose workers see this disk, with the same content. A release is charged here before a
    worker makes it. ``signer``: signs the tickets of charged releases, for workers with the same one.
    """

    job: Job
    signer: remote.Signer
    _shared: tuple[RecordDict, wire.TaskConfig, RecordDict] | None = None
    _begun: dict[tuple[str, int], Begun] = field(default_factory=dict)

    def before(self, message: Message) -> Parcel | Message:
        """Return the message for a worker, without paths, with its client's state; or the answer where it is known."""
        order, content = self._without_paths(message.content)
        files = {Path(path).name: Path(path) for path in (order.pool, order.synthetic) if path}
        try:
            own = self._own(message, order, content)
        except Exception as error:  # noqa: BLE001 (as in fl_sim.engines.batching.answer: this client's failure)
            return raised(message, error)
        return Message(own, reply_to=message) if isinstance(own, RecordDict) else Parcel(content, own, files)

    def after(self, message: Message, answer: Message) -> Message:
        """Store the client state of an answer, and return the answer without it."""
        if answer.has_error():
            return answer
        order, client = self._without_paths(message.content)[0], partition_of(message)
        if order.task == wire.TRAIN:
            save_state(order.state_dir, client, order.server_round, wire.take_state(answer.content))
            return answer
        if (begun := self._begun.pop((order.task, client), None)) is None:
            return answer
        task = self._runtime.tasks[order.task]
        assert isinstance(task, PaidAtHome)
        try:
            kept = task.finish(begun, answer.content)
        except Exception as error:  # noqa: BLE001 (as above)
            return raised(message, error)
        return Message(kept, reply_to=message)

    def _own(
        self, message: Message, order: wire.TaskConfig, content: RecordDict
    ) -> Mapping[str, ArrayRecord | ConfigRecord] | RecordDict:
        """Return the private part of one client's message, or its answer; ``content``: the part that all share."""
        client = partition_of(message)
        task = None if order.task == wire.TRAIN else self._runtime.tasks.get(order.task)
        if order.task == wire.TRAIN or (task is not None and task.reads_state):
            return wire.state_records(load_state(order.state_dir, client, order.server_round))
        if not isinstance(task, PaidAtHome):
            return {}
        if (order.task, client) not in self._begun:
            begun = task.begin(Client(client, self._runtime, order, message.content))
            if not isinstance(begun, Begun):
                return {} if begun is None else begun
            self._begun[order.task, client] = begun
        return self.signer.records(self._begun[order.task, client].ticket, order.task, client, content)

    def _without_paths(self, content: RecordDict) -> tuple[wire.TaskConfig, RecordDict]:
        if self._shared is None or self._shared[0] is not content:
            order = wire.read_task_config(content)
            self._shared = (content, order, wire.with_config(content, order.without_paths))
        return self._shared[1:]

    @cached_property
    def _runtime(self) -> ClientRuntime:
        return procedure_of(self.job).runtime()
