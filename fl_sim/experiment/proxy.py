"""Public proxy records for knowledge distillation. They come from a second data set, which no client holds."""

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.job import Job
from fl_sim.training.loop import resident
from fl_sim.training.records import Source


def proxy_records(job: Job, name: str) -> Source:
    """Return the training records of the public data set ``name``, normalised by the constants of the job's data set.

    Raises UserError if the data set is missing, or if its records have another shape or type.
    """
    experiment, dataset = job.experiment, job.dataset
    found = load(name, job.root, experiment.features)
    if found.input_shape != dataset.input_shape or found.vocabulary != dataset.vocabulary:
        raise UserError(
            f"algorithm.proxy={name} has records of shape {found.input_shape}, and {experiment.data} has records of "
            f"shape {dataset.input_shape}: use a proxy of the same shape"
        )
    if found.train.inputs.dtype != dataset.train.inputs.dtype:
        raise UserError(
            f"algorithm.proxy={name} has {found.train.inputs.dtype} records, and {experiment.data} has "
            f"{dataset.train.inputs.dtype}: use a proxy with records of the same type"
        )
    return resident(found.train, dataset, job.device)
