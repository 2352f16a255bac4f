"""The code of ``fl-sim attack inversion`` and ``fl-sim attack labels``: attacks on messages of single clients."""

from __future__ import annotations

import json
from functools import reduce
from itertools import groupby
from operator import add, itemgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fl_sim.cli.screen import say, waiting
from fl_sim.cli.threats import say_privacy
from fl_sim.importing import importing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fl_sim.threats.finished import FinishedRun
    from fl_sim.threats.inversion import Asked, Attempt
    from fl_sim.threats.labels import Counted


def show_inversion(run: Path, asked: dict[str, Any], out: Path | None, data_root: Path | None, *,
                   json_output: bool) -> None:  # fmt: skip
    """Print how accurately training records of ``run`` are reconstructed from gradients, and the run's epsilon.

    ``asked``: the attack's settings, which are the fields of ``fl_sim.threats.inversion.Asked``. ``out``: the PNG file
    for the images; None: a file in the run directory.
    """
    with importing():
        from fl_sim.store.files import write_whole  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415
        from fl_sim.threats.inversion import Asked, attack  # noqa: PLC0415
        from fl_sim.threats.pictures import PICTURE, picture_of  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    finished.refuse_private_records("attack inversion")
    chosen = Asked(**asked)
    with waiting() as show:
        method, attempts = attack(finished, chosen, show)
    found = [one for attempt in attempts for one in attempt.found]
    is_image = finished.test[0].ndim == 4
    picture = (out or run / PICTURE) if is_image else None
    facts = _facts_of(finished, chosen, method, attempts)
    if picture is not None:
        data, model = finished.job.experiment.data, finished.job.experiment.model.name
        title = [f"{data}, {model}, {chosen.at} model, method {method}, {chosen.batch} in a gradient, {_noise(facts)}"]
        write_whole(picture, picture_of(found, title))
        facts["picture"] = str(picture)
    if json_output:
        say(json.dumps(facts))
        return
    _say_inversion(facts)
    say_privacy(finished.privacy)


def _facts_of(finished: FinishedRun, asked: Asked, method: str, attempts: Sequence[Attempt]) -> dict[str, Any]:
    from fl_sim.threats.membership import most_allowed  # noqa: PLC0415 (slow, only here)

    found = [one for attempt in attempts for one in attempt.found]
    errors, noises = [one.error for one in found], [one.noise_multiplier for one in attempts]
    ratios = [one.psnr for one in found if one.squared]
    facts: dict[str, Any] = {
        "attack": "inversion", "run": str(finished.out), "method": method, "model": asked.at, "batch": asked.batch,
        "records": len(found), "median_error": median(errors),
        "exact": sum(error <= _EXACT for error in errors), "imprint": asked.imprint,
        "exact_records": [
            [one.client, number] for attempt in attempts for number, one in enumerate(attempt.found)
            if one.error <= _EXACT
        ],
        "labels_found": sum(one.label_found for one in found),
        "squared_error": [one.squared for one in found],
        "psnr": [None if not one.squared else one.psnr for one in found],
        "median_psnr": median(ratios) if ratios else None,
        "median_psnr_of_mean_record": median(one.psnr_of_typical for one in found),
        "noise_multiplier": noises[0] and fmean(one for one in noises if one), "privacy": [*finished.facts["privacy"]],
    }  # fmt: skip
    if traced := [one.recognised for one in attempts if one.recognised is not None]:
        total = reduce(add, traced)
        by_epsilon = [most_allowed(*one.of_run, 1 / total.candidates) for one in finished.covering]
        facts["recognised"] = {
            "candidates": total.candidates, "draws": total.draws, "rate": total.right / total.draws,
            "interval": [*total.interval], "most_by_one_step": total.allowed / total.draws,
            "most_by_epsilon": max(by_epsilon, default=None),
        }  # fmt: skip
    return facts


def _noise(facts: dict[str, Any]) -> str:
    noise = facts["noise_multiplier"]
    return "without noise" if noise is None else f"clipped, with noise multiplier {noise:g}"


