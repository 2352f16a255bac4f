"""The ledger of one privacy unit: every release is charged before it happens, and one too many is refused.

Epsilon comes from the sum of the Renyi curves of all charges (or from their PLD), against a budget fixed beforehand.
The charge log is locked and read again before every charge, appended and forced to disk before ``charge`` returns: a
crash can lose a release that was charged, never a charge whose release was seen, and all processes that use one log
share one budget.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dp_accounting import dp_event

from fl_sim.errors import BudgetExhausted, RunError, UserError
from fl_sim.privacy.accounting import epsilon_of_counts, supports_pld
from fl_sim.privacy.charge_log import Charge, ChargeLog, Receipt
from fl_sim.privacy.events import adjacency, single_steps
from fl_sim.privacy.statement import Words, statement
from fl_sim.privacy.terms import Terms, none_if_infinite

__all__ = ["Charge", "Ledger", "Terms"]


class Ledger:
    """Adds up the releases about one privacy unit.

    ``path``: the charge log, created or, where it exists, read back; None keeps the ledger in memory. ``receipt``: the
    charges that the log must begin with, since ``holder`` ("the checkpoint of round 7") was paid for with them.
    Raises UserError where the log was opened under other terms, RunError where it is missing, cut, edited or damaged.
    """

    def __init__(
        self, terms: Terms, path: Path | None = None, *, receipt: Receipt | None = None, holder: str = "this run"
    ) -> None:
        self.terms = terms
        self._charges: dict[tuple[str, str], Charge] = {}
        self._counts: Counter[dp_event.DpEvent] = Counter()
        self._spent: float | None = 0.0
        assert path is not None or receipt is None, "a ledger in memory has no earlier charges"
        self._log = None
        if path is not None:
            said = json.loads(json.dumps(asdict(terms)))
            self._log = ChargeLog(path, said, receipt, holder)
            with self._up_to_date():
                pass

    @property
    def identity(self) -> str:
        """Return the random id of the charge log; "" for a ledger in memory."""
        return self._log.id if self._log else ""

    @property
    def receipt(self) -> Receipt:
        """Return what is kept with a release as the proof of its payment: all charges so far. Not for one in memory."""
        assert self._log is not None
        return self._log.receipt

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Return all charges so far, in order."""
        return tuple(self._charges.values())

    @property
    def epsilon(self) -> float | None:
        """Return what is spent: 0 before the first charge, None once there is no guarantee."""
        return self._spent

    def affords(self, event: dp_event.DpEvent) -> bool:
        """Return whether ``event`` could be charged once more."""
        with self._up_to_date():
            return self.terms.budget is None or _finite_at_most(self._epsilon_after(event), self.terms.budget)

    def has_charged(self, release: str, noise: str) -> bool:
        """Return whether ``release`` was charged with that ``noise``: to charge it again is free."""
        return (release, noise) in self._charges

    def charge(self, event: dp_event.DpEvent, *, release: str, noise: str) -> float | None:
        """Pay for one release BEFORE it is made and return the epsilon spent so far (None: no guarantee).

        ``release`` names it ("round 7"). Charging the same release with the same ``noise`` identity again is free: the
        same bits come out. With other noise it is a second release and costs again. Raises BudgetExhausted, with
        nothing charged, where it would exceed the budget; UserError where its adjacency is not the ledger's.
        """
        self._check_adjacency(event)
        with self._up_to_date() as append:
            if earlier := self._charges.get((release, noise)):
                if earlier.event != event:
                    raise RunError(
                        f"{release} was charged as {earlier.event}, now it is {event}: one noise, two releases"
                    )
                return self._spent
            after = self._epsilon_after(event)
            if self.terms.budget is not None and not _finite_at_most(after, self.terms.budget):
                raise BudgetExhausted(
                    num_releases=len(self._charges),
                    spent=math.inf if self._spent is None else self._spent,
                    would_be=after,
                    budget=self.terms.budget,
                    delta=self.terms.delta,
                )
            charge = Charge(release, noise, event, none_if_infinite(after))
            append(charge)
            self._take(charge)
            self._spent = charge.epsilon
            return self._spent

    def statement(
        self,
        *,
        covers: str,
        does_not_cover: str,
        simulation_only: bool,
        planned: Mapping[dp_event.DpEvent, int] | None = None,
    ) -> dict[str, Any]:
        """Return the guarantee as JSON values, for results and reports.

        ``epsilon`` is the guarantee, ``epsilon_realised`` what was charged so far. ``planned``: all releases that were
        fixed beforehand, event -> number; None where nothing but the budget limits them. ``covers`` and
        ``does_not_cover`` say in plain words what a reader may and may not conclude. ``simulation_only``: whoever knows
        the seed can draw the noise again. Takes seconds: the PLD is computed here.
        """
        charges = [(charge.release, charge.event) for charge in self.charges]
        said = statement(self.terms, charges, planned, Words(covers, does_not_cover, simulation_only))
        return {"ledger": self.identity, **said}

    def _epsilon_after(self, event: dp_event.DpEvent) -> float:
        counts = self._counts + single_steps({event: 1})
        if self.terms.accountant == "pld" and not supports_pld(event):
            raise UserError(f"the PLD accountant does not know {type(event).__name__}: choose the RDP accountant")
        return epsilon_of_counts(counts, self.terms.delta, accountant=self.terms.accountant)

    def _check_adjacency(self, event: dp_event.DpEvent) -> None:
        stated = adjacency(event)
        if stated not in {None, self.terms.adjacency}:
            raise UserError(
                f"a release under {stated} cannot be charged to a ledger under {self.terms.adjacency}: "
                "sample the same way in every step"
            )

    def _take(self, charge: Charge) -> None:
        self._charges[charge.release, charge.noise] = charge
        self._counts += single_steps({charge.event: 1})

    @contextmanager
    def _up_to_date(self) -> Iterator[Callable[[Charge], None]]:
        """Keep other processes from charging, take what they have charged, and give what writes a charge down."""
        if self._log is None:
            yield _write_nothing
            return
        with self._log.held() as (news, append):
            for charge in news:
                self._check_adjacency(charge.event)
                self._take(charge)
            if news:  # the log is believed about what was released, not about what that cost
                spent = epsilon_of_counts(self._counts, self.terms.delta, accountant=self.terms.accountant)
                self._spent = none_if_infinite(spent)
            yield append


def _write_nothing(charge: Charge) -> None:
    """Keep a charge in memory alone."""


def _finite_at_most(epsilon: float, budget: float) -> bool:
    return math.isfinite(epsilon) and epsilon <= budget
