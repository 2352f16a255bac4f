"""The name of a run's directory where nobody chose one: readable, and different for different settings or records."""

import hashlib
import json
import re

from fl_sim.data.naming import without_settings
from fl_sim.experiment.evaluate import Evaluate
from fl_sim.experiment.experiment import Experiment
from fl_sim.kinds import short_form
from fl_sim.tables.words import method
from fl_sim.types import Dataset


def run_name(experiment: Experiment, dataset: Dataset) -> str:
    """Return the name of a resolved experiment's directory, such as ``fedavg-digits-label-1-seed-0-1f0c2a9b``.

    The engine has no part in it: another one goes on with the same run.
    """
    content = experiment.chosen(*(name for name in Experiment.model_fields if name not in {"engine", "round_timeout"}))
    if experiment.evaluate == Evaluate():  # which came later: runs without it keep their names
        del content["evaluate"]
    records = [len(dataset.train), len(dataset.test), dataset.note]
    digest = hashlib.sha256(json.dumps([content, records], sort_keys=True).encode()).hexdigest()[:8]
    split = "" if experiment.is_central else short_form(experiment.partition)
    features = "" if experiment.features == "none" else experiment.features
    readable = f"{method(experiment)} {without_settings(experiment.data)} {features} {split} seed {experiment.seed}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', readable.lower())[:80].strip('-.')}-{digest}"
