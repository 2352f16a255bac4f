"""An aggregator of your own: the coordinate-wise median of the clients' updates (Yin et al. 2018, definition 1).

    fl-sim run aggregator=median:Median partition=iid

The median replaces the mean of a round. The class derives from ``Robust``, so algorithms that need the mean refuse it.
The aggregator gives no privacy guarantee, so results contain no privacy statement.
"""

import torch

from fl_sim.types import Aggregate, Cohort, Payloads
from strategies.aggregators import Robust
from strategies.algorithm import Weighting


class Median(Robust):
    """The median of every number over the clients that have records: a few faulty clients have little effect on it."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the median of all payloads, or None if no client has records."""
        del weighting  # every client has the same weight
        sent = [reply.payloads for reply in cohort.replies if reply.num_examples > 0]
        if not sent:
            return None
        medians: Payloads = {
            group: {
                name: torch.stack([payloads[group][name] for payloads in sent]).quantile(0.5, dim=0)
                for name in sent[0][group]
            }
            for group in sent[0]
        }
        return Aggregate(medians, participation=len(sent) / cohort.num_clients)
