"""Unlearning: the removal of the influence of one client's records from a finished run.

**Retraining without client u** is a run with the same settings in which u holds no records (the setting ``forgotten``).
The clients keep their IDs. Random numbers depend only on seed, purpose, client and round. So the partition of the other
records, the cohorts, the batches and the hostile clients stay the same. A client without records is sampled like all
others. It sends an update with weight 0, which changes no bit of a model (checked in
tests/fl_sim/simulation/test_empty_clients.py). Public facts about the data set, such as the constants of normalisation
and the number of classes, also stay the same.

**Exact unlearning** has the result of this retraining. If u took part for the first time in round t, the rounds before
t are the same with and without u. So training continues from the latest stored state of a round before t (the setting
``keep_every``). If there is no such state, training begins with round 1. In both cases the model is bit-identical to
the model of the full retraining.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, changed
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import job_of
from fl_sim.kinds import is_own
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Observer
from fl_sim.simulation.stage import stages_of
from fl_sim.store import run_directory
from fl_sim.store.run_directory import CHECKPOINT, kept_path, read_kept, write_state
from fl_sim.threats.cohorts import cohorts_known, first_round, steps_in
from fl_sim.threats.finished import FinishedRun, Judged, logits_of
from fl_sim.threats.membership import area_by_loss
from fl_sim.threats.replay import asks_clients
from fl_sim.types import Params
from strategies.layer import layer_kinds

_OF_CLIENTS = [name for name in run_directory.ROUND_FIELDS if name.startswith("client_")]
"""The measures in a round's log entry that depend on the training records of all clients."""


@dataclass(frozen=True)
class KnownStart:
    """The state from which exact unlearning continues: the state after round ``last_round`` (0: the initial model).

    ``why``: a phrase for the user that names the state and the reason to use it.
    """

    last_round: int
    why: str


def check_client(finished: FinishedRun, client: int) -> None:
    """Raise UserError if ``client`` cannot be unlearned, for example because it is unknown or never took part."""
    experiment, out = finished.job.experiment, finished.out
    if not 0 <= client < experiment.num_clients:
        raise UserError(
            f"--client {client} is unknown: the clients of {out} are 0 to {experiment.num_clients - 1}; take one of "
            "these numbers"
        )
    if client in experiment.forgotten:
        raise UserError(
            f"{out} was trained without client {client} (forgotten={client} in its settings): nothing can be unlearned"
        )
    if experiment.is_private:
        bill = "; ".join(f"unit {one['unit']}: {one['guarantee']}" for one in finished.facts["privacy"])
        raise UserError(
            f"the run in {out} promises privacy ({bill}): its published models depend little on one unit, so "
            "unlearning would change little. Published models stay published, so no privacy ledger is refunded; a "
            f"run with forgotten={client} and another --out would publish further models, at a further privacy cost "
            "for all other clients"
        )
    if not finished.job.shards.sizes[client]:
        raise UserError(f"client {client} of {out} has no training records to unlearn: take another client")
    if experiment.num_members < experiment.num_clients and client not in finished.job.members:
        raise UserError(
            f"client {client} of {out} is held out (evaluate.held_out_clients) and never took part: take another client"
        )
    rounds = cohorts_known(finished.job) and finished.facts["rounds"]
    if rounds and first_round(finished.job, client, rounds) is None:
        raise UserError(
            f"client {client} took part in none of the {rounds} rounds of {out}, so the model does not depend on its "
            "records: take another client"
        )


def beginning_of(finished: FinishedRun, client: int) -> KnownStart:
    """Return the latest usable state that does not depend on ``client``, and the reason as text.

    The retraining without this client continues from that state.
    """
    job, experiment = finished.job, finished.job.experiment
    kinds = [*map(type, (experiment.algorithm, experiment.aggregator, experiment.attack)), *layer_kinds(experiment)]
    obstacles = {
        "the cohorts may depend on replies or durations of clients": not cohorts_known(job),
        "clients also answer requests outside the rounds": any(map(asks_clients, stages_of(job))),
        "the client states of earlier rounds are not kept": bool(finished.procedure.kept_by_clients(
            finished.procedure.beginning())),
        "early stopping depends on records that clients hold out": experiment.evaluate.validation not in {0.0, "given"},
        "user-defined code may depend on the number of clients with records": any(map(is_own, kinds)),
    }  # fmt: skip
    if why := next((reason for reason, holds in obstacles.items() if holds), ""):
        return KnownStart(0, f"from the initial model: {why}")
    first = first_round(job, client, finished.facts["rounds"])
    assert first is not None  # not None: ``check_client`` refuses a client that never took part
    took = f"client {client} first took part in round {first}"
    usable = [kept for kept in run_directory.kept_rounds(finished.out) if kept < first]
    if first == 1 or not usable:
        cure = "" if first == 1 else f", and no state of a round before it is kept (keep_every={experiment.keep_every})"
        return KnownStart(0, f"from the initial model: {took}{cure}")
    return KnownStart(usable[-1], f"from the kept state after round {usable[-1]}: {took}")


