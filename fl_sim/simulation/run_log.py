"""The log of a run, its observers, and the content of ``result.json``."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_sim.data import is_own, sealed_content, tuned_on
from fl_sim.data.naming import without_settings
from fl_sim.errors import Diverged, RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of, short_form, title_of
from fl_sim.params import num_parameters
from fl_sim.report.measures import LADDER, Spent, area_under, mean_of_last, reached
from fl_sim.simulation.measuring import Measured
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord, coarse
from fl_sim.store.tensors import StateChecksum, write_private
from fl_sim.store.weights import Placed
from fl_sim.training.evaluation import Confusion, Holdings, OwnTests, Scores, area_under_roc
from fl_sim.training.own_metrics import OwnMetrics
from fl_sim.types import Params, ServerState, Traffic
from partitions import FeatureSkew, RecordSkew
from strategies.algorithm import Reporting
from strategies.layer import Layer, layer_kinds


@dataclass(frozen=True)
class Pooled:
    """A file of synthetic records. ``path``: the file. ``count``: the number of its records."""

    path: Path
    count: int


class FactSource(Protocol):
    """The interface of a stage that adds fields to ``result.json`` and columns to ``clients.csv``."""

    def facts(self) -> Mapping[str, Any]:
        """Return the fields that the stage adds to ``result.json``."""
        ...

    def statements(self, others: Sequence[dict[str, object]]) -> list[dict[str, object]]:
        """Return all privacy statements of the run: ``others``, which this stage may change, and its own statements.

        ``others``: the privacy statements of the rounds and of earlier stages.
        """
        ...

    def by_client(self) -> Mapping[str, NDArray[Any]]:
        """Return columns for ``clients.csv``, {name: one number for each client}."""
        ...


@dataclass
class RunLog:
    """The log of a run: everything that the result and the checkpoint need.

    ``engine``: the kind of the engine. ``trainer``: a description of the clients' trainer. ``stopped``: the reason if
    the run ended early. ``stopped_by_observer``: the reason if an observer ended the run. ``measured``: the measures of
    the last measured model. ``measured_again``: the measures of the final model, if it changed or was first tested
    after the last round. ``pooled``: the synthetic records that all clients train on. ``released``: the synthetic
    records that the server has received, even if clients do not train on them. ``layer``: the outermost layer. A layer,
    such as Global DP, is code that takes part in every round. ``layer_states``: {name of a layer: its state in the
    checkpoint}. ``traffic``: the bytes of one client in one round, None without rounds. ``before`` and ``after``: the
    bytes of all clients before and after the rounds, {purpose: bytes}. A number of bytes is None if it depends on
    private records. ``facts`` and ``statements``: fields and privacy statements that the run's procedure (the code that
    executes the whole run) adds to ``result.json``. ``seal``: the checksum of the client states. ``records``: a digest
    of the user's own records, for the checkpoint. ``versions``: {round: digest} of the models on which clients of an
    asynchronous run still train. ``counts_holders``: True if an algorithm that divides by the number of clients counts
    only clients with records. ``fixed``: the tensors of the model that are not trained. They are saved with the
    server's tensors. ``chain``: the hash chain over the settings and rounds. ``identity``: digests of the user's own
    records and code. ``doubts``: warnings that the user's records or code have changed, or could not be compared with
    those at the start of the run.
    """

    server: ServerState
    rounds: list[RoundRecord] = field(default_factory=list)
    preprocess_seconds: float = 0.0
    engine: str = ""
    trainer: str = ""
    stopped: str = ""
    stopped_by_observer: str = ""
    layer: Layer | None = None
    pooled: Pooled | None = None
    released: Pooled | None = None
    stages: tuple[FactSource, ...] = ()
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
        """Return the number of synthetic records in the pool that clients train on; 0 without a pool."""
        return self.pooled.count if self.pooled else 0


class Observer(Protocol):
    """The interface of an observer: its methods are called as a run makes progress.

    ``own_metrics``: the user's own metric functions, {name of the observer with this function: function}.
    """

    own_metrics: Mapping[str, OwnMetrics]

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Receive a description of the engine and the number of the first round (above 1 in a resumed run)."""
        ...

    def preparing(self, what: str) -> None:
        """Receive a line about the next computation outside of rounds, such as "clients make synthetic records".

        If clients do this computation, later calls of ``replied`` report the progress.
        """
        ...

    def replied(self, replies: int) -> None:
        """Receive the number of clients that have replied to the messages which the server sent last."""
        ...

    def finished_round(self, record: RoundRecord) -> str | None:
        """Receive the ``RoundRecord`` of a round, after ``rounds.jsonl`` and the checkpoint are written.

        To end the run after this round, return the reason as text; otherwise return None.
        """
        ...

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Receive the content of ``result.json`` at the end of a run, also after a failure or an interruption."""
        ...


class Silent:
    """An observer that shows nothing and has no metrics."""

    own_metrics: Mapping[str, OwnMetrics] = MappingProxyType({})

    def started(self, experiment: Experiment, engine: str, first_round: int) -> None:
        """Do nothing: nothing is shown."""

    def preparing(self, what: str) -> None:
        """Do nothing: nothing is shown."""

    def replied(self, replies: int) -> None:
        """Do nothing: nothing is shown."""

    def finished_round(self, record: RoundRecord) -> None:
        """Do nothing: nothing is shown, and the run goes on."""

    def ended(self, facts: Mapping[str, Any]) -> None:
        """Do nothing: nothing is shown."""


VERSIONS = ("fl-sim", "flwr", "torch", "numpy")

_PRIVATE = "the class counts of a client are private"
_ONE_HOLDER = "one client holds all records: there are no other clients whose accuracies could differ"
_SHARES = "accuracy on the test records, with each class weighted by its share of the client's records"
_SKEWED = f"{_SHARES}; the client's feature skew has no effect on this accuracy"
_CHANGED = f"{_SHARES}; the changes of its inputs and labels have no effect on this accuracy (see evaluate.clients)"
_ONCE = "the test records are used at most once, after the last round, so the accuracies of earlier rounds are unknown"
_HIDDEN_COHORT = "the cohort is secret under Global DP; the bytes per client and round depend on no record"
_EARLIER = "some rounds were run by an earlier version, which did not count bytes"


def result_of(job: Job, log: RunLog, status: str, seconds: float) -> dict[str, Any]:
    """Return the content of ``result.json`` for a run that took ``seconds``."""
    experiment, algorithm = job.experiment, job.experiment.algorithm
    scores = _scores(log)
    best = _best(experiment, scores)
    of_stages = _of_stages(experiment, log)
    titles = {"algorithm": title_of(algorithm), "preprocess": title_of(experiment.preprocess)}
    return {
        "status": status,
        "algorithm": kind_of(algorithm),
        "titles": titles if experiment.is_synchronous else titles | {"server": title_of(experiment.server)},
        "data": experiment.data,
        "data_note": job.dataset.note,
        "features": experiment.features,
        **({"image_shape": list(job.dataset.image_shape)} if job.dataset.image_shape else {}),
        "partition": "centralized" if experiment.is_central else short_form(experiment.partition),
        "clients": experiment.num_clients,
        "is_private": experiment.is_private,
        "records": sealed_content(experiment.data, job.root),
        "model": str(experiment.model),
        **({"weights": _weights(job)} if job.weights else {}),
        "evaluated_model": algorithm.reports() if isinstance(algorithm, Reporting) else "the last model",
        "num_parameters": num_parameters(log.server.params),
        **({"trained_part": job.frozen_in_words} if job.frozen_in_words else {}),
        "seed": experiment.seed,
        "engine": log.engine,
        "trainer": log.trainer,
        "precision": experiment.local.precision,
        "rounds": len(log.rounds),
        "final_accuracy": scores[-1].test_accuracy if scores else None,
        "best_accuracy": best.test_accuracy if best else None,
        "best_round": best.round if best else None,
        "best_chosen_on": _chosen_on(experiment),
        **_validation(job, scores),
        "measures": _measures(job, log),
        "bytes": _bytes(log),
        **_by_clock(log),
        **of_stages,
        **log.facts,
        "privacy": _privacy(job, log, of_stages["preprocess"]),
        "stopped": log.stopped,
        **({"stopped_by_observer": True} if log.stopped and log.stopped == log.stopped_by_observer else {}),
        "warnings": log.warnings,
        "chain": log.chain,
        "identity": log.identity,
        "seconds": _seconds(experiment, log, seconds),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def error_fields(error: BaseException | None, out: Path) -> dict[str, Any]:
    """Return the fields of ``result.json`` that describe a failure; empty without a failure.

    Private messages of clients are written to a private file in ``out`` and not to the result.
    """
    if not isinstance(error, RunError):
        return {}
    if error.private:
        with suppress(OSError):
            write_private(out / run_directory.PRIVATE_ERRORS, f"{error.private}\n".encode())
    return {"error": str(error), **({"diverged": True} if isinstance(error, Diverged) else {})}


def is_json(facts: Mapping[str, Any]) -> bool:
    """Return True if all keys of ``facts`` (fields for ``result.json``) are strings, and all its values JSON values."""
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return all(isinstance(name, str) for name in facts)


def _weights(job: Job) -> dict[str, Any]:
    """Return result fields on the initial weights: their file, and the names of tensors that this file lacks."""
    model, placed = job.experiment.model, job.placed
    return {
        "path": model.origin,
        "digest": model.digest,
        "new": list(placed.new),
        "in_words": placed.in_words(model.origin),
    }


def _scores(log: RunLog) -> list[RoundRecord]:
    """Return the ``RoundRecord`` of each round with a measured model, in order.

    A stage may change the model after the last round. If the changed model was measured, its measures come last.
    """
    records = [
        record for record in log.rounds if record.test_accuracy is not None or record.validation_accuracy is not None
    ]
    if log.measured_again is not None:
        blank = RoundRecord(len(log.rounds), None, None, None, None, None, 0.0, None)
        records.append(log.measured_again.noted_in(blank))
    return records


def _best(experiment: Experiment, scores: list[RoundRecord]) -> RoundRecord | None:
    """Return the ``RoundRecord`` of the best model. If several models are equally good, the first one is returned.

    Rounds without a test are considered only if ``evaluate.test`` is "never".
    """
    if experiment.evaluate.test != "never":
        scores = [one for one in scores if one.test_accuracy is not None]
    validated = [one for one in scores if one.validation_accuracy is not None]
    scores = validated or scores  # rounds without a validation accuracy are left out, if others have one

    def chosen_by(one: RoundRecord) -> float:
        return (one.test_accuracy if one.validation_accuracy is None else one.validation_accuracy) or 0.0

    return max(scores, key=chosen_by, default=None)


def _chosen_on(experiment: Experiment) -> str:
    """Return the name of the records on which the best model is chosen: "validation" or "test".

    If only the last model is tested, the result is "last". If no model is measured, the result is "nothing".
    """
    if experiment.evaluate.measures_nothing:
        return "nothing"
    if experiment.evaluate.test == "last":
        return "last"
    return "validation" if experiment.evaluate.validation else "test"


def _validation(job: Job, scores: list[RoundRecord]) -> dict[str, Any]:
    if not job.num_validated:
        return {}
    facts = {
        "records": job.num_validated,
        "final_accuracy": scores[-1].validation_accuracy if scores else None,
        "best_accuracy": max((one.validation_accuracy or 0.0 for one in scores), default=None),
    }
    return {"validation": facts}


def _measures(job: Job, log: RunLog) -> dict[str, Any]:
    """Return the result field ``measures``. A private or unknown measure is None; ``left_out`` gives the reason."""
    left_out = {"client_accuracy": _ONE_HOLDER} if job.experiment.is_central else {}
    left_out |= {"client_accuracy": _PRIVATE} if job.experiment.is_private else {}
    last = _of_the_last(job, log.measured) if log.measured else {}
    if job.experiment.evaluate.test != "rounds":
        unknown = dict.fromkeys(("accuracy_of_last_ten", "accuracy_area", "reached"), _ONCE)
        return last | {
            "accuracy_of_last_ten": None, "accuracy_area": None, "reached": {}, "left_out": left_out | unknown
        }  # fmt: skip
    beforehand = _sum(log.before.values())
    spent = Spent(beforehand.down + beforehand.up if beforehand else None, log.preprocess_seconds)
    steps = [step for accuracy in LADDER if (step := reached(log.rounds, accuracy, spent))]
    return last | {
        "accuracy_of_last_ten": mean_of_last(log.rounds),
        "accuracy_area": area_under(log.rounds),
        "reached": {
            f"{100 * step.accuracy:g}": {"round": step.round, "bytes": step.bytes, "seconds": step.seconds}
            | ({} if step.virtual_seconds is None else {"virtual_seconds": step.virtual_seconds})
            for step in steps
        },
        "left_out": left_out,
    }


def _of_the_last(job: Job, last: Measured) -> dict[str, Any]:
    """Return the measures of the last model on the test records, by name; empty if that model was not tested."""
    if last.test is None:
        return {}
    found: dict[str, Any] = {"test_records": len(last.test.labels)}
    if last.confusion is None:
        found |= {"predictions": int(last.test.predictions[1].sum()), "perplexity": last.test.perplexity}
    else:
        found |= _of_classes(last.test, last.confusion)
    if (clients := last.clients) is None:
        return found
    return found | {
        "client_accuracy": clients.mean,
        "client_deviation": clients.deviation,
        "client_worst_tenth": clients.worst_tenth,
        "client_entropy": clients.entropy,
        "client_quantiles": list(clients.quantiles),
        "client_accuracy_is": _meaning(job.experiment, last.clients_by),
    }


def _of_classes(test: Scores, confusion: Confusion) -> dict[str, Any]:
    """Return the measures of a classifier on the test records, by name."""
    return {
        "majority_share": confusion.majority_share,
        "balanced_accuracy": confusion.balanced_accuracy,
        "macro_f1": confusion.macro_f1,
        "auc": area_under_roc(test),
        "recalls": [None if np.isnan(recall) else float(recall) for recall in confusion.recalls],
        "confusion": confusion.counts.tolist(),
    }


def _meaning(experiment: Experiment, clients_by: Holdings | OwnTests | None) -> str:
    """Return a sentence on the meaning of the client accuracies, and on the clients or records that are left out."""
    if not isinstance(clients_by, OwnTests):
        if experiment.num_clients > 1 and isinstance(experiment.partition, RecordSkew):
            return _CHANGED
        skewed = isinstance(experiment.partition, FeatureSkew) and experiment.num_clients > 1
        return _SKEWED if skewed else _SHARES
    without, nobodys = (clients_by.counts == 0).sum(), (clients_by.owners < 0).sum()
    lacking = f"; {without:,} of {clients_by.num_clients:,} clients have none, and are left out" if without else ""
    strange = f"; {nobodys:,} test records belong to no client of this run, and are left out" if nobodys else ""
    return f"accuracy on each client's own test records{lacking}{strange}"


def _bytes(log: RunLog) -> dict[str, Any]:
    """Return the bytes of sent arrays before, during and after the rounds. A private number of bytes is None."""
    known = [record for record in log.rounds if record.bytes_down is not None and record.bytes_up is not None]
    in_rounds = _sum(Traffic(record.bytes_down or 0, record.bytes_up or 0) for record in known)
    if len(known) < len(log.rounds):
        in_rounds = None
    others = {**log.before, **log.after}
    left_out = {what: _PRIVATE for what, traffic in others.items() if traffic is None}
    if in_rounds is None:
        left_out["rounds"] = _HIDDEN_COHORT if log.layer is not None and log.layer.hides_clients else _EARLIER

    def table(traffic: Traffic | None) -> dict[str, int] | None:
        return asdict(traffic) if traffic else None

    return {
        "each_client_in_a_round": table(log.traffic),
        "rounds": table(in_rounds),
        "before": {what: table(traffic) for what, traffic in log.before.items()},
        "after": {what: table(traffic) for what, traffic in log.after.items()},
        "total": table(_sum([in_rounds, *others.values()])),
        "left_out": left_out,
    }


def _sum(parts: Iterable[Traffic | None]) -> Traffic | None:
    """Return the total number of bytes of all ``parts``; None if the bytes of a part are unknown (None)."""
    total = Traffic(0, 0)
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def _by_clock(log: RunLog) -> dict[str, Any]:
    """Return the result fields of the virtual clock: simulated seconds of all rounds, and number of late updates.

    The result is empty if the run simulates no time.
    """
    timed = [record for record in log.rounds if record.virtual_seconds is not None]
    if not timed:
        return {}
    late = {"late": sum(record.late or 0 for record in timed)} if any(one.late is not None for one in timed) else {}
    return {"virtual_seconds": sum(record.virtual_seconds or 0.0 for record in timed), **late}


def _of_stages(experiment: Experiment, log: RunLog) -> dict[str, Any]:
    """Return the result fields of all stages (code before or after the rounds).

    If the run has no stage for the setting ``preprocess`` or ``calibrate``, the field of this setting contains only
    ``kind``.
    """
    found: dict[str, Any] = {name: {"kind": kind_of(getattr(experiment, name))} for name in ("preprocess", "calibrate")}
    for stage in log.stages:
        facts = stage.facts()
        # All fields are JSON values here: the function run_stage has checked this.
        found |= facts if is_json(facts) else {}
    return found


def _privacy(job: Job, log: RunLog, preprocess: dict[str, Any]) -> list[dict[str, object]]:
    """Return the privacy statements of the run. ``preprocess``: the result fields of the stage before the rounds."""
    experiment = job.experiment
    statements = [*log.statements]
    if log.layer is not None:
        statements += log.layer.statements(experiment.rounds)
    for stage in log.stages:
        statements = stage.statements(statements)
    if not statements:
        return []
    from fl_sim.privacy.statement import UncoveredFacts, beside  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.report.payments import with_whole_run  # noqa: PLC0415 (as above)

    tested_on = ""
    if experiment.evaluate.test != "never":
        said = ", as evaluate.test_is_public=true says," if is_own(experiment.data) else ""
        tested_on = f"the test records of {without_settings(experiment.data)}{said}"
    of_layers = tuple(sentence for kind in layer_kinds(experiment) for sentence in kind.uncovered(experiment))
    if job.weights:
        of_layers = (*of_layers, Placed.uncovered(experiment.model.origin))
    facts = UncoveredFacts(job.dataset.read_off, tested_on, tuned_on(experiment.data), of_layers)
    return beside(with_whole_run(statements, preprocess), facts)


def _seconds(experiment: Experiment, log: RunLog, total: float) -> dict[str, float]:
    train = sum(record.seconds or 0.0 for record in log.rounds)
    if not experiment.is_private:
        return {"preprocess": log.preprocess_seconds, "train": train, "total": total}
    return {"preprocess": coarse(log.preprocess_seconds), "train": coarse(total), "total": coarse(total)}


@cache
def _version(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "not installed"
