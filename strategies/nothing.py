"""The kinds of stages that are not there: nothing before the first round, and nothing after the last."""

from typing import Literal

from fl_sim.settings import Settings


class NoPreprocess(Settings):
    """Clients start with their own records and nothing else."""

    kind: Literal["none"] = "none"


class NoCalibration(Settings):
    """The model stays as the last round left it."""

    kind: Literal["none"] = "none"
