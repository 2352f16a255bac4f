"""Settings for experiments without stages: no preprocessing before the first round, no calibration after the last."""

from typing import Literal

from fl_sim.settings import Settings


class NoPreprocess(Settings):
    """No preprocessing: clients train on their own records only."""

    kind: Literal["none"] = "none"


class NoCalibration(Settings):
    """No calibration: the result is the model after the last round."""

    kind: Literal["none"] = "none"
