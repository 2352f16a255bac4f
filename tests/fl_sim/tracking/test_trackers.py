"""Trackers hold what a run's own files say: all of it, nothing else, and each round once."""

import json
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord
from fl_sim.tracking.observers import Tracking, send_whole

Held: TypeAlias = dict[tuple[str, int], list[float]]

_BLOCK, _START = 32_768, 7  # bytes of a block of wandb's file, and of what stands before the first record


def in_tensorboard(run: Path) -> Held:
    library = import_module("tensorboard.backend.event_processing.event_accumulator")
    read = library.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    held: Held = defaultdict(list)
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            held[name, event.step].append(event.value)
    return held


def in_mlflow(run: Path) -> Held:
    client = import_module("mlflow.tracking").MlflowClient()
    experiment = client.get_experiment_by_name("fl-sim")
    assert experiment is not None
    [found] = [one for one in client.search_runs([experiment.experiment_id]) if one.info.run_name == run.name]
    held: Held = defaultdict(list)
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            held[name, metric.step].append(metric.value)
    return held


def in_trackio(run: Path) -> Held:
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    [name] = [name for name in storage.get_runs("fl-sim") if name.startswith(f"{run.name}-")]
    held: Held = defaultdict(list)
    for line in storage.get_logs("fl-sim", name):
        for key, value in line.items():
            if key not in {"timestamp", "step", "status"}:
                held[key, line["step"]].append(value)
    return held


def in_wandb(run: Path) -> Held:
    record_of = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    held: Held = defaultdict(list)
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        records, results, step, until = [], {}, 0, time.monotonic() + 30
        while not any(record.WhichOneof("record_type") == "exit" for record in records):  # another process writes it
            assert time.monotonic() < until
            records = [record_of(content) for content in _records(path.read_bytes())]
        for record in records:
            said = {_name(one): json.loads(one.value_json) for one in record.history.item}
            step = int(said.get("_step", step))
            for name, value in said.items():
                if not name.startswith("_"):
                    held[name, step].append(value)
            results |= {_name(one): json.loads(one.value_json) for one in record.summary.update}
        for name, value in results.items():
            if name.startswith("result."):
                held[name, step].append(value)
    return held


def _name(item: Any) -> str:
    return ".".join(item.nested_key) or str(item.key)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the whole records of a log in LevelDB's format: blocks of parts, each with checksum, length and place."""
    at, joined = _START, b""
    while at + 7 <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, place = struct.unpack_from("<IHB", content, at)
        if at + 7 + length > len(content):
            return
        joined += content[at + 7 : at + 7 + length]
        at += 7 + length
        if place in {1, 4}:  # whole, or the last part
            yield joined
            joined = b""


READERS = {"tensorboard": in_tensorboard, "mlflow": in_mlflow, "wandb": in_wandb, "trackio": in_trackio}


QUICK = {"model": "logistic", "clients": 3, "partition": "iid", "engine": "inprocess", "rounds": 3}
PRIVATE = {**QUICK, "aggregator": {"kind": "global-dp", "noise": "seeded", "delta": 1e-3}, "clients": 12}


def told(out: Path, tracker: str, settings: Mapping[str, Any] = QUICK, given: object = None) -> list[str]:
    """Run with a tracker; return what was said of it."""
    said: list[str] = []
    run(experiment_from(settings), out, observer=Tracking((tracker,)).of(out, Silent(), said.append, given))
    return said


