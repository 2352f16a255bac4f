"""Rounds under Global DP: charge the cost to the privacy ledger, draw a secret cohort, publish the noised mean update.

Nothing else about the clients is published.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dp_accounting.dp_event import DpEvent

from fl_sim.errors import BudgetExhausted, Malformed, RunError, UserError
from fl_sim.privacy.accounting import epsilon_of_counts, least_noise
from fl_sim.privacy.bill import Payment, payment_of
from fl_sim.privacy.ledger import Ledger, Receipt
from fl_sim.privacy.mechanisms import Noise
from fl_sim.privacy.terms import Accountant, Adjacency, Terms, delta_advice, rounded_up
from fl_sim.store.files import read_whole
from fl_sim.store.run_directory import LEDGER, read_rounds
from fl_sim.types import Aggregate, Cohort, ServerState
from strategies.algorithm import Algorithm, payload_template
from strategies.answers import UNQUOTED, in_words
from strategies.correlated_noise import CorrelatedNoise
from strategies.global_dp import COVERS, DOES_NOT_COVER, GlobalDP, releases_beforehand
from strategies.layer import Beginning, Drawn, Layer, Stop
from strategies.samplers import AnySampler, Coins, FixedSize, Poisson

UNIT = "client"
_UNDERSPENT = 0.9  # the user is warned if a run spends less than this share of its privacy budget

BEFOREHAND = (
    " The sums over records that clients sent before the first round are covered, too. So are the images drawn from "
    "these sums, which are in the run directory."
)


@dataclass
class PrivateRounds(Layer):
    """The layer for Global DP.

    In each round the layer charges the privacy cost to the ledger, and publishes the noised mean update of a secret
    cohort.

    ``clipping_norm``: the clipping norm of the next round; adaptive clipping changes it from round to round.
    ``beforehand``: the mechanisms of the noisy sums that are published before the first round. Each sum is over a
    sampled cohort, as in a round. ``failed``: {client: reason} of the clients that failed since the last valid update.
    ``failed`` is PRIVATE, and must not be published.
    """

    aggregator: GlobalDP
    sampler: AnySampler
    num_clients: int
    ledger: Ledger
    noise: Noise
    clipping_norm: float
    beforehand: tuple[GlobalDP, ...] = ()
    correlated: CorrelatedNoise = field(init=False, repr=False)
    failed: dict[int, Malformed] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.correlated = CorrelatedNoise(self.aggregator.noise_bands)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> "PrivateRounds":
        """Return the Global DP layer of a new or resumed run in run directory ``out``; it opens the ledger there."""
        aggregator = experiment.aggregator
        return open_private_rounds(
            aggregator, experiment.sampler, experiment.num_clients, experiment.seed, out,
            progress.get("clipping_norm"), progress.get("receipt"),
            beforehand=releases_beforehand(experiment.preprocess, aggregator),
        )  # fmt: skip

    @classmethod
    def payments(cls, experiment: Any) -> Sequence[Payment]:
        """Return the privacy cost of all rounds and of the sums that are published before the rounds.

        Takes seconds with PLD.
        """
        aggregator, sampler = experiment.aggregator, experiment.sampler
        terms, charges = terms_of(aggregator, sampler), _charges_of(experiment, aggregator)
        return (payment_of(terms, charges, "", is_simulated=aggregator.noise == "seeded"),)

    @classmethod
    def told(cls, experiment: Any) -> Sequence[str]:
        """Return sentences for the user about the default sampler, and about a missing or unsuitable privacy budget."""
        return [*told_beforehand(experiment), *cost_of_noise(experiment)]

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return warnings about default sampler, budget, correlated noise in a resumed run, and a large delta."""
        del idle
        aggregator, resumed = experiment.aggregator, list[str]()
        if aggregator.noise_bands > 1 and rounds_done:
            resumed.append(
                f"the noise of the first {rounds_done} rounds is not stored, for safety, so the correlation of the "
                "noise starts again in this resumed run: less accuracy than without an interruption, and equal privacy"
            )
        advice = delta_advice(aggregator.delta, experiment.num_clients)
        return [*resumed, *told_beforehand(experiment), *([advice] if advice else [])]

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if a client without records sends numbers other than zero: the guarantee needs zeros."""
        experiment.aggregator.check_silence(experiment.algorithm, beginning.sent)

    @classmethod
    def check_directory(cls, experiment: Any, out: Path) -> None:
        """Raise RunError if the run has published rounds whose costs are missing in the privacy ledger."""
        beforehand = len(releases_beforehand(experiment.preprocess, experiment.aggregator))
        check_paid(out, experiment.sampler.rounds_apart, beforehand)

    def begin(self, server_round: int) -> None:
        """Charge a round's cost to the privacy ledger before the round begins.

        Raises Stop if the privacy budget does not cover this cost. In the first round RunError is raised instead.
        """
        try:
            self.pay(server_round)
        except BudgetExhausted as spent:
            if server_round > 1:
                raise Stop(f"privacy budget spent after {server_round - 1} rounds ({spent})") from spent
            raise RunError(
                f"the privacy budget does not afford the first round ({spent}): earlier charges of a stopped run in "
                "this run directory count, too; take a larger budget and another --out"
            ) from spent
        self.inner.begin(server_round)

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return a cohort drawn with the secret key of the noise.

        The run's seed is public, so anybody could compute a cohort that is drawn with this seed.
        """
        return self.inner.cohort(server_round, coins or self.coins(server_round))

    def lost(self, server_round: int, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Store which clients failed; zeros replace their updates.

        Raises RunError if all clients seem to fail (see ``note``).
        """
        del server_round
        self.note(failed, answered=answered)

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the noised mean of the cohort's updates, which replaces the aggregator's plain mean."""
        return self.release(cohort, algorithm, server)

    def metrics(self) -> Mapping[str, Any]:
        """Return the layer's fields for the round's line in ``rounds.jsonl``, with the epsilon of all rounds so far."""
        return {**self.inner.metrics(), "epsilon": self.ledger.epsilon}

    @property
    def hides_clients(self) -> bool:
        """Return True: the cohort is secret, and the noised mean is all that is published about its clients."""
        return True

    def state(self) -> Mapping[str, Any]:
        """Return the next round's clipping norm, and the receipt (number and digest) of all charges in the ledger."""
        return {"clipping_norm": self.clipping_norm, "receipt": self.ledger.receipt.to_json()}

    def statements(self, rounds: int) -> list[dict[str, object]]:
        """Return the privacy statements of the inner layers, and the statement of Global DP, whose unit is a client."""
        return [*self.inner.statements(rounds), self.statement(rounds)]

    def pay(self, server_round: int) -> float | None:
        """Charge a round's cost to the privacy ledger before the round. Return the epsilon spent (None: no guarantee).

        With cyclic sampling of G groups, one charge (entry) covers G rounds, as no client takes part in two of these
        rounds. Raises BudgetExhausted if the cost would exceed the budget.
        """
        return self.ledger.charge(self._event, release=self._release(server_round), noise=self.noise.identity)

    def pay_beforehand(self, number: int) -> float | None:
        """Charge the privacy cost of one noisy sum, which a stage publishes before round 1, to the privacy ledger.

        ``number``: the index of the sum, from 1. Result and errors are those of ``pay``.
        """
        event = self.sampler.amplify(self.beforehand[number - 1].event(), self.num_clients)
        name = f"before round 1: {number} of {len(self.beforehand)}"
        return self.ledger.charge(event, release=name, noise=self.noise.identity)

    def coins(self, server_round: int) -> Coins:
        """Return the source of random numbers for sampling the round's cohort. It uses the secret key of the noise.

        The random numbers are as secret as the noise, and repeatable only if the noise is seeded.
        """
        draws = itertools.count()
        return lambda count: self.noise.uniform(count, purpose=f"cohort {next(draws)}", server_round=server_round)

    def affords(self, server_round: int) -> bool:
        """Return True if the budget covers the round's privacy cost, or if the ledger already contains this cost."""
        release, noise = self._release(server_round), self.noise.identity
        return self.ledger.has_charged(release, noise) or self.ledger.affords(self._event)

    def note(self, failed: Mapping[int, Malformed], *, answered: bool) -> None:
        """Store which clients failed in a round. ``answered``: True if at least one client sent a valid update.

        Raises RunError if two clients (in a run of one client: this client) have failed since the last valid update:
        the cause is then the set-up. A single failed client among several never ends the run, because the end of the
        run and its reason would reveal something about this client's records.
        """
        self.failed = {} if answered else {**self.failed, **failed}
        if len(self.failed) >= min(2, self.num_clients):
            raise RunError(
                "no client sent a valid update, so the cause is the set-up (the data, the model, a setting) and not a "
                f"single client; {UNQUOTED}",
                private=in_words("client", self.failed),
            )

    def release(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate:
        """Return the noised mean of a round whose cost is already in the privacy ledger."""
        template = payload_template(algorithm, server)
        aggregate, self.clipping_norm = self.aggregator.release(
            cohort,
            noise=self.noise,
            template=template,
            clipping_norm=self.clipping_norm,
            correlated=self.correlated,
        )
        return aggregate

    def statement(self, rounds: int) -> dict[str, object]:
        """Return the privacy statement about clients for ``result.json``, for a run with ``rounds`` planned rounds."""
        return self.ledger.statement(
            covers=f"{COVERS}{_groups_in_words(self.sampler)}{BEFOREHAND if self.beforehand else ''}",
            does_not_cover=DOES_NOT_COVER,
            simulation_only=self.noise.simulation_only,
            planned=planned_charges(self.aggregator, self.sampler, self.num_clients, rounds, self.beforehand),
        )

    @property
    def _event(self) -> DpEvent:
        return self.sampler.amplify(self.aggregator.event(), self.num_clients)

    def _release(self, server_round: int) -> str:
        apart = self.sampler.rounds_apart
        first = (server_round - 1) // apart * apart + 1
        return f"round {first}" if apart == 1 else f"rounds {first} to {first + apart - 1}"


def check_paid(out: Path, rounds_of_a_charge: int, beforehand: int) -> None:
    """Raise RunError if a private run has published rounds whose costs are missing in its privacy ledger.

    ``rounds_of_a_charge``: the number of rounds whose cost one entry (charge) of the ledger covers. ``beforehand``: the
    number of ledger entries before the first round. The receipt in the checkpoint is a stricter check, but does not
    cover a round that was written to ``rounds.jsonl`` without a checkpoint.
    """
    released, path = len(read_rounds(out)), out / LEDGER
    charges = read_whole(path).count(b"\n") - 1 if path.exists() else 0
    if released and (charges - beforehand) * rounds_of_a_charge < released:
        raise RunError(
            f"{path} holds {charges} charges, but {released} rounds were released: put an unchanged copy of it back, "
            "or start a new run in a fresh directory, which is charged again"
        )


def planned_charges(
    aggregator: GlobalDP, sampler: AnySampler, num_clients: int, rounds: int, beforehand: Sequence[GlobalDP] = ()
) -> Mapping[DpEvent, int]:
    """Return the privacy events of one client in a run of ``rounds`` rounds, {event: count}.

    ``beforehand``: the mechanisms of the noisy sums that a stage publishes before round 1. Their events are included.
    """
    events = Counter(sampler.amplify(one.event(), num_clients) for one in beforehand)
    events[sampler.amplify(aggregator.event(), num_clients)] += math.ceil(rounds / sampler.rounds_apart)
    return events


def fitted(experiment: Any) -> float:
    """Return the least noise multiplier with which all rounds of ``experiment`` cost at most ``aggregator.epsilon``."""
    aggregator = experiment.aggregator
    if aggregator.epsilon is None:
        raise UserError(
            "aggregator.noise_multiplier=from-epsilon finds the noise for aggregator.epsilon, which is not set: set "
            "aggregator.epsilon, or a number as aggregator.noise_multiplier"
        )
    return noise_within(aggregator, aggregator.epsilon, partial(_charges_of, experiment))


def noise_within(aggregator: GlobalDP, epsilon: float, charges: Callable[[GlobalDP], Mapping[DpEvent, int]]) -> float:
    """Return the least noise multiplier with which all releases cost at most ``epsilon``, rounded up to 6 digits.

    ``charges``: a function that returns all releases, {event: number}, of ``aggregator`` with another noise multiplier.
    """

    def spent(noise_multiplier: float, accountant: Accountant) -> float:
        tried = aggregator.model_copy(update={"noise_multiplier": noise_multiplier})
        return epsilon_of_counts(charges(tried), aggregator.delta, accountant=accountant)

    found = least_noise(spent, epsilon, aggregator.accountant)
    return math.ceil(found * 1e6) / 1e6


def told_beforehand(experiment: Any) -> list[str]:
    """Return a sentence if the sampler is the default (Poisson), and another if the budget does not fit the rounds."""
    aggregator, sampler, sentences = experiment.aggregator, experiment.sampler, []
    if sampler == Poisson():
        sentences.append(
            f"each client takes part in a round by a secret draw of probability {sampler.sampling_rate:g} (sampler="
            f"poisson:{sampler.sampling_rate:g} is the default of aggregator global-dp; sampler=full takes all clients)"
        )
    if aggregator.epsilon is None or not aggregator.noise_multiplier:
        return sentences
    charges = _charges_of(experiment, aggregator)
    spent = epsilon_of_counts(charges, aggregator.delta, accountant=aggregator.accountant)
    if not _UNDERSPENT * aggregator.epsilon <= spent <= aggregator.epsilon:
        ends = "so training stops early" if spent > aggregator.epsilon else "of which a part stays unused"
        sentences.append(
            f"all {experiment.rounds:,} rounds cost epsilon {rounded_up(spent)} with "
            f"aggregator.noise_multiplier={aggregator.noise_multiplier:g}, and aggregator.epsilon is "
            f"{aggregator.epsilon:g}, {ends}: aggregator.noise_multiplier=from-epsilon finds the noise multiplier that "
            "spends exactly this epsilon ('fl-sim privacy global-dp --epsilon' prints it)"
        )
    return sentences


def cost_of_noise(experiment: Any) -> list[str]:
    """Return a list with a sentence about the epsilon of the noise if no budget is set, else an empty list.

    Without this sentence users may think that global-dp:8 means epsilon 8.
    """
    aggregator = experiment.aggregator
    noise, default = aggregator.noise_multiplier, type(aggregator).model_fields["noise_multiplier"].default
    if aggregator.epsilon is not None or noise in {0, default}:
        return []
    spent = epsilon_of_counts(_charges_of(experiment, aggregator), aggregator.delta, accountant=aggregator.accountant)
    sentence = (
        f"aggregator.noise_multiplier={noise:g} (in short global-dp:{noise:g}) sets the noise and not epsilon: all "
        f"{experiment.rounds:,} rounds cost epsilon {rounded_up(spent)}; to set epsilon instead, give "
        "aggregator.epsilon=8 aggregator.noise_multiplier=from-epsilon"
    )
    return [sentence]


def _charges_of(experiment: Any, aggregator: GlobalDP) -> Mapping[DpEvent, int]:
    beforehand = releases_beforehand(experiment.preprocess, aggregator)
    return planned_charges(aggregator, experiment.sampler, experiment.num_clients, experiment.rounds, beforehand)


def _groups_in_words(sampler: AnySampler) -> str:
    if sampler.rounds_apart == 1:
        return ""
    apart = sampler.rounds_apart
    return (
        f" One step of this statement covers {apart} rounds. A client takes part at most once in these rounds; the "
        "group of each round is public."
    )


def terms_of(aggregator: GlobalDP, sampler: AnySampler) -> Terms:
    """Return the privacy ledger's terms: what its epsilon means (unit, adjacency, delta), budget and accountant.

    Raises UserError for a user's subclass of ``GlobalDP``, because its privacy cost is not known.
    """
    aggregator.check_unchanged()
    adjacency = Adjacency.REPLACE_ONE if isinstance(sampler, FixedSize) else Adjacency.ADD_OR_REMOVE_ONE
    return Terms(UNIT, adjacency, aggregator.delta, aggregator.epsilon, aggregator.accountant)


def open_private_rounds(
    aggregator: GlobalDP,
    sampler: AnySampler,
    num_clients: int,
    seed: int,
    out: Path,
    clipping_norm: float | None,
    receipt: Mapping[str, Any] | None = None,
    beforehand: tuple[GlobalDP, ...] = (),
) -> PrivateRounds:
    """Return the layer of a new or resumed run in run directory ``out``, with the ledger ``ledger.jsonl`` there.

    ``clipping_norm``: the clipping norm of the next round, None in a new run. ``receipt``: the receipt of the charges
    so far, as plain JSON. Raises RunError if the ledger does not contain these charges. A resumed run with secret noise
    has a new key. So a round that was charged but not finished is charged again, and samples another cohort.
    """
    noise = Noise.seeded(seed) if aggregator.noise == "seeded" else Noise.secret()
    norm = aggregator.clipping_norm if clipping_norm is None else clipping_norm
    paid = None if receipt is None else Receipt.from_json(receipt)
    ledger = Ledger(
        terms_of(aggregator, sampler), out / LEDGER, receipt=paid, holder="what this run has released so far"
    )
    return PrivateRounds(aggregator, sampler, num_clients, ledger, noise, norm, beforehand)
