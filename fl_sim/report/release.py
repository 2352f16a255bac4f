"""Privacy statements of results and how they are said: no epsilon without its unit, its delta and what it covers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fl_sim.privacy.terms import rounded_up


class Release(BaseModel):
    """One privacy statement of ``result.json``; ``epsilon`` None means no guarantee.

    ``ledger``: what it was paid from; ``planned_events``: all releases that were fixed beforehand. Older versions
    state neither. ``budget``: within which it was kept, at most; where it is smaller than the plan, it is ``epsilon``.
    ``epsilon_whole_run``, at ``delta_whole_run``: what the whole run costs the unit, where that is more.
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
    epsilon_whole_run: float | None = Field(None, ge=0)
    delta_whole_run: float | None = Field(None, ge=0, lt=1)
    simulation_only: bool = False

    @property
    def protects(self) -> bool:
        """Return whether there is a guarantee."""
        return self.epsilon is not None

    @property
    def of_run(self) -> tuple[float | None, float]:
        """Return epsilon and delta of all that the run releases about the unit."""
        if self.epsilon is None or self.epsilon_whole_run is None:
            return self.epsilon, self.delta or 0.0
        return self.epsilon_whole_run, self.delta_whole_run or 0.0


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
    """Return a table's entry, such as ``epsilon 3.2 per client``: what the whole run costs the unit."""
    epsilon, _ = release.of_run
    if epsilon is None:
        return f"none per {release.unit}"
    return f"epsilon {rounded_up(epsilon, 3)} per {release.unit}"


def notes(rows: Mapping[str, Sequence[Releases]]) -> list[str]:
    """Say who of ``rows``, {row: what each of its runs says}, gives which guarantee, and who gives none.

    A row's epsilon is the largest of its runs', each by itself: what all of them cost together is the bill's to say.
    Rows that promise the same thing are told together.
    """
    promises: dict[tuple[str, str, str], dict[str, tuple[float, tuple[float, float]]]] = {}
    for row, runs in rows.items():
        for release in (one for releases in runs for one in releases if one.protects):
            place = (f"of a {release.unit}, delta {_delta(release)}", release.covers, release.does_not_cover)
            said = promises.setdefault(place, {})
            own, (whole, delta) = release.epsilon or 0.0, release.of_run
            largest, largest_whole = said.get(row, (0.0, (0.0, 0.0)))
            said[row] = max(largest, own), max(largest_whole, (whole or 0.0, delta))
    lines = []
    for (where, covers, does_not_cover), epsilons in promises.items():
        who = ", ".join(f"{row} epsilon {_with_whole_run(*told)}" for row, told in epsilons.items())
        lines.append(f"Privacy of each run by itself, {where}: {who}. {_limits(covers, does_not_cover)}".strip())
    return [*lines, *_bare(rows)]


def _with_whole_run(epsilon: float, whole: tuple[float, float]) -> str:
    more = f" (the whole run {rounded_up(whole[0], 3)} at delta {whole[1]:.4g})" if whole[0] > epsilon else ""
    return f"{rounded_up(epsilon, 3)}{more}"


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
