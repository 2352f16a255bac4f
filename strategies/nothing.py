"""The defaults ``preprocess=none`` and ``calibrate=none``: no stage before the first or after the last round."""

from typing import Literal

from fl_sim.settings import Settings


class NoPreprocess(Settings):
    """No preprocessing: clients train on their own records only."""

    kind: Literal["none"] = "none"


class NoCalibration(Settings):
    """No calibration: the result is the model after the last round."""

    kind: Literal["none"] = "none"