def said_by_files(out: Path) -> dict[tuple[str, int], float]:
    """Return {(name, step): value} of all numbers in ``rounds.jsonl`` and ``result.json``, as those files name them."""
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    numbers = {(name, line["round"]): value for line in lines for name, value in line.items() if value is not None}
    result = json.loads((out / "result.json").read_text())
    flat = {"rounds_done": result["rounds"], **result.pop("measures"), **result}
    for promise in result["privacy"]:
        flat |= {f"{part}.{promise['unit']}": promise[part] for part in ("epsilon", "delta")}

    def leaves(table: Mapping[str, Any], before: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                leaves(value, f"{before}{name}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers[f"{before}{name}", len(lines)] = value

    leaves(flat, "result.")
    return numbers


def as_in_files(held: Mapping[tuple[str, int], list[float]]) -> dict[tuple[str, int], float]:
    """Return what a tracker holds, with shares as files have them. Fails where something is held twice."""
    assert [place for place, values in held.items() if len(values) > 1] == []
    return {
        (name.removesuffix("_percent"), step): value / (100 if name.endswith("_percent") else 1)
        for (name, step), [value] in held.items()
    }


def check(out: Path, tracker: str) -> None:
    """Hold what the tracker has against the run's files."""
    held, files = as_in_files(READERS[tracker](out)), said_by_files(out)
    for name in ("seed", "clients", "rounds"):  # settings, which result.json repeats
        files.pop((f"result.{name}", max(step for _, step in files)))
    assert held.keys() == files.keys()
    for place, value in held.items():
        assert value == pytest.approx(files[place], rel=1e-6), place


def test_a_tracker_holds_what_the_files_say_and_nothing_else(tracker: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert told(out, tracker) == []
    check(out, tracker)
    assert capsys.readouterr().out == ""  # which is for --json


def test_what_a_finished_run_has_is_exported_once(tracker: str, tmp_path: Path) -> None:
    out, said = tmp_path / "run", []
    run(experiment_from(QUICK), out)
    assert send_whole(out, [tracker], said.append).sessions.keys() == {tracker}
    check(out, tracker)
    assert send_whole(out, [tracker], said.append).sessions == {}
    assert said == []
    check(out, tracker)


def test_a_stopped_run_goes_on_in_the_tracker_without_doubling_a_round(
    tracker: str, tmp_path: Path, stop_after: Callable[[int], Any]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        told(out, tracker, given=stop_after(2))
    if tracker in {"tensorboard", "mlflow"}:  # killed before it was noted what was sent: they know it themselves
        marks = json.loads((out / "tracking.json").read_text())
        (out / "tracking.json").write_text(json.dumps({tracker: marks[tracker] | {"sent": 0}}))
    if tracker == "wandb":
        time.sleep(1.1)  # its folders are named after the second
    for torn in (out / "tensorboard").glob("*"):
        with torn.open("ab") as file:
            file.write(b"\x20\x00\x00\x00\x00\x00\x00\x00half an event")
    assert told(out, tracker) == []
    held = {place: values for place, values in READERS[tracker](out).items() if not place[0].startswith("result.")}
    files = {place for place in said_by_files(out) if not place[0].startswith("result.")}
    assert {(name.removesuffix("_percent"), step) for name, step in held} == files
    assert all(len(values) == 1 for values in held.values())


def test_a_run_that_begins_again_is_another_one_to_the_tracker(tracker: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told(out, tracker)
    before = json.loads((out / "tracking.json").read_text())[tracker]["identity"]
    for name in ("checkpoint.safetensors", "result.json", "rounds.jsonl"):
        (out / name).unlink()
    assert told(out, tracker) == []
    assert json.loads((out / "tracking.json").read_text())[tracker]["identity"] != before


@pytest.mark.usefixtures("quick_accounting")
def test_of_a_private_run_nothing_is_told_before_its_end_and_then_what_its_files_say(
    tracker: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    early: list[bool] = []

    class Watching(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            early.append((out / "tracking.json").exists())

    assert told(out, tracker, PRIVATE, Watching()) == []
    assert early == [False, False, False]
    check(out, tracker)
    names = {name for name, _ in READERS[tracker](out)}
    assert "epsilon" in names
    assert names.isdisjoint({"seconds", "cohort", "train_loss"})


@pytest.mark.usefixtures("quick_accounting")
def test_events_of_a_private_run_all_bear_one_time(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told(tmp_path / "run", "tensorboard", PRIVATE)
    read = accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    read.Reload()
    assert len({event.wall_time for event in read.Scalars("epsilon")}) == 1
