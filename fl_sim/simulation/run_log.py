"""What a run has to show: its log while it goes, the observers that see it, and result.json."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fl_sim.data import is_own, sealed_content, tuned_on
from fl_sim.data.naming import without_settings
from fl_sim.errors import Diverged, RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of, short_form, title_of
from fl_sim.params import num_parameters
from fl_sim.report.measures import LADDER, Reached, Spent, area_under, mean_of_last, reached
from fl_sim.simulation.measuring import Measured
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, coarse
from fl_sim.store.tensors import StateChecksum, write_private
from fl_sim.training.evaluation import Holdings, OwnTests, area_under_roc
from fl_sim.types import Params, ServerState, Traffic
from partitions import FeatureSkew
from strategies.algorithm import Reporting
from strategies.layer import Layer


@dataclass(frozen=True)
class Pooled:
    """Records that all clients train on: ``count`` of them, in the file ``path``."""

    path: Path
    count: int


class Telling(Protocol):
    """What has done something before or after the rounds, and says what, for ``result.json``."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts, by their keys there."""
        ...

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return the privacy statements ``others`` with its own among them."""
        ...


@dataclass
class RunLog:
    """What a run has to show so far.

    ``engine``: its kind; ``trainer``: who trains clients, in words. ``measured``: the last model that was;
    ``measured_again``: after a stage that changed the model of the last round. ``pooled``: what all clients train on.
    ``stages``: of the run; ``layer``: the outermost one of its rounds; ``layer_states``: {layer: its part of the
    checkpoint}. ``traffic``: of each client in a round, None
    where there was none; ``before`` and ``after`` the rounds: of all clients, by what it was, None where that depends
    on private records. ``facts`` and ``statements`` (of privacy) are a procedure's own: they go into ``result.json`` as
    they are. ``records``: a digest of the user's own records, for the checkpoint. ``versions``: {round: digest} of the
    models that are kept for clients still at work on them. ``counts_holders``: whether clients without records are left
    out where an algorithm counts all clients. ``fixed``: what of the model nobody trains, which is saved beside what
    the server has.
    """

    server: ServerState
    rounds: list[RoundRecord] = field(default_factory=list)
    preprocess_seconds: float = 0.0
    engine: str = ""
    trainer: str = ""
    stopped: str = ""
    layer: Layer | None = None
    pooled: Pooled | None = None
    stages: tuple[Telling, ...] = ()
    measured: Measured | None = None
    measured_again: Measured | None = None
    traffic: Traffic | None = None
    before: dict[str, Traffic | None] = field(default_factory=dict)
    after: dict[str, Traffic | None] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    statements: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    chain: str = ""
    layer_states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seal: StateChecksum | None = None
    records: str = ""
    versions: dict[int, str] = field(default_factory=dict)
    counts_holders: bool = True
    fixed: Params = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def num_pooled(self) -> int:
        """Return how many records the pool has that all clients train on; 0 where there is none."""
        return self.pooled.count if self.pooled else 0


class Observer(Protocol):
    """Whoever shows progress."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Hear which engine was taken and why, and where the run begins (above 1 where it goes on after a crash)."""
        ...

    def preparing(self, what: str) -> None:
        """Hear what clients do before the first round; ``replied`` counts who is done."""
        ...

    def replied(self, replies: int) -> None:
        """Hear how many clients of the current exchange have answered."""
        ...

    def finished_round(self, record: RoundRecord) -> None:
        """Hear of a round, whose line in ``rounds.jsonl`` and checkpoint are on the disk."""
        ...

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Hear what ``result.json`` says, also of a run that failed or was interrupted."""
        ...


class Silent:
    """Shows nothing."""

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Ignore the start."""

    def preparing(self, what: str) -> None:
        """Ignore what is prepared."""

    def replied(self, replies: int) -> None:
        """Ignore a reply."""

    def finished_round(self, record: RoundRecord) -> None:
        """Ignore a round."""

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Ignore the end."""


VERSIONS = ("fl-sim", "flwr", "torch", "numpy")


def result_of(job: Job, log: RunLog, status: str, seconds: float) -> dict[str, Any]:
    """Return what ``result.json`` says of a run that took ``seconds``."""
    experiment = job.experiment
    scores = _scores(log)
    best = _best(experiment, scores)
    return {
        "status": status,
        "algorithm": kind_of(experiment.algorithm),
        "titles": _titles(experiment),
        "data": experiment.data,
        "data_note": job.dataset.note,
        "features": experiment.features,
        **({"image_shape": list(job.dataset.image_shape)} if job.dataset.image_shape else {}),
        "partition": _split(experiment),
        "clients": experiment.num_clients,
        "is_private": experiment.is_private,
        "records": sealed_content(experiment.data, job.root),
        "model": experiment.model,
        "evaluated_model": _evaluated(experiment),
        "num_parameters": num_parameters(log.server.params),
        "seed": experiment.seed,
        "engine": log.engine,
        "trainer": log.trainer,
        "precision": experiment.local.precision,
        "rounds": len(log.rounds),
        "final_accuracy": scores[-1].accuracy if scores else None,
        "best_accuracy": best.accuracy if best else None,
        "best_round": best.round if best else None,
        "best_chosen_on": _chosen_on(experiment),
        **_validation(job, scores),
        **measures_of(job, log),
        **_of_stages(experiment, log),
        **log.facts,
        "privacy": _privacy(job, log),
        "stopped": log.stopped,
        "warnings": log.warnings,
        "chain": log.chain,
        "identity": log.identity,
        "seconds": _seconds(experiment, log, seconds),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _titles(experiment: Experiment) -> dict[str, str]:
    """Return how the method's parts are written. A server that waits for each round's clients is not mentioned."""
    titles = {"algorithm": title_of(experiment.algorithm), "preprocess": title_of(experiment.preprocess)}
    return titles if experiment.is_synchronous else {**titles, "server": title_of(experiment.server)}


@dataclass(frozen=True)
class _Score:
    """A model's accuracies in [0, 1], after the round ``round``; None where it was not measured on such records."""

    round: int
    accuracy: float | None
    validation: float | None

    @property
    def chosen_by(self) -> float:
        """Return what decides which model is the best."""
        return (self.accuracy if self.validation is None else self.validation) or 0.0