def _say_inversion(facts: dict[str, Any]) -> None:
    of, ratio = f"of {facts['records']}", facts["median_psnr"]
    how = "read off" if facts["method"] == "analytic" else "found by optimisation"
    psnr = "" if ratio is None else f", median PSNR {ratio:.1f} dB"
    sent = ", with an imprint layer" if facts["imprint"] else ""
    say(
        f"gradients of {facts['batch']} record(s){sent}, {_noise(facts)}: {facts['exact']} {of} records are {how} to "
        f"1e-6, median error {facts['median_error']:.2g} of the largest value{psnr}; "
        f"{facts['labels_found']} labels are right"
    )
    if facts["batch"] > 1 and facts["exact"]:
        whose = groupby(facts["exact_records"], key=itemgetter(0))
        said = [f"client {client}: {', '.join(str(number) for _, number in some)}" for client, some in whose]
        more = f"; and of {len(said) - _SHOWN} more clients" if len(said) > _SHOWN else ""
        head = "indices (from 0, among the client's own records) of the exactly reconstructed records"
        say(f"{head}: {'; '.join(said[:_SHOWN])}{more}")
    if facts["method"] == "optimise":
        ratios = ", ".join("exact" if one is None else f"{one:.1f}" for one in facts["psnr"])
        guess = facts["median_psnr_of_mean_record"]
        say(f"PSNR of each record in dB: {ratios} (median {guess:.1f} for the mean test record as the guess)")
    if traced := facts.get("recognised"):
        low, high = traced["interval"]
        say(
            f"a gradient's record is recognised among {traced['candidates']} candidates in {_percent(traced['rate'])} "
            f"[{100 * low:.1f}, {100 * high:.1f}] of {traced['draws']:,} draws of the noise (chance: "
            f"{_percent(1 / traced['candidates'])}); the noise of one step allows at most "
            f"{_percent(traced['most_by_one_step'])} if the batch is known"
        )
        if traced["most_by_epsilon"] is not None:
            say(
                "an attacker who sees all outputs of the run, but does not know the batches, is right in at most "
                f"{_percent(traced['most_by_epsilon'])} of all cases (this follows from the run's epsilon)"
            )
    if "picture" in facts:
        say(f"records and reconstructions: {facts['picture']}")


_EXACT = 1e-6


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def show_labels(run: Path, clients: int, at: str, data_root: Path | None, *, json_output: bool) -> None:
    """Print how accurately an attacker estimates the number of records that a client has of each class.

    The attacker sees the gradient of one batch, or the update of one round. The function also prints the run's epsilon.
    """
    with importing():
        from fl_sim.threats.finished import FinishedRun  # noqa: PLC0415 (slow, only here)
        from fl_sim.threats.labels import infer  # noqa: PLC0415

    finished = FinishedRun.of(run, data_root)
    finished.refuse_private_records("attack labels")
    with waiting() as show:
        batches, updates = infer(finished, clients, at, show)
    facts: dict[str, Any] = {
        "attack": "labels", "run": str(run), "model": at, "batch": _labels_facts(batches) if batches else None,
        "update": _labels_facts(updates) if updates else None, "privacy": [*finished.facts["privacy"]],
    }  # fmt: skip
    if json_output:
        say(json.dumps(facts))
        return
    for what, some in (("the gradient of one batch", batches), ("the update of a round", updates)):
        if not some:
            say(f"labels in {what}: unknown, because no client of this run sends gradients of SGD in this form")
            continue
        say(f"labels in {what} (true counts by class, then the estimate):")
        for one in some[:_SHOWN]:
            say(f"  client {one.client:<5} {_row(one.true)}")
            say(f"  {'estimate':12} {_row(one.estimated)}")
        told = _labels_facts(some)
        say(
            f"  {told['clients']} clients: mean absolute error {told['error']:.2f} records per class "
            f"({told['error_of_guess']:.2f} for a guess by all records' class shares); {_percent(told['right'])} "
            f"of the labels are right ({_percent(told['right_by_guess'])} for this guess)"
        )
    say_privacy(finished.privacy)


_SHOWN = 3
"""The number of clients whose counts are printed."""


def _row(counts: Any) -> str:
    return " ".join(f"{count:>5}" for count in counts.tolist())


def _labels_facts(some: Sequence[Counted]) -> dict[str, Any]:
    return {
        "clients": len(some), "error": fmean(one.error for one in some),
        "error_of_guess": fmean(one.error_of_guess for one in some), "right": fmean(one.right for one in some),
        "right_by_guess": fmean(one.right_by_guess for one in some),
        "counts": [{"client": one.client, "true": one.true.tolist(), "estimated": one.estimated.tolist()}
                   for one in some],
    }  # fmt: skip
