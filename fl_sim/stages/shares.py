"""The stage in which every client shares a summary of its records with all clients, before the first round.

Algorithms such as FedMix need this stage. In FedMix, a client's summary consists of averages of a few records each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import torch
from flwr.app import RecordDict

from clients.client_task import Client
from fl_sim.data import is_own
from fl_sim.engines import arrays, wire
from fl_sim.engines.arrays import float32_bytes
from fl_sim.errors import RunError
from fl_sim.experiment.job import Job
from fl_sim.seeding import rng, seeded_alone
from fl_sim.simulation.client_runtime import sizes_trained_on
from fl_sim.simulation.stage import Run, Stage, stages_of
from fl_sim.store.tensors import save_by_content
from fl_sim.training.loop import to_tensors
from fl_sim.types import Params, Traffic
from strategies.algorithm import Sharing, share_template

SHARE: Final = "share"
"""The name of the client task that returns the algorithm's summary of a client's records."""


def sharing(job: Job) -> Sharing:
    """Return the algorithm of ``job``, which must be an instance of ``Sharing``: its clients share summaries."""
    assert isinstance(job.experiment.algorithm, Sharing)
    return job.experiment.algorithm


@dataclass(frozen=True)
class ShareTask:
    """The client task that computes the algorithm's summary of the client's records, such as averaged records."""

    job: Job
    reads_records: ClassVar[bool] = True
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the message with the summary of the client's records."""
        inputs, labels = client.runtime.records(client.number, client.config.synthetic).tensors()
        seed, num_classes = self.job.experiment.seed, self.job.dataset.num_classes
        with seeded_alone(seed, "share", client.number):
            generator = rng(seed, "share", client.number)
            return wire.pool_content(sharing(self.job).share(inputs.cpu(), labels.cpu(), num_classes, generator))


class Shares(Stage):
    """The stage at the server. It concatenates all clients' summaries, which clients then use in every round."""

    def tasks(self) -> Mapping[str, ShareTask]:
        """Return the client task ``share``, which computes a client's summary."""
        return {SHARE: ShareTask(self.job)}

    def before(self, run: Run) -> None:
        """Ask every client for a summary of its records, and store all summaries in one file.

        Clients read this file in every round.
        """
        experiment, dataset = self.job.experiment, self.job.dataset
        template = share_template(sharing(self.job), dataset.input_shape, dataset.num_classes)
        shared, up = self.gathered(run, template)
        down = arrays.num_bytes(wire.pool_content(shared)) * experiment.num_clients
        run.log.before["shared_records"] = None if experiment.is_private else Traffic(down, up)
        mode = 0o600 if is_own(experiment.data) else 0o666  # averages of few records may reveal the records
        pool = save_by_content(run.out.absolute(), "pool", shared, mode=mode)
        run.strategy.order = replace(run.order, pool=str(pool))

    def gathered(self, run: Run, template: Params) -> tuple[Params, int]:
        """Return the concatenated summaries of all clients, sorted by client, and the number of bytes sent by clients.

        ``template``: names, shapes and types of a summary's tensors. Raises RunError if all summaries are empty.
        """
        most = run.strategy.most_examples
        sent = run.ask(
            SHARE,
            lambda one: (wire.read_pool(one, template, most), arrays.num_bytes(one)),
            quoted=not run.order.synthetic,
        )
        shared = [part for part, _ in sent]
        if not any(len(part) for one in shared for part in one.values()):
            raise RunError(
                f"no client has enough records for a summary before the first round ({self.job.experiment.algorithm}), "
                "so there is nothing to share: use fewer clients, or set the algorithm to average fewer records"
            )
        pool = {name: torch.cat([part[name] for part in shared]) for name in template}
        return pool, sum(num_bytes for _, num_bytes in sent)

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of the bytes that the server exchanges with all clients.

        The forecast assumes that every client has the mean number of records. The size of a client's summary is
        measured with this number of public test records.
        """
        del params
        experiment, public = self.job.experiment, self.job.dataset.test
        pooled = sum(stage.num_pooled() for stage in stages_of(self.job))
        size = round(float(sizes_trained_on(self.job, pooled).mean()))
        records = to_tensors(public.take(np.arange(size) % len(public)), self.job.dataset)
        shared = sharing(self.job).share(*records, self.job.dataset.num_classes, rng(experiment.seed, "share", 0))
        numbers = sum(one.numel() for one in shared.values())
        each = Traffic(float32_bytes(numbers * experiment.num_clients), float32_bytes(numbers))
        return {"shared_records": each * experiment.num_clients}
