"""What ``result.json`` says."""

import importlib.metadata
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fl_sim.data import is_own, sealed_content, tuned_on
from fl_sim.data.naming import without_settings
from fl_sim.errors import Diverged, RunError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job
from fl_sim.kinds import kind_of, short_form, title_of
from fl_sim.params import num_parameters
from fl_sim.simulation.measures import measures_of
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.stage import is_json
from fl_sim.store import run_directory
from fl_sim.store.run_directory import coarse
from fl_sim.store.tensors import write_private
from strategies.algorithm import Reporting

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
        scores.append(_Score(len(log.rounds), after.accuracy, after.validation_accuracy))
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
