"""The stage of CCVR (Luo et al. 2021), after the last round.

Features are the inputs of the model's last layer, the head. Clients send class moments: for each class the number, the
sum and the sum of outer products of their features. The server draws features from normal distributions with these
moments. It trains the head again on the drawn features. The settings are in ``strategies.ccvr``. The module
``clients.private_moments`` adds the noise to the class moments.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from clients.client_task import Begun, Client
from clients.moments import moments_of, num_moments
from fl_sim.engines import arrays, remote, wire
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import replaces_records
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite
from fl_sim.seeding import rng
from fl_sim.simulation.stage import Run, Stage
from fl_sim.training.features import features_of
from fl_sim.types import Params, Traffic
from strategies.ccvr import CCVR, with_trained_head
from strategies.class_gaussians import ClassGaussian, class_gaussians, draw_features

if TYPE_CHECKING:
    from clients.private_moments import MomentsRelease, Protection
    from fl_sim.privacy.bill import Payment
    from fl_sim.simulation.client_ledgers import JointCost

SUMMARISE: Final = "summarise"
"""The name of the client task that returns the class moments of a client's features."""

_COVERS: Final = (
    "the moments of features that each client sends once, after training, and what is computed from nothing but them "
    "and the model of the last round. Each record of each client is protected; clients are disjoint, so the figure "
    "holds for each of them."
)
_NOT_TRAINING: Final = (
    "Training itself is NOT private: in every round clients train on their raw records and send updates without noise, "
    "so the model whose head is trained again, and the features, may show any record."
)
_TRAINING_ELSEWHERE: Final = (
    "Training on synthetic records, whose cost is in the other statement: both together cost the sum at most."
)
_PUBLIC: Final = "How many records a client holds is treated as public."


def settings_of(job: Job) -> CCVR:
    """Return the settings of CCVR. The experiment of ``job`` must use CCVR."""
    assert isinstance(job.experiment.calibrate, CCVR)
    return job.experiment.calibrate


@dataclass(frozen=True)
class Summarise:
    """The client task that returns the class moments of features of the received model, with or without noise."""

    job: Job
    reads_records: ClassVar[bool] = False  # run checks the policy, because moments with noise are charged instead
    reads_state: ClassVar[bool] = False
    runs_in_threads: ClassVar[bool] = False

    def run(self, client: Client) -> RecordDict:
        """Return the message with the class moments, float64 of shape (classes, moments of a class).

        The moments are either exact or noisy. The privacy cost of noisy moments is first written into the client's
        privacy ledger.
        """
        protection, num_classes = settings_of(self.job).protection, self.job.dataset.num_classes
        if client.policy and protection is None:
            client.policy.check_training(own_records=True)
        inputs, labels = client.records.tensors()
        # In a user's own model, a record's features may depend on other records of the batch. Private moments need
        # batches of one record then: a record may change only its own features.
        at_once = {} if protection is None or self.job.trainer.is_stackable() else {"records_at_once": 1}
        features = features_of(client.runtime.model, client.params, inputs, **at_once).numpy().astype(np.float64)
        classes = labels.cpu().numpy()
        if protection is None:
            return wire.moments_content(moments_of(features, classes, num_classes))
        from clients.private_moments import private_moments, released_moments  # noqa: PLC0415 (the accountants load slowly)
        from fl_sim.privacy.mechanisms import Noise  # noqa: PLC0415

        if client.ticket:
            noise = Noise(client.ticket.key, client.ticket.simulation_only)
            return wire.moments_content(private_moments(features, classes, num_classes, protection, noise))
        release = moments_release(self.job, client)
        return wire.moments_content(released_moments(features, classes, num_classes, protection, release))

    def begin(self, client: Client) -> Begun | RecordDict | None:
        """Write the privacy cost of noisy moments into the client's privacy ledger.

        The driver, the process that started the workers, calls this method. A worker computes the moments afterwards.
        If the moments are already stored, the method returns them. It returns None for moments without noise, because
        they have no privacy cost. See ``PaidAtHome``.
        """
        from clients.policy import PaidNoise  # noqa: PLC0415 (the accountants load slowly)
        from clients.private_moments import begin_release  # noqa: PLC0415

        if (protection := settings_of(self.job).protection) is None:
            return None
        release = moments_release(self.job, client)
        begun = begin_release(len(self.job.shards[client.number]), _shape(self.job), protection, release)
        if not isinstance(begun, PaidNoise):
            return wire.moments_content(begun)
        return Begun(remote.Ticket(begun.noise.key, begun.noise.simulation_only), (release, begun))

    def finish(self, begun: Begun, answer: RecordDict) -> RecordDict:
        """Store the private moments that a worker has computed, and return the worker's answer."""
        from clients.private_moments import finish_release  # noqa: PLC0415 (the accountants load slowly)

        release, paid = begun.paid
        finish_release(release, paid, wire.read_moments(answer, _shape(self.job)))
        return answer


