"""The client task and the privacy statement of methods whose clients send sums of their features once.

Features are the inputs of the model's last layer, the head. A setting with the interface ``FeatureSums`` defines the
sums: class moments for CCVR, or products of features for a head in closed form. ``clients.private_moments`` stores
noisy sums, and writes their privacy cost into the client's privacy ledger.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from clients.client_task import Begun, Client
from fl_sim.engines import arrays, remote, wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite
from fl_sim.training.features import features_of
from fl_sim.types import Params, Traffic

if TYPE_CHECKING:
    from clients.private_moments import MomentsRelease, Protection
    from fl_sim.privacy.bill import Payment
    from fl_sim.privacy.mechanisms import Noise
    from fl_sim.simulation.client_ledgers import JointCost

SUMMARISE: Final = "summarise"
"""The name of the client task that returns sums of a client's features."""

PUBLIC: Final = "The number of a client's records is treated as public."


class FeatureSums(Protocol):
    """Settings that define sums of a client's features.

    ``released``: a description of the sums, which is written into the privacy ledger. ``of_initial_model``: True if the
    initial model computes the features. In this case the server need not send a model to clients.
    """

    released: ClassVar[str]
    of_initial_model: ClassVar[bool]

    @property
    def protection(self) -> "Protection | None":
        """Return the privacy parameters of the sums, or None for sums without noise."""

    def shape(self, num_features: int, num_classes: int) -> tuple[int, int]:
        """Return the shape of a client's sums."""

    def summed(
        self, features: NDArray[np.float64], labels: NDArray[np.int64], num_classes: int, noise: "Noise | None"
    ) -> NDArray[np.float64]:
        """Return the sums over n records with the ``features``, shape (n, d), and the ``labels``, shape (n,).

        n may be 0. ``noise``: the source of the noise; None for sums without noise.
        """

    def model_dump(self, *, include: set[str]) -> dict[str, Any]:
        """Return the values of the settings whose names are in ``include``."""


@dataclass(frozen=True)
class Summarise:
    """The client task that returns sums of the features of the client's records, with or without noise.

    ``setting``: the name of the setting that contains ``sums``, such as "calibrate".
    """

    job: Job
    sums: FeatureSums
    setting: str
    reads_records: ClassVar[bool] = False  # the method ``run`` asks the client's policy if sums have no noise
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a client's sums."""
        return self.sums.shape(self.job.num_features, self.job.dataset.num_classes)

    @property
    def traffic(self) -> Traffic:
        """A forecast of the bytes of all answers: every client sends its sums once. The request is not counted."""
        up = arrays.num_bytes(wire.moments_content(np.zeros(self.shape)))
        return Traffic(0, up) * self.job.experiment.num_clients

    def run(self, client: Client) -> RecordDict:
        """Return the message with the exact or noisy sums, in float64.

        The privacy cost of noisy sums is first written into the client's privacy ledger.
        """
        protection, num_classes = self.sums.protection, self.job.dataset.num_classes
        if client.policy and protection is None:
            client.policy.check_training(own_records=True)
        inputs, labels = client.records.tensors()
        # In a user-defined model, the features of one record may depend on the other records in the batch. For sums
        # with noise, each batch of such a model has only one record. So a record changes only its own features.
        at_once = {} if protection is None or self.job.trainer.is_stackable() else {"records_at_once": 1}
        features = features_of(client.runtime.model, self._model(client), inputs, **at_once).numpy().astype(np.float64)
        classes = labels.cpu().numpy()
        if protection is None:
            return wire.moments_content(self.sums.summed(features, classes, num_classes, None))
        from clients.private_moments import released_moments  # noqa: PLC0415 (the accountants load slowly)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

        def noisy(noise: Noise) -> NDArray[np.float64]:
            return self.sums.summed(features, classes, num_classes, noise)

        if client.ticket:
            return wire.moments_content(noisy(Noise(client.ticket.key, client.ticket.simulation_only)))
        sent = released_moments(noisy, len(classes), self.shape, protection, self.release(client))
        return wire.moments_content(sent)

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Write the privacy cost of noisy sums into the client's privacy ledger.

        The driver, the process that started the workers, calls this method. A worker computes the sums afterwards. If
        noisy sums are stored already, this method returns the message with them. It returns None if the settings ask
        for sums without noise, because such sums have no privacy cost. See ``PaidAtHome``.
        """
        from clients.policy import PaidNoise  # noqa: PLC0415 (the accountants load slowly)
        from clients.private_moments import begin_release  # noqa: PLC0415

        if (protection := self.sums.protection) is None:
            return None
        release = self.release(client)
        begun = begin_release(len(self.job.shards[client.number]), self.shape, protection, release)
        if not isinstance(begun, PaidNoise):
            return wire.moments_content(begun)
        return Begun(remote.Ticket(begun.noise.key, begun.noise.simulation_only), (release, begun))

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Store the noisy sums in ``answer``, which a worker has computed, and return ``answer``."""
        from clients.private_moments import finish_release  # noqa: PLC0415 (the accountants load slowly)

        release, paid = begun.paid
        finish_release(release, paid, wire.read_moments(answer, self.shape))
        return answer

    def release(self, client: Client) -> "MomentsRelease":
        """Return the ``MomentsRelease`` of a client's noisy sums: their name, their folder and their privacy ledger."""
        from clients.private_moments import MomentsRelease  # noqa: PLC0415 (the accountants load slowly)
        from fl_sim.simulation.client_ledgers import ledger_path  # noqa: PLC0415

        job, policy = self.job, client.policy
        name = release_name(job.experiment, self.sums, client.number, self._model(client))
        # A client with a policy (its own rules for the server's requests) writes private files to its own folder. The
        # server cannot name another folder.
        place = (policy.home if policy else client.folder("moments")) / f"moments-{name}"
        return MomentsRelease(
            name, place, ledger_path(job, client.number), policy, job.experiment.seed, self.sums.released,
            f"{self.setting}.noise",
        )  # fmt: skip

    def _model(self, client: Client) -> Params:
        return dict(client.runtime.initial) if self.sums.of_initial_model else client.params


