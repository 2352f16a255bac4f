"""The privacy bill of rounds in which clients add noise, for the forecast and the privacy statement.

The module ``clients.paid_rounds`` writes the costs into the clients' own privacy ledgers.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from dp_accounting import dp_event

from clients.paid_rounds import ClientProtection, Releases, RoundCost
from clients.policy import open_ledger
from fl_sim.errors import RunError, UserError
from fl_sim.experiment.job import Job
from fl_sim.params import detached, trainable
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.bill import payment_of
from fl_sim.privacy.loss_distribution import NoTimeError
from fl_sim.privacy.mechanisms import clipping_norm_on_grid
from fl_sim.privacy.statement import Coverage, statement
from fl_sim.privacy.terms import Terms, none_if_infinite, rounded_up
from fl_sim.simulation.client_ledgers import JointCost, joint_cost, joint_cost_in_words, ledger_path
from fl_sim.simulation.stage import Run, Stage
from fl_sim.types import Params
from strategies.dp_sgd import ClientPrivacy
from strategies.layer import found_in
from strategies.private_steps import PrivateTraining, digest_of

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment


@dataclass(frozen=True)
class PayingClients:
    """A group of clients for which a round has the same privacy cost.

    ``clients``: the client IDs. ``cost``: the cost of a round. ``planned``: the privacy events of a round under the
    adjacency of the privacy statement, {event: count}. A client adds noise to a sum of clipped vectors, such as
    gradients. ``std``: the standard deviation of this noise in each coordinate. ``size``: the dimension of the sum.
    ``summands``: the number of vectors in the sum. ``num_records``: the number of records of each client, 0 if this
    number is private.
    """

    clients: tuple[int, ...]
    cost: RoundCost
    planned: Mapping[dp_event.DpEvent, int]
    std: float
    size: int
    summands: int = 1
    num_records: int = 0


class PaidRoundsBill(Stage):
    """The stage at the server that states the privacy cost of the rounds. It sends no messages to clients."""

    released: ClassVar[str]
    """The kind of output that a round releases, as a part of the names of the ledger's charges (``Releases.what``)."""
    covers: ClassVar[str]
    does_not_cover: ClassVar[str]

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._layer: PrivateTraining | None = None
        self._run = ""
        self._together: JointCost | None = None

    @property
    @abstractmethod
    def terms(self) -> Terms:
        """Return the terms of the privacy statement: privacy unit (record or client), adjacency and delta."""

    @cached_property
    @abstractmethod
    def groups(self) -> list[PayingClients]:
        """Return all clients with records, in groups. A round has the same privacy cost for all clients of a group."""

    def before(self, run: Run) -> None:
        """Store the layer that counts each client's rounds.

        Raises UserError if the budget is below the cost of a client's first round, or if the noise is too small or too
        coarsely rounded.
        """
        self._layer, self._run = found_in(run.strategy.layer, PrivateTraining), run.order.run
        for group in self.groups:
            clipping_norm_on_grid(
                self.settings.protection.clipping_norm, group.std, group.size, summands=group.summands
            )
            if group.cost.most_rounds == 0:
                spent = epsilon_of_counts({group.cost.charge: 1}, self.settings.delta)
                whose = f" with {group.num_records:,} records" if group.num_records else ""
                raise UserError(
                    f"local.privacy.epsilon={self.settings.epsilon:g} does not allow the first round of clients{whose},"
                    f" which costs epsilon {rounded_up(spent)} at delta {self.settings.delta:g}: set a larger epsilon "
                    "or noise_multiplier, or leave noise_multiplier out; then the noise is computed from epsilon"
                )

    def after(self, run: Run) -> None:
        """Compute the joint cost of all charges (entries) in the clients' privacy ledgers, if this machine has them."""
        del run
        with suppress(RunError, UserError):
            self._together = joint_cost(self.job, self.settings.delta) if self._is_charged_here() else None

    def _is_charged_here(self) -> bool:
        """Return True if this machine has all clients' privacy ledgers, with the costs of all their rounds."""
        assert self._layer is not None
        releases = Releases(self.released, self.settings.noise, digest_of(self.job.experiment))
        paths = {client: ledger_path(self.job, client) for client in self._layer.counts}
        return all(
            path.exists() and releases.num_charged(open_ledger(path), self._run, client) >= self._layer.counts[client]
            for client, path in paths.items()
        )

    def payments(self) -> "Iterator[Payment]":
        """Yield the planned privacy cost of all rounds together, for the client with the highest cost."""
        if (worst := self.worst) is not None:
            is_simulated = self.settings.noise == "seeded"
            yield payment_of(self.terms, self.planned(worst), "", is_simulated=is_simulated)

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the given privacy statements ``others``, and the privacy statement about the rounds."""
        if (worst := self.worst) is None:
            return list(others)
        counts = self._layer.counts if self._layer else {}
        trained = max((counts.get(client, 0) for client in worst.clients), default=0)
        each = [
            event if times == 1 else dp_event.SelfComposedDpEvent(event, times)
            for event, times in worst.planned.items()
        ]
        charges = [(f"round {number}", event) for number in range(1, trained + 1) for event in each]
        coverage = Coverage(self.covers, self.does_not_cover, self.settings.noise == "seeded")
        said, together = statement(self.terms, charges, self.planned(worst), coverage), self._together
        # If the privacy ledgers contain more releases about the same records, their joint cost is stated, too.
        if together is None or together.shares > trained:
            said["guarantee"] = f"{said['guarantee']}{joint_cost_in_words(together, self.settings.delta)}"
        joint = together and none_if_infinite(together.epsilon)
        return [*others, {"ledger": self._run, **said, "epsilon_together": joint}]

    @property
    def settings(self) -> ClientPrivacy:
        """Return the settings of the clients' noise."""
        assert isinstance(self.job.experiment.local.privacy, ClientPrivacy)
        return self.job.experiment.local.privacy

    @cached_property
    def params(self) -> Params:
        """Return the initial values of the parameters that are trained, for their names and shapes."""
        return detached(trainable(self.job.model()).items())

    def protection_in_time(self, cost: Callable[[ClientProtection], RoundCost]) -> ClientProtection:
        """Return the privacy parameters, with RDP in place of PLD accounting if PLD is too slow for a forecast.

        PLD and RDP are methods that add up privacy costs. RDP is faster. RDP is also safe, because it computes at
        least as much noise for the same budget. ``cost``: the function that computes a client's noise and privacy cost.
        """
        protection = self.settings.protection
        try:
            cost(protection)
        except NoTimeError:
            return replace(protection, accountant="rdp")
        return protection

    def rounds_of(self, group: PayingClients) -> int:
        """Return the number of rounds that a ``group`` member's budget allows, at most the run's number of rounds."""
        rounds, most = self.job.experiment.rounds, group.cost.most_rounds
        return rounds if most is None else min(rounds, most)

    def planned(self, group: PayingClients) -> Mapping[dp_event.DpEvent, int]:
        """Return a client's planned privacy events in the whole run, {event: count}."""
        return {event: times * self.rounds_of(group) for event, times in group.planned.items()}

    def spent_by(self, group: PayingClients) -> float:
        """Return a client's planned epsilon for the whole run, by RDP if the chosen accountant is too slow."""
        planned, delta = self.planned(group), self.settings.delta
        try:
            return epsilon_of_counts(planned, delta, accountant=self.settings.accountant)
        except NoTimeError:
            return epsilon_of_counts(planned, delta)

    @cached_property
    def worst(self) -> PayingClients | None:
        """Return the group with the highest planned privacy cost; None if no client has records."""
        delta = self.settings.delta
        return max(self.groups, key=lambda group: epsilon_of_counts(self.planned(group), delta), default=None)


def range_in_words(values: Sequence[float]) -> str:
    """Return the range of ``values`` as text, such as "1 to 2"; only one number if all are equal."""
    least, most = f"{min(values):.4g}", f"{max(values):.4g}"
    return least if least == most else f"{least} to {most}"
