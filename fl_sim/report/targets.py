"""What runs took to a test accuracy that somebody asks for: rounds, bytes and seconds, and how many got there."""

from collections.abc import Iterator
from dataclasses import dataclass

from fl_sim.report.files import Outcome
from fl_sim.report.measures import Reached, Spent, reached
from fl_sim.report.page_words import Groups, spread
from fl_sim.report.runs import Run

HEADS = ("Rounds", "MB", "Seconds", "Virtual seconds", "Runs that got there")


@dataclass(frozen=True)
class Taken:
    """What a line's finished runs, ``runs`` of them, took to the target; ``reached`` has those that got there."""

    method: str
    where: str
    runs: int
    reached: tuple[Reached, ...]

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Return rounds, megabytes, seconds, virtual seconds, of those that got there ("-" without any); their number.

        The same in the order of ``HEADS``.
        """
        return (
            spread(float(one.round) for one in self.reached),
            spread((None if one.bytes is None else one.bytes / 1e6 for one in self.reached), digits=2),
            spread(one.seconds for one in self.reached),
            spread(one.virtual_seconds for one in self.reached),
            f"{len(self.reached)} of {self.runs}",
        )

    @property
    def in_words(self) -> str:
        """Return all of it as a line."""
        rounds, megabytes, seconds, virtual, count = self.cells
        taken = f"rounds {rounds}, MB {megabytes}, seconds {seconds}" if self.reached else "-"
        taken += f", virtual seconds {virtual}" if virtual != "-" else ""
        return f"{self.method} on {self.where}: {taken} ({count} runs got there)"


def taken(groups: Groups, accuracy: float) -> list[Taken]:
    """Return what every line of ``groups`` took to a test accuracy of at least ``accuracy``, in [0, 1]."""
    return [
        Taken(label, where, len(one.finished), tuple(_reached(one.finished, accuracy)))
        for where, some in groups.items()
        for label, one in some
    ]


def spent_beforehand(outcome: Outcome) -> Spent:
    """Return what a run had spent before its first round."""
    before = [one for one in outcome.bytes.before.values() if one is not None]
    known = len(before) == len(outcome.bytes.before)
    return Spent(sum(one.down + one.up for one in before) if known else None, outcome.seconds.preprocess)


def _reached(runs: tuple[Run, ...], accuracy: float) -> Iterator[Reached]:
    for run in runs:
        if run.outcome is None:
            continue
        if (found := reached(run.rounds, accuracy, spent_beforehand(run.outcome))) is not None:
            yield found
