"""Whole numbers packed into bytes and back, in the fewest bits that any of them may need.

Every list of numbers has exactly one packed form: bits that are left over are 0, and whoever unpacks says so otherwise.
"""

import numpy as np
from numpy.typing import NDArray

from fl_sim.errors import Malformed

_WORD = 64


def bits_for(values: int) -> int:
    """Return how many bits tell ``values`` numbers, 0 to one less, apart.

    >>> [bits_for(values) for values in (1, 2, 3, 1024, 1025)]
    [0, 1, 2, 10, 11]
    """
    return (values - 1).bit_length()


def num_bytes(count: int, bits: int) -> int:
    """Return how many bytes ``count`` numbers of so many bits take."""
    return -(-count * bits // 8)


def pack(numbers: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    """Return numbers from 0 to 2^``bits`` - 1, one behind the other, the highest bit first."""
    places = np.arange(bits - 1, -1, -1)
    return np.packbits((numbers[:, None] >> places & 1).astype(np.uint8))


def unpack(packed: NDArray[np.uint8], count: int, bits: int) -> NDArray[np.int64]:
    """Return the ``count`` numbers that ``pack`` was given. Raises Malformed where bits behind them are not 0."""
    each = np.unpackbits(packed)
    if each[count * bits :].any():
        raise Malformed("sent packed numbers with something behind the last of them")
    numbers = np.zeros(count, np.int64)
    for column in each[: count * bits].reshape(count, bits).T:
        numbers = numbers << 1 | column
    return numbers


def digits_in_word(base: int) -> int:
    """Return how many digits of a number system fit into 64 bits.

    >>> [digits_in_word(base) for base in (2, 3, 15, 255)]
    [64, 40, 16, 8]
    """
    digits, values = 0, base
    while values <= 2**_WORD:
        digits, values = digits + 1, values * base
    return digits


def num_digit_bytes(count: int, base: int) -> int:
    """Return how many bytes ``pack_digits`` makes of ``count`` digits."""
    return _WORD // 8 * -(-count // digits_in_word(base))


def pack_digits(digits: NDArray[np.int64], base: int) -> NDArray[np.uint8]:
    """Return digits from 0 to ``base`` - 1 as words of 64 bits: of three levels, 1.6 bits each and not 2."""
    columns = _columns(digits, base)
    words = np.zeros(len(columns), np.uint64)
    for column in columns.T[::-1]:
        words = words * np.uint64(base) + column
    return words.astype("<u8").view(np.uint8)


def unpack_digits(packed: NDArray[np.uint8], count: int, base: int) -> NDArray[np.int64]:
    """Return the ``count`` digits that ``pack_digits`` was given. Raises Malformed for words that it never makes."""
    words, digits = packed.view("<u8").astype(np.uint64), np.zeros((digits_in_word(base), len(packed) // 8), np.int64)
    for row in digits:
        words, left = np.divmod(words, np.uint64(base))
        row[:] = left
    every = digits.T.ravel()
    if words.any() or every[count:].any():
        raise Malformed(f"sent levels that are not among the {base} there are")
    return every[:count]


def _columns(digits: NDArray[np.int64], base: int) -> NDArray[np.uint64]:
    width = digits_in_word(base)
    padded = np.zeros(-(-len(digits) // width) * width, np.uint64)
    padded[: len(digits)] = digits
    return padded.reshape(-1, width)
