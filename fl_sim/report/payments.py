"""The privacy cost of runs on disk: of each run, and of all runs together (see ``fl_sim.privacy.bill``).

A payment is the privacy cost that one privacy statement states. A bill is the total privacy cost of several payments.
This module is imported only when needed, because the accountants take long to import.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_sim.errors import RunError
from fl_sim.privacy import events
from fl_sim.privacy.bill import Bill, Counts, Payment, RunPayments, bills, whole_run
from fl_sim.privacy.terms import Adjacency, rounded_up
from fl_sim.report.files import PrivacyStatement, StageResult
from fl_sim.report.groups import split_of
from fl_sim.report.runs import Found, Problem, SavedRun
from fl_sim.types import called


def bills_of(found: Found) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Return (bills in JSON form, error messages). A bill is the total privacy cost of all runs on one data set.

    Each privacy unit, such as a client or a record, has its own bill. The bills also cover runs that the report does
    not show. A run with damaged privacy statements gives an error message, and is treated as a run with unknown
    published outputs. If no run has a privacy statement, there are no bills. The computation takes seconds.
    """
    if not found.has_statements:
        return [], []
    paid, problems = [], []
    for run in found.read:
        payments = None
        try:
            payments = payments_of(run)
        except (RunError, KeyError, TypeError, ValueError) as error:
            problems.append(Problem(run.path, f"its privacy statements are damaged: {error}"))
        clients = f"{split_of(run)}, {run.config.clients} clients"
        content = run.result.records if run.result else ""
        by_name = not content and ":" in run.config.data
        paid.append(RunPayments(called(run.config.data), clients, payments, _is_bare(run), content, by_name))
    # A digest of records depends on a machine's secret key, so only digests from the same machine can be compared.
    if len({one.content.partition(":")[0] for one in paid if one.content}) > 1:
        paid = [replace(one, by_name=one.by_name or ":" in one.data) for one in paid]
    paid += [RunPayments("", "", None, bare=False)] * found.num_unread
    return [bill.to_json() for bill in bills(paid)], problems


def with_whole_run(statements: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add to each privacy statement of a run the privacy cost of the whole run for the statement's privacy unit.

    The result is a list of the new statements. The added cost is None for a statement without a guarantee, and for a
    statement that already states the cost of the whole run. ``made``: the section ``preprocess`` of the run's
    ``result.json``. The computation takes seconds, because it uses PLD accounting.
    """
    checked = [PrivacyStatement.model_validate(one) for one in statements]
    payments = _payments(checked, StageResult.model_validate(made))
    costs = {unit: whole_run(payments, unit) for unit in {one.unit for one in checked}}
    return [{**one, **_whole(costs[own.unit], own, payments)} for one, own in zip(statements, checked, strict=True)]


def _whole(cost: Bill, statement: PrivacyStatement, payments: Sequence[Payment]) -> dict[str, Any]:
    own = (statement.epsilon, statement.delta or 0.0)
    is_own = (cost.epsilon, cost.delta if cost.totals else own[1]) == own
    if statement.epsilon is None or cost.epsilon is None or is_own:
        return {"epsilon_whole_run": None, "delta_whole_run": None}
    carried = statement.unit == "record" and any(one.unit == "client" and one.on_records for one in payments)
    why = (
        "The rounds protect whole clients, and so each record of a client. The cost for a record is the cost of "
        "replacing the client's data, because a client with a changed record still takes part. "
    )
    guarantee = (
        f"{statement.guarantee}. {why if carried else ''}All releases of the run about a {statement.unit} "
        f"that have a guarantee are together ({rounded_up(cost.epsilon)}, {cost.delta:.4g})-differentially private"
    )
    return {"epsilon_whole_run": cost.epsilon, "delta_whole_run": cost.delta, "guarantee": guarantee}


def payments_of(run: SavedRun) -> tuple[Payment, ...] | None:
    """Return the payments of a run, one for each of its privacy statements; None if its published outputs are unknown.

    Raises RunError, KeyError, TypeError or ValueError for damaged privacy statements.
    """
    result = run.result
    if result is None or (not result.privacy and not result.rounds and result.is_private):
        return None
    return _payments(result.privacy, result.preprocess)


def _payments(statements: Sequence[PrivacyStatement], made: StageResult) -> tuple[Payment, ...]:
    found = [_payment(statement, made) for statement in statements]
    return tuple(replace(one, on_records=one.unit != "client" or made.train_on != "synthetic") for one in found)


def _payment(statement: PrivacyStatement, made: StageResult) -> Payment:
    # If a statement is about a pool of synthetic records, its field ``ledger`` contains the name of the pool's file.
    is_of_pool = statement.unit == "record" and statement.ledger in {"", Path(made.pool).stem}
    pool = made.pool if is_of_pool else ""
    plan = () if statement.planned_events is None else (counted(statement.planned_events),)
    charged = _charged_by_client(made) if pool else plan
    # The epsilon of this privacy statement is its budget, so the epsilon is not computed from the planned events.
    if not pool and statement.epsilon == statement.budget:
        charged = ()
    # The name of a pool's file depends on its content, so it identifies the pool.
    # Two ledgers of PATE, "ID" and "ID, published", have one identity: the second one includes all costs of the first.
    identity = pool or statement.ledger.partition(",")[0]
    delta, adjacency = statement.delta or 0.0, Adjacency(statement.adjacency)
    said = (statement.unit, identity, statement.epsilon, delta, adjacency, charged, statement.simulation_only)
    return Payment(*said, plan=plan)


def _charged_by_client(made: StageResult) -> tuple[Counts, ...]:
    """Return the privacy costs of the synthetic records: the events that were charged to the clients' ledgers.

    A privacy event describes a noisy output, and is counted with its number of occurrences. Clients with equal events
    are returned once. The result is empty if the events of any client are unknown.
    """
    shares = made.clients
    if any(share.facts is None and any(share.counts) for share in shares):
        return ()
    distinct: dict[str, Counts] = {}
    for facts in (share.facts for share in shares if share.facts):
        listed = [
            {"event": facts["labels"], "times": 1},
            {"event": facts["generator"], "times": facts["generator_steps"]},
        ]
        distinct.setdefault(repr(listed), counted(listed))
    return tuple(distinct.values()) or (Counter(),)


def counted(listed: Sequence[Mapping[str, Any]]) -> Counts:
    """Return a privacy statement's events as {event: number}. Raises ValueError or RunError for damaged events."""
    counts: Counts = Counter()
    for one in listed:
        times = one["times"]
        if not events.is_count(times):
            raise ValueError(f"times = {times!r}: the number of releases of an event must be an integer from 0 up")
        if times:
            counts[events.from_json(one["event"])] += times
    return counts


def _is_bare(run: SavedRun) -> bool:
    """Return True if a run published anything about its records without a privacy guarantee."""
    result = run.result
    if result is None:
        return False
    if any(statement.epsilon is None for statement in result.privacy):
        return True
    if run.voted or "client" in {statement.unit for statement in result.privacy}:
        return False
    if run.settings.get("local", {}).get("privacy"):
        return False
    on_raw_records = run.config.preprocess.kind == "none" or run.settings["preprocess"].get("train_on") != "synthetic"
    return on_raw_records and result.rounds > 0
