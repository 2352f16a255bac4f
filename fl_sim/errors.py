"""Error classes, and functions that make texts safe for terminals and spreadsheets.

Every command imports this module, so it imports only modules that load fast.
"""

import math
import re
import unicodedata
from typing import Final

MOST_LETTERS: Final = 3000
"""Maximum length of a message, in characters. The maximum for one word is ``MOST_OF_A_WORD``."""
MOST_OF_A_WORD: Final = 600


class UserError(ValueError):
    """A mistake of the user: the message names the wrong value and the cure. The command line ends with exit code 2.

    A message has at most ``MOST_LETTERS`` characters, however long the quoted values are.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_middle_cut(message))


class RunError(RuntimeError):
    """A failed run: the message names client and round. The command line ends with exit code 1.

    ``private``: error messages of clients. They may contain a client's records, so they are never written to a file
    that other people may read.
    """

    def __init__(self, message: str, *, private: str = "") -> None:
        super().__init__(message)
        self.private = private


class Diverged(RunError):  # noqa: N818 (named after the event)
    """Training produced NaN or infinity. The code that catches this error adds advice about the settings to change."""


class Malformed(ValueError):  # noqa: N818 (named after the reply)
    """A client sent no reply, or a reply that the server cannot use. The message states the reason and the cure.

    ``said``: the error message of a client that failed; it may quote the client's records.
    """

    def __init__(
        self, reason: str, *, cure: str = "see that it runs the same version of fl-sim", said: str = ""
    ) -> None:
        super().__init__(f"{reason}: {cure}" if cure else reason)
        self.said = said


class BudgetExhausted(Exception):  # noqa: N818 (an outcome of a run, not an error)
    """The next private output would exceed the privacy budget. Nothing was written to the privacy ledger."""

    def __init__(self, *, num_releases: int, spent: float, would_be: float, budget: float, delta: float):
        after = f"{would_be:.4g}" if would_be < math.inf else "none (no guarantee)"
        super().__init__(
            f"budget spent after {num_releases} releases: epsilon {spent:.4g} of {budget:g} at delta {delta:g}; "
            f"one more release would make epsilon {after}"
        )
        self.num_releases = num_releases
        self.spent = spent
        self.would_be = would_be


_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters except tab and line feed, Unicode marks of writing direction, and surrogates (half characters)."""


def printable(text: str) -> str:
    """Return ``text`` with ASCII escapes in place of control characters, which a terminal would execute."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def in_a_line(text: str) -> str:
    """Return ``text`` as one printable line: line breaks and tabs become spaces."""
    return printable(re.sub(r"\s*[\t\n\r\x0b\x0c\x85\u2028\u2029]+\s*", " ", text))


def as_cell(text: str) -> str:
    """Return ``text`` for a cell of a spreadsheet. A formula gets an apostrophe in front, so that it is not executed.

    Numbers and other texts are unchanged.
    """
    first = unicodedata.normalize("NFKC", text.lstrip())[:1]
    return f"'{text}" if (first in {"=", "+", "-", "@"} and not _is_number(text)) or text[:1] in {"\t", "\r"} else text


def _middle_cut(message: str) -> str:
    """Return ``message`` for the user, with "..." in the middle of any word that is too long.

    If the whole message is too long, its middle is also replaced by "...".
    """
    half = MOST_OF_A_WORD // 2
    text = re.sub(rf"(\S{{{half}}})\S{{11,}}(\S{{{half}}})", r"\1 ... \2", message)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS // 2]} ... {text[5 - MOST_LETTERS // 2 :]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
