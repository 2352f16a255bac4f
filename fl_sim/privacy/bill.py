"""What all releases about the same units cost together: one bill for each data set and unit.

Whoever sees several runs about the same records sees all of their releases, so a record pays for all of them: for each
epsilon, for each seed, for each run. The largest of their epsilons would be an under-count. A release that several runs
use (a pool of synthetic records, the labels of PATE) is paid for once. A release that protects a client protects each
of its records, which pays for it, too (``payments_of_unit``); one that protects records protects no client.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from dp_accounting import dp_event

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import bounds, compose, epsilon_of_counts, epsilon_of_curve
from fl_sim.privacy.events import adjacency, under_replacement
from fl_sim.privacy.loss_distribution import NoTimeError
from fl_sim.privacy.terms import Adjacency, none_if_infinite, rounded_up

Counts: TypeAlias = Counter[dp_event.DpEvent]

_MOST_BY_PLD: Final = 12  # kinds of events; each takes the PLD accountant about a second
_NEIGHBOURS: Final = {
    Adjacency.ADD_OR_REMOVE_ONE: "adding or removing one",
    Adjacency.REPLACE_ONE: "replacing one",
}


@dataclass(frozen=True)
class Payment:
    """One release, as its statement says it.

    ``identity``: payments of one identity are for one release; "" is a release of its own. ``epsilon`` None: no
    guarantee. ``charged``: all that was fixed beforehand, as events (empty counts: nothing is released); several where
    units were charged differently, none where it is not known, or where a budget is what holds; ``plan`` is then what
    was to be released within it. ``on_records``: whether what was released looked at
    records; False where it looked at synthetic ones alone.
    """

    unit: str
    identity: str
    epsilon: float | None
    delta: float
    adjacency: Adjacency
    charged: tuple[Counts, ...] = ()
    simulation_only: bool = False
    on_records: bool = True
    plan: tuple[Counts, ...] = ()


@dataclass(frozen=True)
class Paid:
    """What one run released about the records of ``data``, "" where not even that is known.

    ``clients`` says whose clients they are: a split.
    ``bare``: it released something about them without a guarantee. ``payments`` None: what it released is not known.
    ``content``: what tells the records apart whatever they are called, "" where that is not known; ``by_name``: whether
    nothing but ``data`` tells them apart from those of other runs.
    """

    data: str
    clients: str
    payments: tuple[Payment, ...] | None
    bare: bool
    content: str = ""
    by_name: bool = False


@dataclass(frozen=True)
class Total:
    """What ``releases`` under one adjacency cost together: (epsilon, delta) twice, and both hold.

    ``plain``: all epsilons and all deltas added up. ``joint``: by composing their events, where that bounds anything.
    """

    adjacency: Adjacency
    releases: int
    plain: tuple[float, float]
    joint: tuple[float, float]


@dataclass(frozen=True)
class Bill:
    """What all ``runs`` about the records of ``data`` cost one ``unit``.

    ``clients``: whose clients; "" where the unit is not the client. ``totals``: for each adjacency what the private
    releases cost. ``bare``, ``elsewhere``, ``unknown``: how many runs released something without a guarantee, released
    something that protects other units alone, and do not say what they released. ``simulated``: how many releases drew
    their noise from a published seed. ``also``: what else the records are called. ``by_name``: how many runs tell their
    records by name alone, where that matters.
    """

    data: str
    unit: str
    clients: str
    totals: tuple[Total, ...]
    runs: int
    bare: int
    elsewhere: int
    unknown: int
    simulated: int
    also: tuple[str, ...] = ()
    by_name: int = 0

    @property
    def epsilon(self) -> float | None:
        """Return the smallest epsilon of everything together, at ``delta``; None for no guarantee."""
        return None if self.bare or self.unknown else none_if_infinite(self._together[0])

    @property
    def delta(self) -> float:
        """Return the delta of ``epsilon``."""
        return self._together[1]

    @property
    def _together(self) -> tuple[float, float]:
        """Add up both adjacencies. To replace one is to remove it and to add another: twice, by group privacy."""
        epsilon, delta = 0.0, 0.0
        for total in self.totals:
            own = min(total.joint, total.plain)
            if total.adjacency is Adjacency.ADD_OR_REMOVE_ONE and len(self.totals) > 1:
                own = _replaced(*own)
            epsilon, delta = epsilon + own[0], delta + own[1]
        return (epsilon, delta) if delta < 1 else (math.inf, 1.0)

    @property
    def in_words(self) -> str:
        """Return the bill as a reader is told it."""
        also = f", also called {', '.join(self.also)}," if self.also else ""
        whose = also + (f" ({self.clients})" if self.clients else "")
        about = f"Privacy of all {self.runs} runs together, of one {self.unit} of {self.data}{whose}"
        costs = "; ".join(map(_cost, self.totals)) or "nothing is released"
        lines = [f"{about}: {costs}"]
        if missing := self._missing():
            lines = [f"{about}: none, since {missing}", f"The private releases among themselves cost {costs}"]
        elif len(self.totals) > 1:
            lines.append(self._both())
        if self.elsewhere:
            lines.append(
                f"In no sum here: {self.elsewhere} of the runs, which released something that protects other units "
                "alone"
            )
        if self.simulated:
            lines.append(
                f"{self.simulated} of these releases drew their noise from a published seed: a simulation only"
            )
        if self.by_name:
            lines.append(
                f"The names of their data alone tell what {self.by_name} of all runs here are about (an earlier "
                "version made them, or another machine): the same records under another name would pay for both"
            )
        return ". ".join(lines) + "."

    def _missing(self) -> str:
        why = []
        if self.bare:
            why.append(
                f"{self.bare} of the {self.runs} runs released something about the same records without a guarantee"
            )
        if self.unknown:
            why.append(f"it is not known what {self.unknown} of the {self.runs} runs released")
        return " and ".join(why)

    def _both(self) -> str:
        if self.epsilon is None:
            return f"Under replacing one {self.unit}, all of them together promise nothing"
        return (
            f"All of them under replacing one {self.unit}, which is at most removing one and adding another: epsilon "
            f"{rounded_up(self.epsilon)} at delta {self.delta:.4g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the bill for programs."""
        return {
            "data": self.data, "also_called": list(self.also), "unit": self.unit, "clients": self.clients,
            "epsilon": self.epsilon, "delta": self.delta,
            "private_releases": [
                {
                    "adjacency": str(total.adjacency), "releases": total.releases,
                    "epsilon_joint": total.joint[0], "delta_joint": total.joint[1],
                    "epsilon_sum": total.plain[0], "delta_sum": total.plain[1],
                }
                for total in self.totals
            ],
            "runs": self.runs, "runs_without_guarantee": self.bare, "runs_that_protect_others": self.elsewhere,
            "runs_not_known": self.unknown, "runs_told_by_name": self.by_name, "simulation_only": self.simulated,
            "in_words": self.in_words,
        }  # fmt: skip


