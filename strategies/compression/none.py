"""Updates travel as they are: four bytes a number."""

from typing import ClassVar, Literal

from fl_sim.settings import Settings


class NoCompression(Settings):
    """All that clients send travels whole."""

    kind: Literal["none"] = "none"
    keeps_error: ClassVar[bool] = True
