"""What a run found on disk released about its records, and what it paid for that: see ``fl_sim.privacy.bill``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fl_sim.errors import RunError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import Adjacency
from fl_sim.privacy.bill import Counts, Paid, Payment
from fl_sim.report.files import Outcome
from fl_sim.report.groups import split_of
from fl_sim.report.release import Release
from fl_sim.report.runs import Run
from fl_sim.same_records import records_of

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
    return Paid(records_of(run.config.data), clients, payments, _is_bare(run)), problem


def payments_of(run: Run) -> tuple[Payment, ...] | None:
    """Return what a run paid for, None where that is not known.

    Raises RunError, KeyError, TypeError or ValueError where its statements are not as this program writes them.
    """
    outcome = run.outcome
    if outcome is None or (not outcome.privacy and not outcome.rounds and outcome.is_private):
        return None
    return tuple(_payment(release, outcome) for release in outcome.privacy)


def _payment(release: Release, outcome: Outcome) -> Payment:
    pool = outcome.preprocess.pool if release.unit == "record" and not release.ledger.startswith(_MOMENTS) else ""
    if pool:
        charged = _charged_by_client(outcome)
    elif release.planned_events is None or release.epsilon == release.budget:
        charged = ()  # what holds is the budget, and no events say that
    else:
        charged = (_counted(release.planned_events),)
    # A pool's file is named by its content. What PATE publishes about its labels ("ID, published") includes them.
    identity = pool or release.ledger.partition(",")[0]
    delta, adjacency = release.delta or 0.0, Adjacency(release.adjacency)
    return Payment(release.unit, identity, release.epsilon, delta, adjacency, charged, release.simulation_only)


def _charged_by_client(outcome: Outcome) -> tuple[Counts, ...]:
    """Return what the clients of a pool paid, each different bill once; nothing where no client released any."""
    shares = outcome.preprocess.clients
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