def bills(runs: Sequence[Paid]) -> list[Bill]:
    """Return a bill for each data set and unit of which something was paid for, in order.

    Runs are about the same records where their data have one name or one content. Clients of another split are other
    clients, so these have a bill for each split. Takes seconds: the PLD is computed here.
    """
    groups = _by_records(runs)
    by_name = sum(run.by_name for run in runs) if len(groups) > 1 else 0
    return [bill for names, mine in groups for bill in _bills_of([*names], mine, by_name)]


def payments_of_unit(run: Paid, unit: str, clients: str = "") -> tuple[Payment, ...]:
    """Return what a run makes one ``unit`` pay: everybody who says what a run costs asks this.

    A release that protects a client protects each of its records: a record that changes leaves its client taking part,
    with other data. ``clients``: whose clients, where the unit is the client.
    """
    own = [one for one in run.payments or () if one.unit == unit and _whose(run, unit) == clients]
    if unit != "record":
        return tuple(own)
    relations = {one.adjacency for one in own}
    relation = Adjacency.REPLACE_ONE if relations == {Adjacency.REPLACE_ONE} else Adjacency.ADD_OR_REMOVE_ONE
    of_clients = (one for one in run.payments or () if one.unit == "client" and one.on_records)
    return (*own, *(_of_a_record(one, relation) for one in of_clients))


