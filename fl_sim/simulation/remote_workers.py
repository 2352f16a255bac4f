"""Workers without access to the driver's disk. The driver is the process that runs the server.

The driver sends the job (the experiment and its records) to such workers as arrays, and stores all client states
itself.
"""

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
from clients.train import TrainingJob
from fl_sim.engines import remote, wire
from fl_sim.engines.batching import BatchHandler, partition_of, raised
from fl_sim.engines.remote import Parcel
from fl_sim.errors import RunError
from fl_sim.experiment.device import device_of
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.simulation.rounds import procedure_of
from fl_sim.store.tensors import load_state, save_state
from fl_sim.types import Dataset, Examples, Params
from partitions import MovingParts, Parts


@dataclass(frozen=True, eq=False)
class WorkerSetup:
    """The description of a job that a worker without access to the driver's files receives.

    ``experiment``: the experiment as JSON. ``shards``, ``validation``, ``own_tests``, ``weights``, ``moving``: as in
    ``Job``.
    ``digest``: the digest of all arrays. ``signer``: the object with which the worker checks the signatures of tickets.
    A ticket is the driver's signed proof that a client's privacy ledger contains the cost of a private output.
    ``files``: {name: content} of files that the worker received later.
    """

    experiment: str
    dataset: Dataset
    shards: Parts
    validation: Parts
    own_tests: Parts
    weights: Params
    digest: str
    signer: remote.Signer
    moving: MovingParts | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    _tensors: dict[str, Params] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, signer: remote.Signer) -> "WorkerSetup":
        """Return the setup that workers receive for ``job``.

        A ticket is the driver's proof that a client's privacy ledger contains the cost of a private output. Workers
        accept a ticket only if ``signer`` signed it.
        """
        # Workers get no validation records, because the driver evaluates models.
        dataset = replace(job.dataset, train=_plain(job.dataset.train), test=_plain(job.dataset.test), validation=None)
        parts = (job.shards, job.validation, job.own_tests)
        digest = _digest(dataset, job.weights, job.moving, *parts)
        return cls(job.experiment.model_dump_json(), dataset, *parts, job.weights, digest, signer, job.moving)

    @cached_property
    def runtime(self) -> ClientRuntime:
        """Return the client runtime of the job.

        Raises RunError if the received records differ from the sent records.
        """
        parts = (self.shards, self.validation, self.own_tests)
        if _digest(self.dataset, self.weights, self.moving, *parts) != self.digest:
            raise RunError("the received records differ from those that were sent: start the same command again")
        experiment = Experiment.model_validate_json(self.experiment)
        device = device_of(experiment)
        job = Job(
            experiment, self.dataset, self.shards, device, None, self.validation, self.own_tests, self._read,
            self.weights, moving=self.moving,
        )  # fmt: skip
        return procedure_of(job).runtime()

    def _read(self, name: str) -> Params:
        if name not in self._tensors:
            self._tensors[name] = load(self.files[name])
        return self._tensors[name]


def worker_app(setup: WorkerSetup) -> ClientApp:
    """Return the ClientApp (Flower's client code) of a worker with ``setup``, and create the worker's trainer.

    The trainer is created now, so that no client has to wait for it.
    """
    setup.runtime.trainer  # noqa: B018 (a cached property: the access creates the trainer)
    return build_client_app(lambda *_: setup.runtime, setup.signer)


def worker_handler(setup: WorkerSetup, *, stacked: bool) -> BatchHandler:
    """Return the function that trains a batch of clients on a worker with ``setup``.

    ``stacked``: True if the clients are trained as one computation over stacked parameters.
    """
    return train_together(lambda *_: setup.runtime, setup.signer, stacked=stacked)


def _plain(examples: Examples) -> Examples:
    """Return ``examples`` as arrays in memory, because the worker cannot read this machine's memory-mapped files."""
    groups = None if examples.groups is None else examples.groups.view(np.ndarray)
    return Examples(examples.inputs.view(np.ndarray), examples.labels.view(np.ndarray), groups)


