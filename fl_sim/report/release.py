"""Privacy statements of results and how they are said: no epsilon without its unit, its delta and what it covers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fl_sim.privacy.rounding import rounded_up


class Release(BaseModel):
    """One privacy statement of ``result.json``; ``epsilon`` None means no guarantee.

    ``ledger``: what it was paid from; ``planned_events``: all releases that were fixed beforehand. Older versions
    state neither. ``budget``: within which it was kept, at most; where it is smaller than the plan, it is ``epsilon``.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    unit: str
    epsilon: float | None = Field(ge=0)
    delta: float | None = Field(None, ge=0, lt=1)
    guarantee: str = ""
    covers: str = ""
    does_not_cover: str = ""
    ledger: str = ""
    adjacency: str = "add-or-remove-one"
    planned_events: list[Any] | None = None
    budget: float | None = None
    simulation_only: bool = False

    @property
    def protects(self) -> bool:
        """Return whether there is a guarantee."""
        return self.epsilon is not None


Releases: TypeAlias = Sequence[Release]
"""What one run says: a statement for each unit that something was paid for."""


def in_words(release: Release) -> str:
    """Return the statement in full."""
    return f"{promise(release)} {'' if release.epsilon is None else limits(release)}".strip()


def promise(release: Release) -> str:
    """Return what is promised."""
    if release.epsilon is None:
        return f"No privacy guarantee for a {release.unit}. {release.guarantee}".strip() + "."
    promised = release.guarantee or f"({rounded_up(release.epsilon)}, {_delta(release)})-differential privacy"
    return f"Per {release.unit}: {promised.rstrip('.')}."


def limits(release: Release) -> str:
    """Return what the promise covers and what it does not."""
    return _limits(release.covers if release.protects else "", release.does_not_cover)


def in_short(release: Release) -> str:
    """Return a table's entry, such as ``epsilon 3.2 per client``."""
    if release.epsilon is None:
        return f"none per {release.unit}"
    return f"epsilon {rounded_up(release.epsilon, 3)} per {release.unit}"


def notes(rows: Mapping[str, Sequence[Releases]]) -> list[str]:
    """Say who of ``rows``, {row: what each of its runs says}, gives which guarantee, and who gives none.

    A row's epsilon is the largest of its runs', each by itself: what all of them cost together is the bill's to say.
    Rows that promise the same thing are told together.
    """
    promises: dict[tuple[str, str, str], dict[str, float]] = {}
    for row, runs in rows.items():
        for release in (one for releases in runs for one in releases if one.protects):
            place = (f"of a {release.unit}, delta {_delta(release)}", release.covers, release.does_not_cover)
            said = promises.setdefault(place, {})
            said[row] = max(said.get(row, 0.0), release.epsilon or 0.0)
    lines = []
    for (where, covers, does_not_cover), epsilons in promises.items():
        who = ", ".join(f"{row} epsilon {rounded_up(epsilon, 3)}" for row, epsilon in epsilons.items())
        lines.append(f"Privacy of each run by itself, {where}: {who}. {_limits(covers, does_not_cover)}".strip())
    return [*lines, *_bare(rows)]


def _bare(rows: Mapping[str, Sequence[Releases]]) -> list[str]:
    bare = {
        row: [any(one.protects for one in releases) for releases in runs]
        for row, runs in rows.items()
        if not all(any(one.protects for one in releases) for releases in runs)
    }
    if not bare:
        return []
    names = ", ".join(f"{row} (in some runs)" if any(protected) else row for row, protected in bare.items())
    everybody = len(bare) == len(rows) and not any(any(protected) for protected in bare.values())
    return [f"No privacy guarantee: {'any method here' if everybody else names}."]


def _limits(covers: str, does_not_cover: str) -> str:
    told = (_sentence("It covers:", covers), _sentence("It does not cover:", does_not_cover))
    return " ".join(text for text in told if text)


def _sentence(name: str, text: str) -> str:
    return f"{name} {text.rstrip('.')}." if text else ""


def _delta(release: Release) -> str:
    return f"{release.delta:g}" if release.delta else "0"
