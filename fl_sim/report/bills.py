"""What all runs found on disk together cost the records that they are about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fl_sim.report.runs import Found, Problem

if TYPE_CHECKING:
    from fl_sim.privacy.bill import RunPayments


@dataclass(frozen=True)
class Bills:
    """``bills``: ``fl_sim.privacy.bill.Bill.to_json`` of each data set and unit. ``problems``: damaged statements."""

    bills: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def in_words(self) -> list[str]:
        """Return a paragraph for each bill."""
        return [str(bill["in_words"]) for bill in self.bills]


def bills_of(found: Found) -> Bills:
    """Return the bills of all runs in ``found``, shown or not. Takes seconds where there are private ones.

    A run whose statements are damaged is a problem, and counts as one that does not say what it released.
    """
    if not any(run.outcome and run.outcome.privacy for run in found.read):
        return Bills()
    from fl_sim.privacy.bill import RunPayments, bills  # noqa: PLC0415 (the accountants load slowly)
    from fl_sim.report.payments import paid_by  # noqa: PLC0415

    told = [(run, *paid_by(run)) for run in found.read]
    problems = tuple(Problem(run.path, problem) for run, _, problem in told if problem)
    paid = [*_comparable([paid for _, paid, _ in told]), *[RunPayments("", "", None, bare=False)] * found.num_unread]
    return Bills(tuple(bill.to_json() for bill in bills(paid)), problems)


def _comparable(paid: Sequence["RunPayments"]) -> list["RunPayments"]:
    """Return what runs paid; contents that were told under the keys of several machines cannot be compared."""
    several = len({one.content.partition(":")[0] for one in paid if one.content}) > 1
    return [replace(one, by_name=one.by_name or (several and ":" in one.data)) for one in paid]
