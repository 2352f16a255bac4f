"""Approximate unlearning: it changes the final model, without a guarantee that a client's records are forgotten."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

from fl_sim.errors import RunError, UserError
from fl_sim.experiment.identity import identity_of
from fl_sim.experiment.job import job_of
from fl_sim.params import is_finite
from fl_sim.simulation.resuming import finished_result
from fl_sim.store import run_directory
from fl_sim.threats.cohorts import first_round, steps_in
from fl_sim.threats.federaser import FedEraser
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.gradient_ascent import GradientAscent, distance
from fl_sim.threats.replay import replay_of
from fl_sim.threats.unlearning import check_client, further_in, measures, settings_without
from fl_sim.types import Params

FACTS: Final = "unlearning.json"
"""The file with the measures, in the directory of an approximately unlearned model."""


Approximate: TypeAlias = FedEraser | GradientAscent
"""The settings of a method of approximate unlearning."""


def unlearn_approximately(
    finished: FinishedRun, client: int, method: Approximate, name: str, out: Path, exact: Path
) -> dict[str, Any]:
    """Unlearn ``client`` by ``method``, write the new model into ``out``, and return the measures of the unlearning.

    ``name``: the name of the method. ``exact``: the directory for the retraining without ``client``. If this retraining
    is finished there, the result also contains the measures of the retraining, and the distance to the retrained model.
    Raises UserError as ``check_client`` and ``check_replayable`` do, and RunError if the model is not finite.
    """
    check_client(finished, client)
    without = settings_without(finished.job.experiment, client)
    job_of(without, finished.job.root)  # raises UserError if no other client has records
    if out.exists() and (others := {path.name for path in out.iterdir()} - {run_directory.MODEL, FACTS}):
        raise UserError(f"{out} already contains other files ({min(others)}): choose another --out")
    with replay_of(finished) as replay:
        first = first_round(finished.job, client, replay.num_rounds)
        assert first is not None  # not None: ``check_client`` refuses a client that never took part
        start = time.perf_counter()
        server, work = method.unlearned(replay, client, first)
        seconds = time.perf_counter() - start
        params, further = replay.model(server), replay.measured_by_stages(server)
        rounds = replay.num_rounds
    if not is_finite({"params": params}):
        raise RunError(f"the method {name} gave a model with NaN or infinite numbers: use --method exact")
    out.mkdir(parents=True, exist_ok=True)
    run_directory.write_model(out, params)
    before = run_directory.read_model(finished.out)
    made = {
        "client": client, "method": name, "settings": asdict(method), "run": str(finished.out), "out": str(out),
        "cost": {
            "rounds": work.rounds, "rounds_of_retraining": rounds,
            "steps": work.steps, "recomputed_steps": work.recomputed,
            "steps_of_retraining": steps_in(finished.job, range(1, rounds + 1), client),
            "seconds": seconds, "seconds_of_the_run": finished.facts["seconds"]["total"],
        },
        "before": measures(finished, before, client) | further_in(finished.out),
        "after": measures(finished, params, client) | {"further": further},
        **_against_exact(finished, client, params, before, exact),
    }  # fmt: skip
    run_directory.write_text(out / FACTS, json.dumps(made, indent=2) + "\n")
    return made


def _against_exact(finished: FinishedRun, client: int, params: Params, before: Params, exact: Path) -> dict[str, Any]:
    """Return a comparison of the unlearned model with the model that was retrained without the client.

    ``exact``: the directory of the retraining. The result is empty if the directory does not contain this retraining.

    The comparison consists of the measures of the retrained model, and of two L2 distances to the retrained model: from
    the model before unlearning, and from the model after unlearning.
    """
    experiment = settings_without(finished.job.experiment, client)
    try:
        facts = finished_result(experiment, exact, identity_of(experiment, finished.job.root))
    except UserError:  # the directory contains another run
        facts = None
    if facts is None:
        return {}
    found = run_directory.read_model(exact)
    return {
        "exact": measures(finished, found, client) | further_in(exact),
        "distance_to_exact": distance(params, found), "distance_before": distance(before, found),
    }  # fmt: skip