def moments_release(job: Job, client: Client) -> "MomentsRelease":
    """Return the name, the folder and the privacy ledger for the noisy moments that a client sends."""
    from clients.private_moments import MomentsRelease  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.simulation.client_ledgers import ledger_path  # noqa: PLC0415

    name, policy = release_name(job.experiment, client.number, client.params), client.policy
    # Private files of a client with a policy go to its own folder, not to a folder that the server names.
    place = (policy.home if policy else client.folder("moments")) / f"moments-{name}"
    return MomentsRelease(name, place, ledger_path(job, client.number), policy, job.experiment.seed)


def release_name(experiment: Experiment, client: int, params: Params) -> str:
    """Return the name of a client's private moments: a digest of the settings, the client and the model.

    A resumed run finds the moments under this name in the client's folder. It also finds their privacy cost under this
    name in the privacy ledger. ``params``: the model that computes the features.
    """
    names = ("data", "normalise", "features", "model", "partition", "clients", "seed", "partition_seed")
    asked, calibrate = experiment.chosen(*names), experiment.calibrate
    assert isinstance(calibrate, CCVR)
    priced = calibrate.model_dump(include={"epsilon", "delta", "clipping_norm", "noise"})
    digest = hashlib.sha256(json.dumps([asked, priced, client], sort_keys=True).encode())
    for value in params.values():
        digest.update(value.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]


class Calibration(Stage):
    """The stage of CCVR at the server: it asks clients for moments, and trains the head of the last model again."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._found: dict[str, Any] = {}

    def tasks(self) -> Mapping[str, Summarise]:
        """Return the client task ``summarise``."""
        return {SUMMARISE: Summarise(self.job)}

    def after(self, run: Run) -> None:
        """Train the head of the last model again, on features drawn from the clients' moments.

        Raises RunError if a client fails; Diverged if the loss is not finite. The checkpoint contains the model of the
        last round, so a run that is interrupted here repeats this method when it resumes.
        """
        job, log, settings = self.job, run.log, settings_of(self.job)
        params, seed, num_classes = log.server.params, job.experiment.seed, job.dataset.num_classes
        with _statement_first(run):
            answers = self._moments(run)
        log.after["moments"] = self._traffic_of_moments(log.server.model)
        classes = self._classes(np.sum(answers, axis=0))
        if classes:
            features, labels = draw_features(classes, settings.samples_per_class, rng(seed, "class gaussians"))
            generator = rng(seed, "calibration batches")
            params = with_trained_head(settings, job.model(), params, features, labels, generator)
        calibrated = replace(log.server, params=params)
        when = "after the calibration; try a smaller calibrate.learning_rate"
        after = run.measuring.measured(calibrated.model, when, is_last=True)
        skipped = sorted(set(range(num_classes)) - {one.label for one in classes})
        self._found = {
            "accuracy_before": log.rounds[-1].test_accuracy,
            "accuracy_after": after.test.accuracy if after.test else None,
            "loss_after": after.test.loss if after.test else None,
            "classes_skipped": skipped,
        }
        log.server, log.measured, log.measured_again = calibrated, after, after

    def _moments(self, run: Run) -> list[NDArray[np.float64]]:
        shape, most = _shape(self.job), None if settings_of(self.job).is_private else run.strategy.most_examples
        return run.ask(
            SUMMARISE,
            lambda one: wire.read_moments(one, shape, most),
            quoted=not self.job.experiment.is_private,
            params=run.strategy.server.model,
        )

    def _classes(self, moments: NDArray[np.float64]) -> list[ClassGaussian]:
        settings, num_features = settings_of(self.job), self.job.num_features
        if (protection := settings.protection) is None:
            return class_gaussians(moments, num_features)
        std = protection.std * math.sqrt(np.count_nonzero(self.job.shards.sizes))  # empty shards add no noise
        return [one.scaled(settings.clipping_norm) for one in class_gaussians(moments, num_features, std)]

    def trains_model(self) -> bool:
        """Return True, because this stage trains the head of the model."""
        return True

    def traffic(self, params: Params) -> Mapping[str, Traffic]:
        """Return a forecast of bytes: all clients receive the model, and all clients send moments."""
        return {"moments": self._traffic_of_moments(params)}

    def _traffic_of_moments(self, model: Params) -> Traffic:
        down = arrays.num_bytes(wire.task_content(wire.BLANK, model, {}))
        up = arrays.num_bytes(wire.moments_content(np.zeros(_shape(self.job))))
        return Traffic(down, up) * self.job.experiment.num_clients

    def payments(self) -> "Iterator[Payment]":
        """Yield the privacy cost of the clients' noisy moments. Yield nothing if the moments have no noise."""
        if (protection := settings_of(self.job).protection) is None:
            return
        from fl_sim.privacy.bill import payment_of  # noqa: PLC0415

        terms = Terms("record", Adjacency.ADD_OR_REMOVE_ONE, protection.delta)
        yield payment_of(terms, {protection.event: 1}, "", is_simulated=protection.noise == "seeded")

    def warnings(self) -> list[str]:
        """Return a warning about the contents of the clients' messages after training."""
        with_noise = "with" if settings_of(self.job).is_private else "without"
        said = "after training clients send, for every class, how many records they hold, the sum of their features and"
        return [f"{said} that of the features' products, {with_noise} noise"]

    def facts(self) -> Mapping[str, Any]:
        """Return fields for ``result.json``: accuracy before and after this stage, and the classes without moments."""
        return {"calibrate": {"kind": settings_of(self.job).kind, **self._found}}


