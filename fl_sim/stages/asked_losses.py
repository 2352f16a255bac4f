"""The stage for samplers that ask clients for the loss of the global model before they choose a cohort."""

from collections.abc import Mapping
from typing import Any

from clients.asked_loss import TellLoss
from clients.client_task import ClientTask
from fl_sim.simulation.stage import Stage
from strategies.guided_cohorts import TELL_LOSS


class AskedLosses(Stage):
    """The stage that adds the client task ``tell-loss`` to runs whose sampler needs client losses.

    In each round, the layer ``GuidedCohorts`` sends this task to clients, and a client returns its loss.
    """

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the sampler asks clients for their loss."""
        return bool(experiment.sampler.num_asked(experiment.num_clients))

    def tasks(self) -> Mapping[str, ClientTask]:
        """Return the client task ``tell-loss``."""
        return {TELL_LOSS: TellLoss()}
