"""The privacy statement of one privacy unit: the guarantee and the epsilon spent, which are two different numbers.

A guarantee is an epsilon that was fixed before the data were read. The epsilon spent by a run is no guarantee, because
the moment at which the run ends may depend on its published results. For example, the budget may not be used up, some
queries may get no answer, or a user may interrupt the run. The cost up to such a moment is no upper bound.

The cost of ALL planned releases is a guarantee. If a run ends earlier, it publishes only some of these releases, and to
drop the others is post-processing. A budget is a guarantee, too: it is a privacy filter (Feldman, Zrnic 2021).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dp_accounting import dp_event

from fl_sim.privacy import events
from fl_sim.privacy.accounting import Bounds, bounds, epsilon_of_counts
from fl_sim.privacy.events import single_steps
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite, rounded_up

_Counts: TypeAlias = Counter[dp_event.DpEvent]

_NEIGHBOURS: Final = {
    Adjacency.ADD_OR_REMOVE_ONE: (
        "zero-out adjacency, that is replacing all data of one {unit} by nothing while the numbers of clients and of "
        "records stay public"
    ),
    Adjacency.REPLACE_ONE: "replacing one {unit} by any other",
}


@dataclass(frozen=True)
class Coverage:
    """The outputs of a run that a privacy statement covers, and the outputs that it does not cover.

    ``covers``: the covered outputs, in words. ``does_not_cover``: the outputs that are not protected, in words.
    ``simulation_only``: True if the noise is seeded, so that anybody with the seed can subtract it.
    """

    covers: str
    does_not_cover: str
    simulation_only: bool


_SEVERAL: Final = {
    "record": " A person with several records, at one client or at several, pays for each of them.",
    "client": " A person with records at several clients pays for each of these clients.",
}
"""{privacy unit: a sentence about a person whose data are in several such units}"""
_SEEDED: Final = (
    " The noise and all other random choices for privacy, such as the cohorts, come from the experiment's seed. "
    "Whoever knows the seed can compute them again and subtract the noise, so the guarantee describes the method (a "
    "simulation), not this particular release."
)


@dataclass(frozen=True)
class UncoveredFacts:
    """Facts about the data that no epsilon covers.

    ``read_off``: facts that were computed from the private records without noise, in words. ``tested_on``: the public
    test records, in words; empty if no measure uses them. ``tuned_on``: a sentence about settings that were chosen
    earlier on the same records. ``beside``: further sentences about such facts, from other parts of fl-sim.
    """

    read_off: tuple[str, ...] = ()
    tested_on: str = ""
    tuned_on: str = ""
    beside: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the facts as sentences, each with a leading space, to be appended to the text ``does_not_cover``."""
        read_off = (
            f" Taken from the private records and published without noise: {'; '.join(self.read_off)}."
            if self.read_off
            else ""
        )
        tested = (
            f" {self.tested_on[:1].upper()}{self.tested_on[1:]} count as public, so measures on them have no privacy "
            "cost."
            if self.tested_on
            else ""
        )
        return f"{self.tuned_on}{read_off}{tested}{''.join(f' {one}' for one in self.beside)}"


def beside(statements: Iterable[Mapping[str, Any]], facts: UncoveredFacts) -> list[dict[str, Any]]:
    """Return copies of the privacy statements, with further sentences in their field ``does_not_cover``.

    The further sentences state ``facts``, and the cost for a person whose data belong to several privacy units.
    """
    more = facts.in_words()
    return [
        {**one, "does_not_cover": f"{one['does_not_cover']}{_SEVERAL.get(str(one['unit']), '')}{more}"}
        for one in statements
    ]


def statement(
    terms: Terms,
    charges: Sequence[tuple[str, dp_event.DpEvent]],
    planned: Mapping[dp_event.DpEvent, int] | None,
    coverage: Coverage,
) -> dict[str, Any]:
    """Return the privacy statement as a dictionary of JSON values.

    ``charges``: all charges so far, as (name of the release, event). ``planned``: {event: number of releases} for all
    releases that were fixed beforehand; None if only the budget limits the releases.
    """
    account = _account(terms, charges, planned)
    epsilon, accountant, source = _guarantee(terms, account)
    shown = account.bounds or account.realised
    kinds = list(account.promised or account.spent)
    only = kinds[0] if len(kinds) == 1 else None
    return {
        "unit": terms.unit,
        "epsilon": epsilon,
        "epsilon_realised": none_if_infinite(account.realised.least),
        "delta": terms.delta,
        "adjacency": str(terms.adjacency),
        "sampling": "; ".join(events.sampling_in_words(event, terms.unit) for event in kinds) or "none yet",
        "noise_multiplier": None if only is None else events.noise_multiplier(only),
        "sampling_rate": None if only is None else events.sampling_rate(only),
        "steps": account.spent.total(),
        "steps_planned": None if account.promised is None else account.promised.total(),
        "accountant": accountant,
        "epsilon_rdp": none_if_infinite(shown.rdp),
        "epsilon_pld": None if shown.pld is None else none_if_infinite(shown.pld),
        "budget": terms.budget,
        "budget_accountant": None if terms.budget is None else terms.accountant,
        "events": _listed(account.spent),
        "planned_events": None if account.promised is None else _listed(account.promised),
        "guarantee": _in_words(terms, account, epsilon, source),
        "simulation_only": coverage.simulation_only,
        "covers": coverage.covers,
        "does_not_cover": coverage.does_not_cover + (_SEEDED if coverage.simulation_only else ""),
    }


