"""What a run found on disk released about its records, and what it paid for that: see ``fl_sim.privacy.bill``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fl_sim.errors import RunError
from fl_sim.names import called
from fl_sim.privacy import events
from fl_sim.privacy.bill import Bill, Counts, Paid, Payment, whole_run
from fl_sim.privacy.terms import Adjacency, rounded_up
from fl_sim.report.files import Made
from fl_sim.report.groups import split_of
from fl_sim.report.release import Release
from fl_sim.report.runs import Run

_MOMENTS: Final = "moments-"
"""How the identity begins of the moments of features that clients release after training."""


def paid_by(run: Run) -> tuple[Paid, str]:
    """Return what ``run`` paid, and why that is not known; "" where it is, or where the run has no result."""
    payments, problem = None, ""
    try:
        payments = payments_of(run)
    except (RunError, KeyError, TypeError, ValueError) as error:
        problem = f"its privacy statements are damaged: {error}"
    clients = f"{split_of(run)}, {run.config.clients} clients"
    content = run.outcome.records if run.outcome else ""
    by_name = not content and ":" in run.config.data
    return Paid(called(run.config.data), clients, payments, _is_bare(run), content, by_name), problem


def payments_of(run: Run) -> tuple[Payment, ...] | None:
    """Return what a run paid for, None where that is not known.

    Raises RunError, KeyError, TypeError or ValueError where its statements are not as this program writes them.
    """
    outcome = run.outcome
    if outcome is None or (not outcome.privacy and not outcome.rounds and outcome.is_private):
        return None
    return _payments(outcome.privacy, outcome.preprocess)


def with_whole_run(statements: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the statements of a result with what the whole run costs their unit, where that is more than they say.

    ``made``: what the result says of what was done before the first round. Takes seconds: the PLD is computed here.
    """
    releases, preprocess = [Release.model_validate(one) for one in statements], Made.model_validate(made)
    payments = _payments(releases, preprocess)
    costs = {unit: whole_run(payments, unit) for unit in {one.unit for one in releases}}
    return [
        {**one, **_whole(costs[release.unit], release, payments)}
        for one, release in zip(statements, releases, strict=True)
    ]


def _whole(cost: Bill, release: Release, payments: Sequence[Payment]) -> dict[str, Any]:
    own = (release.epsilon, release.delta or 0.0)
    if release.epsilon is None or (cost.epsilon, cost.delta if cost.totals else own[1]) == own:
        return {"epsilon_whole_run": None, "delta_whole_run": None}
    told = {"epsilon_whole_run": cost.epsilon, "delta_whole_run": None if cost.epsilon is None else cost.delta}
    if cost.epsilon is None:
        return told
    carried = release.unit == "record" and any(one.unit == "client" and one.on_records for one in payments)
    why = (
        "The rounds are private per client, and so per record, at what they cost where a client's data are replaced by "
        "others: a record that changes leaves its client taking part. "
    )
    said = (
        f". {why if carried else ''}All that the run releases about a {release.unit} under a guarantee is together "
        f"({rounded_up(cost.epsilon)}, {cost.delta:.4g})-differentially private"
    )
    return told | {"guarantee": f"{release.guarantee}{said}"}


def _payments(releases: Sequence[Release], made: Made) -> tuple[Payment, ...]:
    found = [_payment(release, made) for release in releases]
    return tuple(replace(one, on_records=one.unit != "client" or made.train_on != "synthetic") for one in found)


def _payment(release: Release, made: Made) -> Payment:
    pool = made.pool if release.unit == "record" and not release.ledger.startswith(_MOMENTS) else ""
    if pool:
        charged = _charged_by_client(made)
    elif release.planned_events is None or release.epsilon == release.budget:
        charged = ()  # what holds is the budget, and no events say that
    else:
        charged = (_counted(release.planned_events),)
    # A pool's file is named by its content. What PATE publishes about its labels ("ID, published") includes them.
    identity = pool or release.ledger.partition(",")[0]
    delta, adjacency = release.delta or 0.0, Adjacency(release.adjacency)
    plan = () if release.planned_events is None else (_counted(release.planned_events),)
    said = (release.unit, identity, release.epsilon, delta, adjacency, charged, release.simulation_only)
    return Payment(*said, plan=plan)


def _charged_by_client(made: Made) -> tuple[Counts, ...]:
    """Return what the clients of a pool paid, each different bill once; nothing where no client released any."""
    shares = made.clients
    if any(share.facts is None and any(share.counts) for share in shares):
        return ()
    told: dict[str, Counts] = {}
    for facts in (share.facts for share in shares if share.facts):
        listed = [
            {"event": facts["labels"], "times": 1},
            {"event": facts["generator"], "times": facts["generator_steps"]},
        ]
        told.setdefault(repr(listed), _counted(listed))
    return tuple(told.values()) or (Counter(),)


def _counted(listed: Sequence[Mapping[str, Any]]) -> Counts:
    counts: Counts = Counter()
    for one in listed:
        times = one["times"]
        if not events.is_count(times):
            raise ValueError(f"{times!r} releases of an event: give a whole number from 0 up")
        if times:
            counts[events.from_json(one["event"])] += times
    return counts


def _is_bare(run: Run) -> bool:
    """Return whether a run released anything about its records without a guarantee."""
    outcome = run.outcome
    if outcome is None:
        return False
    if any(release.epsilon is None for release in outcome.privacy):
        return True
    if run.voted or "client" in {release.unit for release in outcome.privacy}:
        return False
    on_raw_records = run.config.preprocess.kind == "none" or run.settings["preprocess"].get("train_on") != "synthetic"
    return on_raw_records and outcome.rounds > 0
