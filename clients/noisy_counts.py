"""The client task that sends the number of a model's correct predictions on the client's test records, with noise.

The model is the client's own model. The privacy unit is one test record of the client. Adjacency is zero-out: one
record is replaced by nothing, while the number of test records stays public. The sensitivity of the count is 1. So one
count with Gaussian noise of standard deviation s is a Gaussian mechanism with noise multiplier s. The cost of k counts
is the cost of k Gaussian mechanisms (adaptive composition).

The client's training records and test records are disjoint. The measured model depends only on results that the private
training has already released. So a count has no privacy cost for a training record, and training has no privacy cost
for a test record (parallel composition). The client's privacy ledger nevertheless adds the cost of training to the cost
of counts. The total is an upper bound for each record.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
from flwr.app import MetricRecord, RecordDict

from clients.evaluate import OWN, TESTED, EvaluateOwn
from clients.paid_rounds import ClientProtection, Releases, RoundCost, cost_of_round
from fl_sim.errors import RunError, UserError
from fl_sim.privacy.mechanisms import Noise, add_noise
from fl_sim.store.tensors import write_private

if TYPE_CHECKING:
    from clients.client_task import Client

COUNTED: Final = "counts of right answers"
"""The name of the noisy counts in the privacy ledger."""

_FILE: Final = "count.json"


def counting_cost(protection: ClientProtection, times: int) -> RoundCost:
    """Return the privacy cost of one noisy count, in a run that publishes ``times`` counts of each client.

    ``protection.noise_multiplier``: the standard deviation of the noise on a count; None means the least noise with
    which all counts together cost at most epsilon, by the RDP accountant. Raises UserError if no noise is enough for
    epsilon.
    """
    return cost_of_round(replace(protection, accountant="rdp"), 1.0, 1.0, times, 1)


def noisy_count(right: int, num_records: int, std: float, noise: Noise, server_round: int) -> int:
    """Return the number of correct predictions with noise, rounded and clamped to the range 0 to ``num_records``.

    ``right``: the exact number. ``std``: the standard deviation of the noise. Rounding and clamping use only the noisy
    number and public numbers, so they have no privacy cost.
    """
    steps = noise.gaussian(1, std, purpose="right answers", server_round=server_round)
    [noisy] = add_noise(np.array([right], dtype=np.float64), std, steps)
    return int(np.clip(np.rint(noisy), 0, num_records))


@dataclass(frozen=True)
class CountPrivately:
    """The client task that releases one noisy count, after its cost is in the client's privacy ledger.

    ``measuring``: the task that measures the client's model on its test records, without training. ``protection``: the
    privacy parameters (``counting_cost``). ``times``: the number of counts of a client in the run. ``run_digest``: a
    digest of the experiment.
    """

    measuring: EvaluateOwn
    protection: ClientProtection
    times: int
    run_digest: str
    # False because the answer has noise; a client's policy limits its privacy cost instead
    reads_records: ClassVar[bool] = False
    reads_state: ClassVar[bool] = True
    runs_in_threads: ClassVar[bool] = True

    def run(self, client: Client) -> RecordDict:
        """Return the message with the public number of test records and the noisy number of correct predictions.

        The message is empty for a client without test records, and for a client whose budget is spent. The last count
        is stored. So a resumed run that asks for the same model again gets the same count, without a second charge.
        Raises RunError for a worker without access to the client's privacy ledger.
        """
        tests = self.measuring.own_records.tests(client.number)
        if not len(tests):
            return RecordDict({"counts": MetricRecord({})})
        if not client.has_disk:
            raise RunError(
                "this worker has no access to the client's privacy ledger, and no count is released without a charge: "
                "set engine=inprocess, or leave evaluate.clients out"
            )
        path, asked = client.folder("counts") / _FILE, _digest(client)
        stored = json.loads(path.read_text()) if path.exists() else {}
        if stored.get("asked") == asked:
            return _answer(len(tests), int(stored["right"]))
        scores = self.measuring.measured(client, tests.none())[OWN].scores(*tests.tensors())
        if scores.counts is not None:
            raise UserError(
                "evaluate.clients counts several predictions for each record of this model, but noisy counts support "
                "only one prediction per record: leave evaluate.clients out"
            )
        cost, server_round = counting_cost(self.protection, self.times), client.config.server_round
        noise = Releases(COUNTED, self.protection.noise, self.run_digest).paid(client, server_round, cost)
        if noise is None:
            return RecordDict({"counts": MetricRecord({})})
        exact = int((scores.predicted == scores.labels).sum())
        right = noisy_count(exact, len(tests), cost.noise_multiplier, noise, server_round)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps({"asked": asked, "right": right}).encode())
        return _answer(len(tests), right)


def _answer(num_records: int, right: int) -> RecordDict:
    # sums over all classes: numbers of records, of predictions, and of correct predictions
    counts = [num_records, num_records, right]
    return RecordDict({"counts": MetricRecord({f"{OWN}/{TESTED}": counts})})


def _digest(client: Client) -> str:
    """Return a digest that identifies a noisy count. A second request with this digest gets the stored count.

    The digest is computed from the run, the client, the round, and all tensors that determine the client's own
    model.
    """
    digest = hashlib.sha256(f"{client.run} {client.number} {client.config.server_round}".encode())
    for name, params in {"": client.params, **client.broadcast.groups, **client.state}.items():
        for key, value in params.items():
            digest.update(f"{name}/{key} {tuple(value.shape)}".encode())
            digest.update(value.numpy(force=True).tobytes())
    return digest.hexdigest()
