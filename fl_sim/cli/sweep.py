"""``fl-sim sweep``: a table over the values of any settings, without a file."""

import hashlib
import json
from pathlib import Path

from fl_sim.cli.arguments import Given
from fl_sim.cli.run import base_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import with_overrides

_MOST_CHARACTERS = 60


def as_table(given: Given) -> Given:
    """Return what was typed as a table: settings with several values are its grid, all others its base.

    It is named after the settings that vary and what stays the same, so that further values go on with the same table.
    Raises UserError where nothing has several values, or a value is empty.
    """
    typed = [override.partition("=") for override in given.overrides]
    varied = {key: value.split(",") for key, _, value in typed if "," in value}
    if not varied:
        raise UserError(
            "nothing varies: give a setting several values, such as 'fl-sim sweep local.learning_rate=0.01,0.1 "
            "seed=0,1,2'; one run is 'fl-sim run'"
        )
    for key, values in varied.items():
        if "" in values or len(set(values)) < len(values):
            raise UserError(
                f"{key}={','.join(values)} names a value twice, or an empty one: separate values by one comma"
            )
    fixed = [override for override in given.overrides if override.partition("=")[0] not in varied]
    base = with_overrides(base_of(given), fixed)
    same = json.dumps([base, sorted(varied)], sort_keys=True, default=str)
    names = "-".join(varied)[:_MOST_CHARACTERS]
    path = Path(f"sweep-{names}-{hashlib.sha256(same.encode()).hexdigest()[:8]}.toml")
    return Given("the sweep", path, {"centralized": False, "base": base, "grid": varied}, [])
