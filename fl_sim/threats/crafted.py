"""An audit of DP-SGD with crafted canaries: worst-case records that change noisy sums as much as possible.

Ordinary records are weak canaries: their gradients point in similar directions, and a model that hardly changes has
nearly the same loss on all of them. A crafted canary is zero except for one feature, which no other canary has, and its
gradient is much longer than the clipping norm. So each canary that joins a step moves the noisy sum of this step by
exactly the clipping norm, in its own direction (worst-case input canaries, as in Nasr et al. 2023, section 4).

The audit repeats the private training of one client: the client of a finished run with the largest epsilon. The number
of steps, noise multiplier and sampling rate are those of the client. The model of the audit is linear. Its training
records are canaries. Each canary is replaced by zeros with probability 1/2. The auditor does not see the batches. It
sees the model after every step, because the bill assumes that each step is published. (If there are more than
``MOST_SEEN`` steps, it sees the model only after equal groups of steps.) No record of the finished run is read.

The directions, the memberships and the noise of two canaries are independent. So each canary is a separate audit. The
scores of the canaries are log likelihood ratios. A noise multiplier claims a delta for each epsilon, and the scores may
refute this claim. The lower bound is the epsilon of the smallest noise multiplier whose claim is refuted
(``fl_sim.privacy.audit.least_refuted``).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy import stats
from scipy.special import logsumexp
from torch import nn

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.accounting import delta_profile, epsilon_of_counts
from fl_sim.privacy.audit import EPSILONS, audit_ratios, epsilon_estimate, guess, least_refuted
from fl_sim.privacy.events import amplify_poisson
from fl_sim.report.files import PrivacyStatement
from fl_sim.seeding import rng
from fl_sim.simulation.rounds import procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord, read_checkpoint
from fl_sim.threats.finished import FinishedRun
from fl_sim.types import Dataset, Examples, Params, ServerState
from strategies.dp_sgd import DPSGD

FILE: Final = "canaries.npz"
"""The file in the data root: the mask ``taking_part`` of the canaries, and ``records``, the number of records."""
MOST_CANARIES: Final = 2000
"""The largest number of canaries in one run."""
MOST_SEEN: Final = 500
"""The largest number of models that the auditor sees, except in runs with more rounds."""
_MOST_NUMBERS: Final = 2**26
_LENGTH: Final = 100.0
"""The value of a canary's only nonzero feature. The canary's gradient at a model of zeros has the norm 71."""
_LEARNING_RATE: Final = 1e-4
"""A small learning rate, so that the parameters stay close to zero. There a canary's gradient has its largest norm."""


def records(root: Path | None) -> Dataset:
    """Return the records of the audited client: canaries, each with its own feature, and records of zeros.

    ``root``: the folder that contains ``FILE``.
    """
    assert root is not None
    with np.load(root / FILE) as stored:
        taking_part, count = stored["taking_part"], int(stored["records"])
    inputs = np.zeros((count, len(taking_part)), np.float32)
    np.fill_diagonal(inputs, _LENGTH * taking_part)
    train = Examples(inputs, np.ones(count, np.int64), np.zeros(count, np.int64))
    test = Examples(inputs[:2], np.array([0, 1]), np.zeros(2, np.int64))
    return Dataset("crafted canaries", train, test, 2, (0.0,), (1.0,))