def whole_run(payments: Sequence[Payment], unit: str) -> Bill:
    """Return what one run alone costs a ``unit``."""
    return _bill("", unit, "", [Paid("", "", tuple(payments), bare=False)])


def _of_a_record(payment: Payment, relation: Adjacency) -> Payment:
    """Return what a release that protects clients costs one of their records, whose ``relation`` is either."""
    mine = replace(payment, unit="record", adjacency=relation)
    if payment.epsilon is None:
        return mine
    try:
        charged = tuple(_under_replacement(counts) for counts in payment.charged or payment.plan)
        costs = [_least(counts, payment.delta) for counts in charged]
    except UserError:
        charged, costs = (), []
    if costs:
        return replace(mine, epsilon=none_if_infinite(max(costs)), charged=charged, plan=())
    if payment.adjacency is Adjacency.REPLACE_ONE:
        return replace(mine, charged=())
    epsilon, delta = _replaced(payment.epsilon, payment.delta)
    return replace(mine, epsilon=epsilon, delta=delta, charged=())


def _under_replacement(counts: Counts) -> Counts:
    replaced: Counts = Counter()
    for event, times in counts.items():
        replaced[under_replacement(event)] += times  # two events may become one
    return replaced


def _replaced(epsilon: float, delta: float) -> tuple[float, float]:
    """Return what replacing one costs where adding or removing one costs this: twice, by group privacy."""
    return 2 * epsilon, delta * (1 + math.exp(min(epsilon, 700.0)))


def _by_records(runs: Sequence[Paid]) -> list[tuple[dict[str, None], list[Paid]]]:
    """Return {names} and runs for each set of records, in order; runs on nobody knows what are in all of them."""
    groups: list[tuple[dict[str, None], set[str]]] = []
    for run in runs:
        names, contents = {run.data: None} if run.data else {}, {run.content} - {""}
        same = [one for one in groups if one[0].keys() & names.keys() or one[1] & contents]
        if not run.data and not same:
            continue
        place = groups.index(same[0]) if same else len(groups)
        for one in same:
            names, contents = {**one[0], **names} if one is same[0] else {**names, **one[0]}, contents | one[1]
            groups.remove(one)
        groups.insert(place, (names, contents))
    return [
        (names, [run for run in runs if not (run.data or run.content) or run.data in names or run.content in contents])
        for names, contents in groups
    ]


def _bills_of(names: Sequence[str], runs: Sequence[Paid], by_name: int) -> list[Bill]:
    places: dict[tuple[str, str], None] = {}
    for run in runs:
        for one in run.payments or ():
            places.setdefault((one.unit, _whose(run, one.unit)))
    made = (_bill(names[0], *place, runs) for place in places)
    return [replace(bill, also=tuple(names[1:]), by_name=by_name) for bill in made]


def _whose(run: Paid, unit: str) -> str:
    return run.clients if unit == "client" else ""


def _bill(data: str, unit: str, clients: str, runs: Sequence[Paid]) -> Bill:
    mine = [payments_of_unit(run, unit, clients) for run in runs]
    releases = _released(one for payments in mine for one in payments)
    bare = [run.bare or any(one.epsilon is None for one in own) for run, own in zip(runs, mine, strict=True)]
    private = [one for one in releases if one.epsilon is not None and (not one.charged or any(one.charged))]
    totals = (_total(relation, [one for one in private if one.adjacency is relation]) for relation in Adjacency)
    return Bill(
        data,
        unit,
        clients,
        tuple(total for total in totals if total.releases),
        runs=len(runs),
        bare=sum(bare),
        elsewhere=sum(_has_others(run, unit, clients) and not without for run, without in zip(runs, bare, strict=True)),
        unknown=sum(run.payments is None for run in runs),
        simulated=sum(one.simulation_only for one in private),
    )