def _scores(log: RunLog) -> list[_Score]:
    """Return what was measured, in order; a model that a stage changed comes after the rounds'."""
    scores = [
        _Score(record.round, record.test_accuracy, record.validation_accuracy)
        for record in log.rounds
        if record.test_accuracy is not None or record.validation_accuracy is not None
    ]
    if (after := log.measured_again) is not None:
        accuracies = (one.accuracy if one else None for one in (after.test, after.validation))
        scores.append(_Score(len(log.rounds), *accuracies))
    return scores


def _best(experiment: Experiment, scores: list[_Score]) -> _Score | None:
    """Return the model that is the best, of those that were tested where any is to be; the first of equals."""
    if experiment.evaluate.test != "never":
        scores = [one for one in scores if one.accuracy is not None]
    return max(scores, key=lambda one: one.chosen_by, default=None)


def _chosen_on(experiment: Experiment) -> str:
    """Say by which records the best model is chosen; "last": the last one alone was tested; "nothing": none was."""
    if experiment.evaluate.measures_nothing:
        return "nothing"
    if experiment.evaluate.test == "last":
        return "last"
    return "validation" if experiment.evaluate.validation else "test"


def _validation(job: Job, scores: list[_Score]) -> dict[str, Any]:
    if not job.num_validated:
        return {}
    facts = {
        "records": job.num_validated,
        "final_accuracy": scores[-1].validation if scores else None,
        "best_accuracy": max((one.validation or 0.0 for one in scores), default=None),
    }
    return {"validation": facts}


def told(error: BaseException | None, out: Path) -> dict[str, Any]:
    """Return what ``result.json`` says of a failure; what clients said in private goes into a file of its own."""
    if not isinstance(error, RunError):
        return {}
    if error.private:
        with suppress(OSError):
            write_private(out / run_directory.PRIVATE_ERRORS, f"{error.private}\n".encode())
    return {"error": str(error), **({"diverged": True} if isinstance(error, Diverged) else {})}


def _evaluated(experiment: Experiment) -> str:
    algorithm: object = experiment.algorithm
    return algorithm.reports() if isinstance(algorithm, Reporting) else "the last model"


