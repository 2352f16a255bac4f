"""What ``result.json`` says under ``measures`` and ``bytes``."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.report.measures import LADDER, Reached, Spent, area_under, mean_of_last, reached
from fl_sim.simulation.measuring import Tested
from fl_sim.simulation.run_log import RunLog
from fl_sim.store.run_directory import RoundRecord
from fl_sim.training.evaluation import Holdings, OwnTests
from fl_sim.types import Traffic
from partitions import FeatureSkew

_PRIVATE = "how many records of which class a client holds is private"
_ONE_HOLDER = "one holder has all records: there are no clients whose accuracies could differ"
_SHARES = "accuracy on the test records, each counted as often as its class occurs with the client"
_SKEWED = f"{_SHARES}; what each client sees of its own in its records is not in it"
_ONCE = "the test records are looked at once at most, after the last round, so nobody knows how rounds before it did"
_UNTOLD = "who took part is secret under Global DP; the bytes of a client in a round depend on no record"
_EARLIER = "some rounds were run by an earlier version, which did not count"


def measures_of(job: Job, log: RunLog) -> dict[str, Any]:
    """Return what ``result.json`` says under ``measures`` and ``bytes``, and of the virtual clock, if there is one.

    What may not be told, or is not known, is None, and ``left_out`` says why.
    """
    return {"measures": _measures(job, log), "bytes": _bytes(log), **_by_clock(log)}


def _by_clock(log: RunLog) -> dict[str, Any]:
    """Return how long all rounds lasted by the virtual clock, and how many updates came too late."""
    timed = [record for record in log.rounds if record.virtual_seconds is not None]
    if not timed:
        return {}
    late = {"late": sum(record.late or 0 for record in timed)} if any(one.late is not None for one in timed) else {}
    return {"virtual_seconds": sum(record.virtual_seconds or 0.0 for record in timed), **late}


def _measures(job: Job, log: RunLog) -> dict[str, Any]:
    left_out = {"client_accuracy": _ONE_HOLDER} if job.experiment.is_central else {}
    left_out |= {"client_accuracy": _PRIVATE} if job.experiment.is_private else {}
    last = _of_the_last(job, log.measured.test) if log.measured and log.measured.test else {}
    if job.experiment.evaluate.test != "rounds":
        untold = dict.fromkeys(("accuracy_of_last_ten", "accuracy_area", "reached"), _ONCE)
        nothing: dict[str, Any] = {"accuracy_of_last_ten": None, "accuracy_area": None, "reached": {}}
        return {**last, **nothing, "left_out": left_out | untold}
    beforehand = _sum(log.before.values())
    spent = Spent(beforehand.down + beforehand.up if beforehand else None, log.preprocess_seconds)
    steps = [reached(log.rounds, accuracy, spent) for accuracy in LADDER]
    reached_so_far = {f"{100 * step.accuracy:g}": _taken(step) for step in steps if step}
    return {
        **last,
        "accuracy_of_last_ten": mean_of_last(log.rounds),
        "accuracy_area": area_under(log.rounds),
        "reached": reached_so_far,
        "left_out": left_out,
    }


def _of_the_last(job: Job, tested: Tested) -> dict[str, Any]:
    """Return what is said of the model that was measured last, on the test records."""
    confusion = tested.confusion
    return {
        "test_records": len(tested.scores.labels),
        "majority_share": confusion.majority_share,
        "balanced_accuracy": confusion.balanced_accuracy,
        "macro_f1": confusion.macro_f1,
        "auc": tested.auc,
        "recalls": [None if np.isnan(recall) else float(recall) for recall in confusion.recalls],
        "confusion": confusion.counts.tolist(),
        **_clients(job.experiment, tested),
    }


def _taken(step: Reached) -> dict[str, float | None]:
    virtual = {} if step.virtual_seconds is None else {"virtual_seconds": step.virtual_seconds}
    return {"round": step.round, "bytes": step.bytes, "seconds": step.seconds, **virtual}


def _clients(experiment: Experiment, tested: Tested) -> dict[str, Any]:
    if (clients := tested.clients) is None:
        return {}
    skewed = isinstance(experiment.partition, FeatureSkew) and experiment.num_clients > 1
    return {
        "client_accuracy": clients.mean,
        "client_deviation": clients.deviation,
        "client_worst_tenth": clients.worst_tenth,
        "client_quantiles": list(clients.quantiles),
        "client_accuracy_is": _own(tested.clients_by) or (_SKEWED if skewed else _SHARES),
    }


def _own(clients_by: Holdings | OwnTests | None) -> str:
    """Say what clients' accuracies are where test records are somebody's, and what is left out; nothing elsewhere."""
    if not isinstance(clients_by, OwnTests):
        return ""
    without, nobodys = (clients_by.counts == 0).sum(), (clients_by.owners < 0).sum()
    lacking = f"; {without:,} of {clients_by.num_clients:,} clients have none, and are left out" if without else ""
    strange = f"; {nobodys:,} test records are of nobody who trains, and are left out" if nobodys else ""
    return f"accuracy on each client's own test records{lacking}{strange}"


def _bytes(log: RunLog) -> dict[str, Any]:
    in_rounds, others = _sum(_traffic(record) for record in log.rounds), {**log.before, **log.after}
    total = _sum([in_rounds, *others.values()])
    left_out = {what: _PRIVATE for what, traffic in others.items() if traffic is None}
    if in_rounds is None:
        left_out["rounds"] = _UNTOLD if log.layer is not None and log.layer.hides_clients else _EARLIER
    return {
        "each_client_in_a_round": _table(log.traffic),
        "rounds": _table(in_rounds),
        "before": {what: _table(traffic) for what, traffic in log.before.items()},
        "after": {what: _table(traffic) for what, traffic in log.after.items()},
        "total": _table(total),
        "left_out": left_out,
    }


def _table(traffic: Traffic | None) -> dict[str, int] | None:
    return asdict(traffic) if traffic else None


def _traffic(record: RoundRecord) -> Traffic | None:
    known = record.bytes_down is not None and record.bytes_up is not None
    return Traffic(record.bytes_down or 0, record.bytes_up or 0) if known else None


def _sum(parts: Iterable[Traffic | None]) -> Traffic | None:
    """Return all together, None where one of them is."""
    total = Traffic(0, 0)
    for part in parts:
        if part is None:
            return None
        total += part
    return total
