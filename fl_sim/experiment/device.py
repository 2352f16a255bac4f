"""The device on which a process trains, and the precision of training there."""

import torch

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.groups import Auto, Ray
from fl_sim.native.kernel import load_kernel
from fl_sim.types import Precision


def device_of(experiment: Experiment) -> torch.device:
    """Return the device of this process. Raises UserError if the settings require a GPU and none is visible."""
    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda, but this process sees no CUDA device: set device=cpu, or use the GPUs of a Ray cluster by "
            "engine=ray engine.gpus=1"
        )
    return torch.device("cuda" if experiment.device != "cpu" and torch.cuda.is_available() else "cpu")


def has_gpus_elsewhere(experiment: Experiment) -> bool:
    """Return True if clients train in Ray actors with GPUs. This process may not see these GPUs."""
    return isinstance(experiment.engine, Ray) and bool(experiment.engine.gpus)


def precision_of(experiment: Experiment, device: torch.device) -> Precision:
    """Return the precision of training on ``device``. Raises UserError if ``device`` does not support it."""
    precision, engine = experiment.local.precision, experiment.engine
    stacked = not isinstance(engine, Auto) and engine.stack > 1
    if precision == "float32" or (precision == "bfloat16" and stacked):
        return precision
    if device.type == "cpu" and precision == "bfloat16":
        kernel, why_not = load_kernel()
        if kernel is not None and kernel.has_bfloat16:
            return precision
        why = "this processor has no avx512_bf16" if kernel is not None else f"no native trainer is here: {why_not}"
        raise UserError(
            "local.precision=bfloat16 needs the native trainer and a processor that multiplies bfloat16 numbers, "
            f"and {why}; leave it out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return precision
    where = "a CPU" if device.type == "cpu" else "a GPU older than NVIDIA's Ampere"
    raise UserError(f"local.precision={precision} has no effect on {where}: leave it out, or train on a newer GPU")