def settings_without(experiment: Experiment, client: int) -> Experiment:
    """Return the experiment of the retraining without ``client``."""
    return changed(experiment, forgotten=(*experiment.forgotten, client))


def unlearn(finished: FinishedRun, client: int, out: Path, observer: Observer | None = None) -> dict[str, Any]:
    """Retrain without ``client`` in the directory ``out``, and return the measures of the unlearning.

    An unfinished run in ``out`` is resumed. Raises UserError as ``check_client`` does, and RunError for a failed run.
    """
    check_client(finished, client)
    if out.resolve() == finished.out.resolve():
        raise UserError(f"--out {out} is the directory of the run, which is not changed: choose another directory")
    beginning, experiment = beginning_of(finished, client), settings_without(finished.job.experiment, client)
    start = time.perf_counter()
    if beginning.last_round and not (out / run_directory.CONFIG).exists():
        _copy_rounds(finished, experiment, beginning.last_round, out)
    facts = run(experiment, out, finished.job.root, observer)
    seconds = time.perf_counter() - start
    rounds = int(facts["rounds"])
    return {
        "client": client, "method": "exact", "run": str(finished.out), "out": str(out), "begins": asdict(beginning),
        "cost": {
            "rounds": rounds - beginning.last_round, "rounds_of_retraining": rounds,
            "rounds_saved": beginning.last_round,
            "steps": steps_in(finished.job, range(beginning.last_round + 1, rounds + 1), client),
            "steps_of_retraining": steps_in(finished.job, range(1, rounds + 1), client),
            "seconds": seconds, "seconds_of_the_run": finished.facts["seconds"]["total"],
        },
        "before": measures(finished, run_directory.read_model(finished.out), client) | further_in(finished.out),
        "after": measures(finished, run_directory.read_model(out), client) | further_in(out),
    }  # fmt: skip


def measures(finished: FinishedRun, params: Params, client: int) -> dict[str, Any]:
    """Return accuracies in [0, 1] and the success of membership inference, for the model ``params``.

    ``test_accuracy``: on the test records. ``kept_accuracy``: on the training records of all other clients.
    ``forgotten_accuracy``: on the records of ``client``. ``membership``: the area under the ROC curve of a membership
    test by the loss, for the client's records against test records of the same classes; None if there are no such test
    records.
    """
    model = finished.job.whole_model()
    inputs, labels = finished.test
    test = Judged.of(logits_of(model, params, inputs), labels)
    right, count = 0, 0
    for other in np.flatnonzero(finished.job.shards.sizes).tolist():
        if other != client:
            inputs, labels = finished.held_by(other)
            judged = Judged.of(logits_of(model, params, inputs), labels)
            right, count = right + int(judged.right.sum()), count + len(judged.right)
    inputs, labels = finished.held_by(client)
    forgotten = Judged.of(logits_of(model, params, inputs), labels)
    area = area_by_loss(forgotten, test)
    return {
        "test_accuracy": test.accuracy,
        "kept_accuracy": right / count if count else None,
        "forgotten_accuracy": forgotten.accuracy,
        "membership": None if area is None else asdict(area),
    }


def further_in(out: Path) -> dict[str, Any]:
    """Return the additional measures of the last round of the run in ``out``, {"further": {name: number}}.

    The run's stages compute these measures, such as the success rate of an attack, or they are user-defined metrics.
    """
    records = run_directory.read_rounds(out)
    return {"further": dict((records[-1].metrics if records else None) or {})}


def _copy_rounds(finished: FinishedRun, experiment: Experiment, last_round: int, out: Path) -> None:
    """Copy rounds 1 to ``last_round`` of a run, and their stored states, into the directory ``out``.

    The copy is the beginning of a run of ``experiment``, the retraining. Measures that depend on the records of all
    clients are left out, because they could reveal something about the forgotten records.
    """
    job = job_of(experiment, finished.job.root)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UserError(f"{out} is not empty and contains no run: choose another --out")
    like = finished.procedure.beginning()
    kept = [one for one in run_directory.kept_rounds(finished.out) if one <= last_round]
    states = {one: read_kept(finished.out, one, like) for one in kept}
    records = run_directory.read_rounds(finished.out)[:last_round]
    settings: Mapping[str, Any] = job.experiment.as_written()
    unfinished = out / "unfinished"
    unfinished.mkdir()
    run_directory.write_config(unfinished, settings, identity_of(job.experiment, finished.job.root).written())
    chain = run_directory.chain_start(unfinished)
    unknown: dict[str, Any] = dict.fromkeys(_OF_CLIENTS)
    for record in records:
        chain = run_directory.append_round(unfinished, replace(record, **unknown), chain)
        if record.round in states:
            progress, server = states[record.round]
            write_state(kept_path(unfinished, record.round), replace(progress, chain=chain), server)
    write_state(unfinished / CHECKPOINT, replace(progress, chain=chain), server)
    # config.toml is moved last: if the moves are interrupted, later calls refuse the directory without this file
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == run_directory.CONFIG):
        path.rename(out / path.name)
    unfinished.rmdir()
