"""Privacy bills: the joint privacy cost of all releases (published results) about the same records or clients.

A bill contains releases that were made and releases that are planned.

An adversary may see all releases about the same records, from runs with any epsilon and seed. So the cost for a record
is the joint cost of all these releases. The largest epsilon of a single run would be too small.

If several runs use one release, such as a pool of synthetic records or the labels of PATE, this release counts once. A
release that protects a client protects each record of this client. So the release counts in the bill of a record, too
(``payments_of_unit``). A release that protects records protects no client.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from dp_accounting import dp_event

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import bounds, compose, epsilon_of_counts, epsilon_of_curve
from fl_sim.privacy.events import adjacency, from_json, single_steps, under_replacement
from fl_sim.privacy.ledger import Ledger
from fl_sim.privacy.loss_distribution import NoTimeError
from fl_sim.privacy.terms import Adjacency, Terms, none_if_infinite, rounded_up

Counts: TypeAlias = Counter[dp_event.DpEvent]

_MOST_BY_PLD: Final = 12  # maximum number of distinct events; the PLD accountant takes about a second for each
_NEIGHBOURS: Final = {
    Adjacency.ADD_OR_REMOVE_ONE: "adding or removing one",
    Adjacency.REPLACE_ONE: "replacing one",
}


@dataclass(frozen=True)
class Payment:
    """The privacy cost of one release, taken from its privacy statement.

    ``unit``: the privacy unit. ``identity``: a name of the release, so that several payments for one release are
    recognised; "" if there are no other payments for the release. ``epsilon``: None for no guarantee. ``adjacency``:
    the adjacency of ``epsilon`` and ``delta``. ``charged``: the planned releases, as mappings {event: number of
    releases}. There are several mappings if the cost differs between units, such as between the records of different
    clients; otherwise one. ``charged`` is empty if the events are unknown, or if ``epsilon`` is a privacy budget.
    ``plan``: the planned releases in the form of ``charged``, given even if ``epsilon`` is a privacy budget.
    ``simulation_only``: True if the noise comes from a published seed. ``on_records``: False for a release that read
    only synthetic records.
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
class RunPayments:
    """The payments for all releases of one run.

    ``data``: the name of the data set, "" if it is unknown. ``clients``: the partition, as a text. ``payments``: one
    for each privacy statement of the run; None if the run's releases are unknown. ``bare``: True if the run published
    something about the records without a guarantee. ``content``: a digest of the records, independent of the data set's
    name; "" if it is unknown. ``by_name``: True if these records can be compared with the records of other runs only by
    the name ``data``.
    """

    data: str
    clients: str
    payments: tuple[Payment, ...] | None
    bare: bool
    content: str = ""
    by_name: bool = False


@dataclass(frozen=True)
class Total:
    """The joint privacy cost of several releases under one adjacency, as two valid pairs (epsilon, delta).

    ``releases``: the number of releases. ``plain``: the sum of all epsilons and the sum of all deltas. ``joint``:
    epsilon and delta from the composition of all events; equal to ``plain`` if the composition gives no bound.
    """

    adjacency: Adjacency
    releases: int
    plain: tuple[float, float]
    joint: tuple[float, float]