def release_name(experiment: Experiment, sums: FeatureSums, client: int, params: Params) -> str:
    """Return the name of a client's noisy sums: a digest of the settings, the client and the model.

    A resumed run finds the sums under this name in the client's folder. It also finds their privacy cost under this
    name in the privacy ledger. ``params``: the model that computes the features.
    """
    names = (
        "data", "normalise", "features", "model", "partition", "clients", "seed", "partition_seed", "model_seed",
        "forgotten", "left_out",
    )  # fmt: skip
    priced = sums.model_dump(include={"epsilon", "delta", "clipping_norm", "noise"})
    priced |= {"released": sums.released} if sums.of_initial_model else {}
    digest = hashlib.sha256(json.dumps([experiment.chosen(*names), priced, client], sort_keys=True).encode())
    for value in params.values():
        digest.update(value.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]


def payments_of(sums: FeatureSums) -> "Iterator[Payment]":
    """Yield the planned privacy cost of the clients' noisy sums. Yield nothing if the sums have no noise."""
    if (protection := sums.protection) is None:
        return
    from fl_sim.privacy.bill import payment_of  # noqa: PLC0415

    terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, protection.delta)
    yield payment_of(terms, {protection.event: 1}, "", is_simulated=protection.noise == "seeded")


def statement(
    sums: FeatureSums, covers: str, limits: str, identity: str, together: "JointCost | None"
) -> dict[str, object]:
    """Return the privacy statement about a client's noisy sums, for ``result.json``. The privacy unit is a record.

    ``covers``: a text about the outputs that the privacy cost covers. ``limits``: a text about the outputs that the
    cost does not cover. ``identity``: a name that is different for each run, so that the privacy costs of several runs
    are added up. ``together``: the joint privacy cost of all private outputs about the same records, None if it is
    unknown here.
    """
    from fl_sim.privacy.ledger import Ledger  # noqa: PLC0415
    from fl_sim.simulation.client_ledgers import joint_cost_in_words  # noqa: PLC0415

    protection = sums.protection
    assert protection is not None
    ledger = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, protection.delta))
    ledger.charge(protection.event, release=sums.released, noise="")
    said = ledger.statement(
        covers=covers,
        does_not_cover=f"{limits} {PUBLIC}",
        simulation_only=protection.noise == "seeded",
        planned={protection.event: 1},
    )
    others = together is None or together.shares > 1
    return said | {
        "ledger": identity,
        "epsilon_together": together and none_if_infinite(together.epsilon),
        "shares_together": together and together.shares,
        "guarantee": str(said["guarantee"]) + (joint_cost_in_words(together, protection.delta) if others else ""),
    }


def paid_together(job: Job, sums: FeatureSums, params: Params) -> "JointCost | None":
    """Return the joint privacy cost of all private outputs about the job's records, from the clients' privacy ledgers.

    The result is None if the ledgers on this machine lack the cost of the noisy sums ``sums``. For example, remote
    clients have their ledgers on other machines. ``params``: the model that computed the features.
    """
    from clients.policy import open_ledger  # noqa: PLC0415 (the accountants load slowly)
    from clients.private_moments import charge_name  # noqa: PLC0415
    from fl_sim.simulation.client_ledgers import joint_cost, ledger_path  # noqa: PLC0415

    assert sums.protection is not None
    try:
        for client, shard in enumerate(job.shards):
            path = ledger_path(job, client)
            charged = charge_name(release_name(job.experiment, sums, client, params), sums.released)
            if len(shard) and not (path.exists() and charged in {one.release for one in open_ledger(path).charges}):
                return None
        return joint_cost(job, sums.protection.delta)
    except (RunError, UserError):
        return None