def _shape(job: Job) -> tuple[int, int]:
    return job.dataset.num_classes, num_moments(job.num_features)


@contextmanager
def _statement_first(run: Run) -> Iterator[None]:
    """Add the privacy statement of the clients' noisy moments to the log, before this block asks any client.

    So the statement exists even if the run stops in this block. Other private outputs about the same records may exist.
    After the block, the joint privacy cost of all these outputs is added to the statement.
    """
    log, protection = run.log, settings_of(run.job).protection
    if protection is None:
        yield
        return
    before, identity = list(log.statements), f"moments-{secrets.token_hex(8)}"
    log.statements = [*before, statement(run.job, protection, identity, None)]
    yield
    together = paid_together(run.job, protection, log.server.model)
    log.statements = [*before, statement(run.job, protection, identity, together)]


def statement(job: Job, protection: "Protection", identity: str, together: "JointCost | None") -> dict[str, object]:
    """Return the privacy statement for ``result.json``: the privacy cost of a client's noisy moments for each record.

    ``identity``: a name that is different for each run, so that the privacy costs of several runs are added up.
    ``together``: the joint privacy cost of all private outputs about the same records. It is None if this machine does
    not know that cost.
    """
    from fl_sim.privacy.ledger import Ledger  # noqa: PLC0415
    from fl_sim.simulation.client_ledgers import joint_cost_in_words  # noqa: PLC0415

    on_synthetic, delta = replaces_records(job.experiment.preprocess), protection.delta
    limits = f"{_TRAINING_ELSEWHERE if on_synthetic else _NOT_TRAINING} {_PUBLIC}"
    ledger = Ledger(Terms("record", Adjacency.ADD_OR_REMOVE_ONE, delta))
    ledger.charge(protection.event, release="class moments", noise="")
    said = ledger.statement(
        covers=_COVERS,
        does_not_cover=limits,
        simulation_only=protection.noise == "seeded",
        planned={protection.event: 1},
    )
    others = together is None or together.shares > 1
    return said | {
        "ledger": identity,
        "epsilon_together": together and none_if_infinite(together.epsilon),
        "shares_together": together and together.shares,
        "guarantee": str(said["guarantee"]) + (joint_cost_in_words(together, delta) if others else ""),
    }


def paid_together(job: Job, protection: "Protection", params: Params) -> "JointCost | None":
    """Return the joint privacy cost of all private outputs about the job's records, from the clients' privacy ledgers.

    Clients on other machines have their own privacy ledgers. So the ledgers on this machine may lack the privacy cost
    of these noisy moments. Then the result is None. ``params``: the model that computed the features.
    """
    from clients.policy import open_ledger  # noqa: PLC0415 (the accountants load slowly)
    from clients.private_moments import charge_name  # noqa: PLC0415
    from fl_sim.simulation.client_ledgers import joint_cost, ledger_path  # noqa: PLC0415

    try:
        for client, shard in enumerate(job.shards):
            path = ledger_path(job, client)
            charged = charge_name(release_name(job.experiment, client, params))
            if len(shard) and not (path.exists() and charged in {one.release for one in open_ledger(path).charges}):
                return None
        return joint_cost(job, protection.delta)
    except (RunError, UserError):
        return None
