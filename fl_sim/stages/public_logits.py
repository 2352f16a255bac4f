"""The stage of algorithms whose clients send logits on public records. It draws and stores these records."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clients.client_task import ClientTask
from clients.public_logits import TellLogits
from fl_sim.errors import UserError
from fl_sim.experiment.proxy import proxy_records
from fl_sim.seeding import rng
from fl_sim.simulation.stage import Run, Stage
from fl_sim.store.tensors import save_by_content
from strategies.layer import found_in
from strategies.public_logits import PUBLIC_LOGITS, PublicLogits


class PublicRecords(Stage):
    """The stage that gives the same public records to all clients, in a file that all clients read."""

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the algorithm uses public records."""
        return bool(experiment.algorithm.proxy != "none")

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return the client task that sends logits. The layer ``PublicLogits`` sends this task to clients."""
        return {PUBLIC_LOGITS: TellLogits()}

    def before(self, run: Run) -> None:
        """Draw the public records from the seed, and write them into the run directory.

        The records come from the data set ``proxy``. Raises UserError if it has too few records, or if the model does
        not predict classes.
        """
        settings: Any = self.job.experiment.algorithm
        if not self.job.predicts_classes:
            raise UserError(f"algorithm {settings.kind} distils class predictions, and this model has none: use fedavg")
        proxy = proxy_records(self.job, settings.proxy)
        if len(proxy.labels) < settings.public_records:
            raise UserError(
                f"algorithm.public_records={settings.public_records}, and {settings.proxy} has {len(proxy.labels)} "
                "training records: set at most this number, or choose another proxy"
            )
        draw = rng(self.job.experiment.seed, "public records")
        rows = np.sort(draw.choice(len(proxy.labels), settings.public_records, replace=False))
        inputs = proxy.normalised(proxy.inputs[torch.from_numpy(rows).to(proxy.inputs.device)])
        pool = save_by_content(run.out.absolute(), "pool", {"inputs": inputs.cpu().contiguous()})
        found_in(run.strategy.layer, PublicLogits).shape = (settings.public_records, self.job.dataset.num_classes)
        run.strategy.order = replace(run.order, pool=str(pool))