def _digest(dataset: Dataset, weights: Params, moving: MovingParts | None, *splits: Parts) -> str:
    digest = hashlib.sha256()
    every = splits if moving is None else (*splits, moving.first, moving.last)
    dealt = [array for split in every for array in (split.records, split.bounds)]
    dealt += [] if moving is None else [moving.rounds]
    tensors = [weights[name].numpy() for name in sorted(weights)]
    for array in (*dataset.train.arrays, *dataset.test.arrays, *dealt, *tensors):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@dataclass
class ClientStore:
    """The driver's files of all remote clients of a run: client states, privacy ledgers and noise keys.

    The driver is the process that runs the server. The files are the same as in a run whose workers share the driver's
    disk. A noise key is the secret seed of a client's privacy noise. Before a worker makes a private output, this class
    writes the privacy cost into the client's ledger. ``signer``: the object with which the driver signs a ticket (the
    proof that the cost was written).
    """

    job: Job
    signer: remote.Signer
    _shared: tuple[RecordDict, wire.TaskConfig, RecordDict] | None = None
    _begun: dict[tuple[str, int], Begun] = field(default_factory=dict)

    def before(self, message: Message) -> Parcel | Message:
        """Return the message for a worker: ``message`` without file paths, and with the client's state.

        In two cases no worker is needed, and this method returns the client's answer: synthetic records are stored
        already, or an error occurs.
        """
        order, content = self._without_paths(message.content)
        files = {Path(path).name: Path(path) for path in (order.pool, order.synthetic) if path}
        try:
            own = self._own(message, order, content)
        except Exception as error:  # noqa: BLE001 (it becomes this client's error reply, as in batching.answer)
            return raised(message, error)
        return Message(own, reply_to=message) if isinstance(own, RecordDict) else Parcel(content, own, files)

    def after(self, message: Message, answer: Message) -> Message:
        """Store the client state or private output in a worker's ``answer``; return the answer for the server."""
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
        except Exception as error:  # noqa: BLE001 (it becomes this client's error reply)
            return raised(message, error)
        return Message(kept, reply_to=message)

    def _own(
        self, message: Message, order: wire.TaskConfig, content: RecordDict
    ) -> Mapping[str, ArrayRecord | ConfigRecord] | RecordDict:
        """Return the data that only this client gets in its message: its client state, or a signed ticket.

        A ticket is the proof that the client's privacy ledger contains the cost of a private output. If the client's
        answer exists already (stored synthetic records), the method returns this answer, and no worker is needed.
        ``content``: the data that all clients get in their messages.
        """
        client = partition_of(message)
        task = None if order.task == wire.TRAIN else self._runtime.tasks.get(order.task)
        if order.task == wire.TRAIN or (task is not None and task.reads_state):
            state = wire.state_records(load_state(order.state_dir, client, order.server_round))
            return {**state, **self._ticket_to_train(message, order, RecordDict({**content, **state}))}
        if not isinstance(task, PaidAtHome):
            return {}
        if (order.task, client) not in self._begun:
            begun = task.begin(Client(client, self._runtime, order, message.content))
            if not isinstance(begun, Begun):
                return {} if begun is None else begun
            self._begun[order.task, client] = begun
        return self.signer.records(self._begun[order.task, client].ticket, order.task, client, content)

    def _ticket_to_train(
        self, message: Message, order: wire.TaskConfig, content: RecordDict
    ) -> Mapping[str, ConfigRecord]:
        """Return a Flower record with the signed ticket for a round of training; empty if local steps are not private.

        The method first writes the privacy cost of the round into the client's ledger. The ticket is the signed proof
        of this entry. ``content``: the content of the message, including the client state.
        """
        if order.task != wire.TRAIN or not any(layer.protects for layer in self._runtime.layers):
            return {}
        client = partition_of(message)
        ticket = TrainingJob.of(Client(client, self._runtime, order, message.content)).ticket
        return {} if ticket is None else self.signer.records(ticket, order.task, client, content)

    def _without_paths(self, content: RecordDict) -> tuple[wire.TaskConfig, RecordDict]:
        if self._shared is None or self._shared[0] is not content:
            order = wire.read_task_config(content)
            self._shared = (content, order, wire.with_config(content, order.without_paths))
        return self._shared[1:]

    @cached_property
    def _runtime(self) -> ClientRuntime:
        return procedure_of(self.job).runtime()
