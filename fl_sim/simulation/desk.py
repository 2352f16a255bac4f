"""What is done at home for clients that are played elsewhere: here lie the files in which they keep what is theirs.

They are the files of a run whose workers see this disk, with the same content: SCAFFOLD's c_i, the noise key and the
ledger of a private release, and the release itself. A release is paid for here before a worker is told of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from clients.client_task import Begun, Client, ClientRuntime, PaidAtHome
from fl_sim.engines import remote, wire
from fl_sim.engines.batching import partition_of, raised
from fl_sim.engines.remote import Parcel
from fl_sim.experiment.job import Job
from fl_sim.simulation.procedure import procedure_of
from fl_sim.store.tensors import load_state, save_state


@dataclass
class HomeDesk:
    """The desk of one run. What was paid for and is not made yet waits here, by task and client.

    ``signer``: signs that it was paid for, for the workers that have the same one.
    """

    job: Job
    signer: remote.Signer
    _shared: tuple[RecordDict, wire.TaskConfig, RecordDict] | None = None
    _begun: dict[tuple[str, int], Begun] = field(default_factory=dict)

    def before(self, message: Message) -> Parcel | Message:
        """Return what a worker needs: the message without paths, and beside it what its client has at home."""
        order, content = self._for_the_road(message.content)
        files = {Path(path).name: Path(path) for path in (order.pool, order.synthetic) if path}
        try:
            own = self._own(message, order, content)
        except Exception as error:  # noqa: BLE001 (as in fl_sim.engines.batching.answer: this client's failure)
            return raised(message, error)
        return Message(own, reply_to=message) if isinstance(own, RecordDict) else Parcel(content, own, files)

    def after(self, message: Message, answer: Message) -> Message:
        """Keep what the client keeps, and return its answer without."""
        if answer.has_error():
            return answer
        order, client = self._for_the_road(message.content)[0], partition_of(message)
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
        """Return what one client's message has beside the ``content`` that all have, or its answer."""
        client = partition_of(message)
        if order.task == wire.TRAIN:
            return wire.state_records(load_state(order.state_dir, client, order.server_round))
        task = self._runtime.tasks.get(order.task)
        if task is not None and task.reads_state:
            return wire.state_records(load_state(order.state_dir, client, order.server_round))
        if not isinstance(task, PaidAtHome):
            return {}
        if (order.task, client) not in self._begun:
            begun = task.begin(Client(client, self._runtime, order, message.content))
            if not isinstance(begun, Begun):
                return {} if begun is None else begun
            self._begun[order.task, client] = begun
        return self.signer.records(self._begun[order.task, client].ticket, order.task, client, content)

    def _for_the_road(self, content: RecordDict) -> tuple[wire.TaskConfig, RecordDict]:
        if self._shared is None or self._shared[0] is not content:
            order = wire.read_task_config(content)
            self._shared = (content, order, wire.with_config(content, order.without_paths))
        return self._shared[1:]

    @cached_property
    def _runtime(self) -> ClientRuntime:
        return procedure_of(self.job).runtime()
