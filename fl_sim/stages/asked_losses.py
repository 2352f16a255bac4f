"""The stage of samplers that ask clients for their loss before a round."""

from collections.abc import Mapping
from typing import Any

from clients.asked_loss import TellLoss
from clients.client_task import ClientTask
from fl_sim.simulation.stage import Stage
from strategies.guided_cohorts import TELL_LOSS


class AskedLosses(Stage):
    """The stage that adds the client task ``tell-loss``. The layer ``GuidedCohorts`` sends this task to clients."""

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the sampler asks clients for their loss."""
        return bool(experiment.sampler.num_asked(experiment.num_clients))

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return the client task ``tell-loss``."""
        return {TELL_LOSS: TellLoss()}
