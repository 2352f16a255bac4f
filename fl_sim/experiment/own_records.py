"""The job of a node that has records of its own; the server says what is public about all records."""

from dataclasses import replace
from typing import Any

import numpy as np

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import Job, device_of
from fl_sim.types import Dataset
from partitions import Parts


def public_facts(dataset: Dataset) -> dict[str, Any]:
    """Return, as JSON values, what nodes with records of their own must know of the server's."""
    return {
        "shape": list(dataset.input_shape), "classes": dataset.num_classes, "mean": list(dataset.mean),
        "std": list(dataset.std),
    }  # fmt: skip


def own_job(experiment: Experiment, name: str, client: int, facts: dict[str, Any]) -> Job:
    """Return the job of the node that plays ``client`` with all training records of its own data set ``name``.

    ``facts``: the server's ``public_facts``, by whose constants records are scaled. Raises UserError for records of
    another shape or other classes, and for validation records.
    """
    own = load(name, None, experiment.features)
    if list(own.input_shape) != facts["shape"]:
        raise UserError(
            f"the node's own records have shape {list(own.input_shape)}, but the experiment's have shape "
            f"{facts['shape']}: give the node such records"
        )
    if int(own.train.labels.max()) >= facts["classes"]:  # which class may be a record's secret, and this goes out
        raise UserError(
            f"the node's own records have a class beyond the experiment's {facts['classes']}: give the node others"
        )
    if own.validation is not None:
        raise UserError(
            f"the node's own records come with {len(own.validation):,} validation records, and a node measures "
            "nothing: leave them out"
        )
    dataset = replace(own, num_classes=facts["classes"], mean=tuple(facts["mean"]), std=tuple(facts["std"]))
    # Nothing is dealt out there, and nobody sees records in another way than they are.
    settled = {**{key: getattr(experiment, key) for key in Experiment.model_fields}, "data": name, "partition": "iid"}
    experiment = experiment_from(settled)
    none, everything = np.zeros(0, dtype=np.int64), np.arange(len(dataset.train))
    shards = Parts.of([everything if one == client else none for one in range(experiment.num_clients)])
    return Job(experiment, dataset, shards, device_of(experiment), None)