def _has_others(run: Paid, unit: str, clients: str) -> bool:
    """Return whether a run released something that protects other units, and not this one."""
    others = [one for one in run.payments or () if (one.unit, _whose(run, one.unit)) != (unit, clients)]
    return any(unit != "record" or one.unit != "client" for one in others)


def _released(payments: Iterable[Payment]) -> list[Payment]:
    """Return one payment for each release: the dearest, since a run that was interrupted has paid for a part of it."""
    releases: list[Payment] = []
    known: dict[str, int] = {}
    for one in payments:
        place = known.get(one.identity) if one.identity else None
        if place is None:
            known[one.identity] = len(releases)
            releases.append(one)
        elif _dearness(one) > _dearness(releases[place]):
            releases[place] = one
    return releases


def _dearness(payment: Payment) -> float:
    return math.inf if payment.epsilon is None else payment.epsilon


def _total(relation: Adjacency, payments: Sequence[Payment]) -> Total:
    known, plain = [one for one in payments if one.charged], _added(payments)
    if len(payments) < 2 or not known:
        return Total(relation, len(payments), plain, plain)
    kinds: dict[frozenset[Adjacency], list[Payment]] = {}
    for one in known:
        kinds.setdefault(_stated_under(one), []).append(one)
    parts = [_joined(some) for some in kinds.values()]
    rest = _added([one for one in payments if not one.charged])
    whole = (math.fsum([*(epsilon for epsilon, _ in parts), rest[0]]), math.fsum([*(of for _, of in parts), rest[1]]))
    return Total(relation, len(payments), plain, whole if math.isfinite(whole[0]) else plain)


def _stated_under(payment: Payment) -> frozenset[Adjacency]:
    """Return under which adjacencies the events of a payment are stated: events of two do not compose."""
    stated = (adjacency(event) for counts in payment.charged for event in counts)
    return frozenset(one for one in stated if one is not None) or frozenset({Adjacency.ADD_OR_REMOVE_ONE})


def _joined(payments: Sequence[Payment]) -> tuple[float, float]:
    """Return what payments ``_stated_under`` the same cost by composing their events; one costs what its run says."""
    if len(payments) == 1:
        return payments[0].epsilon or 0.0, payments[0].delta
    delta = max(one.delta for one in payments)
    if len(_stated_under(payments[0])) > 1:
        return math.inf, delta  # a statement may carry events over to its own adjacency; two kinds do not compose
    return _composed([one.charged for one in payments], delta), delta


def _added(payments: Sequence[Payment]) -> tuple[float, float]:
    return math.fsum(one.epsilon or 0.0 for one in payments), math.fsum(one.delta for one in payments)


def _composed(charged: Sequence[tuple[Counts, ...]], delta: float) -> float:
    """Return epsilon of everything at ``delta``; of units that were charged differently the dearest at every order."""
    if any(len(alternatives) > 1 for alternatives in charged):
        curves = (np.max([compose(counts) for counts in alternatives], axis=0) for alternatives in charged)
        return epsilon_of_curve(np.sum(list(curves), axis=0), delta)
    counts: Counts = Counter()
    for [only] in charged:
        counts += only
    return _least(counts, delta) if len(counts) <= _MOST_BY_PLD else epsilon_of_counts(counts, delta)


def _least(counts: Counts, delta: float) -> float:
    """Return the smaller of both accountants' epsilons; that of RDP where there is no time for a PLD."""
    try:
        return bounds(counts, delta).least
    except NoTimeError:
        return epsilon_of_counts(counts, delta)


def _cost(total: Total) -> str:
    what = f"{total.releases} private release{'' if total.releases == 1 else 's'} under {_NEIGHBOURS[total.adjacency]}"
    if total.joint == total.plain:
        return f"epsilon {rounded_up(total.plain[0])} at delta {total.plain[1]:.4g} ({what})"
    return (
        f"epsilon {rounded_up(total.joint[0])} at delta {total.joint[1]:.4g} by composing all events, and "
        f"{rounded_up(total.plain[0])} at delta {total.plain[1]:.4g} as the plain sum ({what})"
    )