@dataclass(frozen=True)
class _Account:
    """The releases of one ledger, with their epsilons: charged releases, and releases that were fixed before the run.

    ``spent``: all charges (paid releases) so far. ``realised``: the epsilon of ``spent``. ``promised``: all releases
    that were fixed beforehand. ``bounds``: the epsilon of ``promised``. ``promised`` and ``bounds`` are None if only
    a budget was fixed. ``again``: the number of repeated charges. A repeated charge is for a release that was charged
    before.
    """

    spent: _Counts
    promised: _Counts | None
    realised: Bounds
    bounds: Bounds | None
    again: int


def promised_releases(
    terms: Terms, charges: Sequence[tuple[str, dp_event.DpEvent]], planned: Mapping[dp_event.DpEvent, int]
) -> _Counts:
    """Return all releases that were fixed beforehand: the planned releases, or fewer if the budget is too small.

    Releases that were charged again after an interruption are added to the plan. If all releases have the same event,
    the number of releases that the budget allows is known before the first release. This number does not depend on
    outputs or on the end of the run. ``charges``: all charges so far, as (name of the release, event).
    """
    spent, again = _spent(charges)
    promised = (single_steps(planned) | (spent - again)) + again
    if terms.budget is None or len(promised) != 1:
        return promised
    [event] = promised
    return Counter({event: _affordable(terms, event, spent[event], promised[event])})


def _account(
    terms: Terms, charges: Sequence[tuple[str, dp_event.DpEvent]], planned: Mapping[dp_event.DpEvent, int] | None
) -> _Account:
    spent, again = _spent(charges)
    promised = None if planned is None else promised_releases(terms, charges, planned)
    if promised is None and _used_up(terms, spent):
        promised = spent
    realised = bounds(spent, terms.delta)
    whole = realised if promised == spent else None if promised is None else bounds(promised, terms.delta)
    return _Account(spent, promised, realised, whole, again.total())


def _spent(charges: Sequence[tuple[str, dp_event.DpEvent]]) -> tuple[_Counts, _Counts]:
    """Return (all charges, repeated charges), each as counts {privacy event: number of releases}.

    A charge is repeated if an earlier charge is for a release of the same name.
    """
    spent = single_steps(Counter(event for _, event in charges))
    return spent, spent - single_steps(Counter(dict(charges).values()))


def _affordable(terms: Terms, event: dp_event.DpEvent, least: int, most: int) -> int:
    """Return the number of releases of the event ``event``, from ``least`` to ``most``, that the budget allows.

    If the budget does not allow even ``least`` releases, the result is ``most``. This happens only with a ledger of an
    earlier version, which accepted a charge beyond the budget.
    """

    def fits(number: int) -> bool:
        return _cost(terms, Counter({event: number})) <= (terms.budget or 0.0)

    if least == most or fits(most) or not fits(least):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _used_up(terms: Terms, spent: _Counts) -> bool:
    """Return True if all releases have the same event, and the privacy budget does not allow one more release."""
    return terms.budget is not None and len(spent) == 1 and _cost(terms, spent + Counter(list(spent))) > terms.budget


def _cost(terms: Terms, counts: _Counts) -> float:
    """Return the joint epsilon of the releases ``counts``, for comparison with the privacy budget.

    The epsilon is computed by the ledger's accountant (``terms.accountant``).
    """
    return epsilon_of_counts(counts, terms.delta, accountant=terms.accountant)


def _guarantee(terms: Terms, account: _Account) -> tuple[float | None, str, str]:
    """Return (epsilon, accountant, source) of the guarantee: the smallest epsilon that was fixed beforehand.

    ``source``: a sentence that says how this epsilon was determined.
    """
    budget, whole = terms.budget, account.bounds
    if budget is not None and _cost(terms, account.spent) > budget:
        budget = None  # an earlier version of fl-sim accepted a charge beyond the budget, so the budget is no guarantee
    if budget is not None and (whole is None or budget < whole.least):
        source = f"This is the budget; the {terms.accountant.upper()} accountant checked it before every release"
        return budget, terms.accountant, source
    if whole is None:
        return None, terms.accountant, ""
    return none_if_infinite(whole.least), whole.accountant, whole.in_words()


def _in_words(terms: Terms, account: _Account, epsilon: float | None, source: str) -> str:
    change = _NEIGHBOURS[terms.adjacency].format(unit=terms.unit)
    if epsilon is None and account.promised is not None:
        return f"none: at least one release has no noise, so {change} may be visible in it"
    if epsilon is None:
        return (
            "none: the number of releases was not fixed beforehand, and no budget limits them. So no epsilon is valid "
            f"for every moment at which the run may stop. {_so_far(account)}"
        )
    if not (account.spent or account.promised):
        return "complete privacy: nothing is released"
    shown = rounded_up(epsilon)
    said = (
        f"({shown}, {terms.delta:g})-differential privacy under {change}: except with probability about "
        f"{terms.delta:g}, this change makes no released result more than e^{shown} times as likely. {source}"
    )
    if account.again:
        said += (
            f". {account.again} of the releases were paid for again, after an interruption or by --again; the "
            "guarantee assumes that these repetitions do not depend on the data"
        )
    if account.promised == account.spent:
        return said
    return f"{said}. It was fixed beforehand and holds wherever the run stops. {_so_far(account)}"


def _so_far(account: _Account) -> str:
    if not account.spent:
        return "Nothing has been released yet"
    realised = none_if_infinite(account.realised.least)
    cost = "have no finite epsilon" if realised is None else f"cost epsilon {rounded_up(realised)}"
    return (
        f"The {account.spent.total()} releases so far {cost}; this is the epsilon spent and no guarantee, because the "
        "moment at which a run stops may depend on its releases"
    )


def _listed(counts: _Counts) -> list[dict[str, Any]]:
    return [{"event": events.to_json(event), "times": times} for event, times in counts.items()]
