"""What goes wrong, in words for the user. Apart from all other types, so that a typo is answered without torch."""

import math
import re
from typing import Final

MOST_LETTERS: Final = 3000
"""Of a message; and what goes on for longer than ``MOST_OF_A_WORD`` without a space is no word that people read."""
MOST_OF_A_WORD: Final = 600


class UserError(ValueError):
    """The user's mistake: the message names the value and the fix. The command line exits with 2.

    However long the values are that a message quotes, or the lists of valid names, it is never longer than
    ``MOST_LETTERS``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_bounded(message))


class RunError(RuntimeError):
    """A run that could not go on: the message names client and round. The command line exits with 1.

    ``private``: what clients said, where it may hold their records; it belongs in no file that others may read.
    """

    def __init__(self, message: str, *, private: str = "") -> None:
        super().__init__(message)
        self.private = private


class Diverged(RunError):  # noqa: N818 (what happened to the numbers, not a kind of error of ours)
    """Numbers that stopped being finite; whoever knows the algorithm adds which of its settings bear on that."""


class Malformed(ValueError):  # noqa: N818 (what an answer is, not what went wrong with us)
    """An answer that cannot be used. The message says why in our words; ``said``: the client's own, where it failed."""

    def __init__(
        self, reason: str, *, cure: str = "see that it runs the same version of fl-sim", said: str = ""
    ) -> None:
        super().__init__(f"{reason}: {cure}" if cure else reason)
        self.said = said


class BudgetExhausted(Exception):  # noqa: N818 (an outcome of a run, not an error in it)
    """The next release would exceed the budget. Nothing was charged and nothing may be released."""

    def __init__(self, *, num_releases: int, spent: float, would_be: float, budget: float, delta: float):
        after = f"{would_be:.4g}" if would_be < math.inf else "none (no guarantee)"
        super().__init__(
            f"budget spent after {num_releases} releases: epsilon {spent:.4g} of {budget:g} at delta {delta:g}; "
            f"one more would make it {after}"
        )
        self.num_releases = num_releases
        self.spent = spent
        self.would_be = would_be


def _bounded(message: str) -> str:
    """Return ``message`` without the middle of its longest words, and of itself."""
    half = MOST_OF_A_WORD // 2
    text = re.sub(rf"(\S{{{half}}})\S{{11,}}(\S{{{half}}})", r"\1 ... \2", message)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS // 2]} ... {text[5 - MOST_LETTERS // 2 :]}"