@dataclass(frozen=True)
class Bill:
    """The joint privacy cost of several runs about the records of one data set, for one privacy unit.

    ``runs``: the number of runs. ``data``: the name of the data set. ``unit``: the privacy unit. ``clients``: the
    partition of the records, "" if the unit is not the client. ``totals``: the costs of the private releases, one for
    each adjacency. ``bare``: the number of runs that published something without a guarantee. ``elsewhere``: the number
    of runs whose releases protect only other units. ``unknown``: the number of runs whose releases are unknown.
    ``simulated``: the number of releases with noise from a published seed. ``also``: other names of the data set with
    these records. ``by_name``: the number of runs that identify their records only by name, 0 if all runs are known to
    be about the same records.
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
        """Return the smallest epsilon that is proven for all releases together, at ``delta``; None for no guarantee."""
        return None if self.bare or self.unknown else none_if_infinite(self._together[0])

    @property
    def delta(self) -> float:
        """Return the delta of the bill's joint guarantee (``epsilon``, ``delta``) for all releases."""
        return self._together[1]

    @property
    def _together(self) -> tuple[float, float]:
        """Return the joint (epsilon, delta) of all releases of the bill.

        If the bill has costs under both adjacencies, the result is their sum under replace-one. A replacement is the
        removal of one unit and the addition of another unit. So the cost under add-or-remove-one is first converted to
        replace-one, by group privacy for two units.
        """
        epsilon, delta = 0.0, 0.0
        for total in self.totals:
            own = min(total.joint, total.plain)
            if total.adjacency is Adjacency.ADD_OR_REMOVE_ONE and len(self.totals) > 1:
                own = _replaced(*own)
            epsilon, delta = epsilon + own[0], delta + own[1]
        return (epsilon, delta) if delta < 1 else (math.inf, 1.0)

    @property
    def in_words(self) -> str:
        """Return the bill (joint privacy cost) as sentences, for reports."""
        also = f", also called {', '.join(self.also)}," if self.also else ""
        whose = also + (f" ({self.clients})" if self.clients else "")
        about = f"Privacy of all {self.runs} runs together, of one {self.unit} of {self.data}{whose}"
        costs = "; ".join(map(_cost, self.totals)) or "nothing is released"
        why = []
        if self.bare:
            why.append(
                f"{self.bare} of the {self.runs} runs released something about the same records without a guarantee"
            )
        if self.unknown:
            why.append(f"the releases of {self.unknown} of the {self.runs} runs are not known")
        lines = [f"{about}: {costs}"]
        if why:
            lines = [f"{about}: none, since {' and '.join(why)}", f"The private releases alone cost {costs}"]
        elif len(self.totals) > 1:
            lines.append(
                f"Under replacing one {self.unit}, all private releases together have no guarantee"
                if self.epsilon is None
                else f"All private releases together, under replacing one {self.unit} (a removal and an addition): "
                f"epsilon {rounded_up(self.epsilon)} at delta {self.delta:.4g}"
            )
        if self.elsewhere:
            lines.append(
                f"Not included here: {self.elsewhere} of the runs, whose releases protect only other privacy units"
            )
        if self.simulated:
            lines.append(
                f"{self.simulated} of these releases drew their noise from a published seed: a simulation only"
            )
        if self.by_name:
            lines.append(
                f"{self.by_name} of all runs here identify their records only by the name of the data set (an earlier "
                "version or another machine made these runs). If two such names mean the same records, the costs of "
                "both add up"
            )
        return ". ".join(lines) + "."

    def to_json(self) -> dict[str, Any]:
        """Return the bill (joint privacy cost) as JSON values, for programs."""
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


def bills(runs: Sequence[RunPayments]) -> list[Bill]:
    """Return one bill for each data set and each privacy unit that a payment names, in order of appearance.

    Two runs are about the same records if their data have the same name or the same content. Another partition makes
    other clients, so for the unit client each partition has its own bill. A call takes seconds, because it computes
    PLDs.
    """
    groups, found = _by_records(runs), list[Bill]()
    by_name = sum(run.by_name for run in runs) if len(groups) > 1 else 0
    for (first, *also), mine in groups:
        places = dict.fromkeys((one.unit, _whose(run, one.unit)) for run in mine for one in run.payments or ())
        found += (replace(_bill(first, *place, mine), also=tuple(also), by_name=by_name) for place in places)
    return found


def payments_of_unit(run: RunPayments, unit: str, clients: str = "") -> tuple[Payment, ...]:
    """Return all payments of a run that belong to the bill of one privacy unit, ``unit``.

    The privacy costs that a report shows for this run are computed from these payments. If the unit is a record,
    payments for clients are included, too: a changed record changes the data of its client. ``clients``: the partition
    of the records, if the unit is the client.
    """
    own = [one for one in run.payments or () if one.unit == unit and _whose(run, unit) == clients]
    if unit != "record":
        return tuple(own)
    relations = {one.adjacency for one in own}
    relation = Adjacency.REPLACE_ONE if relations == {Adjacency.REPLACE_ONE} else Adjacency.ADD_OR_REMOVE_ONE
    of_clients = (one for one in run.payments or () if one.unit == "client" and one.on_records)
    return (*own, *(_of_a_record(one, relation) for one in of_clients))


def whole_run(payments: Sequence[Payment], unit: str) -> Bill:
    """Return the bill of a single run for the privacy unit ``unit``. ``payments``: all its payments for this unit."""
    return _bill("", unit, "", [RunPayments("", "", tuple(payments), bare=False)])


def payment_of(terms: Terms, releases: Mapping[dp_event.DpEvent, int], identity: str, *, is_simulated: bool) -> Payment:
    """Return the payment under ``terms`` for ``releases``, {event: number}, that are fixed before a run begins.

    ``identity``: see ``Payment``. If a forecast has no time to compute a PLD, the epsilon is the smaller of two upper
    bounds: the budget, and the RDP accountant's epsilon of all planned releases.
    """
    try:
        said = Ledger(terms).statement(covers="", does_not_cover="", simulation_only=is_simulated, planned=releases)
    except NoTimeError:
        plan, spent = single_steps(releases), epsilon_of_counts(releases, terms.delta)
        is_within = terms.budget is not None and terms.budget < spent
        epsilon = terms.budget if is_within else none_if_infinite(spent)
    else:
        # all planned releases, or the number of releases that the budget allows
        plan = Counter({from_json(one["event"]): one["times"] for one in said["planned_events"]})
        epsilon = said["epsilon"]
        is_within = epsilon is not None and epsilon == terms.budget
    charged = () if is_within else (plan,)
    return Payment(terms.unit, identity, epsilon, terms.delta, terms.adjacency, charged, is_simulated, plan=(plan,))


