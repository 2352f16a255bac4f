"""Compression of updates: the layer, quantization, and compressors with error feedback."""

from typing import ClassVar, Literal

from fl_sim.settings import Settings


class NoCompression(Settings):
    """No compression: clients send each number of an update as four bytes."""

    kind: Literal["none"] = "none"
    keeps_error: ClassVar[bool] = True