def _split(experiment: Experiment) -> str:
    return "centralized" if experiment.is_central else short_form(experiment.partition)


def _seconds(experiment: Experiment, log: RunLog, total: float) -> dict[str, float]:
    train = sum(record.seconds or 0.0 for record in log.rounds)
    if not experiment.is_private:
        return {"preprocess": log.preprocess_seconds, "train": train, "total": total}
    return {"preprocess": coarse(log.preprocess_seconds), "train": coarse(total), "total": coarse(total)}


def _of_stages(experiment: Experiment, log: RunLog) -> dict[str, Any]:
    """Return what was done before and after the rounds; of what was not done its kind alone."""
    told: dict[str, Any] = {name: {"kind": kind_of(getattr(experiment, name))} for name in ("preprocess", "calibrate")}
    for stage in log.stages:
        facts = stage.facts()
        told |= facts if is_json(facts) else {}  # where they are not, the run has failed of it
    return told


def is_json(facts: Mapping[str, Any]) -> bool:
    """Say whether ``facts`` are JSON values by name."""
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return all(isinstance(name, str) for name in facts)


def _privacy(job: Job, log: RunLog) -> list[dict[str, object]]:
    """Return a statement for each unit that something was paid for."""
    experiment = job.experiment
    statements = [*log.statements]
    if log.layer is not None:
        statements += log.layer.statements(experiment.rounds)
    for stage in log.stages:
        statements = stage.statements(statements)
    if not statements:
        return []
    from fl_sim.privacy.statement import Facts, beside  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.report.payments import with_whole_run  # noqa: PLC0415 (as above)

    facts = Facts(job.dataset.read_off, _tested_on(experiment), tuned_on(experiment.data))
    return beside(with_whole_run(statements, _of_stages(experiment, log)["preprocess"]), facts)


def _tested_on(experiment: Experiment) -> str:
    """Return which test records are taken to be public, in words; nothing where models are measured on none."""
    if experiment.evaluate.test == "never":
        return ""
    said = ", as evaluate.test_is_public=true says," if is_own(experiment.data) else ""
    return f"the test records of {without_settings(experiment.data)}{said}"


@cache
def _version(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "not installed"


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
    last = _of_the_last(job, log.measured) if log.measured else {}
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


def _of_the_last(job: Job, last: Measured) -> dict[str, Any]:
    """Return the fields of the last model on the test records; none where it was not tested."""
    if last.test is None or last.confusion is None:
        return {}
    found = {
        "test_records": len(last.test.labels),
        "majority_share": last.confusion.majority_share,
        "balanced_accuracy": last.confusion.balanced_accuracy,
        "macro_f1": last.confusion.macro_f1,
        "auc": area_under_roc(last.test),
        "recalls": [None if np.isnan(recall) else float(recall) for recall in last.confusion.recalls],
        "confusion": last.confusion.counts.tolist(),
    }
    if (clients := last.clients) is None:
        return found
    return found | {
        "client_accuracy": clients.mean,
        "client_deviation": clients.deviation,
        "client_worst_tenth": clients.worst_tenth,
        "client_quantiles": list(clients.quantiles),
        "client_accuracy_is": _meaning(job.experiment, last.clients_by),
    }


def _meaning(experiment: Experiment, clients_by: Holdings | OwnTests | None) -> str:
    """Return the meaning of the clients' accuracies, and what is left out of them, in words."""
    if not isinstance(clients_by, OwnTests):
        skewed = isinstance(experiment.partition, FeatureSkew) and experiment.num_clients > 1
        return _SKEWED if skewed else _SHARES
    without, nobodys = (clients_by.counts == 0).sum(), (clients_by.owners < 0).sum()
    lacking = f"; {without:,} of {clients_by.num_clients:,} clients have none, and are left out" if without else ""
    strange = f"; {nobodys:,} test records are of nobody who trains, and are left out" if nobodys else ""
    return f"accuracy on each client's own test records{lacking}{strange}"


def _taken(step: Reached) -> dict[str, float | None]:
    virtual = {} if step.virtual_seconds is None else {"virtual_seconds": step.virtual_seconds}
    return {"round": step.round, "bytes": step.bytes, "seconds": step.seconds, **virtual}


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
