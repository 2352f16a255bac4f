"""``fl-sim run``: one experiment."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_sim.cli.arguments import Given
from fl_sim.cli.screen import say
from fl_sim.data.naming import without_settings
from fl_sim.data.places import look_for
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.importing import importing
from fl_sim.tables.labels import took
from fl_sim.tracking.trackers import chosen_trackers

_BEST = {
    "test": "picked on the test set, so optimistic",
    "validation": "picked on records held out for validation",
    "last": "the last, which alone was tested",
    "nothing": "nothing was measured",
}


def run_experiment(
    given: Given,
    out: Path | None,
    data_root: Path | None,
    *,
    track: str = "",
    again: bool,
    json_output: bool,
) -> None:
    """Run what was typed, and print what came of it."""
    trackers = chosen_trackers(track)  # now: a mistake is told without waiting for torch
    experiment = parse_experiment(given)
    look_for(experiment.data, data_root)
    with importing():  # now: a mistake in the settings is told without waiting for torch and Flower
        from fl_sim.interface import run  # noqa: PLC0415
    result = run(experiment, out=out, data_root=data_root, again=again, track=trackers)
    if json_output:
        say(json.dumps(result.facts))
    else:
        _print(result.facts, result.directory)


def parse_experiment(given: Given) -> Experiment:
    """Return the experiment that was typed; of a table's file, its [base]."""
    return experiment_from(with_overrides(base_of(given), given.overrides))


def base_of(given: Given) -> dict[str, Any]:
    """Return the settings in the file that was typed; of a table's, those of its [base], and say what is left out."""
    table = given.table
    if "base" in table and (left := [f"[{name}]" for name in ("grid", "tune") if name in table]):
        say(
            f"{given.name} is a table's: this run takes its [base] alone, not {' and '.join(left)}; 'fl-sim table "
            f"{given.name}' takes all",
            err=True,
        )
    base: dict[str, Any] = table.get("base", table)
    return base


def _print(result: Mapping[str, Any], out: Path) -> None:
    note = f" ({result['data_note']})" if result["data_note"] else ""
    say(
        f"{result['algorithm']}{_server(result)} on {without_settings(result['data'])}{note}, {result['partition']}, "
        f"{result['clients']} clients, {result['model']}: "
        f"accuracy {_percent(result['final_accuracy'])}{_majority(result)} after {result['rounds']} rounds, "
        f"best {_percent(result['best_accuracy'])} ({_BEST[result.get('best_chosen_on', 'test')]}), "
        f"{took(result)} on engine {result['engine']}"
    )
    if result["stopped"]:
        say(result["stopped"])
    _print_virtual_time(result)
    if result["preprocess"]["kind"] != "none":
        say(_in_words(result["preprocess"], is_drawn=(out / "samples.png").exists()))
    if result["calibrate"]["kind"] != "none":
        say(_calibration_in_words(result["calibrate"]))
    if "tstr" in result:
        say(_classifiers_in_words(result["tstr"]))
    if "pate" in result:
        say(_votes_in_words(result["pate"]))
    if not result["privacy"]:
        say("privacy: none - updates leave the clients without noise")
    for promise in result["privacy"]:
        _print_promise(promise)
    say(f"results in {out}")


def _print_promise(promise: Mapping[str, Any]) -> None:
    say(f"privacy of a {promise['unit']}: {promise['guarantee']}")
    if promise["unit"] == "client":
        say(f"  who takes part: {promise['sampling']}")
    say(f"  covers: {promise['covers']}")
    say(f"  does not cover: {promise['does_not_cover']}")


def _server(result: Mapping[str, Any]) -> str:
    """Name the server where it does not wait for a round's clients."""
    title = result["titles"].get("server")
    return f", {title}" if title else ""


def _print_virtual_time(result: Mapping[str, Any]) -> None:
    if "virtual_seconds" in result:
        late = f", {result['late']:,} updates came too late" if result.get("late") else ""
        say(f"virtual time: {result['virtual_seconds']:,.1f} s on simulated devices{late}")


def _majority(result: Mapping[str, Any]) -> str:
    """Say how often guessing the most frequent class would be right: an accuracy near it has learned nothing."""
    share = result.get("measures", {}).get("majority_share")
    return "" if share is None else f" (largest class: {_percent(share)} of the test records)"


def _in_words(made: Mapping[str, Any], *, is_drawn: bool) -> str:
    if made["kind"] == "private-start":
        return (
            f"{made['kind']}: the first model learned from {made['num_images']:,} images, drawn from "
            f"{made['releases']} releases whose cost is part of the clients' epsilon"
        )
    origin = "from an earlier run with the same settings" if made["reused"] else "made in this run"
    trainer = f", trained by: {made['trainer']}" if made.get("trainer") else ""
    pictures = "; look at them in samples.png" if is_drawn else ""
    return (
        f"{made['kind']}: {made['num_synthetic']} synthetic records by {made['generator']} (gamma {made['gamma']:g}, "
        f"trained on: {made['train_on']}), {origin}{trainer}{pictures}"
    )


def _calibration_in_words(made: Mapping[str, Any]) -> str:
    if "accuracy_after" not in made:
        return f"{made['kind']}: the run did not come to it"
    skipped = ", ".join(map(str, made["classes_skipped"]))
    left_out = f"; left out, for too few records: class {skipped}" if skipped else ""
    return (
        f"{made['kind']}: accuracy {_percent(made['accuracy_before'])} before the head was trained again, "
        f"{_percent(made['accuracy_after'])} after{left_out}"
    )


def _votes_in_words(facts: dict[str, Any]) -> str:
    return (
        f"{facts['teachers']} teachers answered {facts['queries_answered']} of {facts['queries_asked']} queries about "
        f"{facts['public_records']} public records; noisy labels right: {_percent(facts['label_accuracy'])}; student "
        f"{facts['student']}, evaluated on {facts['evaluation_records']} other records"
    )


def _classifiers_in_words(facts: Mapping[str, Any]) -> str:
    tried = "; ".join(
        f"{one['name']} {_percent(one['test_accuracy'])} (held-out synthetic {_percent(one['held_out_accuracy'])})"
        for one in facts["classifiers"]
    )
    frechet = facts["frechet"]
    apart = frechet and f"; Frechet distance to real test records {frechet['distance']:.1f} ({frechet['features']})"
    return f"classifiers on synthetic records: {tried}; chosen: {facts['chosen']}{apart or ''}"


def _percent(accuracy: float | None) -> str:
    return "not evaluated" if accuracy is None else f"{100 * accuracy:.2f} %"
