"""An aggregator of your own: the median of the clients' updates, number by number (Yin et al. 2018, definition 1).

    fl-sim run aggregator=median:Median partition=iid

It replaces a round's mean; as it is ``Robust``, algorithms that need the mean itself refuse it. It promises no privacy,
and results say so.
"""

import torch

from fl_sim.types import Aggregate, Cohort, Payloads
from strategies.aggregators import Robust
from strategies.algorithm import Weighting


class Median(Robust):
    """Of every number the middle one of the clients that have records: a few broken clients cannot move it far."""

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the medians of all payloads, or None where no client has a record."""
        del weighting  # each client counts the same
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
