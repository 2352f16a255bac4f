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
        count, made = len(first), np.empty(len(first))
        words = _row(first, np.uint64, count), _row(second, np.uint64, count)
        self.kernel.function("normals")(*words, _LONG(count), _row(made, np.float64, count))
        return made

    def rounded(self, first: NDArray[np.uint64], ratio: float, out: NDArray[np.float64]) -> NDArray[np.intp]:
        """Write the numbers times ``ratio``, rounded to whole ones, into ``out``, and return the places to decide.

        They are where ``first`` and float64 do not tell which way to round. Raises ValueError where there are not as
        many words as numbers.
        """
        count, undecided, number = len(first), np.empty(len(first), np.int64), _LONG()
        places = _row(undecided, np.int64, count), ctypes.byref(number)
        words, made = _row(first, np.uint64, count), _row(out, np.float64, count)
        self.kernel.function("rounded_normals")(words, _LONG(count), _DOUBLE(ratio), made, *places)
        return undecided[: number.value]


def _row(numbers: NDArray[Any], kind: type[np.generic], count: int) -> ctypes.c_void_p:
    if numbers.dtype != kind or numbers.shape != (count,) or not numbers.flags.c_contiguous:
        raise ValueError(f"{count} normal numbers are made of as many pairs of 64-bit words, in one row")
    return ctypes.c_void_p(numbers.ctypes.data)