def _of_a_record(payment: Payment, relation: Adjacency) -> Payment:
    """Convert a payment for the unit client to a payment for the unit record.

    ``relation``: the adjacency of the new payment.
    """
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
        replaced[under_replacement(event)] += times  # adds, because two distinct events may become equal
    return replaced


def _replaced(epsilon: float, delta: float) -> tuple[float, float]:
    """Convert (epsilon, delta) from add-or-remove-one to replace-one adjacency.

    Group privacy for two units gives the result, because a replacement is a removal and an addition.
    """
    return 2 * epsilon, delta * (1 + math.exp(min(epsilon, 700.0)))


def _by_records(runs: Sequence[RunPayments]) -> list[tuple[dict[str, None], list[RunPayments]]]:
    """Group the runs by their records. Return (names of the data set, runs) for each group.

    A run with unknown records is in every group.
    """
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


def _whose(run: RunPayments, unit: str) -> str:
    return run.clients if unit == "client" else ""


def _bill(data: str, unit: str, clients: str, runs: Sequence[RunPayments]) -> Bill:
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


def _has_others(run: RunPayments, unit: str, clients: str) -> bool:
    """Return True if a run made a release that does not protect ``unit``, but another privacy unit.

    The bill of ``unit`` leaves this release out.
    """
    others = [one for one in run.payments or () if (one.unit, _whose(run, one.unit)) != (unit, clients)]
    return any(unit != "record" or one.unit != "client" for one in others)


def _released(payments: Iterable[Payment]) -> list[Payment]:
    """Return one payment for each release: the largest payment if several runs paid for the same release.

    The payments may differ, because an interrupted run has paid for only a part of the release.
    """
    releases: list[Payment] = []
    known: dict[str, int] = {}
    for one in payments:
        place = known.get(one.identity) if one.identity else None
        if place is None:
            known[one.identity] = len(releases)
            releases.append(one)
        elif _cost_of(one) > _cost_of(releases[place]):
            releases[place] = one
    return releases


def _cost_of(payment: Payment) -> float:
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
    """Return the set of adjacencies of all privacy events in ``payment``.

    Payments can be composed only if their sets are equal.
    """
    stated = (adjacency(event) for counts in payment.charged for event in counts)
    return frozenset(one for one in stated if one is not None) or frozenset({Adjacency.ADD_OR_REMOVE_ONE})


def _joined(payments: Sequence[Payment]) -> tuple[float, float]:
    """Return the joint (epsilon, delta) of ``payments``, by composing all their privacy events.

    All payments must have the same adjacencies. For a single payment, the result is the payment's epsilon and delta.
    """
    if len(payments) == 1:
        return payments[0].epsilon or 0.0, payments[0].delta
    delta = max(one.delta for one in payments)
    if len(_stated_under(payments[0])) > 1:
        # The costs of events with two adjacencies cannot be composed.
        return math.inf, delta
    return _composed([one.charged for one in payments], delta), delta


def _added(payments: Sequence[Payment]) -> tuple[float, float]:
    return math.fsum(one.epsilon or 0.0 for one in payments), math.fsum(one.delta for one in payments)


def _composed(charged: Sequence[tuple[Counts, ...]], delta: float) -> float:
    """Return the joint epsilon at ``delta`` of several releases, by composing their events.

    ``charged``: for each release, one mapping {event: number}, or several mappings if the cost differs between units.
    For several mappings, the largest of their Renyi divergences is taken at each order.
    """
    if any(len(alternatives) > 1 for alternatives in charged):
        curves = (np.max([compose(counts) for counts in alternatives], axis=0) for alternatives in charged)
        return epsilon_of_curve(np.sum(list(curves), axis=0), delta)
    counts: Counts = Counter()
    for [only] in charged:
        counts += only
    return _least(counts, delta) if len(counts) <= _MOST_BY_PLD else epsilon_of_counts(counts, delta)


def _least(counts: Counts, delta: float) -> float:
    """Return the joint epsilon of the releases ``counts``: the smaller of the RDP epsilon and the PLD epsilon.

    If a forecast has no time to compute a PLD, return the RDP epsilon.
    """
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
