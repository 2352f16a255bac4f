"""DA-FL's client half: a client releases synthetic records. What it does is ``clients.dafl.share``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from flwr.app import RecordDict

from clients.client_task import Begun, Client
from clients.dafl.settings import DaFl
from fl_sim.data import version_of
from fl_sim.engines import remote, wire
from fl_sim.experiment.job import Job
from fl_sim.simulation.client_runtime import to_generator
from fl_sim.training.records import Records

if TYPE_CHECKING:
    from clients.dafl.generator import PrivateRecords
    from clients.dafl.share import Client as Releasing
    from clients.dafl.share import Share

SYNTHESIZE: Final = "synthesize"
"""The task of releasing synthetic records."""


@dataclass(frozen=True)
class Synthesize:
    """A client's part of the pool, with what is said of it: paid for on its ledger, and made once."""

    job: Job
    reads_records: ClassVar[bool] = False  # it pays the policy, which asks for secret noise and for mechanisms of ours
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the client's synthetic records, and as JSON what it says of them."""
        if client.ticket:
            return self._made_elsewhere(client, client.ticket)
        [made] = self.run_together([client])
        if isinstance(made, Exception):
            raise made
        return made

    def run_together(self, clients: Sequence[Client]) -> list[RecordDict | Exception]:
        """Return every client's answer, or what it raised; their generators are trained together."""
        from clients.dafl.share import make_shares  # noqa: PLC0415 (the accountants load slowly)

        job, experiment = self.job, self.job.experiment
        releasing = [releasing_client(job, client) for client in clients]
        shares = make_shares(
            settings_of(job), releasing, seed=experiment.seed, public_records=len(job.dataset.train),
            check=clients[0].check,
        )  # fmt: skip
        return [share if isinstance(share, Exception) else content_of(share) for share in shares]

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Pay for a share where the client's ledger is: see ``PaidAtHome``."""
        from clients.dafl.share import Paid, begin_share  # noqa: PLC0415 (the accountants load slowly)

        job, releasing = self.job, releasing_client(self.job, client)
        begun = begin_share(settings_of(job), releasing, job.experiment.seed, len(job.dataset.train))
        if not isinstance(begun, Paid):
            return content_of(begun)
        noise, counts = begun.request.noise, begun.request.counts
        return Begun(remote.Ticket(noise.key, noise.simulation_only, tuple(counts.tolist())), (releasing, begun))

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Keep the records that a worker made."""
        from clients.dafl.share import finish_share  # noqa: PLC0415 (the accountants load slowly)

        releasing, paid = begun.paid
        return content_of(finish_share(settings_of(self.job), releasing, paid, wire.read_made(answer)))

    def _made_elsewhere(self, client: Client, ticket: remote.Ticket) -> RecordDict:
        from clients.dafl.share import generate_elsewhere  # noqa: PLC0415 (the accountants load slowly)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

        counts, noise = np.array(ticket.counts, dtype=np.int64), Noise(ticket.key, ticket.simulation_only)
        records, seed = _private_records(self.job, client.runtime.own_records, client.number), self.job.experiment.seed
        made = generate_elsewhere(settings_of(self.job), client.number, records, counts, noise, seed=seed)
        return wire.made_content(made)


def settings_of(job: Job) -> DaFl:
    """Return the settings of an experiment whose clients release synthetic records."""
    assert isinstance(job.experiment.preprocess, DaFl)
    return job.experiment.preprocess


def content_of(share: "Share") -> RecordDict:
    """Return a share as it is sent: its records, and as JSON what is said of them."""
    receipt = share.receipt and share.receipt.to_json()
    said = {"counts": share.counts.tolist(), "refused": share.refused, "facts": share.facts, "receipt": receipt}
    return wire.synthetic_content(share.inputs, json.dumps(said))


def releasing_client(job: Job, client: Client) -> "Releasing":
    """Return a client that is to release synthetic records: what it holds, and where its key and its ledger lie."""
    from clients.dafl.share import Client as Releasing  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.simulation.client_ledgers import ledger_path, names_of_deal  # noqa: PLC0415

    ledger, folder, policy = ledger_path(job, client.number), client.folder(), client.policy
    if policy:  # what is private stays where the client wants it, not where the server says
        features = version_of(job.experiment.features)
        release = settings_of(job).release_of(client.number, job.experiment.seed, features)
        now, earlier = (policy.home / f"{name}-{release}" for name in names_of_deal(job))
        folder = earlier if earlier.exists() else now
    records = _private_records(job, client.runtime.own_records, client.number)
    return Releasing(client.number, records, folder, ledger, policy)


def _private_records(job: Job, own: Callable[[int], Records], client: int) -> "PrivateRecords":
    from clients.dafl.generator import PrivateRecords  # noqa: PLC0415 (the accountants load slowly)

    inputs, labels = (tensor.cpu() for tensor in own(client).tensors())
    dataset, features = job.dataset, version_of(job.experiment.features)
    return PrivateRecords(to_generator(inputs, job), labels, dataset.num_classes, dataset.columns, features)