def linear(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a linear model without a bias, whose weights are 0."""
    layer = nn.Linear(math.prod(input_shape), num_classes, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(layer)


@dataclass(frozen=True)
class AuditedSteps:
    """The private steps that are audited: ``rounds`` rounds of ``steps`` steps each. A model is seen after each round.

    ``batch_size``: the expected number of records in a step. ``count``: the number of records. ``noise``: the noise
    multiplier. ``claimed``: the claimed epsilon of all steps at ``delta``. ``source``: the value of
    the setting ``local.privacy.noise``.
    """

    rounds: int
    steps: int
    batch_size: int
    count: int
    noise: float
    claimed: float
    delta: float
    source: str

    @classmethod
    def of(cls, finished: FinishedRun) -> Self:
        """Return the steps of the client with the largest epsilon. Raises UserError for a run without private steps."""
        privacy = finished.job.experiment.local.privacy
        statement = max(
            (one for one in finished.covering if one.of_run[0] is not None), key=_claim, default=None
        )  # fmt: skip
        facts: Mapping[str, Any] = finished.facts.get("local_privacy") or {}
        if type(privacy) is not DPSGD or statement is None:
            raise UserError(
                f"{finished.out} claims no epsilon for local steps, but crafted canaries need such a claim: leave "
                "--crafted out, or give a run with local.privacy=dp-sgd"
            )
        events = finished.facts["privacy"][[*finished.privacy].index(statement)]["events"]
        event, times = events[0]["event"], int(events[0]["times"])
        noise, rate = event.get("event", event).get("noise_multiplier", 0.0), event.get("sampling_rate", 1.0)
        clients = [one for one in facts["by_records"] if one["rounds"] and _is_near(one, noise, rate)]
        if len(events) > 1 or not clients or times % clients[0]["rounds"]:
            raise UserError(
                f"the bill of {finished.out} has other releases besides equal local steps, and crafted canaries audit "
                "local steps only: leave --crafted out"
            )
        count, rounds = int(clients[0]["records"]), int(clients[0]["rounds"])
        size = min(count, finished.job.experiment.local.batch_size)
        copies = -(-MOST_CANARIES // count)  # records and batch size are both multiplied, so the rate is unchanged
        rounds = max(rounds, *(one for one in range(1, min(times, MOST_SEEN) + 1) if times % one == 0), 1)
        return cls(
            rounds, times // rounds, copies * size, copies * count, noise, _claim(statement), statement.of_run[1],
            privacy.noise,
        )  # fmt: skip

    @property
    def canaries(self) -> int:
        """The number of canaries in one run."""
        return min(self.count, MOST_CANARIES, max(1, _MOST_NUMBERS // self.count))

    @property
    def rate(self) -> float:
        """The probability with which a record joins a step, in (0, 1]."""
        return self.batch_size / self.count

    def event(self, noise: float) -> dp_event.DpEvent:
        """Return the privacy event of one step with the noise multiplier ``noise``."""
        return amplify_poisson(dp_event.GaussianDpEvent(noise), self.rate)

    def claims(self, noise: float) -> list[float]:
        """Return the delta of all steps together with noise multiplier ``noise``, for each epsilon in ``EPSILONS``."""
        return delta_profile([dp_event.SelfComposedDpEvent(self.event(noise), self.rounds * self.steps)], EPSILONS)

    def epsilon_with(self, noise: float) -> float:
        """Return the epsilon of all steps with the noise multiplier ``noise``."""
        return epsilon_of_counts({self.event(noise): self.rounds * self.steps}, self.delta, accountant="pld")

    def experiment(self, seed: int) -> Experiment:
        """Return the settings of one audit run."""
        return experiment_from({
            "data": "fl_sim.threats.crafted:records", "model": "fl_sim.threats.crafted:linear",
            "partition": "natural", "clients": 1, "rounds": self.rounds, "seed": seed, "engine": "inprocess",
            "device": "cpu", "evaluate": {"test": "last", "test_is_public": True},
            "local": {
                "epochs": 0, "steps": self.steps, "batch_size": self.batch_size, "learning_rate": _LEARNING_RATE,
                "momentum": 0.0, "weight_decay": 0.0,
                "privacy": {
                    "kind": "dp-sgd", "noise_multiplier": self.noise, "delta": self.delta, "noise": self.source,
                },
            },
        })  # fmt: skip

    def ratios(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log likelihood ratio of each canary, (canaries,).

        ``sums``: the sums of a round's noisy gradients along the canaries, in clipping norms, (rounds, canaries). The
        canary joins k of the s steps of a round, and k has a binomial distribution. Given k, the sum is N(k, s z^2),
        with the noise multiplier z.
        """
        joined = np.arange(self.steps + 1)
        log_shares = stats.binom(self.steps, self.rate).logpmf(joined)
        chosen = log_shares > -60
        joined, log_shares = joined[chosen], log_shares[chosen]
        variance = self.steps * self.noise**2
        total = np.zeros(sums.shape[1])
        for one in sums:
            total += logsumexp(log_shares + (2 * np.outer(one, joined) - joined**2) / (2 * variance), axis=1)
        return total


@dataclass(frozen=True)
class ProvenByCrafted:
    """The result of an audit with crafted canaries: a lower bound on epsilon, with 95 % confidence.

    ``claimed``: the claimed epsilon at ``delta``. ``epsilon_lower_bound``: the lower bound with each canary as a
    separate audit. ``one_run``: the lower bound of theorem 5.2 of Steinke et al. 2023, from guesses about all canaries
    together; a separate statement with 95 % confidence. ``estimate``: an estimate of epsilon without confidence (Andrew
    et al. 2024). ``runs``: the number of audit runs.
    """

    claimed: float
    delta: float
    canaries: int
    runs: int
    noise_multiplier: float
    sampling_rate: float
    steps: int
    epsilon_lower_bound: float
    one_run: float
    estimate: float


def audit_crafted(finished: FinishedRun, runs: int, progress: Callable[[str], object] = str) -> ProvenByCrafted:
    """Audit the private steps of ``finished`` in ``runs`` runs with crafted canaries, in a temporary directory.

    ``progress``: a function that receives progress messages. Raises UserError as ``AuditedSteps.of`` does.
    """
    steps, experiment = AuditedSteps.of(finished), finished.job.experiment
    scores, coins = [], []
    for number in range(1, runs + 1):
        progress(f"audit run {number} of {runs}")
        seed = int(rng(experiment.seed, "crafted canaries", number).integers(2**31))
        taking_part = rng(seed, "canary coins").random(steps.canaries) < 0.5
        scores.append(steps.ratios(_sums(steps, taking_part, seed)))
        coins.append(taking_part)
    score, is_in = np.concatenate(scores), np.concatenate(coins)
    profile = audit_ratios(score[~is_in], score[is_in], steps.claims(steps.noise), delta=steps.delta)
    least = least_refuted(profile, steps.claims, steps.noise)
    return ProvenByCrafted(
        steps.claimed, steps.delta, len(score), runs, steps.noise, steps.rate, steps.rounds * steps.steps,
        0.0 if math.isinf(least) else steps.epsilon_with(least),
        max(one.epsilon_lower_bound for one in guess(score, is_in, steps.delta)),
        epsilon_estimate(score, is_in, steps.delta),
    )  # fmt: skip


def _sums(steps: AuditedSteps, taking_part: NDArray[np.bool_], seed: int) -> NDArray[np.float64]:
    """Make one audit run, and return the sums of its noisy gradients along the canaries, (rounds, canaries)."""
    experiment = steps.experiment(seed)
    with TemporaryDirectory() as name:
        root = Path(name)
        np.savez(root / FILE, taking_part=taking_part, records=steps.count)
        seen = _Models(root / "run", procedure_of(job_of(experiment, root)).beginning())
        run(experiment, seen.out, root, seen)
    assert len(seen.models) == steps.rounds + 1
    return np.diff([_along(one) for one in seen.models], axis=0) * (steps.batch_size / _LEARNING_RATE)


class _Models(Silent):
    """An observer that keeps the client's model of every round, as the server sees it.

    ``out``: the run directory. ``beginning``: the server state before the first round.
    """

    def __init__(self, out: Path, beginning: ServerState) -> None:
        self.out, self.beginning = out, beginning
        self.models = [beginning.params]

    def finished_round(self, record: RoundRecord) -> None:
        """Keep the model of the checkpoint that was written after the round."""
        kept = read_checkpoint(self.out, self.beginning)
        assert kept is not None
        assert kept[0].last_round == record.round
        self.models.append(kept[1].params)


def _along(params: Params) -> NDArray[np.float64]:
    """Return the projection of a model on the direction of each canary's gradient, shape (canaries,), for label 1."""
    [weight] = params.values()
    both = weight.double().numpy()
    return np.asarray((both[1] - both[0]) / math.sqrt(2))


def _claim(statement: PrivacyStatement) -> float:
    claim = statement.of_run[0]
    assert claim is not None
    return float(claim)


def _is_near(client: Mapping[str, Any], noise: float, rate: float) -> bool:
    return math.isclose(client["noise_multiplier"], noise) and math.isclose(client["sampling_rate"], rate)
