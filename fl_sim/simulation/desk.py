"""What is done at home for clients that are played elsewhere: here lie the files in which they keep what is theirs.

They are the files of a run whose workers see this disk, with the same content: SCAFFOLD's c_i, the noise key and the
ledger of a private release, and the release itself. A release is paid for here before a worker is told of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from clients.app import Site, moments_folder, share_folder
from clients.class_moments import num_moments
from clients.dafl.settings import DaFl
from fl_sim.engines import releases, wire
from fl_sim.engines.apart import Parcel
from fl_sim.engines.grid import partition_of, raised
from fl_sim.experiment.job import Job
from fl_sim.simulation.procedure import procedure_of
from fl_sim.simulation.site import releasing_client, said_of
from fl_sim.simulation.summaries import moments_release
from fl_sim.store.tensors import load_state, save_state
from strategies.ccvr import CCVR

if TYPE_CHECKING:
    from clients.dafl.share import Client, Paid
    from clients.private_moments import PaidNoise, Release


@dataclass
class HomeDesk:
    """The desk of one run. What was paid for and is not made yet waits here, by client.

    ``signer``: signs that it was paid for, for the workers that have the same one.
    """

    job: Job
    signer: wire.Signer
    _shared: tuple[RecordDict, wire.Order, RecordDict] | None = None
    _shares: "dict[int, tuple[Client, Paid]]" = field(default_factory=dict)
    _moments: "dict[int, tuple[Release, PaidNoise]]" = field(default_factory=dict)

    def before(self, message: Message) -> Parcel | Message:
        """Return what a worker needs: the message without paths, and beside it what its client has at home."""
        order, content = self._for_the_road(message.content)
        files = {Path(path).name: Path(path) for path in (order.pool, order.synthetic) if path}
        try:
            own = self._own(message, order, content)
        except Exception as error:  # noqa: BLE001 (as in fl_sim.engines.grid.answer: this client's failure)
            return raised(message, error)
        return Message(own, reply_to=message) if isinstance(own, RecordDict) else Parcel(content, own, files)

    def after(self, message: Message, answer: Message) -> Message:
        """Keep what the client keeps, and return its answer without."""
        if answer.has_error():
            return answer
        order, client = self._for_the_road(message.content)[0], partition_of(message)
        match message.metadata.message_type:
            case wire.TRAIN:
                save_state(order.state_dir, client, order.server_round, wire.take_kept(answer.content))
            case wire.SYNTHESIZE:
                return self._finish_share(message, answer)
            case wire.SUMMARISE if client in self._moments:
                from clients.private_moments import finish_release  # noqa: PLC0415 (the accountants load slowly)

                release, paid = self._moments.pop(client)
                finish_release(release, paid, releases.read_moments(answer.content, self._shape))
        return answer

    def _own(
        self, message: Message, order: wire.Order, content: RecordDict
    ) -> Mapping[str, ArrayRecord | ConfigRecord] | RecordDict:
        """Return what one client's message has beside the ``content`` that all have, or its answer."""
        client = partition_of(message)
        ticket: wire.Ticket | RecordDict
        match message.metadata.message_type:
            case wire.TRAIN:
                return wire.kept_records(load_state(order.state_dir, client, order.server_round))
            case wire.SYNTHESIZE:
                ticket = self._pay_for_share(client, share_folder(order, client))
            case wire.SUMMARISE if self._protects_moments:
                ticket = self._pay_for_moments(client, message.content, moments_folder(order, client))
            case _:
                return {}
        if not isinstance(ticket, wire.Ticket):
            return ticket
        return self.signer.records(ticket, message.metadata.message_type, client, content)

    def _for_the_road(self, content: RecordDict) -> tuple[wire.Order, RecordDict]:
        if self._shared is None or self._shared[0] is not content:
            order = wire.read_order(content)
            self._shared = (content, order, wire.reordered(content, order.for_the_road))
        return self._shared[1:]

    def _pay_for_share(self, client: int, folder: Path) -> wire.Ticket | RecordDict:
        """Return the ticket of a share that is to be made; or the share, where there is one or can be none."""
        from clients.dafl.share import Paid, begin_share  # noqa: PLC0415 (the accountants load slowly)

        job = self.job
        assert isinstance(job.experiment.preprocess, DaFl)
        if client not in self._shares:
            releasing = releasing_client(job, lambda one: self._site.records(one, ""), client, folder)
            begun = begin_share(job.experiment.preprocess, releasing, job.experiment.seed, len(job.dataset.train))
            if not isinstance(begun, Paid):
                return releases.synthetic_content(*said_of(begun))
            self._shares[client] = releasing, begun
        request = self._shares[client][1].request
        return wire.Ticket(request.noise.key, request.noise.simulation_only, tuple(request.counts.tolist()))

    def _finish_share(self, message: Message, answer: Message) -> Message:
        from clients.dafl.share import finish_share  # noqa: PLC0415 (the accountants load slowly)

        assert isinstance(self.job.experiment.preprocess, DaFl)
        releasing, paid = self._shares.pop(partition_of(message))
        try:
            share = finish_share(self.job.experiment.preprocess, releasing, paid, releases.read_made(answer.content))
        except Exception as error:  # noqa: BLE001 (as above)
            return raised(message, error)
        return Message(releases.synthetic_content(*said_of(share)), reply_to=message)

    def _pay_for_moments(self, client: int, content: RecordDict, folder: Path) -> wire.Ticket | RecordDict:
        """Return the ticket of moments that are to be made; or the moments, where they are there, or cost nothing."""
        from clients.private_moments import PaidNoise, begin_release  # noqa: PLC0415 (the accountants load slowly)

        calibrate = self.job.experiment.calibrate
        assert isinstance(calibrate, CCVR)
        assert calibrate.protection is not None
        if client not in self._moments:
            params, _ = wire.read_task(content)
            release = moments_release(self.job, client, params, folder)
            begun = begin_release(len(self.job.shards[client]), self._shape, calibrate.protection, release)
            if not isinstance(begun, PaidNoise):
                return releases.moments_content(begun)
            self._moments[client] = release, begun
        noise = self._moments[client][1].noise
        return wire.Ticket(noise.key, noise.simulation_only)

    @cached_property
    def _site(self) -> Site:
        return procedure_of(self.job).site()

    @cached_property
    def _shape(self) -> tuple[int, int]:
        return self.job.dataset.num_classes, num_moments(self.job.num_features)

    @property
    def _protects_moments(self) -> bool:
        calibrate = self.job.experiment.calibrate
        return isinstance(calibrate, CCVR) and calibrate.protection is not None
