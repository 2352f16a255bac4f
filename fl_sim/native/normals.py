"""Call the compiled code that makes normal numbers of uniform bits: ``Normals`` of fl_sim/privacy/mechanisms.py."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_sim.native.kernel import Kernel

_LONG, _DOUBLE = ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class CompiledNormals:
    """The normal numbers of normals.h; other threads run while they are made."""

    kernel: Kernel

    def draw(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return one N(0, 1) number for each pair of words. Raises ValueError where they are none."""
        made = np.empty(len(first))
        self._call("normals", first, second, _LONG(len(first)), made)
        return made

    def rounded(
        self, first: NDArray[np.uint64], second: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]
    ) -> NDArray[np.intp]:
        """Write the numbers times ``ratio``, rounded to whole ones, into ``out``, and return the places to decide.

        They are where float64 does not tell which way to round. Raises ValueError where there are not as many words.
        """
        undecided, number = np.empty(len(first), np.int64), np.zeros(1, np.int64)
        self._call("rounded_normals", first, second, _LONG(len(first)), _DOUBLE(ratio), out, undecided, number)
        return undecided[: number[0]]

    def _call(self, name: str, first: NDArray[np.uint64], second: NDArray[np.uint64], *rest: Any) -> None:
        arrays = [first, second, *(one for one in rest if isinstance(one, np.ndarray))]
        types = [np.uint64, np.uint64, np.float64, np.int64, np.int64][: len(arrays)]
        are_plain = all(one.flags.c_contiguous and one.dtype == type_ for one, type_ in zip(arrays, types, strict=True))
        if not are_plain or first.ndim != 1 or any(one.shape != first.shape for one in arrays[:4]):
            raise ValueError(f"{first.shape} normal numbers are made of as many pairs of 64-bit words, in one row")
        function = getattr(self.kernel.library, f"fl_sim_{name}_{self.kernel.lanes}")
        given = [ctypes.c_void_p(one.ctypes.data) if isinstance(one, np.ndarray) else one for one in rest]
        function(*(ctypes.c_void_p(one.ctypes.data) for one in (first, second)), *given)
