"""Over which of the seeds a table has means, and how that is written."""

from collections.abc import Mapping, Sequence
from typing import Any

from fl_sim.experiment.experiment import Experiment

SEEDS = ("seed", "partition_seed", "model_seed", "sampling_seed")


def seed_of_means(values: Mapping[str, Sequence[Any]]) -> str:
    """Return over which of SEEDS a table has means: ``seed``, unless another one alone has several ``values``.

    Several values of one that is not averaged make rows.

    >>> seed_of_means({"seed": [0], "model_seed": [0, 1]}), seed_of_means({"seed": [0, 1], "model_seed": [0, 1]})
    ('model_seed', 'seed')
    """
    several = [name for name in SEEDS if len(values.get(name, ())) > 1]
    return several[0] if len(several) == 1 else "seed"


def spread(experiments: Sequence[Experiment]) -> str:
    """Return over which seeds the table of ``experiments`` has means, and which seeds are fixed."""
    found = {name: list(dict.fromkeys(getattr(one, name) for one in experiments)) for name in SEEDS}
    over = seed_of_means(found)
    values, what = found.pop(over), over.replace("_", " ")
    mean = f"mean ± sample standard deviation over {what}s" if len(values) > 1 else f"one {what}"
    listed = ", ".join(map(str, values))
    fixed = [f"{name} {', '.join(map(str, own))}" for name, own in found.items() if own != [None]]
    return "; ".join([f"{mean} {listed}" if len(values) > 1 else f"{mean} ({listed})", *fixed])
