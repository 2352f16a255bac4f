"""The job of a client that runs on a node (client machine) with training records of its own."""

from dataclasses import replace
from typing import Any

import numpy as np

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.device import device_of
from fl_sim.experiment.experiment import Experiment, changed
from fl_sim.experiment.fixed_shards import has_moving_shards
from fl_sim.experiment.job import Job, start_weights
from fl_sim.kinds import kind_of
from fl_sim.types import Dataset
from partitions import Parts


def public_facts(dataset: Dataset) -> dict[str, Any]:
    """Return the public facts of ``dataset``, as JSON values, for nodes (client machines) with their own data.

    The public facts are the shape of a record, the number of classes, and the constants of normalisation.
    """
    return {
        "shape": list(dataset.input_shape), "classes": dataset.num_classes, "mean": list(dataset.mean),
        "std": list(dataset.std),
    }  # fmt: skip


def own_job(experiment: Experiment, name: str, client: int, facts: dict[str, Any]) -> Job:
    """Return the job of a client that runs on a node with its own data set ``name``.

    The client with the ID ``client`` holds all training records of this data set. ``facts``: the result of
    ``public_facts`` for the server's data set. The node's records are normalised by the constants in ``facts``. Raises
    UserError for records of another shape or with other classes. Also raises UserError if the data set has validation
    records, because a node evaluates no models.
    """
    if experiment.evaluate.measures_clients:
        raise UserError(
            f"evaluate.clients={experiment.evaluate.clients} chooses each client's test records at the server, and "
            "this node has records of its own: leave evaluate.clients out"
        )
    if has_moving_shards(experiment):
        raise UserError(
            f"partition={kind_of(experiment.partition)} moves records of the server's data set between clients, but "
            "this node has records of its own: use a partition with fixed shards, such as iid"
        )
    if experiment.left_out:
        raise UserError(
            f"left_out={experiment.left_out:g} chooses records of the server's data set, but this node has records of "
            "its own: remove the setting left_out"
        )
    own = load(name, None, experiment.features)
    if list(own.input_shape) != facts["shape"]:
        raise UserError(
            f"the node's own records have shape {list(own.input_shape)}, but the experiment's have shape "
            f"{facts['shape']}: give the node records of that shape"
        )
    # the server receives this error message, so the message must not quote a label
    if int(own.train.labels.max()) >= facts["classes"]:
        raise UserError(
            f"the node's own records have a class beyond the experiment's {facts['classes']}: give the node records "
            "with the experiment's classes"
        )
    if own.validation is not None:
        raise UserError(
            f"the node's own records come with {len(own.validation):,} validation records, and a node evaluates no "
            "models: leave them out"
        )
    dataset = replace(own, num_classes=facts["classes"], mean=tuple(facts["mean"]), std=tuple(facts["std"]))
    # A node does not partition its records. The partition is set to iid, which has no feature skew.
    experiment = changed(experiment, data=name, partition="iid")
    none, everything = np.zeros(0, dtype=np.int64), np.arange(len(dataset.train))
    held = none if client in experiment.forgotten else everything
    shards = Parts.of([held if one == client else none for one in range(experiment.num_clients)])
    return Job(experiment, dataset, shards, device_of(experiment), None, weights=start_weights(experiment))
