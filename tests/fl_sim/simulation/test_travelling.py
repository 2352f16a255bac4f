"""A worker elsewhere plays the clients that were sent, not others."""

from dataclasses import replace

import numpy as np
import pytest

from fl_sim.engines.remote import Signer
from fl_sim.errors import RunError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.travelling import TravellingJob
from partitions import Parts


def test_shards_that_were_dealt_otherwise_are_other_records() -> None:
    goods = TravellingJob.of(job_of(experiment_from({"model": "logistic", "clients": 3})), Signer.fresh())
    first, second, third = (goods.shards[client] for client in range(3))
    for shards in (Parts.of([second, first, third]), Parts.of([first[:-1], np.append(second, first[-1]), third])):
        with pytest.raises(RunError, match="other records arrived than were sent"):
            replace(goods, shards=shards).runtime  # noqa: B018 (made when it is asked for)
    assert goods.runtime.num_clients == 3
